"""Give any ONNX model a backward pass, as plain ONNX."""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and ("-m", "onnxgrad") in zip(sys.orig_argv, sys.orig_argv[1:]) and not sys.flags.safe_path:
    del sys.path[0]  # ``python -m onnxgrad`` looks for modules among the user's files, the command onnxgrad does not

# ruff: noqa: E402
from typing import TYPE_CHECKING

from onnxgrad import _lazy_sympy, _startup

_startup.begin()  # before anything that takes its time
if "sympy" not in sys.modules:
    sys.meta_path.insert(0, _lazy_sympy.Finder())

from onnxgrad._later import import_later
from onnxgrad.errors import (
    BadInput,
    NoDerivative,
    NoRule,
    NotDifferentiable,
    OnnxGradError,
    UnknownName,
    ZeroDerivative,
)

if TYPE_CHECKING:
    from onnxgrad.control_flow.checkpointing import checkpointing
    from onnxgrad.custom import CustomRule, custom_jvp, custom_rules, custom_vjp, load_rule
    from onnxgrad.function import Function
    from onnxgrad.linear_operator import linear_operator
    from onnxgrad.model_io.publish import push_to_hub
    from onnxgrad.model_io.signature import Signature, signature
    from onnxgrad.rules.registry import straight_through, without_lowerings
    from onnxgrad.runtime import Options, Session, StepRunner
    from onnxgrad.training import (
        IA3,
        Group,
        LoHa,
        LoKr,
        LoRA,
        Loss,
        Optimizer,
        Schedule,
        Trainer,
        VeRA,
        attach,
        compile_step,
        evaluate,
        export_step,
        generate,
        load_adapter,
        predict,
        prune,
        quantize,
        train,
    )
    from onnxgrad.transforms.attribution import (
        attention_rollout,
        expected_gradients,
        grad_cam,
        integrated_gradients,
        occlusion,
        smooth_grad,
    )
    from onnxgrad.transforms.deep_lift import deep_lift
    from onnxgrad.transforms.first_order import grad, jvp, value_and_grad, vjp
    from onnxgrad.transforms.jacobians import hessian, jacobian
    from onnxgrad.transforms.linearize import Split, linearize, split_vjp, transpose
    from onnxgrad.transforms.per_example import per_example_grad
    from onnxgrad.transforms.rematerialize import rematerialize
    from onnxgrad.transforms.second_order import gauss_newton_vp, hvp
    from onnxgrad.transforms.sparse.matrices import sparse_hessian, sparse_jacobian
    from onnxgrad.transforms.taylor.jets import jet
    from onnxgrad.transforms.taylor.laplacians import laplacian
    from onnxgrad.transforms.vmap import vmap
    from onnxgrad.transplants.transplant import transplant

__version__ = "0.1.0"

__all__ = [
    "IA3",
    "BadInput",
    "CustomRule",
    "Function",
    "Group",
    "LoHa",
    "LoKr",
    "LoRA",
    "Loss",
    "NoDerivative",
    "NoRule",
    "NotDifferentiable",
    "OnnxGradError",
    "Optimizer",
    "Options",
    "Schedule",
    "Session",
    "Signature",
    "Split",
    "StepRunner",
    "Trainer",
    "UnknownName",
    "VeRA",
    "ZeroDerivative",
    "attach",
    "attention_rollout",
    "checkpointing",
    "compile_step",
    "custom_jvp",
    "custom_rules",
    "custom_vjp",
    "deep_lift",
    "evaluate",
    "expected_gradients",
    "export_step",
    "gauss_newton_vp",
    "generate",
    "grad",
    "grad_cam",
    "hessian",
    "hvp",
    "integrated_gradients",
    "jacobian",
    "jet",
    "jvp",
    "laplacian",
    "linear_operator",
    "linearize",
    "load_adapter",
    "load_rule",
    "occlusion",
    "per_example_grad",
    "predict",
    "prune",
    "push_to_hub",
    "quantize",
    "rematerialize",
    "signature",
    "smooth_grad",
    "sparse_hessian",
    "sparse_jacobian",
    "split_vjp",
    "straight_through",
    "train",
    "transplant",
    "transpose",
    "value_and_grad",
    "vjp",
    "vmap",
    "without_lowerings",
]

#: The module of each name, which is imported on first use: most of them take half a second.
__getattr__ = import_later(
    __name__,
    {
        "control_flow.checkpointing": ("checkpointing",),
        "custom": ("CustomRule", "custom_jvp", "custom_rules", "custom_vjp", "load_rule"),
        "function": ("Function",),
        "linear_operator": ("linear_operator",),
        "model_io": ("Signature", "signature"),
        "model_io.publish": ("push_to_hub",),
        "rules.registry": ("straight_through", "without_lowerings"),
        "runtime": ("Options", "Session", "StepRunner"),
        "training": (
            *("Group", "IA3", "LoHa", "LoKr", "LoRA", "Loss", "Optimizer", "Schedule", "VeRA", "load_adapter"),
            *("Trainer", "attach", "compile_step", "evaluate", "export_step", "generate", "predict"),
            *("prune", "quantize", "train"),
        ),
        "transforms.jacobians": ("hessian", "jacobian"),
        "transforms.linearize": ("Split", "linearize", "split_vjp", "transpose"),
        "transforms.per_example": ("per_example_grad",),
        "transforms.rematerialize": ("rematerialize",),
        "transforms.second_order": ("gauss_newton_vp", "hvp"),
        "transforms.sparse.matrices": ("sparse_hessian", "sparse_jacobian"),
        "transforms.taylor.jets": ("jet",),
        "transforms.taylor.laplacians": ("laplacian",),
        "transforms.vmap": ("vmap",),
        "transforms.attribution": (
            *("attention_rollout", "expected_gradients", "grad_cam", "integrated_gradients", "occlusion"),
            "smooth_grad",
        ),
        "transforms.deep_lift": ("deep_lift",),
        "transplants.transplant": ("transplant",),
        "transforms.first_order": ("grad", "jvp", "value_and_grad", "vjp"),
    },
)

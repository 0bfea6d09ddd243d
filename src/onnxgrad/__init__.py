"""Give any ONNX model a backward pass, as plain ONNX."""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and ("-m", "onnxgrad") in zip(sys.orig_argv, sys.orig_argv[1:]) and not sys.flags.safe_path:
    del sys.path[0]  # ``python -m onnxgrad`` looks for modules among the user's files, the command onnxgrad does not

# ruff: noqa: E402, I001
from typing import TYPE_CHECKING

from onnxgrad import _lazy_sympy, _startup

_startup.begin()  # before anything that takes its time
if "sympy" not in sys.modules:
    sys.meta_path.insert(0, _lazy_sympy.Finder())

from onnxgrad._later import import_later
from onnxgrad.errors import (
    BadInput as BadInput,
    NoDerivative as NoDerivative,
    NoRule as NoRule,
    NotDifferentiable as NotDifferentiable,
    OnnxGradError as OnnxGradError,
    UnknownName as UnknownName,
    ZeroDerivative as ZeroDerivative,
)

if TYPE_CHECKING:  # ``import x as x`` exports a name to type checkers
    from onnxgrad.control_flow.checkpointing import checkpointing as checkpointing
    from onnxgrad.custom import (
        CustomRule as CustomRule,
        custom_jvp as custom_jvp,
        custom_rules as custom_rules,
        custom_vjp as custom_vjp,
        load_rule as load_rule,
    )
    from onnxgrad.function import Function as Function
    from onnxgrad.linear_operator import linear_operator as linear_operator
    from onnxgrad.model_io.publish import push_to_hub as push_to_hub
    from onnxgrad.model_io.signature import Signature as Signature, signature as signature
    from onnxgrad.rules.registry import straight_through as straight_through, without_lowerings as without_lowerings
    from onnxgrad.runtime import Options as Options, Session as Session, StepRunner as StepRunner
    from onnxgrad.training import (
        IA3 as IA3,
        Group as Group,
        LoHa as LoHa,
        LoKr as LoKr,
        LoRA as LoRA,
        Loss as Loss,
        Optimizer as Optimizer,
        Schedule as Schedule,
        Trainer as Trainer,
        VeRA as VeRA,
        attach as attach,
        compile_step as compile_step,
        evaluate as evaluate,
        export_step as export_step,
        generate as generate,
        load_adapter as load_adapter,
        predict as predict,
        prune as prune,
        quantize as quantize,
        train as train,
    )
    from onnxgrad.transforms.attribution import (
        attention_rollout as attention_rollout,
        expected_gradients as expected_gradients,
        grad_cam as grad_cam,
        integrated_gradients as integrated_gradients,
        occlusion as occlusion,
        smooth_grad as smooth_grad,
    )
    from onnxgrad.transforms.deep_lift import deep_lift as deep_lift
    from onnxgrad.transforms.first_order import grad as grad, jvp as jvp, value_and_grad as value_and_grad, vjp as vjp
    from onnxgrad.transforms.jacobians import hessian as hessian, jacobian as jacobian
    from onnxgrad.transforms.linearize import (
        Split as Split,
        linearize as linearize,
        split_vjp as split_vjp,
        transpose as transpose,
    )
    from onnxgrad.transforms.per_example import per_example_grad as per_example_grad
    from onnxgrad.transforms.rematerialize import rematerialize as rematerialize
    from onnxgrad.transforms.second_order import gauss_newton_vp as gauss_newton_vp, hvp as hvp
    from onnxgrad.transforms.sparse.matrices import sparse_hessian as sparse_hessian, sparse_jacobian as sparse_jacobian
    from onnxgrad.transforms.taylor.jets import jet as jet
    from onnxgrad.transforms.taylor.laplacians import laplacian as laplacian
    from onnxgrad.transforms.vmap import vmap as vmap
    from onnxgrad.transplants.transplant import transplant as transplant

__version__ = "0.1.0"

#: The module of each name, which is imported on first use: most of them take half a second.
__getattr__, __all__ = import_later(
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
__all__ += [
    *("BadInput", "NoDerivative", "NoRule", "NotDifferentiable", "OnnxGradError", "UnknownName", "ZeroDerivative"),
]

"""Give any ONNX model a backward pass, as plain ONNX."""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"] and ("-m", "onnxgrad") in zip(sys.orig_argv, sys.orig_argv[1:]) and not sys.flags.safe_path:
    del sys.path[0]  # ``python -m onnxgrad`` looks for modules among the user's files, the command onnxgrad does not

# ruff: noqa: E402
import importlib
from typing import TYPE_CHECKING, Any

from onnxgrad import _startup

_startup.begin()  # before anything that takes its time

from onnxgrad.control_flow.checkpointing import checkpointing
from onnxgrad.custom import CustomRule, custom_jvp, custom_rules, custom_vjp, load_rule
from onnxgrad.errors import (
    BadInput,
    NoDerivative,
    NoRule,
    NotDifferentiable,
    OnnxGradError,
    UnknownName,
    ZeroDerivative,
)
from onnxgrad.model_io import Signature, signature
from onnxgrad.rules.registry import straight_through
from onnxgrad.transforms import (
    Split,
    gauss_newton_vp,
    hessian,
    hvp,
    jacobian,
    linearize,
    per_example_grad,
    rematerialize,
    split_vjp,
    transpose,
    vmap,
)
from onnxgrad.transforms.first_order import grad, jvp, value_and_grad, vjp

if TYPE_CHECKING:
    from onnxgrad.function import Function
    from onnxgrad.linear_operator import linear_operator
    from onnxgrad.runtime import Options, Session, StepRunner
    from onnxgrad.training import Group, Loss, Optimizer, Schedule, Trainer, attach, compile_step, export_step

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "CustomRule",
    "Function",
    "Group",
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
    "ZeroDerivative",
    "attach",
    "checkpointing",
    "compile_step",
    "custom_jvp",
    "custom_rules",
    "custom_vjp",
    "export_step",
    "gauss_newton_vp",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "linear_operator",
    "linearize",
    "load_rule",
    "per_example_grad",
    "rematerialize",
    "signature",
    "split_vjp",
    "straight_through",
    "transpose",
    "value_and_grad",
    "vjp",
    "vmap",
]

#: What needs a runtime, which differentiating does not: imported when first asked for.
_LATER = {
    "Function": "onnxgrad.function",
    "linear_operator": "onnxgrad.linear_operator",
    **dict.fromkeys(("Options", "Session", "StepRunner"), "onnxgrad.runtime"),
    **dict.fromkeys(
        ("Group", "Loss", "Optimizer", "Schedule", "Trainer", "attach", "compile_step", "export_step"),
        "onnxgrad.training",
    ),
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found

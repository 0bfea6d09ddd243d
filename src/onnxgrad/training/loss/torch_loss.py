"""Losses of PyTorch: recognised without importing the package, exported as graphs, evaluated in float64."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxgrad.errors import BadInput, warn_caller
from onnxgrad.ir import identifier

_HINT = (
    "\n  hint: a formula without the decision can be recorded; for GaussianNLLLoss, of a model with the values mu and "
    "sigma2: mean(log(maximum(sigma2, 1e-6)) + (mu - y)**2 / maximum(sigma2, 1e-6)) / 2"
)


def is_module(loss: Any) -> bool:
    """True for a module of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(loss, torch.nn.Module)


def is_of_torch(loss: Any) -> bool:
    """True for a module, a function of PyTorch, or a function that reads one of its names."""
    if "torch" not in sys.modules:
        return False
    if is_module(loss) or _from_torch(loss):
        return True
    code, names = getattr(loss, "__code__", None), getattr(loss, "__globals__", {})
    if code is None:
        return False
    read = [names[n] for n in code.co_names if n in names]
    read += [cell.cell_contents for cell in loss.__closure__ or ()]
    return any(is_module(x) or _from_torch(x) for x in read)


def is_pytorchs_own(loss: Any) -> bool:
    """True for a module or a function that PyTorch defines."""
    return _from_torch(type(loss) if is_module(loss) else loss)


def _from_torch(thing: Any) -> bool:
    name = getattr(thing, "__name__", "") if inspect.ismodule(thing) else getattr(thing, "__module__", "")
    return isinstance(name, str) and (name == "torch" or name.startswith("torch."))


def of_tensors(loss: Any) -> Callable[..., float]:
    """`loss` as a function of arrays; a module with its numbers in float64, the caller's unchanged."""
    import torch

    wide = copy.deepcopy(loss).double() if is_module(loss) else loss

    def of_arrays(*arrays: np.ndarray) -> float:
        with torch.no_grad():
            return float(wide(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)))

    return of_arrays


def export_torch(
    loss: Any, name: str, examples: Sequence[np.ndarray], dynamic: Sequence[Mapping[int, str]]
) -> onnx.ModelProto:
    """The graph of `loss`, by PyTorch's own exporter.

    Args:
        loss: a function of tensors, or a module.
        name: of the loss in messages.
        examples: arrays for its parameters.
        dynamic: the names of the dynamic axes of each.

    Raises:
        BadInput: the exporter needs another package, or the loss decides by numbers in its arrays.
        UserWarning: PyTorch's own, of labels that one of its losses broadcasts, which makes pairs of all rows.
    """
    import torch

    if is_module(loss) and any(p.requires_grad for p in loss.parameters()):
        warn_caller(f"the weights of the loss {name!r} are constants: they are not trained")

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = loss

        def forward(self, *arrays: Any) -> Any:
            return self.loss(*arrays)

    dims = {d: torch.export.Dim(identifier(d)) for axes in dynamic for d in axes.values()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = (tuple({a: dims[d] for a, d in axes.items()} for axes in dynamic),)
            given = tuple(torch.from_numpy(x) for x in examples)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Using a target size")
                loss(*given)
            program = torch.export.export(Wrapped().eval(), given, dynamic_shapes=shapes)
            # the exporter's own cross entropy leaves label smoothing out
            program = program.run_decompositions()
            program = torch.onnx.export(program, dynamo=True, opset_version=20, verbose=False)
    except ImportError as error:
        raise BadInput(f"PyTorch's exporter needs a package: {error}") from error
    except Exception as error:  # of several private types
        if "data-dependent" not in str(error):
            raise
        raise BadInput(f"it decides by the numbers in its arrays, which PyTorch's exporter refuses{_HINT}") from error
    model: onnx.ModelProto = program.model_proto
    return model

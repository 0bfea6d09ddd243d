"""Functions of arrays as losses: called, and exported, by `onnxgrad.eager`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import onnxgrad.eager.numpy as xp
from onnxgrad.eager import export
from onnxgrad.training.loss.expression import OF_NUMPY, OF_SCIPY, Expression


def _of_scipy(name: str) -> Callable[..., Any]:
    """A function of `onnxgrad.eager.scipy.special`, which is imported by its first call: SciPy is an extra."""

    def call_special(*arrays: Any, **settings: Any) -> Any:
        from onnxgrad.eager.scipy import special

        return getattr(special, name)(*arrays, **settings)

    return call_special


#: The functions of formulas.
_FUNCTIONS = {
    **{name: getattr(xp, name) for name in OF_NUMPY},
    **{name: _of_scipy(name) for name in OF_SCIPY},
    "norm": xp.linalg.norm,
    "relu": lambda x: xp.maximum(x, 0),
    "sigmoid": _of_scipy("expit"),
    "softplus": lambda x: xp.logaddexp(x, 0),
}


def call(loss: Any, names: Sequence[str], arrays: Sequence[Any]) -> Any:
    """The value of a function or a formula of `arrays`; `names` are those of its parameters."""
    given = [xp.asarray(a) for a in arrays]
    return loss.value(dict(zip(names, given)), _FUNCTIONS) if isinstance(loss, Expression) else loss(*given)


def export_function(
    loss: Any, name: str, names: Sequence[str], examples: Sequence[np.ndarray], dynamic: Sequence[Mapping[int, str]]
) -> onnx.ModelProto:
    """The graph of `loss`.

    Args:
        loss: the function or the formula.
        name: of it in messages.
        names: of its parameters.
        examples: arrays for them, the prediction first.
        dynamic: the names of the dynamic axes of each.
    """

    def recorded(*arrays: Any) -> Any:
        result = xp.asarray(call(loss, names, arrays))
        return result.astype(examples[0].dtype) if result.dtype.kind == "f" else result

    formals = [f"in_{i}" for i in range(len(names))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    recorded.__name__ = name
    recorded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in formals]
    )
    return export(recorded, *examples, dynamic={n: axes for n, axes in zip(formals, dynamic) if axes})


def value_of_graph(model: onnx.ModelProto, arrays: Sequence[np.ndarray]) -> float:
    """The first result of `model`, in the precision of `arrays`."""
    feeds: dict[str, Any] = {v.name: a for v, a in zip(model.graph.input, arrays)}
    results: Any = ReferenceEvaluator(model).run(None, feeds)
    return float(np.asarray(results[0]))

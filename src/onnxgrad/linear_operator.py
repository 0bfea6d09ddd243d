"""The Jacobian of a model at a point as a SciPy linear operator: products only, the matrix is never formed.

The primal runs once, when the operator is made. A product runs the linear half of the derivative, with the residuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.function import Function
from onnxgrad.ir.graph import named_values, prune
from onnxgrad.ir.match import not_none
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, signature
from onnxgrad.transforms.linearize import linearize
from onnxgrad.transforms.select_values import float_values

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@check_keywords
def linear_operator(
    model: AnyModel | Function, inputs: Mapping[str, Any], *, wrt: str, of: str | None = None
) -> LinearOperator:
    """The Jacobian of `of` with respect to `wrt` at `inputs`, as a ``scipy.sparse.linalg.LinearOperator``.

    Its shape is (elements of `of`, elements of `wrt`); vectors are tensors flattened in C order. It has `matvec`
    (forward mode), `rmatvec` (reverse mode), `matmat` and `rmatmat` (all columns in one run). For a function that is a
    gradient, it is the Hessian: ``linear_operator(f.grad(wrt="x"), {"x": x}, wrt="x")``.

    Args:
        model: a model or a `Function`.
        inputs: an array for each input of the model.
        wrt: the name of an input or initializer.
        of: the name of a float value; default: the only float output.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        from scipy.sparse.linalg import LinearOperator
    except ImportError as error:
        raise ImportError("linear_operator needs SciPy: pip install 'onnxgrad[scipy]'") from error
    f = model if isinstance(model, Function) else Function(model)
    known = {v.name or "": v for v in f.model.graph.inputs} | dict(f.model.graph.initializers)
    if wrt in named_values(f.model.graph) and wrt not in known:
        raise BadInput(f"`wrt` {wrt!r} is no input or initializer of the model, so its shape is not known beforehand")
    value = float_values(wrt, known, "wrt")[wrt]
    feeds = f.feeds(**inputs)
    x_shape = feeds[wrt].shape if wrt in feeds else tuple(d for d in value.shape or () if isinstance(d, int))
    primal, linear, tangent = f._cached(("linearize", wrt, of), lambda: _halves(f, wrt, of))
    zeros = np.zeros(
        x_shape, not_none(value.dtype).numpy()
    )  # products with the Jacobian of a linear map: it only gives its shape
    point = {name: a.copy() for name, a in feeds.items()}  # the caller may go on to change them
    point |= {} if primal is None else primal.session.run(feeds)
    point = {name: a for name, a in point.items() if name in linear.inputs} | {tangent: zeros}
    y_shape = linear(**point).shape
    size = (math.prod(y_shape), math.prod(x_shape))

    def product(g: Function, v: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        seed = g.inputs[-1]
        return g(**point, **{seed: np.reshape(v, shape).astype(zeros.dtype, copy=False)})

    def push(v: np.ndarray) -> np.ndarray:
        return linear(**point | {tangent: np.reshape(v, x_shape).astype(zeros.dtype, copy=False)}).reshape(-1)

    def pull(u: np.ndarray) -> np.ndarray:
        return product(linear.vjp(wrt=tangent), u, y_shape).reshape(-1)

    def push_all(m: np.ndarray) -> np.ndarray:
        found = product(linear.jvp(wrt=tangent, directions="directions"), m.T, (m.shape[1], *x_shape))
        return found.reshape(m.shape[1], size[0]).T

    def pull_all(m: np.ndarray) -> np.ndarray:
        found = product(linear.vjp(wrt=tangent, directions="directions"), m.T, (m.shape[1], *y_shape))
        return found.reshape(m.shape[1], size[1]).T

    return LinearOperator(dtype=zeros.dtype, shape=size, matvec=push, rmatvec=pull, matmat=push_all, rmatmat=pull_all)


def _halves(f: Function, wrt: str, of: str | None) -> tuple[Function | None, Function, str]:
    """The primal with residuals (None without residuals), the linear half, and the name of its tangent."""
    outputs = (of,) if of is not None else f._float_results() or ()
    if len(outputs) != 1:
        raise BadInput(f"the model has {len(outputs)} float outputs; name one of {', '.join(outputs)} with `of`")
    forward, linear = linearize(f.model, wrt=wrt, of=outputs)
    residuals = set(signature(linear).residuals)
    kept = [v for v in forward.graph.outputs if v.name in residuals]
    forward.graph.outputs[:] = kept
    prune(forward.graph)
    (tangent,) = signature(linear).input_tangents.values()
    return Function(forward, options=f.options) if kept else None, Function(linear, options=f.options), tangent

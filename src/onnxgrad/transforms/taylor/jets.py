"""Derivatives of high order along a path, as a transform."""

from __future__ import annotations

from typing import Any

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names
from onnxgrad.transforms.taylor.propagate import propagate
from onnxgrad.transforms.taylor.series import Series


@transform
def jet(model: AnyModel, *, wrt: Names, of: Names | None = None, order: int) -> Any:
    """The model with the derivatives of `of` along a path of `wrt`, up to an order: Taylor mode.

    Where `wrt` moves as x(t), with derivatives x₁ = x′(0), …, x_k, `of` moves as y(t): the model gives y₁ = y′(0), …,
    y_k. For a straight line (x₂ = x₃ = … = 0), y_k is the k-th derivative in the direction x₁. These are derivatives,
    not coefficients: those are y_k / k!.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of graph inputs, initializers or intermediate float values.
        of: names of float values; default: every float output.
        order: the highest derivative, k.

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, inputs ``{wrt}_1`` …
        ``{wrt}_k`` (shape and dtype of `wrt`) for each `wrt` and outputs ``{of}_1`` … ``{of}_k`` for each `of`;
        ``signature(derived)`` has the exact names in `path` and `jets`. Elementary functions and products take O(k²)
        nodes (Griewank & Walther 2008, chapter 13); operators without a recurrence take their derivatives one after the
        other, which may be many nodes.

    Raises:
        BadInput: `order` is no positive number.
        OnnxGradError: as `jvp`.
    """
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise BadInput(f"`order` is a number from 1 on, not {order!r}")
    d = Derivation(model, wrt, of)
    seeds: dict[Any, Series] = {}
    for name, value in d.wrt.items():
        path = [d.input(value, f"{name}_{k}") for k in range(1, order + 1)]
        d.signature.path[name] = [x.name for x in path]
        seeds[value] = [d.builder.var(value), *path]
    moved = propagate(d.builder, d.nodes, seeds, list(d.of.values()), order)
    firsts = d.derivatives_of({v: s[0] for v, s in moved.items() if s[0] is not None}, d.of)
    for (name, value), zero in zip(d.of.items(), firsts):
        made = moved.get(value, [zero, *[None] * order])
        d.signature.jets[name] = [
            d.output(d.zeros(value) if y is None else y, f"{name}_{k}", value) for k, y in enumerate(made[1:], start=1)
        ]
    return d.close()

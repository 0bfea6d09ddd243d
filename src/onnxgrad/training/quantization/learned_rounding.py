"""Learned rounding: weights are rounded up or down by the effect on their layer (AdaRound, Nagel et al. 2020).

The nearest number is best for each weight, but not for their common effect. Over calibration rows x, the error of a
layer is ‖x·(Ŵ - W)‖², a quadratic form of the rounding errors, with the matrix H = Σ xᵀx (section 3 of the paper). Each
output has a form of its own. The paper relaxes the choices and descends along gradients; here it is coordinate descent
over inputs, for all outputs at once: a weight takes the number below or above it, whichever is better given all others,
until none changes. So the error never grows, and there is nothing to tune.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant, not_none
from onnxgrad.training.graph.inner_values import inner_values
from onnxgrad.training.graph.rounding import is_rounding
from onnxgrad.training.quantization.numbers import limits, spread
from onnxgrad.training.quantization.record import record_in

_SWEEPS, _BLOCK = 20, 64


@dataclass(frozen=True)
class _Layer:
    """A weight that is rounded, and the one node that reads it."""

    master: ir.Value
    rounding: ir.Node
    node: ir.Node

    @property
    def groups(self) -> int:
        return self.node.attributes.get_int("group", 1)

    def columns(self, array: np.ndarray) -> np.ndarray:
        """A tensor of the weight's shape as [group, input, output]."""
        if self.node.op_type == "Conv":
            return array.reshape(self.groups, len(array) // self.groups, -1).swapaxes(1, 2)
        return (array.T if self.node.attributes.get_int("transB", 0) else array)[None]

    def back(self, columns: np.ndarray) -> np.ndarray:
        """The inverse."""
        shape = [int(d) for d in self.master.shape or ()]  # type: ignore[arg-type]
        if self.node.op_type == "Conv":
            return columns.swapaxes(1, 2).reshape(shape)
        return columns[0].T if self.node.attributes.get_int("transB", 0) else columns[0]

    def squares(self, x: np.ndarray) -> tuple[np.ndarray, int]:
        """Σ xᵀx, [group, input, input], and the number of rows; for a convolution, the rows are patches."""
        if self.node.op_type != "Conv":
            rows = (x.T if self.node.attributes.get_int("transA", 0) else x).reshape(-1, self.columns_in())
            return (rows.astype(np.float64).T @ rows)[None], len(rows)
        found, count = np.zeros((self.groups, self.columns_in(), self.columns_in())), 0
        for one in x:
            patches = self._patches(one.astype(np.float64))
            found += patches @ patches.swapaxes(1, 2)
            count += patches.shape[2]
        return found, count

    def columns_in(self) -> int:
        """The number of terms that an output is the sum of."""
        shape = [int(d) for d in self.master.shape or ()]  # type: ignore[arg-type]
        return math.prod(shape[1:]) if self.node.op_type == "Conv" else shape[self.node.attributes.get_int("transB", 0)]

    def _patches(self, x: np.ndarray) -> np.ndarray:
        """[group, input, place] of an image [channel, …]."""
        kernel = [int(d) for d in (self.master.shape or ())[2:]]  # type: ignore[arg-type]
        rank = len(kernel)
        given = {n: list(a.as_ints()) for n, a in self.node.attributes.items() if n in ("pads", "strides", "dilations")}
        pads, ones = given.get("pads", [0] * 2 * rank), [1] * rank
        dilations, strides = given.get("dilations", ones), given.get("strides", ones)
        x = np.pad(x, [(0, 0), *zip(pads[:rank], pads[rank:])])
        windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
        seen = np.lib.stride_tricks.sliding_window_view(x, windows, axis=tuple(range(1, rank + 1)))
        steps = [slice(None, None, s) for s in (*strides, *dilations)]
        seen = seen[(slice(None), *steps)]  # channel, places, kernel
        order = [0, *range(rank + 1, 2 * rank + 1), *range(1, rank + 1)]
        return seen.transpose(order).reshape(self.groups, self.columns_in(), -1)


def learn_rounding(model: ir.Model, batches: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Set the floats of `model`, from `place_quantizers`, to their learned rounded values, in place.

    Weights of MatMul, Gemm and Conv that one node reads are; others stay, and are rounded to the nearest.

    Args:
        model: has floats that are rounded where they are read; scales stay.
        batches: inputs by name.
    """
    layers = list(_layers(model))
    if not layers:
        return
    names = [not_none(layer.node.inputs[0]).name or "" for layer in layers]
    forms = [np.zeros((layer.groups, layer.columns_in(), layer.columns_in())) for layer in layers]
    counts = [0] * len(layers)
    for seen in inner_values(model, names, batches):
        for i, (layer, name) in enumerate(zip(layers, names)):
            form, count = layer.squares(seen[name])
            forms[i] += form
            counts[i] += count
    for layer, form, count in zip(layers, forms, counts):
        _round(layer, form, count)


def _layers(model: ir.Model) -> Iterator[_Layer]:
    """The weights of layers, each rounded and read once."""
    record = record_in(model)
    for name in () if record is None else record.weights:
        master = model.graph.initializers[name]
        way = [(node, at) for value in _exclusive_chain(master, 3) for node, at in value.uses()]
        if len(way) < 3 or not all(is_rounding(node) for node, _ in way[:2]):
            continue
        rounding, (node, at) = way[0][0], way[2]
        padding = node.attributes.get_string("auto_pad", "NOTSET")
        fits = len(master.shape or ()) == 2 if node.op_type in ("MatMul", "Gemm") else node.op_type == "Conv"
        if fits and at == 1 and node.graph is model.graph and padding == "NOTSET":
            yield _Layer(master, rounding, node)


def _exclusive_chain(value: ir.Value, most: int) -> Iterator[ir.Value]:
    """`value` and its successors, as long as each has a single reader; at most `most` values."""
    while most and len(value.uses()) == 1 and not value.is_graph_output():
        yield value
        ((node, _),) = value.uses()
        value, most = node.outputs[0], most - 1


def _round(layer: _Layer, form: np.ndarray, count: int) -> None:
    """Set the weight of `layer` to the best numbers that coordinate descent finds."""
    scale, point = (constant(v) for v in layer.rounding.inputs[1:3] if v is not None)
    held = not_none(layer.master.const_value)
    assert point is not None
    old = held.numpy()
    axis, block = layer.rounding.attributes.get_int("axis", 1), layer.rounding.attributes.get_int("block_size", 0)
    steps, zeros = (np.broadcast_to(spread(a, old.shape, axis, block), old.shape) for a in (not_none(scale), point))
    low, high = limits(layer.rounding.outputs[0].dtype)  # type: ignore[arg-type]
    steps = steps.astype(np.float64)
    exact = np.clip(old / steps, low - zeros.astype(np.float64), high - zeros.astype(np.float64))
    parts = zip(layer.columns(exact), layer.columns(steps), form)
    new = np.stack([descend(of_group, sizes, _damp_diagonal(h, count)) for of_group, sizes, h in parts])
    layer.master.const_value = ir.tensor((layer.back(new) * steps).astype(old.dtype), name=layer.master.name)


def _damp_diagonal(h: np.ndarray, seen: int) -> np.ndarray:
    """H of `seen` rows with a share of its mean diagonal added to it: 1/100, or more where rows are few.

    The inputs of a layer differ a little in use, so directions that no calibration row has are penalized too.
    """
    return h + np.eye(len(h)) * (max(0.01, len(h) / max(seen, 1)) * np.trace(h) / len(h) or 1.0)


def descend(exact: np.ndarray, steps: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Integers next to `exact` that minimize eᵀ·H·e for each output, with e the rounding errors.

    Args:
        exact: the weights in units of their steps, [input, output].
        steps: float64 of the same shape.
        h: float64[input, input].
    """
    found = np.rint(exact)
    slope = h @ ((found - exact) * steps)  # half the gradient
    for _ in range(_SWEEPS):
        moved = False
        for start in range(0, len(h), _BLOCK):  # the slope of others is brought up to date once for a block
            block = slice(start, start + _BLOCK)
            before, near, inner = found[block].copy(), slope[block].copy(), h[block, block]
            for i, row in enumerate(range(start, start + len(near))):
                other = np.where(found[row] > exact[row], np.floor(exact[row]), np.ceil(exact[row]))
                change = (other - found[row]) * steps[row]
                better = change * (2 * near[i] + change * h[row, row]) < -1e-12 * h[row, row] * steps[row] ** 2
                found[row] = np.where(better, other, found[row])
                near += np.outer(inner[:, i], np.where(better, change, 0))
            jumped = (found[block] - before) * steps[block]
            if jumped.any():
                moved = True
                slope += h[:, block] @ jumped
        if not moved:
            break
    return found

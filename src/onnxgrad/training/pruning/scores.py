"""Scores: how much each element of a weight, and each channel, matters.

Wanda (Sun et al. 2023, arXiv:2306.11695) multiplies a weight by the norm of what it multiplies; the gradient score is
the first-order change of the loss if the weight were zero (Molchanov et al. 2019, arXiv:1906.10771); movement (Sanh et
al. 2020, arXiv:2005.07683) is large where training moves a weight away from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import not_none
from onnxgrad.training.graph.inner_values import inner_values
from onnxgrad.training.pruning.channels import Channels, rank_of

Batches = Iterable[Mapping[str, np.ndarray]]
Scores = dict[str, np.ndarray]


def weights_of(channels: Channels) -> dict[str, ir.Value]:
    """The weights that layers read, by name."""
    found = {v.name or "": v for v, _ in channels.layers}
    return {n: v for n, v in found.items() if v.const_value is not None and v.const_value.dtype.is_floating_point()}


def _array(value: ir.Value) -> np.ndarray:
    return not_none(value.const_value).numpy().astype(np.float32)


def magnitudes(channels: Channels) -> Scores:
    """|w| of every element."""
    return {name: np.abs(_array(value)) for name, value in weights_of(channels).items()}


def wanda(model: ir.Model, channels: Channels, batches: Batches) -> Scores:
    """|w|·‖x‖ of every element, x being the channel that it multiplies; |w| where a layer multiplies nothing."""
    found = magnitudes(channels)
    places = {
        (value.name or "", axis): node.inputs[0]
        for (value, axis), node in channels.joined.read.items()
        if (value.name in found and node.inputs[0] is not None and node.op_type != "MatMul") or value is node.inputs[-1]
    }
    reads = {key: x for key, x in places.items() if x is not None and key[0] in found}
    squares = _squares(model, {x.name or "": _channel_axis(channels, key, x) for key, x in reads.items()}, batches)
    for (name, axis), x in reads.items():
        norms = np.sqrt(squares[x.name or ""])
        weight = found[name]
        group = len(norms) // weight.shape[axis]
        if group == 1:
            found[name] = weight * norms.reshape([-1 if a == axis else 1 for a in range(weight.ndim)])
    return found


def _channel_axis(channels: Channels, key: tuple[str, int], x: ir.Value) -> int:
    """The axis of x along which a layer reads."""
    node = next(n for (v, a), n in channels.joined.read.items() if (v.name, a) == key)
    if node.op_type in ("Conv", "ConvTranspose"):
        return 1
    return 0 if node.attributes.get_int("transA", 0) else rank_of(x) - 1


def _squares(model: ir.Model, axes: Mapping[str, int], batches: Batches) -> dict[str, np.ndarray]:
    """Σ x² along all axes but one, of the values of `model` by name."""
    found: dict[str, np.ndarray] = {}
    for seen in inner_values(model, axes, batches):
        for name, axis in axes.items():
            x = seen[name].astype(np.float64)
            part = (x**2).sum(tuple(a for a in range(x.ndim) if a != axis % x.ndim))
            found[name] = found.get(name, 0.0) + part
    return found


def channel_scores(channels: Channels, scores: Scores) -> np.ndarray:
    """The score of every set: the sum over the elements of weights that it would take away."""
    found = np.zeros(len(channels.locked))
    for (value, axis), ids in channels.sets.items():
        score = scores.get(value.name or "") if (value, axis) in channels.layers else None
        if score is not None:
            along = score.astype(np.float64).sum(tuple(a for a in range(score.ndim) if a != axis))
            np.add.at(found, ids, along)
    return found

"""The weights of a trained model, each with its elements before training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import is_op, not_none
from onnxgrad.training.quantization.norms import fold_norms
from onnxgrad.transplants.match import Matcher, Origin
from onnxgrad.transplants.names import score
from onnxgrad.transplants.schemes import array_of, tensor_of
from onnxgrad.transplants.weights import TargetWeight, weights_of


def origins_of(base: ir.Model, source: ir.Model | None) -> tuple[list[Origin], list[str]]:
    """The weights of `base` with their elements in `source`, and the names of weights that only `source` has.

    Without `source`, training has changed nothing. Layers with a normalization behind them are listed as well as they
    are when it is folded into them.
    """
    before = weights_of(base)
    after = before if source is None else weights_of(source)
    pairs, extra = _paired(before, after)
    found = []
    for weight in before:
        other = pairs.get(weight.name)
        trained = None if other is None or other is weight else other.floats
        parts = frozenset([weight.name])
        found.append(Origin(weight.name, weight.shape, weight.floats, trained, weight.labels, weight.uses, parts))
    kept = Matcher([o for o in found if o.name in pairs])
    for origin in found:
        if origin.name not in pairs and origin.size > 1:  # training has tied it to an equal one
            ties = kept.wholes(origin.read_before(), 0.0)
            if ties:
                origin.read_after = partial(ties[0][1].build, origin.shape, True)
    return found + _folded(base, base if source is None else source), extra


def _paired(before: Sequence[TargetWeight], after: Sequence[TargetWeight]) -> tuple[dict[str, TargetWeight], list[str]]:
    """The weights after training by the names before, and the names of those that are new."""
    theirs: dict[str, TargetWeight] = {}
    for weight in after:
        theirs.setdefault(weight.name, weight)
    found = {w.name: theirs[w.name] for w in before if w.name in theirs and theirs[w.name].shape == w.shape}
    taken = {id(w) for w in found.values()}
    left, others = [w for w in before if w.name not in found], [w for w in after if id(w) not in taken]
    for weight in left:
        fits = [w for w in others if w.shape == weight.shape]
        same = [w for w in fits if np.array_equal(w.floats(), weight.floats())]
        named = sorted(fits, key=lambda w: -score([weight.name], w.labels))[:1]
        if named and len(fits) > 1 and score([weight.name], named[0].labels) < 0.75:
            named = []
        for chosen in (same or named)[:1]:
            found[weight.name] = chosen
            others.remove(chosen)
    return found, [w.name for w in others if np.prod(w.shape) > 1]


def _folded(base: ir.Model, source: ir.Model) -> list[Origin]:
    """Weights and biases of layers with the normalization behind them folded in."""
    before, after = _fold(base), _fold(source)
    return [
        Origin(
            key,
            array.shape,
            partial(np.asarray, array),
            partial(np.asarray, after[key][0], array.dtype),
            [key],
            [],
            frozenset(parts),
        )
        for key, (array, parts) in before.items()
        if key in after and after[key][0].shape == array.shape
    ]


def _fold(model: ir.Model) -> dict[str, tuple[np.ndarray, list[str]]]:
    norms = [n for n in model.graph if is_op(n, "BatchNormalization")]
    if not norms:
        return {}
    graph = model.clone().graph
    layers = []
    for norm in [n for n in graph if is_op(n, "BatchNormalization")]:
        x = norm.inputs[0]
        layer = None if x is None else x.producer()
        if layer is not None and len(layer.inputs) > 1 and tensor_of(layer.inputs[1]) is not None:
            names = [v.name or "" for v in (*layer.inputs[1:3], *norm.inputs[1:5]) if v is not None]
            layers.append((norm, layer, names))
    fold_norms(graph)
    found = {}
    for norm, layer, names in layers:
        if norm.graph is None and layer.inputs[1] is not None and layer.inputs[2] is not None:
            for value, end in zip(layer.inputs[1:3], ("weight", "bias")):
                found[f"{names[0]} folded {end}"] = (array_of(not_none(value)), names)
    return found

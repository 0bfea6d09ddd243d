"""Masks that an optimizer keeps: masked weights are zero after every step, also under momentum and decay.

A mask is state of the step, so checkpoints and other processes have it; a callback of the run changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.training.metadata import MASK, QUANTIZED, SALIENCY
from onnxgrad.training.pruning.channels import Channels, Width, find_channels
from onnxgrad.training.pruning.follow import follow
from onnxgrad.training.pruning.known_sizes import settle_sizes
from onnxgrad.training.pruning.masks import prunable_weights
from onnxgrad.training.pruning.plan import PrunePlan
from onnxgrad.training.pruning.record import PruningRecord, record_in
from onnxgrad.training.pruning.scores import weights_of
from onnxgrad.training.pruning.shrink import shrink, weight_masks
from onnxgrad.training.spec.training_info import Source


def channels_of(model: ir.Model) -> Channels:
    """The channels of an opened copy of `model`."""
    copy = model.clone()
    settle_sizes(copy)
    return find_channels(copy.graph, follow)


def widths_of(channels: Channels, kind: str, trained: Mapping[str, object]) -> list[Width]:
    """The widths of a kind all of whose weights train: those of which all of a channel can become zero."""
    layers = set(weights_of(channels))
    return [w for w in channels.widths if w.kind == kind and all(n in trained for n in w.weights if n in layers)]


class WeightMasks:
    """The masks of the weights of one model.

    Args:
        model: whose zeros stay, if it is recorded as pruned; it records the `plans`.
        plans: how a run prunes.

    Raises:
        BadInput: nothing in the model can be pruned so.
    """

    def __init__(self, model: ir.Model, plans: Sequence[PrunePlan]) -> None:
        record = record_in(model)
        self.plans = list(plans)
        self.zeros = set(record.weights)
        self.names = set(record.weights)
        if plans:
            channels = channels_of(model)
            for plan in plans:
                found = self._weights(plan, channels)
                if not found or (plan.kind != "weights" and QUANTIZED in model.metadata_props):
                    raise BadInput(f"prune {plan.text!r}: the model has no {plan.kind} that can be removed")
                self.names |= found
        weights = {*record.weights, *(n for p in plans if p.kind == "weights" for n in self._weights(p, channels))}
        PruningRecord(tuple(sorted(weights)), tuple(p.text for p in plans)).write(model)

    def _weights(self, plan: PrunePlan, channels: Channels) -> set[str]:
        if plan.kind == "weights":
            return set(prunable_weights(channels, ()))
        layers = set(weights_of(channels))
        return {n for w in channels.widths if w.kind == plan.kind for n in w.weights if n in layers}

    def masked(
        self, b: Builder, held: ir.Value, new: Var, add: Callable[..., Var], bind: Callable[[ir.Value, Var], None]
    ) -> Var:
        """`new`, the next value of a weight, with zeros where its mask says so; others as they are."""
        if held.name not in self.names or held.const_value is None:
            return new
        array = held.const_value.numpy()
        first = array != 0 if held.name in self.zeros else np.ones(array.shape, bool)
        mask = add(f"{held.name}_mask", first, ir.DataType.BOOL, notes={MASK: held.name})
        bind(mask.value, mask)
        return b.Where(mask, new, 0.0)

    def write_scores(
        self,
        b: Builder,
        add: Callable[..., Var],
        bind: Callable[[ir.Value, Var], None],
        parameters: Sequence[ir.Value],
        gradients: Sequence[Var],
    ) -> None:
        """Sum up |w·g| or -w·g of every masked weight, if a plan asks for it."""
        scores = {p.score for p in self.plans} - {"magnitude"}
        if len(scores) > 1:
            raise BadInput(f"a run sums up one score, not {' and '.join(sorted(scores))}")
        for x, g in zip(parameters, gradients) if scores else ():
            if x.name in self.names and x.const_value is not None:
                product = b.Cast(b.var(x) * g, to=int(ir.DataType.FLOAT))
                change = b.Abs(product) if scores == {"gradient"} else b.Neg(product)
                zeros = np.zeros(x.const_value.numpy().shape)
                held = add(f"{x.name}_saliency", zeros, ir.DataType.FLOAT, notes={SALIENCY: x.name})
                bind(held.value, held + change)


def noted(source: Source | None, key: str) -> dict[str, str]:
    """The state that an algorithm has of each weight under `key`, `MASK` or `SALIENCY`."""
    return {
        prop.value: tensor.name
        for info in (() if source is None else source.infos)
        for tensor in info.algorithm.initializer
        for prop in tensor.metadata_props
        if prop.key == key
    }


def with_masks(source: Source | None, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`state` with zeros where masks say so: averages of weights may have others there."""
    found = dict(state)
    for weight, mask in noted(source, MASK).items():
        if weight in state and mask in state:
            found[weight] = np.where(state[mask], state[weight], np.zeros((), state[weight].dtype))
    return found


def narrowed(model: ir.Model) -> ir.Model:
    """`model`, which is used up, without the channels whose weights are all zero, if a run has pruned channels."""
    record = record_in(model)
    kinds = {PrunePlan.of(text).kind for text in record.plan} - {"weights"}
    if kinds:
        copy = model.clone()
        settle_sizes(copy)
        channels = find_channels(copy.graph, follow)
        removed = [i for w in channels.widths if w.kind in kinds for i in _zero_channels(channels, w)]
        if removed:
            shrink(copy, channels, removed)
            model = copy
    PruningRecord(record.weights, ()).write(model)
    return model


def _zero_channels(channels: Channels, width: Width) -> list[int]:
    """The channels of `width` all of whose weights are zero; no axis loses all of its channels."""
    arrays = {n: v.const_value.numpy() for n, v in weights_of(channels).items() if v.const_value is not None}
    zero = []
    for one in width.channels.tolist():
        masks = weight_masks(channels, [one])
        if masks and all(not arrays[n][np.broadcast_to(~m, arrays[n].shape)].any() for n, m in masks.items()):
            zero.append(one)
    rest = [one for one in width.channels.tolist() if one not in zero]
    order, least = channels.protect(width, np.array([*zero, *rest], int))
    return [one for one in order[: len(order) - least].tolist() if one in zero]

"""A model that is being narrowed: layers judged, channels chosen, the smaller graph compared with the masked one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import holds_floats, not_none
from onnxgrad.model_io.save import to_proto
from onnxgrad.remat.budget import megabytes
from onnxgrad.runtime import Options, Session
from onnxgrad.training.pruning import costs
from onnxgrad.training.pruning.budget import SHARES, Sensitivity, first_within, give_back, ways_down
from onnxgrad.training.pruning.channels import Channels, find_channels
from onnxgrad.training.pruning.follow import follow
from onnxgrad.training.pruning.masks import excluded, prunable_weights, smallest_go
from onnxgrad.training.pruning.recipe import PruneRecipe, pattern_of
from onnxgrad.training.pruning.record import record_masked
from onnxgrad.training.pruning.scores import Scores, channel_scores
from onnxgrad.training.pruning.shrink import shrink, weight_masks

_PROBES = 32
#: A time is met with so much to spare: measurements differ.
_MARGIN = 0.95
#: Channels up to which widths are sought in steps of one.
_FEW = 2048
#: The largest difference to the masked model, as a share of the largest output.
_TOLERANCE = 1e-4


@dataclass
class Pruned:
    """A pruned model, and what happened to it.

    Attributes:
        model: the smaller model.
        layers: for each layer that can be narrowed: name, kind, channels before and after, and its damage.
        left_alone: weights whose channels stay, with the reason.
        before, after: operations for a row, bytes of weights, milliseconds where they are the budget.
        zeros: the share of the weights of layers that are zero.
        difference: to the model in which what was removed is zero, as a share of the largest output.
    """

    model: ir.Model
    layers: list[dict[str, Any]]
    left_alone: dict[str, str]
    before: dict[str, float]
    after: dict[str, float]
    zeros: float = 0.0
    difference: float = 0.0


class Narrowing:
    """One model that is being pruned."""

    def __init__(
        self, model: ir.Model, channels: Channels, recipe: PruneRecipe, scores: Scores,
        batches: list[dict[str, np.ndarray]],
    ) -> None:  # fmt: skip
        self.model, self.channels, self.recipe, self.scores = model, channels, recipe, scores
        self.batches = batches
        self.feeds = batches[0] if batches else _random_feeds(model)
        self.widths = [w for w in channels.widths if not any(excluded(n, recipe.exclude) for n in w.weights)]
        self.flops, self.bytes = costs.flops(model, channels), costs.weight_bytes(model, channels)

    def run(self, sensitivity: bool) -> Pruned:
        """Everything, in order: channels, then weights, then the comparison."""
        recipe = self.recipe
        budgeted = recipe.flops is not None or recipe.bytes is not None or recipe.milliseconds is not None
        layers = self._layers(measured=(budgeted or sensitivity) and bool(self.batches))
        removed = self._within_budget(layers) if budgeted else self._shares(layers)
        gone = np.zeros(len(self.channels.locked), bool)
        none = gone.copy()
        gone[removed] = True
        before = {"flops": self.flops(none), "bytes": self.bytes(none)}
        after = {"flops": self.flops(gone), "bytes": self.bytes(gone)}
        table = [
            {
                "name": s.width.name, "kind": s.width.kind, "before": len(s.width.channels),
                "after": int((~gone[s.width.channels]).sum()), "damage": dict(zip(map(str, SHARES), s.damage)),
            }
            for s in layers
        ]  # fmt: skip
        report = Pruned(self.model, table, self.channels.left_alone, before, after)
        if recipe.weights is not None:
            self._set_zeros(report)
        masked = self._masked(removed)
        if recipe.milliseconds is not None:
            before["milliseconds"] = costs.milliseconds(to_proto(self.model), self._timed_feeds())
        shrink(self.model, self.channels, removed)
        self._compare(masked, report)
        if recipe.milliseconds is not None:
            after["milliseconds"] = costs.milliseconds(to_proto(self.model), self._timed_feeds())
        return report

    # --- channels --------------------------------------------------------------------------------

    def _layers(self, measured: bool) -> list[Sensitivity]:
        totals = channel_scores(self.channels, self.scores)
        orders, least = [], []
        for w in self.widths:
            order, count = self.channels.protect(w, w.channels[np.argsort(totals[w.channels], kind="stable")])
            orders.append(order)
            least.append(count)
        if measured:
            damages = self._damages(orders)
        else:
            damages = [_lost_shares(np.maximum(totals[order] - min(totals[order].min(), 0), 0)) for order in orders]
        return [Sensitivity(*fields) for fields in zip(self.widths, orders, damages, least)]

    def _damages(self, orders: Sequence[np.ndarray]) -> list[list[float]]:
        """The change of the outputs with the first channels of each order at zero."""
        probe = self.model.clone()
        held = {n: v for n, v in probe.graph.initializers.items() if n in self.scores and v.const_value is not None}
        weights = {n: v.const_value.numpy() for n, v in held.items() if v.const_value is not None}
        for value in held.values():  # an initializer that is an input can be fed, and is not folded
            probe.graph.inputs.append(value)
            value.shape = value.shape or ir.Shape(weights[value.name or ""].shape)
        session = Session(probe, options=Options(target="portable"))
        size = max(1, _PROBES // max(len(next(iter(self.batches[0].values()))), 1))
        batches = self.batches[:size]
        floats = [v.name or "" for v in self.model.graph.outputs if holds_floats(v)]

        def outputs(changed: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
            return [session.run({**weights, **changed, **batch}) for batch in batches]

        reference = outputs({})
        found = []
        for order in orders:
            damages = []
            for share in SHARES:
                masks = weight_masks(self.channels, order[: max(1, round(share * len(order)))])
                changed = {
                    n: np.where(m, weights[n], 0).astype(weights[n].dtype) for n, m in masks.items() if n in weights
                }
                damages.append(_distance(reference, outputs(changed), floats))
            found.append(damages)
        return found

    def _shares(self, layers: Sequence[Sensitivity]) -> list[int]:
        """The sets of a share of the channels, and of the heads, of every layer."""
        shares = {"channels": self.recipe.channels, "heads": self.recipe.heads}
        wanted = [name for name, share in shares.items() if share is not None]
        removed: list[int] = []
        for layer in layers:
            share = shares[layer.width.kind]
            if share is None:
                continue
            left = max(layer.least, round((1 - share) * len(layer.order)))
            if layer.width.kind == "channels" and len(layer.order) > self.recipe.multiple > 1:
                left = max(-(-layer.least // self.recipe.multiple), round(left / self.recipe.multiple))
                left *= self.recipe.multiple
            removed += layer.order[: max(0, len(layer.order) - left)].tolist()
        if wanted and not removed:
            raise BadInput(f"no {' or '.join(wanted)} can be removed{_why(self.channels)}")
        return removed

    def _within_budget(self, layers: Sequence[Sensitivity]) -> list[int]:
        recipe, none = self.recipe, np.zeros(len(self.channels.locked), bool)
        saving = self.bytes if recipe.bytes is not None else self.flops
        steps = list(ways_down(layers, saving, len(none), recipe.multiple))

        def reached(removed: list[int]) -> float:
            gone = none.copy()
            gone[removed] = True
            if recipe.milliseconds is None:
                return saving(gone)
            smaller = self.model.clone()
            again = find_channels(smaller.graph, follow)
            shrink(smaller, again, removed)
            return costs.milliseconds(to_proto(smaller), self._timed_feeds())

        whole = saving(none)
        if recipe.milliseconds is not None:
            most, said = _MARGIN * recipe.milliseconds, "{:.3g} ms"
        elif recipe.bytes is not None:
            most, said = recipe.most_bytes(whole), ""
        else:
            assert recipe.flops is not None
            most, said = (recipe.flops * whole if recipe.flops <= 1 else recipe.flops), "{:.3g} operations"
        found = first_within(steps, reached, most)
        if found is None:
            least = reached([one for step in steps for one in step])
            text = said.format(least) if said else megabytes(least)
            raise BadInput(
                f"the budget cannot be met: with one channel in each layer that can be narrowed, the model still has "
                f"{text}{_why(self.channels)}"
            )
        if recipe.milliseconds is None and recipe.multiple == 1 and len(found) <= _FEW:
            return give_back(found, layers, reached, most)
        return found

    def _timed_feeds(self) -> dict[str, np.ndarray]:
        rows = self.recipe.latency_rows
        fixed = {
            v.name
            for v in self.model.graph.inputs
            if v.shape is not None and len(v.shape) and isinstance(v.shape[0], int)
        }
        return {
            n: a if n in fixed or not a.ndim else np.ascontiguousarray(np.resize(a, (rows, *a.shape[1:])))
            for n, a in self.feeds.items()
        }

    # --- weights, and the proof ------------------------------------------------------------------

    def _set_zeros(self, report: Pruned) -> None:
        axes = {n: a for n, a in prunable_weights(self.channels, self.recipe.exclude).items() if n in self.scores}
        if not axes:
            raise BadInput("no layer of the model reads a weight that can be pruned")
        assert self.recipe.weights is not None
        masks = smallest_go(self.scores, axes, pattern_of(self.recipe.weights))
        _apply(self.model, masks)
        report.zeros = 1 - sum(int(m.sum()) for m in masks.values()) / sum(m.size for m in masks.values())
        record_masked(self.model, list(masks))

    def _masked(self, removed: Sequence[int]) -> ir.Model:
        copy = self.model.clone()
        _apply(copy, weight_masks(self.channels, removed))
        return copy

    def _compare(self, masked: ir.Model, report: Pruned) -> None:
        """Compare the outputs with those of the model in which what was removed is zero.

        Raises:
            BadInput: they differ, so that an operator between depends on what was removed.
        """
        onnx.checker.check_model(to_proto(self.model), full_check=True)
        try:
            reference = Session(masked, options=Options(target="portable")).run(self.feeds)
        except BadInput as error:
            if self.batches:
                raise
            raise BadInput(f"{error}\n  hint: these were random numbers; give data that the model takes") from error
        left, right = reference, Session(self.model, options=Options(target="portable")).run(self.feeds)
        for name, x in left.items():
            if x.dtype.kind == "f" and x.size:
                scale = max(float(np.abs(x).max()), 1e-9)
                report.difference = max(report.difference, float(np.abs(x - right[name]).max()) / scale)
        if not report.difference <= _TOLERANCE:
            raise BadInput(
                f"the smaller model differs from the one with zeros in place of what was removed, by "
                f"{report.difference:.1e} of the largest output\n  hint: exclude the weights around unusual operators"
            )


def _apply(model: ir.Model, masks: Mapping[str, np.ndarray]) -> None:
    for name, mask in masks.items():
        value = model.graph.initializers[name]
        array = not_none(value.const_value).numpy()
        value.const_value = ir.tensor(np.where(mask, array, 0).astype(array.dtype), name=name)


def _lost_shares(scores: np.ndarray) -> list[float]:
    """The share of the scores that is lost with the first channels, for each of `SHARES`."""
    total = float(scores.sum()) or 1.0
    return [float(scores[: max(1, round(share * len(scores)))].sum()) / total for share in SHARES]


def _distance(
    reference: Sequence[Mapping[str, np.ndarray]], found: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]
) -> float:
    """The mean square of the change of outputs, in units of their variance."""
    total = 0.0
    for name in names:
        before, after = (
            np.concatenate([b[name].astype(np.float64).ravel() for b in side]) for side in (reference, found)
        )
        total += float(((after - before) ** 2).mean() / (before.var() + 1e-12))
    return total


def _random_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for value in model.graph.inputs:
        wide = len(value.shape or ()) == 4  # pictures
        open_dims = [2, *([64 if wide else 8] * 8)]
        shape = [d if isinstance(d, int) else n for d, n in zip(value.shape or (), open_dims)]
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        numbers = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        found[value.name or ""] = numbers.astype(dtype)
    return found


def _why(channels: Channels) -> str:
    """The first reasons why layers are left alone, as a hint."""
    if not channels.left_alone:
        return ""
    listed = "; ".join(f"{name}: {why}" for name, why in list(channels.left_alone.items())[:3])
    return f"\n  hint: left alone are {listed}"

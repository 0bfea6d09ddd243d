"""Channels and heads that a model can lose: positions along axes that must go together.

Each position along each axis of known size is an element of one set; every operator joins the elements that have to be
removed together (`follow`), and locks those that cannot be removed. A set without a lock that a layer produces is a
channel; a head is a channel of several positions. Channels that the same layers produce form a `Width`: any number of
them may be removed, except the last. (Fang et al. 2023, arXiv:2301.12900, join whole layers; here it is positions, so
that concatenations, groups and flattened features need no cases of their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import is_constant, is_op
from onnxgrad.ir.operators import traits_of
from onnxgrad.training.pruning.known_sizes import in_a_row

Axis = tuple[ir.Value, int]
#: Operators that change at most the type of elements, beside those that move them.
_SAME_ELEMENTS = ("Cast", "CastLike", "Identity")


@dataclass
class Width:
    """Channels that the same layers produce.

    Attributes:
        name: of the first weight that makes them.
        kind: "channels" or "heads".
        channels: the numbers of the sets, in the order of their positions.
        weights: the names of the weights that make or read them.
    """

    name: str
    kind: str
    channels: np.ndarray
    weights: list[str] = field(default_factory=list)


class Coupling:
    """Positions along the axes of values, and which of them go together.

    Attributes:
        graph: the graph whose axes these are.
        choices: for a node that can be followed in several ways, which of them is taken.
        options: how many ways there are, and the axes that each of them frees.
        made, read: the axes of weights along which layers make and read channels.
        split: axes that a reshape divides into heads.
        normalized: axes that a mean of squares runs over: what is removed has to be zero there, from any weight.
        reasons: why an axis is locked.
    """

    def __init__(self, graph: ir.Graph, choices: dict[ir.Node, int]) -> None:
        self.graph, self.choices = graph, choices
        self.options: dict[ir.Node, list[Axis]] = {}
        self.made: dict[Axis, ir.Node] = {}
        self.read: dict[Axis, ir.Node] = {}
        self.split: set[Axis] = set()
        self.normalized: set[Axis] = set()
        self.reasons: dict[Axis, str] = {}
        self.parameters = _parameters(graph)
        self._starts: dict[Axis, np.ndarray] = {}
        self._count = 0
        self._edges: list[tuple[np.ndarray, np.ndarray]] = []
        self._locks: list[np.ndarray] = []
        self._touched: set[Axis] = set()

    # --- what operators say ----------------------------------------------------------------------

    def positions(self, value: ir.Value, axis: int) -> np.ndarray | None:
        """The elements along an axis; None if its size is unknown."""
        size = None if value.shape is None else in_a_row(value.shape[axis])
        if size is None:
            return None
        key = value, axis
        if key not in self._starts:
            self._starts[key] = np.arange(self._count, self._count + size)
            self._count += size
        return self._starts[key]

    def join(self, value: ir.Value | None, axis: int, other: ir.Value | None, other_axis: int) -> None:
        """Positions of two axes go together, one by one; axes of other sizes are locked."""
        if value is None or other is None:
            return
        mine, theirs = self.positions(value, axis), self.positions(other, other_axis)
        self._touched |= {(value, axis), (other, other_axis)}
        if mine is None or theirs is None or len(mine) != len(theirs):
            self.lock(value, axis, "sizes that are not known to agree")
            self.lock(other, other_axis, "sizes that are not known to agree")
        else:
            self._edges.append((mine, theirs))

    def tie(self, left: np.ndarray, right: np.ndarray) -> None:
        """Record that positions of two arrays, which broadcast, are removed together."""
        a, b = np.broadcast_arrays(left, right)
        self._edges.append((a.ravel(), b.ravel()))

    def touch(self, *axes: Axis) -> None:
        """Record that the rule of the present node has handled these axes."""
        self._touched.update(axes)

    def normalize(self, *axes: Axis) -> None:
        """The present node takes the mean of squares over these axes."""
        self.touch(*axes)
        for value, axis in axes:
            if self.positions(value, axis) is not None:
                self.normalized.add((value, axis))

    def lock(self, value: ir.Value | None, axis: int, reason: str) -> None:
        """No position along this axis may be removed."""
        if value is None:
            return
        found = self.positions(value, axis)
        self._touched.add((value, axis))
        if found is not None:
            self._locks.append(found)
            self.reasons.setdefault((value, axis), reason)

    def lock_all(self, value: ir.Value | None, reason: str) -> None:
        """No position of this value may be removed."""
        for axis in range(rank_of(value)):
            self.lock(value, axis, reason)

    def choose(self, node: ir.Node, ways: Sequence[Axis]) -> int:
        """The way in which `node` is followed, one of `ways`, each described by an axis that it frees."""
        self.options[node] = list(ways)
        return self.choices.get(node, 0)

    # --- the sets --------------------------------------------------------------------------------

    def visit(self, node: ir.Node, follow: Callable[[Coupling, ir.Node], None]) -> None:
        """Have `follow` join the axes of `node`; axes that it does not mention are locked."""
        self._touched = set()
        follow(self, node)
        means = ", whose mean is of all of them" if node.op_type == "LayerNormalization" else ""
        for value in dict.fromkeys([*reads(node), *node.outputs]):
            for axis in range(rank_of(value)):
                if (value, axis) not in self._touched:
                    self.lock(value, axis, f"{node.op_type} at {node.name or node.outputs[0].name!r}{means}")

    def solve(self) -> Channels:
        """The sets of positions that go together."""
        labels = np.arange(self._count)
        if self._edges:
            left, right = (np.concatenate(side) for side in zip(*self._edges))
            while True:
                before = labels.copy()
                least = np.minimum(labels[left], labels[right])
                np.minimum.at(labels, left, least)
                np.minimum.at(labels, right, least)
                labels = labels[labels]
                if (labels == before).all():
                    break
        locked = np.zeros(self._count, bool)
        for ids in self._locks:
            locked[labels[ids]] = True
        return Channels(self, {key: labels[ids] for key, ids in self._starts.items()}, locked)


class Channels:
    """The channels of a graph.

    Attributes:
        sets: the set of each position, by axis.
        widths: channels that may be removed, by the layers that make them.
        left_alone: the weights whose channels cannot be removed, with the reason.
        layers: axes of initializers along which layers make or read channels, also behind a Transpose or a Cast; of
            channels that a mean of squares runs over, those of all initializers.
    """

    def __init__(self, joined: Coupling, sets: dict[Axis, np.ndarray], locked: np.ndarray) -> None:
        self.joined, self.sets, self.locked = joined, sets, locked
        normalized = np.zeros(len(locked), bool)
        for key in joined.normalized:
            normalized[sets[key]] = True
        self.layers = _layers(joined)
        self.layers |= {key for key, ids in sets.items() if key[0].is_initializer() and normalized[ids].any()}
        makers: dict[int, list[str]] = {}
        first: dict[int, Axis] = {}
        heads: set[int] = set()
        for (value, axis), ids in sets.items():
            if (value, axis) in joined.made:
                for one in np.unique(ids).tolist():
                    makers.setdefault(one, []).append(f"{value.name}[{axis}]")
                    first.setdefault(one, (value, axis))
            if (value, axis) in joined.split:
                heads.update(np.unique(ids).tolist())
        grouped: dict[tuple[tuple[str, ...], bool], list[int]] = {}
        for one, names in makers.items():
            if not locked[one]:
                grouped.setdefault((tuple(names), one in heads), []).append(one)
        self.widths: list[Width] = []
        for (_, is_heads), members in grouped.items():
            if len(members) < 2:
                continue
            value, _ = first[members[0]]
            self.widths.append(Width(value.name or "", "heads" if is_heads else "channels", np.array(sorted(members))))
        chosen = {int(one) for w in self.widths for one in w.channels}
        self.left_alone = self._left_alone(chosen)
        of = {one: w for w in self.widths for one in w.channels.tolist()}
        for (value, _), ids in sets.items():
            if value.is_initializer():
                for width in {id(of[i]): of[i] for i in np.unique(ids).tolist() if i in of}.values():
                    if value.name not in width.weights:
                        width.weights.append(value.name or "")

    def _left_alone(self, chosen: set[int]) -> dict[str, str]:
        """Weights whose channels stay, and why: the nearest reason in the same set."""
        reasons: dict[int, str] = {}
        for key, why in self.joined.reasons.items():
            for one in np.unique(self.sets[key]).tolist():
                reasons.setdefault(one, why)
        found = {}
        for key in self.joined.made:
            ids = np.unique(self.sets[key]) if key in self.sets else np.array([], int)
            if not chosen & set(ids.tolist()):
                why = next((reasons[i] for i in ids.tolist() if i in reasons), "all of its channels go together")
                found[key[0].name or ""] = why
        return found

    def protect(self, width: Width, order: np.ndarray) -> tuple[np.ndarray, int]:
        """Keep every axis from losing all of its positions: a part of a split makes or reads a few of the channels.

        Args:
            width: the channels.
            order: their numbers, those that go first in front.

        Returns:
            The order with the channels that have to stay at its end, and how many these are.
        """
        rank = np.full(len(self.locked), -1)
        rank[order] = np.arange(len(order))
        axes = {tuple(np.unique(ids)) for ids in self.sets.values() if len(ids) and (rank[ids] >= 0).all()}
        staying: set[int] = set()
        for ids in sorted(axes, key=lambda ids: (len(ids), ids)):
            if not staying.intersection(ids):
                staying.add(max(ids, key=lambda one: rank[one]))
        stays = np.isin(order, list(staying))
        return np.concatenate([order[~stays], order[stays]]), max(1, len(staying))

    def keep_masks(self, removed: Iterable[int]) -> dict[Axis, np.ndarray]:
        """For every axis that loses positions without the sets `removed`, the mask of those that stay."""
        gone = np.zeros(len(self.locked), bool)
        gone[list(removed)] = True
        return {key: ~gone[ids] for key, ids in self.sets.items() if gone[ids].any()}


def _layers(joined: Coupling) -> set[Axis]:
    found: set[Axis] = set()
    for value, axis in {**joined.made, **joined.read}:
        if value.is_initializer():
            found.add((value, axis))
            continue
        near = [value]
        while near:
            node = near.pop().producer()
            if node is None or not (traits_of(node).moves is not None or is_op(node, _SAME_ELEMENTS)):
                continue
            sources = [v for v in node.inputs if v is not None and v in joined.parameters and v.dtype in FLOATS]
            near += sources
            found.update((v, a) for v in sources if v.is_initializer() for a in range(rank_of(v)))
    return found


def size_of(value: ir.Value, axis: int) -> int | None:
    """The size of an axis, if it is known."""
    dim = None if value.shape is None else value.shape[axis]
    return dim if isinstance(dim, int) else None


def rank_of(value: ir.Value | None) -> int:
    """The number of axes; 0 if it is unknown."""
    return 0 if value is None or value.shape is None else len(value.shape)


def _parameters(graph: ir.Graph) -> set[ir.Value]:
    """Values that only depend on initializers and constants."""
    found = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        read = reads(node)
        if all(v in found for v in read) and (read or is_constant(node.outputs[0])):
            found.update(node.outputs)
    return found


def find_channels(graph: ir.Graph, follow: Callable[[Coupling, ir.Node], None]) -> Channels:
    """The channels of an inferred graph.

    Some nodes can be followed in several ways: a reshape into three axes has one of them shrink. The first way is
    taken; where its axis turns out to be locked, the next one is tried.

    Args:
        graph: every weight in it is an initializer.
        follow: joins the axes of a node.
    """
    choices: dict[ir.Node, int] = {}
    while True:
        joined = Coupling(graph, choices)
        for value in (*graph.inputs, *graph.outputs):
            joined.lock_all(value, f"{value.name!r} is an input or output of the model")
        for node in graph:
            joined.visit(node, follow)
        found = joined.solve()
        changed: set[int] = set()  # sets of nodes whose way changes: what depends on them is judged in the next round
        for node, ways in joined.options.items():
            at = choices.get(node, 0)
            ids = found.sets.get(ways[at])
            blocked = ids is None or found.locked[ids].any() or len(np.unique(ids)) < 2
            near = {int(n) for way in ways if way in found.sets for n in np.unique(found.sets[way])}
            if blocked and at + 1 < len(ways) and not near & changed:
                choices[node] = at + 1
                changed |= near
        if not changed:
            return found

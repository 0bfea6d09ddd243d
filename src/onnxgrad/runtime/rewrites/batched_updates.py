"""Small vectors that are updated alike are updated as one.

An optimizer has about a dozen elementwise operators per tensor, and on a bias of a hundred numbers each of them takes
as long as its call. So vectors with the same operators (of any length, with the same scalars) are concatenated, updated
together, and split again. That saves 2 % of the step of a transformer under AdamW, with 200 calls fewer; for few
tensors, or the four operators of momentum, it does not pay off. It does for the three of a running statistic, which are
a quarter of the calls of networks with many BatchNormalizations: the statistic of the batch is there anyway. Only
operators that lead to outputs of the graph alone are moved, and only elementwise ones, so the bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import take_over
from onnxgrad.ir.match import is_op, sizes
from onnxgrad.runtime.rewrites.rewrite import rewrite_found

#: Marks the concatenation of vectors.
_JOINED = "onnxgrad.joined"

#: Longer vectors take longer to be laid side by side than the calls that it spares.
LONGEST = 4096

#: Fewer calls than these are not worth it, nor are fewer operators for a vector (momentum has four), or for one that is
#: computed for another purpose anyway.
SPARED, SHORTEST, SHORTEST_OF_MADE = 32, 8, 3

#: Operators that are rounded alike in every lane.
_EXACT = frozenset({"Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sign", "Sqrt", "Sub", "Where"})


@dataclass(frozen=True)
class _Chain:
    """A chain of operators that a vector passes through at the end of a graph.

    Attributes:
        nodes: in order.
        leaves: the vectors that they start from.
        ends: the places in `nodes` of outputs of the graph.
        form: everything but the leaves; equal where the same is done.
    """

    nodes: tuple[ir.Node, ...]
    leaves: tuple[ir.Value, ...]
    ends: tuple[int, ...]
    form: Hashable


def _length(value: ir.Value) -> int | None:
    """The length of a vector; None if the value is none, or too long."""
    dims = sizes(value)
    return dims[0] if dims is not None and len(dims) == 1 and 0 < dims[0] <= LONGEST else None


def _elementwise(node: ir.Node) -> bool:
    """True if all operands of `node` are scalars or as long as its result."""
    if not is_op(node, _EXACT) or len(node.outputs) != 1:
        return False
    length = _length(node.outputs[0])
    return length is not None and all(
        v is None or sizes(v) == () or (v.dtype is not None and _length(v) == length) for v in node.inputs
    )


def _final(graph: ir.Graph) -> list[ir.Node]:
    """Elementwise operators on short vectors that lead to outputs of the graph only, through others of the kind."""
    nodes: set[ir.Node] = set()
    for node in reversed(graph):
        if not _elementwise(node):
            continue
        users = {user for user, _ in node.outputs[0].uses()}
        if users <= nodes and (users or node.outputs[0].is_graph_output()):
            nodes.add(node)
    return [node for node in graph if node in nodes]


def _chains(graph: ir.Graph) -> list[_Chain]:
    nodes = _final(graph)
    number = {node: i for i, node in enumerate(nodes)}
    owner = list(range(len(nodes)))

    def root(i: int) -> int:
        while owner[i] != i:
            owner[i] = i = owner[owner[i]]
        return i

    for node in nodes:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            if maker in number:
                owner[root(number[node])] = root(number[maker])
    parts: dict[int, list[ir.Node]] = defaultdict(list)
    for i, node in enumerate(nodes):
        parts[root(i)].append(node)
    return [_chain(part) for part in parts.values()]


def _chain(nodes: list[ir.Node]) -> _Chain:
    place = {node.outputs[0]: i for i, node in enumerate(nodes)}
    leaves: dict[ir.Value, int] = {}
    form = []
    for node in nodes:
        reads: list[Hashable] = []
        for value in node.inputs:
            if value is None or sizes(value) == ():
                reads.append(value)
            elif value in place:
                reads.append(("made", place[value]))
            else:
                reads.append(("leaf", leaves.setdefault(value, len(leaves)), value.dtype))
        attributes = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items()))
        form.append((node.op_type, tuple(reads), attributes, node.outputs[0].is_graph_output()))
    ends = tuple(i for i, node in enumerate(nodes) if node.outputs[0].is_graph_output())
    return _Chain(tuple(nodes), tuple(leaves), ends, tuple(form))


def _is_made_anyway(chain: _Chain) -> bool:
    """True if no node has to run for `chain` alone."""
    return not any(_is_made_for(leaf, chain.nodes) for leaf in chain.leaves)


def _is_made_for(value: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """True if the node that computes `value` runs for the sake of `nodes` alone."""
    maker = value.producer()
    return maker is not None and all(
        not v.is_graph_output() and all(user in nodes for user in v.consumers()) for v in maker.outputs
    )


def _alike(graph: ir.Graph) -> list[list[_Chain]]:
    """Chains of the same form, if one chain on the concatenated vectors saves enough calls."""
    groups: dict[Hashable, list[_Chain]] = defaultdict(list)
    for chain in _chains(graph):
        groups[chain.form].append(chain)
    return [
        group
        for group in groups.values()
        if len(group[0].nodes) >= (SHORTEST_OF_MADE if all(map(_is_made_anyway, group)) else SHORTEST)
        and (len(group) - 1) * len(group[0].nodes) > len(group[0].leaves) + len(group[0].ends) + SPARED
    ]


def _write(b: Builder, groups: Sequence[Sequence[_Chain]]) -> int:
    outputs = b.graph.outputs
    places: dict[ir.Value, list[int]] = defaultdict(list)
    for i, value in enumerate(outputs):
        places[value].append(i)
    for group in groups:
        first = group[0]
        values: dict[ir.Value, Var] = {}
        for k, leaf in enumerate(first.leaves):
            values[leaf] = joined = b.Concat(*(chain.leaves[k] for chain in group), axis=0)
            joined.value.producer().meta[_JOINED] = True
        for node in first.nodes:
            reads = [values.get(v, v) if v is not None else None for v in node.inputs]
            values[node.outputs[0]] = getattr(b, node.op_type)(*reads, **node.attributes)
        lengths = b.const([_length(chain.nodes[0].outputs[0]) for chain in group])
        axis = [ir.AttrInt64("axis", 0)]
        for i in first.ends:
            whole = values[first.nodes[i].outputs[0]].value  # of equal ends, too, each is an output of its own
            parts = b.append(ir.Node("", "Split", [whole, lengths.value], axis, num_outputs=len(group)))
            for chain, part in zip(group, parts):
                old = chain.nodes[i].outputs[0]
                for place in places[old]:  # at once: looking for each among all of them takes seconds where many are
                    outputs[place] = part.value
                take_over(part.value, old)
    return sum(map(len, groups))


def compute_soon(b: Builder) -> None:
    """Have the concatenated vectors in the graph of `b` computed as early as the separate ones were.

    The runtime computes values that only the end of a graph reads at its end. The gradient of a bias is computed from
    the cotangent of a whole layer, which would live until then: 15 to 50 % on top of the peak of a step. So each vector
    is read by one more node, which copies nothing and has no readers; the runtime runs such nodes in turn. This is done
    last: pruning a graph removes these nodes.
    """
    joined = [node for node in b.graph if _JOINED in node.meta]
    if not joined:
        return
    b.before = joined[-1]
    for value in dict.fromkeys(v for node in joined for v in node.inputs):
        if value is not None and _is_made_for(value, joined):
            b.reshape(value, [-1])


BATCHED_UPDATES = rewrite_found(
    "batched_updates",
    "vectors that are updated alike are updated as one",
    "optimizers with many operators, vectors of up to 4096 elements",
    _alike,
    _write,
)

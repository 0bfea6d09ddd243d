"""Cheap results that the backward pass computes again, where a step's memory matters more than they cost.

A step keeps what its backward pass reads. The result of an activation, a normalization or short attention costs little
beside the products around it, and its operands are often kept anyway: the cotangent of a normalization reads x, from
which y follows. So the node runs a second time, right before the first late reader, and its first results are freed
early. Only single nodes are repeated, and of products those of short attention that no kernel computes, with a learned
bias, say (longer ways: `onnxgrad.remat`). The copy waits for another operand of that reader through `After`, a kernel
whose result is its first operand, in the same memory. The bits are the same.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.ir.execution_order import execution_order, sort
from onnxgrad.ir.graph import ancestors
from onnxgrad.ir.match import is_op, not_none, permutation, producer
from onnxgrad.ir.names import Names
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.runtime.kernels.elementwise_steps import DOMAIN, dims

#: As many products run between the last reader of the forward pass and the first one of the backward pass.
_APART = 6
_CHEAP = frozenset({"LayerNormalization", "Relu"})
#: Attention is computed again if keys are so many times fewer than columns of all heads, half of the keys being hidden.
_SHORT = 3
_PRODUCTS = frozenset({"Product", "Attention", "AttentionGrad"})


class _Reader(NamedTuple):
    """A reader of a result: when it runs, the node that needs the numbers, and the node and operand that are rewired.

    These are not the same where a view of the result is read.
    """

    place: float
    leaf: ir.Node
    node: ir.Node
    operand: int


def compute_again(graph: ir.Graph, state: Collection[str]) -> int:
    """Let the backward pass read repeated results of cheap nodes of `graph`, if that saves memory.

    Args:
        graph: its outputs are new values of state, and results of the forward pass, such as a loss.
        state: the names of those that are state.

    Returns:
        The count of repeated nodes.
    """
    repeating = _Repeating(graph, [v for v in graph.outputs if v.name not in state])
    for node in repeating.parts:
        _read_before(node)
    # from the last node on: the operand that a copy reads is then read late, too
    count = 0
    for node in reversed(repeating.order):
        while node in repeating.cheap and repeating.repeat(node):
            count += 1
    if count:
        sort(graph)
    return count


class _Repeating:
    """Nodes of one graph, in the order in which they run, and copies of some."""

    def __init__(self, graph: ir.Graph, results: Sequence[ir.Value]) -> None:
        self.graph = graph
        self.names = Names.of_graph(graph)
        self.order = execution_order(graph)
        #: when nodes run; copies have places between those of others
        self.place: dict[ir.Node, float] = {node: i for i, node in enumerate(self.order)}
        self.products = [i for i, node in enumerate(self.order) if _is_product(node)]
        self.copies: set[ir.Node] = set()
        #: parts of short attention, in operators
        self.parts = {part for node in self.order for part in _parts_of_attention(node)}
        self.cheap = {node for node in self.order if _is_cheap(node)} | self.parts
        self.forward = set(ancestors(self.order, results))
        #: the place from which on the backward pass runs
        self.turn = max((i for i in self.products if self.order[i] in self.forward), default=len(self.order))

    def repeat(self, node: ir.Node) -> bool:
        """Write a copy of `node` for its late readers, if that saves memory."""
        largest = node.outputs[0] if is_op(node, _CHEAP) else max(node.outputs, key=_size)
        shape = dims(largest)
        results = [v for v in node.outputs if dims(v) == shape]  # others are small, and stay
        for result in results:
            self._split_views(result)
        readers = sorted((r for v in results for r in self._readers(v)), key=lambda r: r.place)
        early = max((r.place for r in readers if r.leaf in self.forward), default=self.place[node])
        late = [r for r in readers if r.place > self.turn and r.leaf not in self.forward]
        if node not in self.forward or not late or self._products_between(early, late[0].place) < _APART:
            return False
        first: dict[ir.Value, float] = {}
        for reader in late:
            if (value := reader.node.inputs[reader.operand]) is not None:
                first.setdefault(value, reader.place)
        # what is read much later gets a copy of its own
        saved = [v for v, place in first.items() if self._products_between(late[0].place, place) < _APART]
        late = [r for r in late if r.node.inputs[r.operand] in saved]
        if shape is None or not saved or any(v.is_graph_output() for v in saved):
            return False
        whole = self._needed(node, shape)
        awaited = self._awaited(late[0].leaf, late[0].place, saved)
        if not whole or awaited is None or sum(not self._is_there(v, late[0].place) for v in whole) >= len(saved):
            return False
        after = ir.Node(DOMAIN, "After", [whole[0], awaited], num_outputs=1)
        operands = [after.outputs[0] if v is whole[0] else v for v in node.inputs]
        again = ir.Node(node.domain, node.op_type, operands, node.attributes.values(), num_outputs=len(node.outputs))
        place = late[0].place
        step = (place % 1 or 1.0) / 4
        self._insert(after, [whole[0]], late[0].leaf, place - 2 * step)
        self._insert(again, [v if v in saved else None for v in node.outputs], late[0].leaf, place - step)
        new = dict(zip(node.outputs, again.outputs))
        for reader in late:
            old = not_none(reader.node.inputs[reader.operand])
            reader.node.replace_input_with(reader.operand, new[old])
        for value in saved:
            if not value.uses():  # ONNX Runtime frees a result that nothing reads at the end of the step
                value.name = ""
        return True

    def _insert(self, node: ir.Node, like: Sequence[ir.Value | None], before: ir.Node, place: float) -> None:
        """Put `node` `before` another one; its results are like others, or left out."""
        node.name = self.names.fresh("again")
        for made, old in zip(node.outputs, like):
            made.name = "" if old is None else self.names.fresh("again")
            if old is not None:
                made.type, made.shape = old.type, old.shape
        self.graph.insert_before(before, node)
        self.place[node] = place
        self.copies.add(node)

    def _split_views(self, value: ir.Value) -> None:
        """Give late readers of views of `value` that are also read early a view of their own."""
        for node, at in list(value.uses()):
            if at != 0 or not _is_reshaped(node):
                continue
            view = node.outputs[0]
            self._split_views(view)
            readers = sorted(self._readers(view), key=lambda r: r.place)
            late = [r for r in readers if r.place > self.turn and r.leaf not in self.forward]
            early = [r for r in readers if r not in late]
            if not late or not early or self._products_between(early[-1].place, late[0].place) < _APART:
                continue
            again = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values(), num_outputs=1)
            self._insert(again, [view], late[0].leaf, late[0].place)
            for reader in late:
                reader.node.replace_input_with(reader.operand, again.outputs[0])

    def _readers(self, value: ir.Value) -> Iterator[_Reader]:
        """The readers of `value`; a view of it is read when the first of its own readers is."""
        for node, at in value.uses():
            inner = [r for v in node.outputs for r in self._readers(v)] if at == 0 and _is_reshaped(node) else []
            first = min(inner, key=lambda r: r.place, default=None)
            yield _Reader(self._place(node), node, node, at) if first is None else first._replace(node=node, operand=at)

    def _place(self, node: ir.Node) -> float:
        """The place in the order of `node`, or a place before all for a node in a body, which stays as it is."""
        return self.place.get(node, -1)

    def _products_between(self, before: float, place: float) -> int:
        return bisect.bisect_left(self.products, place) - bisect.bisect_right(self.products, before)

    def _awaited(self, leaf: ir.Node, when: float, saved: Sequence[ir.Value]) -> ir.Value | None:
        """The latest operand of `leaf`, at `when`, besides `saved` and views of it, or of the reader of its result.

        None if the forward pass computes it, too.
        """
        operands = [v for x in leaf.inputs if x is not None for v in _waiting(x) if v not in saved]
        made = [(v, maker) for v in operands if (root := _root(v)) not in saved
                and (maker := root.producer()) is not None]  # fmt: skip
        others = [(place, v) for v, maker in made if (place := self._place(maker)) < when]
        if not others and len(readers := list(leaf.outputs[0].consumers())) == 1:
            return self._awaited(readers[0], when, [*saved, *leaf.outputs])
        place, value = max(others, key=lambda other: other[0], default=(-1, None))
        return value if place > self.turn else None

    def _needed(self, node: ir.Node, shape: Sequence[int | str] | None) -> list[ir.Value]:
        """The operands of `node` that take memory: those of the shape of its result, and all factors."""
        factors = node.inputs[:3] if _is_attention(node) or is_op(node, ("MatMul", "Transpose")) else ()
        return [v for v in node.inputs if v is not None and (dims(v) == shape or v in factors)]

    def _is_there(self, value: ir.Value, when: float, depth: int = 2) -> bool:
        """True if `value` is in memory at `when` anyway, or a cheap result of values that are."""
        maker = value.producer()
        if self._is_held(value, when) or maker is None:
            return True
        if not depth or maker not in self.cheap:
            return False
        operands = self._needed(maker, dims(value))
        depth -= maker not in self.parts  # which are a short way by themselves
        return bool(operands) and all(self._is_there(v, when, depth) for v in operands)

    def _is_held(self, value: ir.Value, when: float) -> bool:
        """True if `value` is in memory at `when` for other nodes than copies, or was shortly before."""
        root = _root(value)
        maker, last = root.producer(), max(self._uses(root), default=-1)
        if maker is None or root.is_graph_output() or last >= when:
            return True
        return last > self.turn and self._products_between(last, when) < _APART

    def _uses(self, value: ir.Value) -> Iterator[float]:
        for node, at in value.uses():
            if node not in self.copies:
                yield self._place(node)
            if at == 0 and _is_view(node):
                yield from (place for v in node.outputs for place in self._uses(v))


def _root(value: ir.Value) -> ir.Value:
    """The value whose memory `value` is a view of."""
    while (node := value.producer()) is not None and _is_view(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _is_view(node: ir.Node) -> bool:
    """True if the result of `node` lies where its first operand does."""
    return _is_reshaped(node) or _is_after(node)


def _is_after(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, "After")


def _waiting(value: ir.Value) -> list[ir.Value]:
    """`value`, or what it is a result of waiting for."""
    node = value.producer()
    return [v for v in node.inputs if v is not None] if node is not None and _is_after(node) else [value]


def _is_reshaped(node: ir.Node) -> bool:
    return traits_of(node).moves is Moves.VIEW


def _size(value: ir.Value) -> int:
    """The number of elements, for a comparison: symbols are numbers."""
    return math.prod(d if isinstance(d, int) else 64 for d in dims(value) or ())


def _is_cheap(node: ir.Node) -> bool:
    return (
        is_op(node, _CHEAP)
        or (node.domain, node.op_type) == (DOMAIN, "Elementwise")
        or (_is_attention(node) and _is_short(node))
    )


def _is_attention(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, "Attention")


def _is_short(node: ir.Node) -> bool:
    """True if this attention takes about a hundredth of a step: few keys, and wide products beside it."""
    order = node.attributes["order"].as_ints()
    q, k, mask = (((1, *(dims(v) or ())) if v is not None else ())[-4:] for v in (*node.inputs[:2], node.inputs[4]))
    if len(q) != 4 or len(k) != 4:
        return False
    hides_half = len(mask) > 1 and mask[-2] != 1  # of every query others: kernels leave out what is hidden
    return _are_few(k[order[6]], q[order[1]], q[order[3]], _SHORT if hides_half else 2 * _SHORT)


def _are_few(keys: int | str, heads: int | str, columns: int | str, times: int) -> bool:
    if not isinstance(heads, int) or not isinstance(columns, int) or not isinstance(keys, int):
        return False
    return keys * times <= heads * columns


def _parts_of_attention(softmax: ir.Node) -> list[ir.Node]:
    """The nodes of short attention that a softmax belongs to, with Transposes of operands and of the result."""
    if not is_op(softmax, "Softmax") or (shape := dims(softmax.outputs[0])) is None or len(shape) < 3:
        return []
    nodes, scores = [softmax], softmax.inputs[0]
    while (maker := None if scores is None else scores.producer()) is not None and _is_elementwise(maker):
        nodes.append(maker)
        scores = next((v for v in maker.inputs if v is not None and dims(v) == shape), None)
    q = None if maker is None or not is_op(maker, "MatMul") or maker.inputs[0] is None else dims(maker.inputs[0])
    if maker is None or not q or not _are_few(shape[-1], shape[-3], q[-1], 2 * _SHORT):
        return []
    results = [n for n in softmax.outputs[0].consumers() if is_op(n, "MatMul") and n.inputs[0] is softmax.outputs[0]]
    near = [n for result in results for n in result.outputs[0].consumers()]
    near += [n for v in (*maker.inputs, *(result.inputs[1] for result in results)) if (n := producer(v, "Transpose"))]
    return [*nodes, maker, *results, *(n for n in near if is_op(n, "Transpose"))]


def _read_before(node: ir.Node) -> None:
    """Let Transposes of a Transpose read its operand, as ONNX Runtime will: that is what is kept."""
    for reader in node.outputs[0].consumers() if is_op(node, "Transpose") else ():
        first, second = permutation(node), permutation(reader) if is_op(reader, "Transpose") else None
        if first is not None and second is not None:
            reader.replace_input_with(0, node.inputs[0])
            reader.attributes["perm"] = ir.AttrInt64s("perm", [first[i] for i in second])


def _is_elementwise(node: ir.Node) -> bool:
    return traits_of(node).is_elementwise or (node.domain, node.op_type) == (DOMAIN, "Elementwise")


def _is_product(node: ir.Node) -> bool:
    return traits_of(node).is_product or (node.domain == DOMAIN and node.op_type in _PRODUCTS)

"""Attention by blocks of queries and keys, found where exporters write it out: no matrix of all scores is ever there.

Attention over S tokens has S² scores per head, and its backward pass several matrices of that size. Between the two
products, all operations are elementwise except the softmax: scaling, capping and masking of scores, and masks computed
from query and key indices. So the scores can be computed block by block (see `online_softmax`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.attention import Scores
from onnxgrad.ir.graph import dependents
from onnxgrad.ir.match import is_number, is_op, is_single, is_standard, not_none
from onnxgrad.ir.operators import traits_of
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.lower.registry import expand, lowering_for, replace
from onnxgrad.training.graph.online_softmax import BlockedScores, attend

#: From so many keys on, attention goes by blocks unless it is said otherwise; so many where a kernel may have it, which
#: is faster below, but reads a mask of [queries, keys] as a whole.
MANY, MANY_FOR_KERNEL = 1024, 8192
#: Queries and keys of a block, which were the fastest of those tried.
QUERIES, KEYS = 512, 256

#: Operators that are attention, by domain.
_WHOLE = {"": ("Attention",), "com.microsoft": ("Attention", "MultiHeadAttention", "GroupQueryAttention")}

Dims = list[int | ir.SymbolicDim]


def attend_by_blocks(graph: ir.Graph, rows: int | str | None = None) -> int:
    """Rewrite attention in `graph` to be computed by blocks, in place. Returns the count.

    Args:
        graph: typed, with nodes of the inference graph.
        rows: queries of a block; 0: leave all as it is; None: `QUERIES`, where there are `MANY` keys or more; "kernel":
            the same, but what a kernel takes is left to it where there are fewer than `MANY_FOR_KERNEL`.

    Raises:
        BadInput: `rows` is no such number.
    """
    check_rows(rows)
    leave, rows = rows == "kernel", None if isinstance(rows, str) else rows
    if rows == 0 or not any(n.op_type == "Softmax" or n.op_type in _WHOLE.get(n.domain, ()) for n in graph):
        return 0
    builder = Builder(graph)
    for node in list(graph):
        if _is_expanded(node, rows):
            for made in reversed(expand(builder, node) or []):
                if not any(v.uses() or v.is_graph_output() for v in made.outputs):
                    graph.remove(made, safe=True)
    count = 0
    for node in [n for n in graph if is_op(n, "MatMul")]:
        found = _Attention.of(node)
        if found is None or not found.is_large(rows):
            continue
        if leave and found.is_for_kernel and not found.has_keys(MANY_FOR_KERNEL):
            continue
        replace(builder, found.last, lambda b, n, found=found: [found.write(b, rows)])  # type: ignore[misc]
        count += 1
    return count


def check_rows(rows: int | str | None) -> None:
    """Raise BadInput if `rows` is no number of queries."""
    if rows in (None, "kernel"):
        return
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise BadInput(f"attention_rows is a number of queries, 0 for all at once, not {rows!r}")


def wants_blocks(graph: ir.Graph, rows: int | str | None = None) -> bool:
    """True if there may be attention in `graph` that `attend_by_blocks` would change."""
    if not any(n.op_type == "Softmax" or n.op_type in _WHOLE.get(n.domain, ()) for n in graph):
        return False
    rows = None if isinstance(rows, str) else rows
    if any(_is_expanded(n, rows) for n in graph):
        return True
    if rows is None and not any(_has_many(n.inputs[0], MANY) for n in graph if is_op(n, "Softmax")):
        return False
    products = (n for n in graph if is_op(n, "MatMul"))
    return any((found := _Attention.of(n)) is not None and found.is_large(rows) for n in products)


def _has_many(score: ir.Value | None, many: int) -> bool:
    """True if the last axis of `score`, that of keys, is known to be of size `many` at least."""
    dims = None if score is None else _dims(score)
    return bool(dims) and isinstance(dims[-1], int) and dims[-1] >= many  # type: ignore[index]


def _is_expanded(node: ir.Node, rows: int | None) -> bool:
    """True if `node` is an attention operator that is expanded to be computed by blocks."""
    if node.op_type not in _WHOLE.get(node.domain, ()):
        return False
    return lowering_for(node.op_type, node.domain) is not None and (rows is not None or _reads_many(node))


def _reads_many(node: ir.Node) -> bool:
    """True if an attention operator reads a tensor of so many rows that keys may be many."""
    shapes = [v.shape for v in node.inputs if v is not None and v.shape is not None and len(v.shape) > 2]
    return any(isinstance(d, int) and d >= MANY for shape in shapes for d in shape[1:-1])


@dataclass
class _Attention:
    """Attention: a product of queries and keys, elementwise nodes, a softmax, and a product with values.

    Attributes:
        last: the node of the result: the second product, or a Reshape of it.
        q, kt, v: queries, transposed keys, values; several heads of queries may share one of keys.
        product: the first product, as scores see it.
        score: the operand of the softmax.
        probabilities: its result.
        nodes: those between `product` and `score`, and those of masks, in order.
        moving: those that depend on the product.
        reads: the other operands of the nodes, with their axes of queries and keys.
        lost: conditions, one number per query, under which the result is 0.
        hides_lost: True if the result is 0 where the softmax is no number.
    """

    last: ir.Node
    q: ir.Value
    kt: ir.Value
    v: ir.Value
    product: ir.Value
    score: ir.Value
    probabilities: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    moving: set[ir.Node] = field(default_factory=set)
    reads: dict[ir.Value, tuple[int | None, int | None]] = field(default_factory=dict)
    lost: list[ir.Value] = field(default_factory=list)
    hides_lost: bool = False

    @classmethod
    def of(cls, node: ir.Node) -> _Attention | None:
        """Match attention that ends in the product `node`; None if it does not."""
        end, v = node.inputs
        graph = node.graph
        if end is None or v is None or end.shape is None or len(end.shape) < 3 or not isinstance(graph, ir.Graph):
            return None
        last, own = node, {node}
        if (grouped := _group(end, node)) is not None:
            last, reshape = grouped
            end, own = not_none(reshape.inputs[0]), own | {last, reshape}
        lost: list[ir.Value] = []
        hides_lost, value = False, end
        while (maker := value.producer()) is not None and maker.op_type != "Softmax":
            inner, condition, hides = _before_softmax(maker, end)
            if inner is None:
                return None
            own |= {maker} if not hides else {maker, *(u for u in inner.consumers() if u.op_type == "IsNaN")}
            lost += [] if condition is None else [condition]
            hides_lost, value = hides_lost or hides, inner
        if maker is None or not is_standard(maker) or not _is_last(maker) or maker.inputs[0] is None:
            return None
        score = maker.inputs[0]
        inside = _score_nodes(score)
        products = [n for n in inside if n.op_type in ("MatMul", "Reshape")]
        operands = _factors(products[0], score) if len(products) == 1 else None
        if operands is None:
            return None
        q, kt, made_by = operands
        product = products[0].outputs[0]
        nodes = [n for n in graph if n in inside and n is not products[0]]
        moved = dependents(graph, [product])
        own |= {maker, *made_by, *nodes}
        moving = {n for n in nodes if n.outputs[0] in moved}
        hidden = [product, *(n.outputs[0] for n in moving), *(m.outputs[0] for m in own - {*nodes, last})]
        if any(u not in own for x in hidden for u in x.consumers()) or any(x.is_graph_output() for x in hidden):
            return None  # another node reads the scores
        found = cls(last, q, kt, v, product, score, value, nodes, moving, lost=lost, hides_lost=hides_lost)
        return found if not {v, *lost} & moved and found._reads(moved) else None

    def _reads(self, moved: set[ir.Value]) -> bool:
        """Fill in `reads`. Returns True if the axes of all of them are known."""
        made = {n.outputs[0] for n in self.nodes} | {self.product}
        for x in dict.fromkeys(x for n in self.nodes for x in n.inputs[: 1 if n.op_type == "Expand" else None]):
            if x is None or x in made:
                continue
            axes = _axes(x, self.score)
            if axes is None or x in moved:
                return False
            if axes != (None, None):
                self.reads[x] = axes
        return True

    def has_keys(self, many: int) -> bool:
        """True if the number of keys is known to be at least `many`."""
        return _has_many(self.score, many)

    def is_large(self, rows: int | None) -> bool:
        """True if attention is computed by blocks: of so many `rows`, or because there are many keys."""
        return rows is not None or self.has_keys(MANY)

    @property
    def is_for_kernel(self) -> bool:
        """True if a kernel computes this form."""
        scores = Scores.of(self.score)
        return scores is not None and scores.fits(self.v)

    def write(self, b: Builder, rows: int | None) -> Var:
        """The same by blocks."""
        q, product, nodes = b.var(self.q), self.product, list(self.nodes)
        while (
            scaled := _match_scale(product, nodes)
        ) is not None:  # fewer numbers are scaled in queries than in scores
            node, factor = scaled
            q = q / b.var(factor) if node.op_type == "Div" else q * b.var(factor)
            product = node.outputs[0]
            nodes.remove(node)
        reads = {v: axes for v, axes in self.reads.items() if any(v in n.inputs for n in nodes)}
        scores = BlockedScores(
            q, b.var(self.kt), b.var(self.v), product, nodes, self.moving & set(nodes), self.score, reads,
            self.hides_lost,
        )  # fmt: skip
        y = attend(b, scores, rows or QUERIES, KEYS)
        for condition in self.lost:
            y = b.Where(b.var(condition), 0.0, y)
        return y


def _group(end: ir.Value, node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The Reshapes after and before a product in which heads of queries that share one of keys are rows of one."""
    reshape, users = end.producer(), list(node.outputs[0].consumers())
    if reshape is None or reshape.op_type != "Reshape" or len(users) != 1 or users[0].op_type != "Reshape":
        return None
    before, after = _dims_of(reshape.inputs[0]), _dims(users[0].outputs[0])
    is_of_heads = before is not None and after is not None and len(before) == len(after) == len(end.shape or ()) == 4
    return (users[0], reshape) if is_of_heads and same_dims(before[:3], after[:3]) else None  # type: ignore[index]


def _factors(node: ir.Node, score: ir.Value) -> tuple[ir.Value, ir.Value, set[ir.Node]] | None:
    """Queries, transposed keys, and the nodes that multiply them; None if queries are not laid out as scores."""
    made_by = {node}
    if node.op_type == "Reshape":
        source = node.inputs[0]
        inner = None if source is None else source.producer()
        if inner is None or inner.op_type != "MatMul" or inner.inputs[0] is None:
            return None
        reshape = inner.inputs[0].producer()
        if reshape is None or reshape.op_type != "Reshape" or len(_dims_of(inner.inputs[1]) or ()) != 4:
            return None
        q, kt = reshape.inputs[0], inner.inputs[1]
        made_by.add(inner)
    else:
        q, kt = node.inputs
    dims, whole = _dims_of(q), _dims(score)
    if q is None or kt is None or kt.shape is None or dims is None or whole is None:
        return None
    return (q, kt, made_by) if same_dims(dims[:-1], whole[:-1]) and same_dim(kt.shape[-1], whole[-1]) else None


def _before_softmax(node: ir.Node, end: ir.Value) -> tuple[ir.Value | None, ir.Value | None, bool]:
    """One step back from probabilities to a softmax: its source, the condition for 0, whether NaNs become 0."""
    x = node.inputs[0] if node.inputs else None  # a Constant reads nothing
    if not is_standard(node) or x is None:
        return None, None, False
    if node.op_type in ("Identity", "Cast"):
        return x, None, False
    if node.op_type != "Where" or not is_number(node.inputs[1], 0) or node.inputs[2] is None:
        return None, None, False
    inner, asked = node.inputs[2], x.producer()
    if asked is not None and asked.op_type == "IsNaN" and asked.inputs[0] is inner:
        return inner, None, True
    dims, whole = _dims(x), _dims(end)
    if dims is None or whole is None or not dims or dims[-1] != 1 or len(dims) > len(whole):
        return None, None, False
    return inner, x, False


def _match_scale(product: ir.Value, nodes: Sequence[ir.Node]) -> tuple[ir.Node, ir.Value] | None:
    """The node that alone reads a product and multiplies or divides it by one number, and that number."""
    users = list(product.consumers())
    made = {n.outputs[0] for n in nodes}
    if len(users) != 1 or users[0] not in nodes or users[0].op_type not in ("Mul", "Div"):
        return None
    first, second = users[0].inputs
    factor = second if first is product else first
    fits = factor is not None and factor is not product and factor not in made and is_single(factor)
    return (users[0], factor) if fits and (users[0].op_type == "Mul" or first is product) else None  # type: ignore[return-value]


def _score_nodes(score: ir.Value) -> set[ir.Node]:
    """The elementwise nodes and the product that `score` [.., queries, keys] is computed from."""
    inside: set[ir.Node] = set()
    todo = [score]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or node in inside or not is_standard(node) or not _has_queries_and_keys(value, score):
            continue
        if CONSTANT in node.metadata_props:  # it is read unchanged
            continue
        if node.op_type == "MatMul" or (node.op_type == "Reshape" and _is_product(node.inputs[0])):
            inside.add(node)
        elif len(node.outputs) == 1 and _is_by_element(node, score):
            inside.add(node)
            todo += [v for v in node.inputs if v is not None]
    return inside


def _is_product(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return is_op(node, "MatMul")


def _is_by_element(node: ir.Node, end: ir.Value) -> bool:
    """True if `node` is elementwise; for an Expand: if `end` has the expanded shape too."""
    if node.op_type != "Expand":
        return traits_of(node).is_elementwise
    dims, given, whole = _dims(node.outputs[0]), _dims_of(node.inputs[0]), _dims(end)
    if given is None or dims is None or whole is None or len(given) != len(dims):
        return False
    return all(d == 1 or same_dim(d, w) for d, w in zip(dims[::-1], whole[::-1]))


def _is_last(softmax: ir.Node) -> bool:
    """True if a Softmax runs along the last axis."""
    return softmax.attributes.get_int("axis", -1) in (-1, len(softmax.outputs[0].shape or ()) - 1)


def _has_queries_and_keys(value: ir.Value, score: ir.Value) -> bool:
    """True if `value` has an element for each query and each key."""
    dims, whole = _dims(value), _dims(score)
    if dims is None or whole is None or len(dims) < 2:
        return False
    return all(same_dim(d, w) for d, w in zip(dims[-2:], whole[-2:])) and dims[-2] != 1


def _axes(value: ir.Value, score: ir.Value) -> tuple[int | None, int | None] | None:
    """The axes of queries and keys of `value`, None for a missing one; None if they are not known."""
    dims, whole = _dims(value), _dims(score)
    if dims is None or whole is None or len(dims) > len(whole):
        return None
    found: list[int | None] = []
    for back in (2, 1):
        is_there = len(dims) >= back and dims[-back] != 1
        if is_there and not same_dim(dims[-back], whole[-back]):
            return None
        found.append(len(dims) - back if is_there else None)
    return found[0], found[1]


def _dims_of(value: ir.Value | None) -> Dims | None:
    return None if value is None else _dims(value)


def _dims(value: ir.Value) -> Dims | None:
    return None if value.shape is None else list(value.shape)

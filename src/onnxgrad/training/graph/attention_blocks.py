"""Attention by blocks of queries: the scores of all queries with all keys are never there at once.

Attention over S tokens has S² scores for each head, and its way back several matrices of that size. A softmax is taken
of the scores of one query, so some queries at a time do as well: a block is compared with all keys, normalized and
multiplied with the values, and of all that only the result is kept. The way back computes the scores of a block anew
and sums the cotangents of keys and values (see `by_row_blocks`; as FlashAttention, Dao 2023, but for whole rows: no
maximum and no sum has to be carried along the keys). What is kept is linear in S.

What adds to the scores or hides some of them goes along where it is elementwise: a mask of [queries, keys] is cut, or,
where it is computed from numbers of queries and of keys (as that of causal attention), computed for the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxgrad.control_flow.row_blocks import by_row_blocks
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import dependents
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.lower.registry import expand, replace

#: From so many keys on, attention goes by blocks of queries unless it is said otherwise.
MANY = 4096
#: A head of a block has about so many scores, and at least 32 queries.
_SCORES = 1 << 20

#: What goes row by row between the two products, and in masks.
_ROW_BY_ROW = frozenset([
    "Add", "Sub", "Mul", "Div", "Neg", "Where", "Cast", "Identity", "Tanh", "Max", "Min", "Clip", "Abs", "Expand",
    "And", "Or", "Not", "IsNaN", "IsInf", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Softmax",
])  # fmt: skip


def attend_by_blocks(graph: ir.Graph, rows: int | None = None) -> int:
    """Have attention in `graph` go by blocks of queries, in place; how often that is found.

    Args:
        graph: typed, with nodes of the inference graph.
        rows: queries of a block; 0: leave all as it is; None: where there are `MANY` keys or more, as many as are good.

    Raises:
        BadInput: `rows` is no such number.
    """
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise BadInput(f"attention_rows is a number of queries, 0 for all at once, not {rows!r}")
    if rows == 0 or not any(n.op_type in ("Softmax", "Attention") for n in graph):
        return 0
    builder = Builder(graph)
    for node in [n for n in graph if n.op_type == "Attention" and n.domain == ""]:
        key = node.inputs[1]
        length = None if key is None or key.shape is None else key.shape[-2]
        if rows is not None or (isinstance(length, int) and length >= MANY):
            expand(builder, node)
    count = 0
    for node in [n for n in graph if n.op_type == "MatMul" and n.domain == ""]:
        found = _Attention.of(node)
        if found is not None and (rows is not None or found.is_long):
            replace(builder, node, lambda b, n, found=found: [found.write(b, rows)])  # type: ignore[misc]
            count += 1
    return count


@dataclass
class _Attention:
    """Between a product of queries and keys, and one with values: nodes that go row by row.

    Attributes:
        scores: the first product.
        last: the second.
        nodes: those in between, in order.
        cut: what they read that has a row for each query.
    """

    scores: ir.Node
    last: ir.Node
    nodes: list[ir.Node] = field(default_factory=list)
    cut: list[ir.Value] = field(default_factory=list)

    @classmethod
    def of(cls, last: ir.Node) -> _Attention | None:
        """What ends in `last`; None if that is no attention."""
        end, values = last.inputs
        if end is None or end.shape is None or len(end.shape) < 3 or values is None:
            return None
        inside = _rows_behind(end)
        products = [n for n in inside if n.op_type == "MatMul"]
        if len(products) != 1 or not any(n.op_type == "Softmax" for n in inside):
            return None
        (scores,) = products
        out, graph = scores.outputs[0], last.graph
        assert isinstance(graph, ir.Graph)
        if not same_dims(_dims(out), _dims(end)) or scores.inputs[0] is None or scores.inputs[0].shape is None:
            return None
        nodes = [n for n in graph if n in inside and n is not scores]
        moving = dependents(graph, [out])
        own = {scores, last, *nodes}
        of_scores = [n for n in (scores, *nodes) if n.outputs[0] in moving]
        if any(u not in own for n in of_scores for u in n.outputs[0].consumers()):
            return None  # somebody else reads scores
        if any(n.outputs[0].is_graph_output() for n in of_scores) or values in moving:
            return None
        found = cls(scores, last, nodes)
        made = {n.outputs[0] for n in nodes} | {out}
        for v in dict.fromkeys(v for n in nodes for v in n.inputs[: 1 if n.op_type == "Expand" else None]):
            if v is None or v in made:
                continue
            kind = _kind(v, out)
            if kind is None or v in moving:
                return None
            if kind == "rows":
                found.cut.append(v)
        return found

    @property
    def is_long(self) -> bool:
        """Whether there are many keys."""
        dims = _dims(self.scores.outputs[0])
        return dims is not None and isinstance(dims[-1], int) and dims[-1] >= MANY

    def write(self, b: Builder, rows: int | None) -> Var:
        """The same by blocks."""
        queries = self.scores.inputs[0]
        assert queries is not None
        assert queries.shape is not None
        dims = _dims(self.scores.outputs[0])
        keys = dims[-1] if dims else None
        most = rows or max(32, _SCORES // keys if isinstance(keys, int) else 0)
        columns = [(b.var(v), len(v.shape or ()) - 2) for v in (queries, *self.cut)]

        def block(inner: Builder, parts: Sequence[Var]) -> list[tuple[Var, int]]:
            values = dict(zip((queries, *self.cut), parts))

            def operands(node: ir.Node) -> list[Var | None]:
                return [None if v is None else values.get(v) or inner.var(v) for v in node.inputs]

            for node in (self.scores, *self.nodes):
                if node.op_type == "Expand":  # what reads it broadcasts as well
                    (x, _) = operands(node)
                    assert x is not None
                else:
                    attributes: dict[str, Any] = dict(node.attributes.items())
                    x = inner.emit(node.op_type, *operands(node), **attributes)
                values[node.outputs[0]] = x
            result = inner.MatMul(*operands(self.last))
            return [(result, result.rank - 2)]

        (found,) = by_row_blocks(b, columns, most, block)
        return found


def _rows_behind(end: ir.Value) -> set[ir.Node]:
    """The elementwise nodes, softmaxes over keys and products that `end` [.., queries, keys] is computed from."""
    inside: set[ir.Node] = set()
    todo = [end]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or node in inside or node.domain != "" or not _has_rows_and_keys(value, end):
            continue
        if node.op_type == "MatMul":
            inside.add(node)
        elif node.op_type in _ROW_BY_ROW and len(node.outputs) == 1 and _fits(node, end):
            inside.add(node)
            todo += [v for v in node.inputs if v is not None]
    return inside


def _fits(node: ir.Node, end: ir.Value) -> bool:
    """Whether `node` goes row by row: a Softmax over keys; an Expand to a shape that what it meets has as well."""
    out = node.outputs[0]
    if node.op_type == "Softmax":
        axis = node.attributes.get("axis")
        return axis is None or axis.as_int() in (-1, len(out.shape or ()) - 1)
    if node.op_type == "Expand":
        x, dims, whole = node.inputs[0], _dims(out), _dims(end)
        if x is None or x.shape is None or dims is None or whole is None or len(x.shape) != len(dims):
            return False
        return all(d == 1 or same_dim(d, w) for d, w in zip(dims[::-1], whole[::-1]))
    return True


def _has_rows_and_keys(value: ir.Value, end: ir.Value) -> bool:
    """Whether `value` has a number for each query and each key."""
    dims, whole = _dims(value), _dims(end)
    if dims is None or whole is None or len(dims) < 2:
        return False
    return all(same_dim(d, w) for d, w in zip(dims[-2:], whole[-2:])) and dims[-2] != 1


def _kind(value: ir.Value, scores: ir.Value) -> str | None:
    """Whether there is a "row" of `value` for each query, or all queries share it; None where that is not known."""
    dims, whole = _dims(value), _dims(scores)
    if dims is None or whole is None:
        return None
    if len(dims) < 2 or dims[-2] == 1:
        return "shared"
    return "rows" if same_dim(dims[-2], whole[-2]) else None


def _dims(value: ir.Value) -> list[int | ir.SymbolicDim] | None:
    return None if value.shape is None else list(value.shape)

"""Scores of very many classes, some rows at a time: logits that are never there for all rows.

The last product of a language model computes a row of logits per token: for 4096 tokens and 128,000 words 2 GB, and its
cotangent the same again, several times. For a row-wise loss, the product becomes part of the loss: blocks of rows are
multiplied, compared with labels and discarded (see `by_row_blocks`). The backward pass repeats the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.control_flow.row_blocks import by_row_blocks
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import is_op, is_standard, not_none, permutation, producer

#: From so many classes on, logits are computed by blocks of rows unless options of a loss override it.
MANY = 16384
#: A block has about so many logits, and at least 32 rows.
_LOGITS = 1 << 24

#: Elementwise operators that may follow the product: with an operand of one row, or alone.
_BESIDE = frozenset(["Add", "Sub", "Mul", "Div"])
_ALONE = frozenset(["Identity", "Cast", "Tanh"])

#: Of scores [rows, classes] and labels [rows], something for each row.
OfRows = Callable[[Builder, Var, Var], Var]


@dataclass(frozen=True)
class ScoreBlocks:
    """Logits as a product of rows and a matrix, followed by elementwise nodes.

    Attributes:
        rows: the left operand of the product, [..., K].
        product: the product, which has two operands of rank 2 or a left one of a higher rank.
        after: what follows, in order.
        classes: how many there are.
    """

    rows: ir.Value
    product: ir.Node
    after: Sequence[ir.Node]
    classes: int

    @classmethod
    def of(cls, scores: ir.Value, axis: int) -> ScoreBlocks | None:
        """Match `scores`, with the classes along `axis`, as such a product. Returns None without a match."""
        found = _classes_last(scores, axis)
        after: list[ir.Node] = []
        while found is not None and (node := found.producer()) is not None and is_standard(node):
            if (classes := _classes_of(node)) is not None:
                rows = node.inputs[0]
                return None if rows is None or rows.shape is None else cls(rows, node, after[::-1], classes)
            after.append(node)
            found = _inner(node, found)
        return None

    @property
    def at_a_time(self) -> int:
        """The largest number of rows of a block."""
        return max(32, _LOGITS // self.classes)

    def write(self, b: Builder, labels: Var, functions: Sequence[OfRows], most: int) -> list[Var]:
        """The result of each of `functions` for all rows in order, as vectors."""
        rank = len(self.rows.shape or ())
        rows = b.var(self.rows)
        if rank > 2:  # a flat order would not show that the shapes differ
            labels = b.Expand(labels, b.Shape(rows, end=rank - 1)) if labels.rank == rank - 1 else labels
            rows = b.Flatten(rows, axis=rank - 1)
        labels = b.Reshape(labels, [-1]) if labels.rank != 1 else labels

        def block(inner: Builder, parts: Sequence[Var]) -> list[tuple[Var, int]]:
            scores = self._scores(inner, parts[0])
            return [(function(inner, scores, parts[1]), 0) for function in functions]

        return by_row_blocks(b, [(rows, 0), (labels, 0)], most, block)

    def _scores(self, b: Builder, rows: Var) -> Var:
        """The logits of some of the rows. Gemm reads its matrix in place, also transposed."""
        node, after = self.product, list(self.after)
        weight, bias = not_none(node.inputs[1]), None
        attributes: dict[str, Any] = dict(node.attributes.items())
        if node.op_type == "MatMul":
            turned = weight.producer()
            if is_op(turned, "Transpose"):
                weight, attributes = not_none(turned.inputs[0]), {"transB": ir.AttrInt64("transB", 1)}
            if after and after[0].op_type == "Add":
                bias = next(v for v in after.pop(0).inputs if v is not None and _is_of_one_row(v))
        elif len(node.inputs) > 2:
            bias = node.inputs[2]
        x = b.emit("Gemm", rows, b.var(weight), None if bias is None else b.var(bias), **attributes)
        x.value.shape = ir.Shape([rows.dims[0], self.classes])
        for node in after:
            beside = [v is not None and (len(node.inputs) == 1 or not _is_of_one_row(v)) for v in node.inputs]
            attributes = dict(node.attributes.items())
            operands = [x if own else v and b.var(v) for own, v in zip(beside, node.inputs)]
            x = b.emit(node.op_type, *operands, **attributes)
        return x


def _classes_last(scores: ir.Value, axis: int) -> ir.Value | None:
    """`scores` with the classes last, possibly the operand of a Transpose; None for another axis."""
    if scores.shape is None or not -len(scores.shape) <= axis < len(scores.shape):
        return None
    rank = len(scores.shape)
    axis %= rank
    if axis == rank - 1:
        return scores
    node, order = producer(scores, "Transpose"), (*range(axis), rank - 1, *range(axis, rank - 1))
    return node.inputs[0] if node is not None and permutation(node) == order else None


def _classes_of(node: ir.Node) -> int | None:
    """The number of columns of a product of rows and a matrix; None if unknown, or for other nodes."""
    matrix = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
    if matrix is None or matrix.shape is None or len(matrix.shape) != 2 or matrix.dtype not in FLOATS:
        return None
    if node.op_type == "Gemm" and node.attributes.get_int("transA"):
        return None
    if node.op_type == "Gemm" and len(node.inputs) > 2 and (c := node.inputs[2]) is not None and not _is_of_one_row(c):
        return None
    columns = matrix.shape[0 if node.attributes.get_int("transB", 0) else 1]
    rows = node.inputs[0]
    known = rows is not None and rows.shape is not None and len(rows.shape) > 1
    return columns if isinstance(columns, int) and known else None


def _inner(node: ir.Node, result: ir.Value) -> ir.Value | None:
    """The operand that `node` changes elementwise, alike for each row, to `result`."""
    if node.op_type in _ALONE and node.inputs[0] is not None and node.inputs[0].dtype in FLOATS:
        return node.inputs[0]
    if node.op_type not in _BESIDE:
        return None
    inner = [v for v in node.inputs if v is not None and not _is_of_one_row(v)]
    same = len(inner) == 1 and None not in (inner[0].shape, result.shape) and inner[0].shape == result.shape
    return inner[0] if same else None


def _is_of_one_row(value: ir.Value) -> bool:
    """True if `value` is a number or a vector that applies to each row."""
    shape = value.shape
    return shape is not None and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))

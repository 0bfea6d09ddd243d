"""Row blocks: a function of rows computed block by block, so that intermediate values exist for one block only.

The rows become the steps of a Scan. Reverse mode saves only the rows of a step and recomputes the rest. Shared operands
(a matrix that multiplies the rows) are captured; their cotangents are summed over the steps. So a product of N rows
with a matrix of V columns, followed by row-wise nodes, uses the memory of one block, forward and backward, at the cost
of one more computation of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, save_always
from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import Dim
from onnxgrad.ir.subgraphs import empty, give

#: Writes the nodes for a block of rows, given its inputs; the results have the rows of the block.
Written = Callable[[Builder, Sequence[Var]], Sequence[tuple[Var, int]]]


@dataclass(frozen=True)
class RowBlocks:
    """Rows in blocks of one size, as even as can be; the last block is filled up.

    Attributes:
        whole: how many rows there are.
        steps: how many blocks.
        rows: of a block.
        count, each, missing: int64 vectors of one element: `steps`, `rows`, and how many rows are filled up.
        filled: True if the last block may be filled up.
    """

    whole: Dim
    steps: Dim
    rows: Dim
    count: Var
    each: Var
    missing: Var
    filled: bool

    @classmethod
    def of(cls, b: Builder, x: Var, axis: int, most: int) -> RowBlocks:
        """The rows along an axis of `x`, at most so many in a block."""
        whole = x.dims[axis]
        if isinstance(whole, int):
            blocks = max(1, -(-whole // most))
            each = -(-whole // blocks)
            missing = blocks * each - whole
            return cls(whole, blocks, each, b.const([blocks]), b.const([each]), b.const([missing]), missing != 0)
        size = b.shape_of(x, axis, axis + 1)
        count = b.Max(b.Div(b.Add(size, most - 1), most), 1)
        per_step = b.Div(b.Sub(b.Add(size, count), 1), count)
        steps, rows = (ir.SymbolicDim(b.names.fresh(hint)) for hint in ("blocks", "rows"))
        return cls(whole, steps, rows, count, per_step, b.Sub(b.Mul(count, per_step), size), True)

    def cut(self, b: Builder, x: Var, axis: int) -> Var:
        """Split the rows of `x` into two axes, blocks and rows of a block, filled up with copies of the last row.

        An operation that is defined for that row is defined for its copies; a row of zeros might be entirely masked.
        """
        dims = x.dims
        if self.filled:
            x = b.Pad(x, b.join([0], self.missing), None, [axis], mode="edge")
        x = b.reshape(x, b.join(b.shape_of(x, 0, axis), self.count, self.each, b.shape_of(x, axis + 1)))
        x.value.shape = ir.Shape([*dims[:axis], self.steps, self.rows, *dims[axis + 1 :]])
        return x

    def join_blocks(self, b: Builder, x: Var, axis: int) -> Var:
        """The way back: the blocks along an axis of `x`, and the rows of a block along the next, as rows."""
        x = b.reshape(x, b.join(b.shape_of(x, 0, axis), b.Mul(self.count, self.each), b.shape_of(x, axis + 2)))
        x = b.Pad(x, b.join([0], b.Neg(self.missing)), b.const(0, x.dtype), [axis]) if self.filled else x
        x.value.shape = ir.Shape([*x.dims[:axis], self.whole, *x.dims[axis + 1 :]])
        return x


def by_row_blocks(b: Builder, columns: Sequence[tuple[Var, int]], most: int, write: Written) -> list[Var]:
    """Apply `write` to blocks of at most `most` rows.

    Rows that fill up the last block contribute neither to the results nor to cotangents.

    Rows that fill up the last block contribute neither to the results nor to cotangents.

    Args:
        b: where to write.
        columns: what is cut into blocks, and along which axis, which has the same size in all of them.
        most: rows of a block.
        write: gives values, each with the axis along which the rows of the block lie.

    Returns:
        The values for all rows, along the same axes.
    """
    inner, body = empty(b, "rows")
    blocks = RowBlocks.of(b, *columns[0], most)
    read = []
    for column, at in columns:
        read.append((blocks.cut(b, column, at), ScanAxis(at)))
        dims = [*column.dims[:at], blocks.rows, *column.dims[at + 1 :]]
        body.inputs.append(ir.Value(name=b.names.fresh("rows"), type=column.value.type, shape=ir.Shape(dims)))
    written = list(write(inner, [inner.var(v) for v in body.inputs]))
    give(inner, [value for value, _ in written])
    with b.record() as nodes:
        stacks = scan(b, body, [], read, [ScanAxis(at) for _, at in written])
    save_always(next(n for n in nodes if n.op_type == "Scan"), SavePolicy.STATES)
    return [blocks.join_blocks(b, stack, at) for stack, (_, at) in zip(stacks, written)]

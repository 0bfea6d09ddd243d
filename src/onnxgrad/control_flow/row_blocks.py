"""A function of rows, computed some rows at a time: what it needs in between is never there for all rows at once.

The rows become the steps of a Scan. Reverse mode keeps nothing of a step but the rows that it read, and computes the
rest anew. What the function reads beside the rows (a matrix that multiplies them) is read where it lies; its cotangent
is summed from step to step. So a product of N rows with a matrix of V columns, and what follows it row by row, takes
the memory of one block of rows, forward and backward, for one more computation of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, save_always
from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.subgraphs import empty, give

#: Writes what is computed of a block of rows, given the blocks: values that have the rows of the block.
Written = Callable[[Builder, Sequence[Var]], Sequence[tuple[Var, int]]]


def by_row_blocks(b: Builder, columns: Sequence[tuple[Var, int]], most: int, write: Written) -> list[Var]:
    """What `write` makes of rows, for at most `most` of them at a time.

    Blocks are of one size, as even as can be. The last one is filled up with copies of the last row, of which nothing
    is left in the results, nor in a cotangent; whatever is defined for that row is for them (a row of zeros may be
    one that a mask hides from everything).

    Args:
        b: where to write.
        columns: what is cut into blocks, and along which axis, which has the same size in all of them.
        most: rows of a block.
        write: gives values, each with the axis along which the rows of the block lie.

    Returns:
        The values for all rows, along the same axes.
    """
    inner, body = empty(b, "rows")
    (first, axis), *_ = columns
    whole = first.dims[axis]
    steps: int | ir.SymbolicDim
    rows: int | ir.SymbolicDim
    if isinstance(whole, int):
        blocks = max(1, -(-whole // most))
        each = -(-whole // blocks)
        count, per_step, missing = b.const([blocks]), b.const([each]), b.const([blocks * each - whole])
        steps, rows, filled = blocks, each, blocks * each != whole
    else:
        size = b.shape_of(first, axis, axis + 1)
        count = b.Max(b.Div(b.Add(size, most - 1), most), 1)
        per_step = b.Div(b.Sub(b.Add(size, count), 1), count)
        missing, filled = b.Sub(b.Mul(count, per_step), size), True
        steps, rows = (ir.SymbolicDim(b.names.fresh(hint)) for hint in ("blocks", "rows"))
    read = []
    for given, at in columns:
        x = given
        if filled:
            x = b.Pad(x, b.join([0], missing), None, [at], mode="edge")
        cut = b.reshape(x, b.join(b.shape_of(x, 0, at), count, per_step, b.shape_of(x, at + 1)))
        cut.value.shape = ir.Shape([*given.dims[:at], steps, rows, *given.dims[at + 1 :]])
        read.append((cut, ScanAxis(at)))
        dims = [*given.dims[:at], rows, *given.dims[at + 1 :]]
        body.inputs.append(ir.Value(name=b.names.fresh("rows"), type=x.value.type, shape=ir.Shape(dims)))
    written = list(write(inner, [inner.var(v) for v in body.inputs]))
    give(inner, [value for value, _ in written])
    with b.record() as nodes:
        stacks = scan(b, body, [], read, [ScanAxis(at) for _, at in written])
    save_always(next(n for n in nodes if n.op_type == "Scan"), SavePolicy.STATES)
    results = []
    for stack, (_, at) in zip(stacks, written):
        x = b.reshape(stack, b.join(b.shape_of(stack, 0, at), b.Mul(count, per_step), b.shape_of(stack, at + 2)))
        x = b.Pad(x, b.join([0], b.Neg(missing)), b.const(0, x.dtype), [at]) if filled else x
        x.value.shape = ir.Shape([*x.dims[:at], whole, *x.dims[at + 1 :]])
        results.append(x)
    return results

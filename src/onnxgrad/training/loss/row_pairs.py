"""Broadcasts that compare each row of a batch with all rows, where nothing in the loss asks for it.

Scores [N, 1] less labels [N] are [N, N]: a mean over all pairs of rows, and no error. A loss that means pairs adds the
axis itself, as in ``x[:, None] - x``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import constant, is_op, is_standard
from onnxgrad.ir.operators import traits_of
from onnxgrad.wording import shape_text

Dims = Sequence[int | str | ir.SymbolicDim]


def paired_rows(model: ir.Model, shapes: Sequence[Dims | None]) -> str:
    """The first broadcast of rows over all rows, in words; empty if there is none.

    Args:
        model: the graph of a loss.
        shapes: of its operands, with names for sizes that are not known; the first axis is that of the rows.
    """
    model = model.clone()
    for value, dims in zip(model.graph.inputs, shapes):
        value.shape = None if dims is None else ir.Shape([_named(d, a) for a, d in enumerate(dims)])
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    infer_model(model)
    rows = {str(_named(dims[0], 0)) for dims in shapes if dims and not isinstance(dims[0], int)}
    for node in model.graph:
        if is_standard(node) and node.op_type in BROADCASTING and node.outputs[0].shape is not None:
            out = [str(d) in rows for d in node.outputs[0].shape]
            if sum(out) > 1 and _is_by_accident(node, rows):
                operands = [v for v in node.inputs if v is not None and v.shape is not None]
                found = " and ".join(shape_text(v.shape) for v in operands)
                return (
                    f"its {node.op_type} of {found} is {shape_text(node.outputs[0].shape)}: each row meets all rows"
                    "\n  hint: take scores[:, 0] or labels[:, None]; where pairs are meant, x[:, None] - x[None]"
                )
    return ""


def fit_axes(x: Var, dims: Dims | None, what: str) -> Var:
    """`x` with or without a last axis of size 1, as `dims` have it.

    Raises:
        BadInput: its shape is another one.
    """
    if dims is None or x.shape is None:
        return x
    b, shape = x.builder, tuple(x.shape)
    if len(shape) == len(dims) + 1 and shape[-1] == 1:
        x = b.Squeeze(x, [-1])
    elif len(shape) == len(dims) - 1 and dims[-1] == 1:
        x = b.Unsqueeze(x, [-1])
    both = zip(x.dims, dims)
    if x.rank != len(dims) or any(isinstance(d, int) and isinstance(w, int) and d != w for d, w in both):
        raise BadInput(f"{what} {x.name!r} has shape {shape_text(shape)}, and {shape_text(dims)} is expected")
    return x


def _named(dim: int | str | ir.SymbolicDim, axis: int) -> int | str | ir.SymbolicDim:
    """A name for an unnamed size of the first axis."""
    return "rows" if axis == 0 and isinstance(dim, ir.SymbolicDim) and dim.value is None else dim


def _is_by_accident(node: ir.Node, rows: Collection[str]) -> bool:
    """True if an operand has its rows where another has an axis of size 1 that the loss did not make."""
    operands = [v for v in node.inputs if v is not None and v.shape is not None]
    for value in operands:
        for axis in range(-len(value.shape or ()), 0):
            meets = any(str(_dim(v, axis)) in rows for v in operands)
            if meets and _dim(value, axis) == 1 and not _is_made(value, axis):
                return True
    return False


def _dim(value: ir.Value, axis: int) -> int | ir.SymbolicDim | None:
    """The size along `axis`, counted from the end; None where the value has no such axis."""
    shape = value.shape or ()
    return shape[axis] if len(shape) >= -axis else None


def _is_made(value: ir.Value, axis: int) -> bool:
    """True if the axis of size 1, counted from the end, is one that the loss adds."""
    node = value.producer()
    if is_op(node, "Unsqueeze"):
        axes = constant(node.inputs[1])
        rank = len(value.shape or ())
        added = [] if axes is None else [a % rank - rank for a in axes.ravel().tolist()]
        source = node.inputs[0]
        return axis in added or (source is not None and _is_made(source, axis + sum(a > axis for a in added)))
    if is_op(node, "Reshape"):
        return True
    if node is None or not (traits_of(node).is_elementwise or is_op(node, BROADCASTING)):
        return False
    return any(v is not None and _dim(v, axis) == 1 and _is_made(v, axis) for v in node.inputs)

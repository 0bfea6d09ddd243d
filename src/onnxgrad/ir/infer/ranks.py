"""Infer a rank from the length of a shape, axes or pads operand, where the library leaves it unknown.

Exporters compute shapes, axes and pads: their elements are not known before a run, but their number is. Rules need
no more than the rank.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.match import Dim

#: Dimensions of the first output, None for an unknown one; None if the rank is not known.
Dims = Callable[[ir.Node], "list[Dim | None] | None"]

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def length(value: ir.Value | None) -> int | None:
    """The number of elements of a vector, if known."""
    shape = None if value is None else value.shape
    return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None


def _dims(node: ir.Node, i: int) -> list[Dim | None] | None:
    value = node.inputs[i] if i < len(node.inputs) else None
    return None if value is None or value.shape is None else list(value.shape)


def _count(node: ir.Node, *places: int) -> int | None:
    """The length of the first known of these operands."""
    return next((n for i in places if i < len(node.inputs) and (n := length(node.inputs[i])) is not None), None)


def _unknown(rank: int | None) -> list[Dim | None] | None:
    return None if rank is None else [None] * rank


def _tile(node: ir.Node) -> list[Dim | None] | None:
    x = _dims(node, 0)
    return _unknown(_count(node, 1) if x is None else len(x))


def _unsqueeze(node: ir.Node) -> list[Dim | None] | None:
    x, more = _dims(node, 0), _count(node, 1)
    return None if x is None or more is None else _unknown(len(x) + more)


def _reduce(node: ir.Node) -> list[Dim | None] | None:
    x, gone = _dims(node, 0), _count(node, 1)
    if x is None:
        return None
    if node.attributes.get_int("keepdims", 1) or (gone == 0 and node.attributes.get_int("noop_with_empty_axes", 0)):
        return _unknown(len(x))
    return _unknown(len(x) - gone) if gone and gone <= len(x) else [] if gone == 0 else None


def _affine_grid(node: ir.Node) -> list[Dim | None] | None:
    """[N, …, 2] for θ: [N, 2, 3], and [N, …, 3] for [N, 3, 4]; size is (N, C, …)."""
    theta, size = _dims(node, 0) or [None], _count(node, 1)
    last = theta[1] if len(theta) == 3 else None
    space = size - 2 if size is not None else last if isinstance(last, int) else None
    return None if space is None else [theta[0], *[None] * space, space]


def _col2im(node: ir.Node) -> list[Dim | None] | None:
    x, space = _dims(node, 0) or [None], _count(node, 1, 2)
    return None if space is None else [x[0], *[None] * (space + 1)]


def _pad(node: ir.Node) -> list[Dim | None] | None:
    margins = _count(node, 1)
    whole = len(node.inputs) < 4 or node.inputs[3] is None
    return _unknown(margins // 2) if whole and margins is not None else None


def _resize(node: ir.Node) -> list[Dim | None] | None:
    return None if "axes" in node.attributes else _unknown(_count(node, 3, 2) or None)


def _center_crop_pad(node: ir.Node) -> list[Dim | None] | None:
    return None if "axes" in node.attributes else _unknown(_count(node, 1))


def _transpose(node: ir.Node) -> list[Dim | None] | None:
    order = node.attributes.get_ints("perm", None)
    return None if order is None else _unknown(len(order))


def _concat(node: ir.Node) -> list[Dim | None] | None:
    """The sizes that one operand has, but along the axis."""
    known = next((x for i in range(len(node.inputs)) if (x := _dims(node, i)) is not None), None)
    axis = node.attributes["axis"].as_int()
    if known is None or not -len(known) <= axis < len(known):
        return None
    dims: list[Dim | None] = list(known)
    dims[axis] = None
    return dims


def _grid_sample(node: ir.Node) -> list[Dim | None] | None:
    """[N, C, …] of X: [N, C, …] and the grid: [N, …, r]."""
    x, grid = _dims(node, 0), _dims(node, 1)
    known = x if x is not None else grid
    return None if known is None else [known[0], None if x is None else x[1], *[None] * (len(known) - 2)]


#: Operators whose rank the library leaves open, and their dimensions.
OPEN: dict[str, Dims] = {
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
    "AffineGrid": _affine_grid,
    "Col2Im": _col2im,
    "Pad": _pad,
    "Resize": _resize,
    "CenterCropPad": _center_crop_pad,
    "Transpose": _transpose,
    "Concat": _concat,
    "GridSample": _grid_sample,
    **{f"Reduce{name}": _reduce for name in _REDUCTIONS},
}

#: Operators whose result has the rank of the first operand.
_SAME_RANK = ("Tile", "Pad", "Resize", "CenterCropPad", "Transpose", "Concat", "GridSample")


def with_rank(infer: Infer, name: str) -> Infer:
    """Wrap `infer` of the operator `name`: add the rank that operands imply, even if those have unknown ranks."""
    dims_of, alike = OPEN[name], name in _SAME_RANK

    def infer_ranked(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        dims = dims_of(node)
        for x in (
            node.inputs[: len(node.inputs) if node.op_type == "Concat" else 1] if alike and dims is not None else ()
        ):
            if x is not None and x.shape is None:
                x.shape = ir.Shape([ctx.new_symbolic_dim() for _ in dims or ()])
        infer(ctx, node)
        out = node.outputs[0]
        if out.type is None and node.inputs[0] is not None:
            out.type = node.inputs[0].type
        if out.shape is None and dims is not None:
            out.shape = ir.Shape([ctx.new_symbolic_dim() if d is None else d for d in dims])

    return infer_ranked

"""Corrections of the shapes of single operators, as `registry` lists them with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.constants import MOST_ELEMENTS, slice_indices
from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.ir.infer import ranks
from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.limits import check_asked
from onnxgrad.ir.match import Dim, constant, is_constant, not_none

#: Operators whose output is the multidirectional broadcast of all their inputs.
BROADCASTING = [
    *("Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sub", "Sum", "Where", "BitShift"),
    *("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
]


def broadcast_dims(shapes: Sequence[Sequence[Dim]], unknown: Callable[[], Dim]) -> list[Dim]:
    """The broadcast of `shapes`; `unknown()` where distinct symbols meet and either may be 1."""
    rank = max(map(len, shapes), default=0)
    dims: list[Dim] = []
    for axis in range(-rank, 0):
        here = {s[axis] for s in shapes if len(s) >= -axis} - {1}
        sizes = [d for d in here if isinstance(d, int)]
        if sizes:
            dims.append(sizes[0])
        elif not here:
            dims.append(1)
        elif len(here) == 1 and (only := here.pop()).value is not None:  # type: ignore[union-attr]
            dims.append(only)
        else:
            dims.append(unknown())
    return dims


#: Marks nodes of branches that are never taken: their operands need not fit.
DEAD = "onnxgrad.dead"


def _operands(ctx: osi.ShapeInferenceContext, node: ir.Node) -> list[Sequence[Dim] | None]:
    """The shapes that are broadcast for `node`; for an Expand, the elements of its second operand are a shape."""
    if node.op_type != "Expand":
        return [None if v is None else v.shape for v in node.inputs]  # type: ignore[misc]
    data, target = map(not_none, node.inputs)
    asked = _ints(target) if is_constant(target) else ctx.get_symbolic_value(target)
    if asked is None and (rank := ranks.length(target)) is not None:
        asked = [ctx.new_symbolic_dim() for _ in range(rank)]
    return [data.shape, asked]  # type: ignore[list-item]


def broadcast(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """The sizes of two different symbols are unknown: either may be 1."""
    shapes = _operands(ctx, node)
    if all(s is not None for s in shapes):
        dims = broadcast_dims([list(s) for s in shapes if s is not None], ctx.new_symbolic_dim)
        node.outputs[0].shape = None
        ctx.set_shape(node.outputs[0], ir.Shape(dims))


def infer_elementwise(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Type and shape of an operator of another domain that is elementwise: those of its operands, which broadcast."""
    (out, *_), x = node.outputs, node.inputs[0] if node.inputs else None
    out.type = out.type or (None if x is None else x.type)
    if out.shape is None:
        broadcast(ctx, node)


def batches(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """The leading axes of batches of matrices are broadcast."""
    a, b = (None if v is None or v.shape is None else list(v.shape) for v in node.inputs[:2])
    if a is not None and b is not None and len(a) > 1 and len(b) > 1:
        batch = broadcast_dims([a[:-2], b[:-2]], ctx.new_symbolic_dim)
        node.outputs[0].shape = None
        ctx.set_shape(node.outputs[0], ir.Shape([*batch, a[-2], b[-1]]))


def labels(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Axes with the same label are broadcast."""
    shapes = [v.shape for v in node.inputs if v is not None and v.shape is not None]
    if len(shapes) < len(node.inputs) or node.outputs[0].shape is None:
        return
    terms, out = einsum_labels(node.attributes["equation"].as_string(), [len(s) for s in shapes])
    sizes: dict[str, list[Sequence[Dim]]] = {}
    for term, shape in zip(terms, shapes):
        for label, dim in zip(term, shape):
            sizes.setdefault(label, []).append([dim])
    node.outputs[0].shape = ir.Shape([broadcast_dims(sizes[c], ctx.new_symbolic_dim)[0] for c in out])


def squeeze(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Leave the rank open where the axes to remove are not constant, or are not given and a size is unknown."""
    x, axes = (*node.inputs, None)[:2]
    known = x is not None and x.shape is not None and all(isinstance(d, int) for d in x.shape)
    if "axes" not in node.attributes and (not known if axes is None else not is_constant(axes)):
        count = None if axes is None or axes.shape is None or x is None or x.shape is None else axes.shape[0]
        rank = len(x.shape) - count if isinstance(count, int) else None  # type: ignore[union-attr, arg-type]
        node.outputs[0].shape = None if rank is None else ir.Shape([ctx.new_symbolic_dim() for _ in range(rank)])


def split(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Leave the sizes of the parts open where they are computed."""
    x, sizes = (*node.inputs, None)[:2]
    if sizes is None or x is None or x.shape is None or is_constant(sizes):
        return
    asked = ctx.get_symbolic_value(sizes) or []
    axis = node.attributes.get_int("axis", 0)
    for i, out in enumerate(node.outputs):
        dims = list(x.shape)
        dims[axis] = asked[i] if len(asked) == len(node.outputs) else ctx.new_symbolic_dim()
        out.shape = ir.Shape(dims)


def slice_(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Axes that are not sliced keep their size; the size of a slice needs bounds known to be in range."""
    x, starts, end, axes, steps = (*node.inputs, None, None, None)[:5]
    out = node.outputs[0]
    if x is None or x.shape is None or starts is None or end is None:
        return
    if axes is None and starts.shape is not None and isinstance(starts.shape[0], int):
        along: list[int] = list(range(min(starts.shape[0], len(x.shape))))
    else:
        along = [int(a) for a in _ints(axes)] if axes is not None and is_constant(axes) else list(range(len(x.shape)))
    fixed = (axes is None or is_constant(axes)) and is_constant(starts) and (steps is None or is_constant(steps))
    dims = list(x.shape)
    for i, axis in enumerate(along):
        size = x.shape[axis]
        if fixed and isinstance(size, int) and is_constant(end):
            step = 1 if steps is None else _ints(steps)[i]
            dims[axis] = len(slice_indices(size, _ints(starts)[i], _ints(end)[i], step))
        elif fixed and out.shape is not None and _in_range(node, i, size):
            dims[axis] = out.shape[axis]
        else:
            dims[axis] = ctx.new_symbolic_dim()
    out.shape = ir.Shape(dims)


def _in_range(node: ir.Node, i: int, size: Dim) -> bool:
    """True if the size of slice `i` is certain: x has a known size, or the slice has no end."""
    end = not_none(node.inputs[2])
    if isinstance(size, int) or not is_constant(end):
        return True
    return not 0 <= _ints(end)[i] < 2**31 - 1


def asked_shape(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """The rank is the length of the vector that asks for a shape, even where its elements are not known."""
    out, target = node.outputs[0], node.inputs[-1]
    if out.type is None and node.op_type == "Reshape" and node.inputs[0] is not None:
        out.type = node.inputs[0].type  # the library leaves it open where the rank is unknown
    if out.shape is None and target is not None and target.shape is not None and isinstance(target.shape[0], int):
        asked = ctx.get_symbolic_value(target) if node.op_type == "ConstantOfShape" else None
        out.shape = ir.Shape(asked or [ctx.new_symbolic_dim() for _ in range(target.shape[0])])


def windows(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """With ceil_mode, a last window that starts in the padding at the end is dropped."""
    out, x = node.outputs[0].shape, node.inputs[0]
    if not node.attributes.get_int("ceil_mode", 0) or out is None:
        return
    big = None if x is None or x.shape is None else x.shape[2:]
    heads = node.attributes.get_ints("pads", None) or [0] * len(out)
    strides = node.attributes.get_ints("strides", None) or [1] * len(out)
    dims: list[Dim] = list(out)
    for i, rows in enumerate(dims[2:]):
        h = big[i] if big is not None else None
        if not isinstance(rows, int) or not isinstance(h, int):  # symbols do not decide
            dims[i + 2] = rows if isinstance(rows, int) else ctx.new_symbolic_dim()
        elif (rows - 1) * strides[i] >= h + heads[i]:
            dims[i + 2] = rows - 1
    for value in (v for v in node.outputs if v.shape is not None):
        value.shape = ir.Shape(dims)


def resize(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Leave the sizes open if the aspect ratio is kept: the requested sizes are only bounds then."""
    out = node.outputs[0].shape
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch" and out is not None:
        node.outputs[0].shape = ir.Shape([ctx.new_symbolic_dim() for _ in out])


def unique(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """With an axis, slices along it are compared, and the result has the rank of the operand."""
    x, axis, found = node.inputs[0], node.attributes.get_int("axis", None), node.outputs[0].shape
    if axis is not None and x is not None and x.shape is not None and found is not None and len(found) != len(x.shape):
        dims = list(x.shape)
        dims[axis] = found[0]
        node.outputs[0].shape = ir.Shape(dims)


def _ints(value: ir.Value) -> list[int]:
    array = not_none(constant(value))
    return [int(v) for v in array.reshape(-1)]


def correct_inference(infer: Infer, correct: Infer) -> Infer:
    """Combine `infer`, then `correct`, then the shapes that the model declares, as far as they are credible.

    Declared shapes of operators that broadcast were mostly inferred, with the same mistake: only their numbers are
    trusted. A declared dimension without number and name has no information. A declared shape of another rank is wrong
    (ONNX Runtime only warns).
    """

    def infer_corrected(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        if node.op_type in ("Reshape", "Expand", "ConstantOfShape"):
            check_asked(node)
        declared = [out.shape for out in node.outputs]
        for out in node.outputs:
            out.shape = None
        try:
            infer(ctx, node)
        except osi.ShapeInferenceError:
            if DEAD not in node.meta:
                raise
        for out in node.outputs:
            out.shape = None if out.shape is None else ir.Shape(out.shape)
        correct(ctx, node)
        for out, shape in zip(node.outputs, declared):
            if shape is None or (out.shape is not None and len(out.shape) != len(shape)):
                continue
            if out.shape is not None:
                named = correct not in (broadcast, batches, labels)
                dims = zip(shape, out.shape)
                shape = ir.Shape([d if isinstance(d, int) or (named and d.value is not None) else i for d, i in dims])
            out.shape = shape

    return infer_corrected


def infer_by_tensor(infer: Infer) -> Infer:
    """Return `infer` of a Constant without comparisons with a protocol, which take 30 µs each before Python 3.12.

    Nodes that read a vector of whole numbers find it at the value, as the library keeps those that it computes.
    """

    def infer_constant(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        held = node.attributes.get("value")
        if held is None or held.type != ir.AttributeType.TENSOR:
            infer(ctx, node)
        else:
            (out,) = node.outputs
            ctx.set_shape_and_dtype(out, held.value.shape, held.value.dtype)
            if held.value.dtype == ir.DataType.INT64 and held.value.size <= MOST_ELEMENTS and out.const_value is None:
                out.const_value = ir.Tensor(held.value.numpy(), name=out.name)

    return infer_constant


def ranked_by_weights(infer: Infer) -> Infer:
    """Return `infer` of a convolution, whose weights have the rank of an operand of unknown rank (after an If)."""

    def infer_ranked(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        x, w = node.inputs[:2]
        if x is not None and w is not None and x.shape is None and w.shape is not None:
            x.shape = ir.Shape([ctx.new_symbolic_dim() for _ in w.shape])
        infer(ctx, node)

    return infer_ranked

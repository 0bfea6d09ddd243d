"""Shapes of sequences, which the library does not follow: the shape of a sequence is that of its elements.

The note has the numbers that all elements share. A symbol would claim that they share that dimension too, which cannot
be told from a name that was given to an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.loops import better, declared, elements, elements_in_common, infer_graph, refined
from onnxgrad.ir.match import Dim


def _element(ctx: osi.ShapeInferenceContext, sequence: ir.Value) -> list[Dim] | None:
    """The dimensions of an element of `sequence`."""
    if sequence.shape is None:
        return None
    return [d if isinstance(d, int) else ctx.new_symbolic_dim() for d in sequence.shape]


def _construct(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    return elements_in_common(*node.inputs)


def _insert(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    return elements_in_common(*node.inputs[:2])


def _erase(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    shape = node.inputs[0].shape  # type: ignore[union-attr]
    return None if shape is None else elements(shape)


def _at(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    dims = _element(ctx, node.inputs[0])  # type: ignore[arg-type]
    return None if dims is None else ir.Shape(dims)


def _split(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    x, sizes = (*node.inputs, None)[:2]
    if x is None or x.shape is None:
        return None
    dims: list[Dim | None] = list(x.shape)
    axis = node.attributes.get_int("axis", 0)
    if sizes is not None and sizes.shape is not None and len(sizes.shape):
        dims[axis] = None
    elif sizes is not None:  # ONNX Runtime squeezes pieces of size 1, the specification does not
        dims[axis] = None
        if not node.attributes.get_int("keepdims", 1):
            return None
    elif node.attributes.get_int("keepdims", 1):
        dims[axis] = 1
    else:
        dims.pop(axis)
    return elements(dims)


def _concat(ctx: osi.ShapeInferenceContext, node: ir.Node) -> ir.Shape | None:
    dims = _element(ctx, node.inputs[0])  # type: ignore[arg-type]
    if dims is None:
        return None
    axis = node.attributes["axis"].as_int()
    if node.attributes.get_int("new_axis", 0):
        dims.insert(axis if axis >= 0 else axis + len(dims) + 1, ctx.new_symbolic_dim())
    else:
        dims[axis] = ctx.new_symbolic_dim()
    return ir.Shape(dims)


def infer_map(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Types and shapes of the outputs of a SequenceMap, and of everything in its body."""
    body = node.attributes["body"].as_graph()
    changed = False
    for formal, x in zip(body.inputs, node.inputs):
        if x is None or x.type is None:
            continue
        in_sequence = isinstance(x.type, ir.SequenceType)
        element = x.type.elem_type if in_sequence else x.type
        changed |= formal.type is None
        formal.type = formal.type or element  # type: ignore[assignment]
        if x.shape is not None:
            shape = refined(declared(formal), (_element(ctx, x) or []) if in_sequence else list(x.shape))
            changed |= shape != formal.shape
            formal.shape = shape
    if changed:
        infer_graph(ctx, body)
    for out, each in zip(node.outputs, body.outputs):
        if out.type is None and each.type is not None:
            out.type = ir.SequenceType(each.type)
        if out.shape is None and each.shape is not None:
            out.shape = elements(each.shape)


#: The shapes of the results, where the library has none.
SHAPES: dict[str, Callable[..., ir.Shape | None]] = {
    "SequenceConstruct": _construct,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
}


def with_shape(infer: Infer, name: str) -> Infer:
    """Wrap `infer` of the operator `name`: add the shape from `SHAPES`, unless one of its rank is declared."""

    def infer_shaped(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        shape = SHAPES[name](ctx, node)
        infer(ctx, node)
        node.outputs[0].shape = better(shape, node.outputs[0].shape)

    return infer_shaped

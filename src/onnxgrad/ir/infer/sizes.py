"""Sizes that are broadcast and computed without sympy (see `formulas`).

Each function infers nodes of an operator, and returns False for those that it leaves to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.infer.formulas import factors, product, sum_of
from onnxgrad.ir.match import FLOATS, Dim, constant, producer

#: Operators whose operands broadcast, and whose results are booleans.
_COMPARING = frozenset({"And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
#: Operators whose operands broadcast, by their number of operands, if it is not 2; 0: any.
_OPERANDS = {"Where": 3, "Max": 0, "Mean": 0, "Min": 0, "Sum": 0}


def infer_broadcast(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer the type of a node whose operands broadcast; `corrections.broadcast` infers the shape."""
    name, operands = node.op_type, node.inputs
    if len(operands) != (_OPERANDS.get(name, 2) or len(operands)):
        return False
    shapes = [v.shape for v in operands if v is not None and v.shape is not None]
    first = operands[name == "Where"] if shapes else None
    if len(shapes) < len(operands) or first is None or first.dtype is None:
        return False
    is_data = first.dtype in FLOATS or max(map(len, shapes)) > 1  # others are elements of shapes
    takes_any = is_data or name in _COMPARING or name == "Expand"
    elements = None if takes_any else _computed(ctx, node)
    if not takes_any and elements is None:
        return False
    (out,) = node.outputs
    ctx.set_dtype(out, ir.DataType.BOOL if name in _COMPARING else first.dtype)
    if elements is not None:
        out.shape = ir.Shape([len(elements)] if any(map(len, shapes)) else [])
        ctx.set_symbolic_value(out, elements)
    return True


def _computed(ctx: osi.ShapeInferenceContext, node: ir.Node) -> list[Dim] | None:
    """The elements of an operator on elements of shapes; None if they are not known, or it is another operator."""
    elements: list[Dim | None] = []
    if node.op_type == "Mul":
        elements = [product(pair) for pair in _elements(ctx, node.inputs)]
    elif node.op_type in ("Add", "Sub"):
        signs = _elements(ctx, node.inputs)
        elements = [sum_of(pair) if node.op_type == "Add" else sum_of(pair[:1], pair[1:]) for pair in signs]
    elif node.op_type == "Where" and (compared := producer(node.inputs[0], "Equal")) is not None:
        pairs, choices = _elements(ctx, compared.inputs), _elements(ctx, node.inputs[1:])
        if len(pairs) == len(choices):
            elements = [_choose(*pair, *choice) for pair, choice in zip(pairs, choices)]
    known = [d for d in elements if d is not None]
    return known if known and len(known) == len(elements) else None


def _elements(ctx: osi.ShapeInferenceContext, values: Sequence[ir.Value | None]) -> list[tuple[Dim, Dim]]:
    """The elements of two operands that broadcast, in pairs; none if they are not known."""
    a, b = (None if v is None else ctx.get_symbolic_value(v) for v in values)
    if not a or not b or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return []
    count = max(len(a), len(b))
    return list(zip(a * (count // len(a)), b * (count // len(b))))


def _choose(a: Dim, b: Dim, then: Dim, other: Dim) -> Dim | None:
    """`then` if `a` is `b`, else `other`; None if that is not known. Symbols are no negative numbers."""
    numbers = [d for d in (a, b) if isinstance(d, int)]
    if len(numbers) == 2:
        return then if a == b else other
    return other if any(n < 0 for n in numbers) else None


def infer_matmul(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer the type of a product of matrices that fit; `corrections.batches` infers the shape."""
    if len(node.inputs) != 2 or any(v is None or v.shape is None or len(v.shape) < 2 for v in node.inputs):
        return False
    a, b = (v.shape.dims for v in node.inputs)  # type: ignore[union-attr]
    dtype = node.inputs[0].dtype  # type: ignore[union-attr]
    pairs = [({a[-1], b[-2]}), *({x, y, 1} - {1} for x, y in zip(a[-3::-1], b[-3::-1]))]
    if dtype is None or any(len(p) > 1 and all(isinstance(d, int) for d in p) for p in pairs):
        return False
    ctx.set_dtype(node.outputs[0], dtype)
    return True


def infer_size(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Size, and its element."""
    x = node.inputs[0] if node.inputs else None
    total = None if x is None or x.shape is None else product(x.shape)
    if total is None:
        return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([]), ir.DataType.INT64)
    ctx.set_symbolic_value(node.outputs[0], [total])
    return True


def infer_product(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer the product of all elements of a shape."""
    x = (
        node.inputs[0]
        if len(node.inputs) == 1 and not {"axes", "noop_with_empty_axes"} & set(node.attributes)
        else None
    )
    elements = None if x is None or node.attributes.get_int("keepdims", True) else ctx.get_symbolic_value(x)
    total = None if not elements else product(elements)
    if x is None or x.dtype is None or total is None:
        return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([]), x.dtype)
    ctx.set_symbolic_value(node.outputs[0], [total])
    return True


def infer_negative(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Neg of elements of shapes."""
    x = node.inputs[0] if node.inputs else None
    elements = None if x is None or x.shape is None or x.dtype in FLOATS else ctx.get_symbolic_value(x)
    negative = [d for d in (sum_of([], [d]) for d in elements or ()) if d is not None]
    if x is None or not negative or len(negative) < len(elements or ()):
        return False
    ctx.set_shape_and_dtype(node.outputs[0], x.shape, x.dtype)
    ctx.set_symbolic_value(node.outputs[0], negative)
    return True


def infer_range(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Range of the integers from 0 up to a size."""
    start, limit, step = (*node.inputs, None, None, None)[:3]
    sizes = None if limit is None or limit.dtype in FLOATS else ctx.get_symbolic_value(limit)
    if limit is None or not sizes or len(sizes) > 1 or isinstance(sizes[0], int) or factors(sizes) is None:
        return False
    if [None if (c := constant(v)) is None or c.size != 1 else c.item() for v in (start, step)] != [0, 1]:
        return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(sizes), limit.dtype)
    return True


def first_by(own: Callable[[osi.ShapeInferenceContext, ir.Node], bool]) -> Callable[[Infer], Infer]:
    """A correction that infers by `own`, and by the library's function where `own` returns False."""

    def wrap(infer: Infer) -> Infer:
        return lambda ctx, node: None if own(ctx, node) else infer(ctx, node)

    return wrap


OPERATORS: dict[str, Callable[[osi.ShapeInferenceContext, ir.Node], bool]] = {
    **dict.fromkeys((*BROADCASTING, "Expand"), infer_broadcast),
    "MatMul": infer_matmul,
    "Neg": infer_negative,
    "ReduceProd": infer_product,
    "Range": infer_range,
    "Size": infer_size,
}

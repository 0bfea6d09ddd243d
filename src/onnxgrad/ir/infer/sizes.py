"""Sizes that are broadcast, multiplied and divided without sympy.

The library takes each size for a formula of sympy, whose import takes longer than a derivation. Most sizes are a number
times symbols: a batch that is flattened, heads that are split. Products are written as sympy writes them. Each function
infers nodes of an operator, and returns False for those that it leaves to the library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.match import FLOATS, Dim, constant, producer

#: Operators whose operands broadcast, and whose results are booleans.
_COMPARING = frozenset({"And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
#: Operators whose operands broadcast, by their number of operands, if it is not 2; 0: any.
_OPERANDS = {"Where": 3, "Max": 0, "Mean": 0, "Min": 0, "Sum": 0}
#: A rounded quotient, and the factors of a formula.
_QUOTIENT = re.compile(r"floor\([\w*]+/\d+\)")
_FACTOR = re.compile(rf"(?:{_QUOTIENT.pattern}|[^*])+")


def product(dims: Iterable[Dim], by: Iterable[Dim] = ()) -> Dim | None:
    """The product of `dims`, divided by the sizes `by` and rounded down; None if it is a formula of another form."""
    above, below = factors(dims), factors(by)
    if above is None or below is None or not below[0]:
        return None
    (number, names), (divisor, cancelled) = above, below
    for name in cancelled:
        if name not in names:
            return None
        names.remove(name)
    common = math.gcd(number, divisor)
    number, divisor = number // common, divisor // common
    if not names:
        return number if divisor == 1 else None
    if not number or len(set(names)) < len(names) or (divisor > 1 and not all(map(str.isidentifier, names))):
        return None
    ordered = sorted(names, key=lambda name: (not name.isidentifier(), name))
    text = "*".join([*([str(number)] if number > 1 else []), *ordered])
    return ir.SymbolicDim(text if divisor == 1 else f"floor({text}/{divisor})")


def factors(dims: Iterable[Dim]) -> tuple[int, list[str]] | None:
    """The number, and the symbols and rounded quotients, whose product the sizes are; None for other formulas."""
    number, names = 1, []
    for d in dims:
        if isinstance(d, int):
            number *= d
            continue
        first, *others = _FACTOR.findall(d.value or "?")
        if first.isdigit():
            number *= int(first)
        else:
            others.append(first)
        if not all(name.isidentifier() or _QUOTIENT.fullmatch(name) for name in others):
            return None
        names += others
    return (number, names) if number >= 0 else None


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
    """The elements of a Mul or Where of elements of shapes; None if they are not known, or it is another node."""
    elements: list[Dim | None] = []
    if node.op_type == "Mul":
        elements = [product(pair) for pair in _elements(ctx, node.inputs)]
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


def infer_flatten(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Flatten."""
    x = node.inputs[0] if node.inputs else None
    if x is None or x.shape is None:
        return False
    dims, axis = x.shape.dims, node.attributes.get_int("axis", 1)
    if not -len(dims) <= axis <= len(dims):
        return False
    axis += len(dims) if axis < 0 else 0
    left, right = product(dims[:axis]), product(dims[axis:])
    if left is None or right is None:
        return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([left, right]), x.dtype)
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


def infer_reshape(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Reshape of data with one open size."""
    if len(node.inputs) != 2 or node.attributes.get_int("allowzero", 0) != 0:
        return False
    x, target = node.inputs
    if x is None or x.shape is None or x.dtype is None or target is None or ctx.get_symbolic_value(x) is not None:
        return False
    asked = ctx.get_symbolic_value(target)
    if asked is None or asked.count(-1) != 1 or any(d == 0 and i >= len(x.shape) for i, d in enumerate(asked)):
        return False
    dims: list[Dim] = [x.shape[i] if d == 0 else d for i, d in enumerate(asked)]
    place = asked.index(-1)
    size = product(x.shape, dims[:place] + dims[place + 1 :])
    if size is None:
        return False
    dims[place] = size
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)
    return True


def infer_slice(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Slice of data from the beginning of each axis to its end, or to a number."""
    x, starts, stops, axes, steps = (*node.inputs, None, None)[:5]
    begin, step, along, ends = constant(starts), constant(steps), constant(axes), None
    if x is not None and x.dtype in FLOATS and x.shape is not None and stops is not None:
        ends = ctx.get_symbolic_value(stops)
    if ends is None or begin is None or begin.any() or (steps is not None and (step is None or (step != 1).any())):
        return False
    dims = list(x.shape.dims)  # type: ignore[union-attr]
    if (axes is not None and along is None) or len(ends) > len(dims):
        return False
    for axis, end in zip(range(len(ends)) if along is None else along.tolist(), ends):
        dim = dims[axis]
        if isinstance(dim, int) and isinstance(end, int):
            dims[axis] = len(range(dim)[:end])
        elif end != dim:
            return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)  # type: ignore[union-attr]
    return True


def infer_pad(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Pad whose margins are known, and 0 where the size is a symbol."""
    x, margins, _, axes = (*node.inputs, None, None, None, None)[:4]
    pads, along = constant(margins), constant(axes)
    if x is None or x.shape is None or pads is None or (along is None) != (axes is None):
        return False
    dims, half = list(x.shape.dims), len(pads) // 2
    chosen = range(len(dims)) if along is None else [int(a) for a in along]
    if len(pads) != 2 * len(chosen):
        return False
    for axis, more in zip(chosen, (pads[:half] + pads[half:]).tolist()):
        dim = dims[axis]
        if more:
            if not isinstance(dim, int):
                return False
            dims[axis] = dim + more
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)
    return True


def infer_resize(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Resize of all axes by known scales, 1 where the size is a symbol."""
    x, _, scales, asked = (*node.inputs, None, None, None, None)[:4]
    factors = constant(scales)
    if x is None or x.shape is None or asked is not None or factors is None or "axes" in node.attributes:
        return False
    if len(factors) != len(x.shape) or any(f != 1 and not isinstance(d, int) for d, f in zip(x.shape, factors)):
        return False
    exact = [Fraction(str(f)) for f in factors.tolist()]  # as the library rounds
    dims = [d * f.numerator // f.denominator if isinstance(d, int) else d for d, f in zip(x.shape, exact)]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)
    return True


def first_by(own: Callable[[osi.ShapeInferenceContext, ir.Node], bool]) -> Callable[[Infer], Infer]:
    """A correction that infers by `own`, and by the library's function where `own` returns False."""

    def wrap(infer: Infer) -> Infer:
        return lambda ctx, node: None if own(ctx, node) else infer(ctx, node)

    return wrap


OPERATORS: dict[str, Callable[[osi.ShapeInferenceContext, ir.Node], bool]] = {
    **dict.fromkeys((*BROADCASTING, "Expand"), infer_broadcast),
    "MatMul": infer_matmul,
    "Flatten": infer_flatten,
    "Size": infer_size,
    "Reshape": infer_reshape,
    "Slice": infer_slice,
    "Pad": infer_pad,
    "Resize": infer_resize,
}

"""Sizes that are broadcast, multiplied and divided without sympy.

The library takes each size for a formula of sympy, whose import takes longer than a derivation. Most sizes are a number
times symbols: a batch that is flattened, heads that are split. Products are written as sympy writes them. Each function
infers nodes of an operator, and returns False for those that it leaves to the library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.match import FLOATS, Dim, producer

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


def sum_of(dims: Sequence[Dim]) -> Dim | None:
    """The sum of `dims`; None if they are not all numbers, nor all multiples of the same symbols."""
    if all(isinstance(d, int) for d in dims):
        return sum(dims)  # type: ignore[arg-type]
    total, symbols = 0, None
    for d in dims:
        if (found := factors([d])) is None or sorted(found[1]) != (symbols := symbols or sorted(found[1])):
            return None
        total += found[0]
    return product([total, *map(ir.SymbolicDim, symbols or ())])


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


def infer_size(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
    """Infer a Size, and its element."""
    x = node.inputs[0] if node.inputs else None
    total = None if x is None or x.shape is None else product(x.shape)
    if total is None:
        return False
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([]), ir.DataType.INT64)
    ctx.set_symbolic_value(node.outputs[0], [total])
    return True


def first_by(own: Callable[[osi.ShapeInferenceContext, ir.Node], bool]) -> Callable[[Infer], Infer]:
    """A correction that infers by `own`, and by the library's function where `own` returns False."""

    def wrap(infer: Infer) -> Infer:
        return lambda ctx, node: None if own(ctx, node) else infer(ctx, node)

    return wrap


OPERATORS: dict[str, Callable[[osi.ShapeInferenceContext, ir.Node], bool]] = {
    **dict.fromkeys((*BROADCASTING, "Expand"), infer_broadcast),
    "MatMul": infer_matmul,
    "Size": infer_size,
}

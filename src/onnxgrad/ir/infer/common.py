"""Shapes of the operators that most of a derivative consists of, on floats whose shapes are known.

``onnx-shape-inference`` and its corrections infer them as well, in several times as many steps. Each function here
returns the sizes of the one result of a standard operator, whose type is that of the first operand; None where the
library is asked: for operands that do not fit, and for sizes that need a new symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.constants import slice_indices
from onnxgrad.ir.infer.formulas import part_up_to, product, sum_of
from onnxgrad.ir.match import FLOATS, Dim, constant

Dims = Sequence[Dim]
Operands = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]
#: The elements of a whole-number vector, as far as they are known.
Elements = Callable[[ir.Value], "list[Dim] | None"]
#: The sizes of the result, of the sizes of the first operand.
Sizes = Callable[[Dims, Operands, Attributes, Elements], Dims | None]


def broadcast(a: Dims, b: Dims) -> Dims | None:
    """The sizes that `a` and `b` broadcast to; None if two symbols meet, either of which may be 1, or they do not."""
    if len(a) < len(b):
        a, b = b, a
    dims = list(a)
    for axis in range(-len(b), 0):
        x, y = a[axis], b[axis]
        if x is y or y == 1 or x == y:
            continue
        if x == 1 or (isinstance(y, int) and not isinstance(x, int)):
            dims[axis] = y
        elif isinstance(y, int) or not isinstance(x, int):
            return None
    return dims


def _ints(operands: Operands, place: int) -> list[int] | None:
    """The elements of a constant operand; None if it is computed or left out."""
    array = constant(operands[place]) if len(operands) > place else None
    return None if array is None else array.ravel().tolist()


def _shape(operands: Operands, place: int) -> Dims | None:
    value = operands[place] if len(operands) > place else None
    return None if value is None or value.shape is None else value.shape.dims


def _places(axes: Sequence[int], count: int) -> set[int] | None:
    """`axes` counted from the first; None if one occurs twice or does not exist."""
    places = {a % count for a in axes if -count <= a < count}
    return places if len(places) == len(axes) else None


def _same(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    return dims


def _broadcast(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    dtype = operands[0].dtype  # type: ignore[union-attr]
    for v in operands[1:]:
        if v is None or v.shape is None or v.dtype != dtype:
            return None
        other = v.shape.dims
        if other and other != dims:
            wider = broadcast(dims, other)
            if wider is None:
                return None
            dims = tuple(wider)
    return dims


def _matmul(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    other = _shape(operands, 1)
    if not other or not dims:
        return None
    inner, rows = dims[-1], other[-2] if len(other) > 1 else other[0]
    if inner != rows and isinstance(inner, int) and isinstance(rows, int):
        return None
    batch = broadcast(dims[:-2], other[:-2])
    return None if batch is None else [*batch, *dims[-2:-1], *other[1:][-1:]]


def _gemm(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    other = _shape(operands, 1)
    if other is None or len(dims) != 2 or len(other) != 2:
        return None
    m, inner = dims[::-1] if attributes.get("transA") else dims
    rows, n = other[::-1] if attributes.get("transB") else other
    return None if inner != rows and isinstance(inner, int) and isinstance(rows, int) else (m, n)


def _conv(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    weights = _shape(operands, 1)
    if weights is None or len(weights) != len(dims):
        return None
    spaces = _windows(dims[2:], attributes.get("kernel_shape") or weights[2:], attributes)
    return None if spaces is None else [dims[0], weights[0], *spaces]


def _pool(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    spaces = _windows(dims[2:], attributes.get("kernel_shape", ()), attributes)
    return None if spaces is None else [*dims[:2], *spaces]


def _windows(spaces: Dims, kernel: Dims, attributes: Attributes) -> list[int] | None:
    """The number of windows along each axis, where sizes are numbers and no mode decides on padding."""
    count = len(spaces)
    strides, dilations = (attributes.get(name) or [1] * count for name in ("strides", "dilations"))
    pads = attributes.get("pads") or [0] * 2 * count
    if attributes.get("auto_pad", "NOTSET") != "NOTSET" or attributes.get("ceil_mode"):
        return None
    if not (count and len(kernel) == len(strides) == len(dilations) == count and len(pads) == 2 * count):
        return None
    dims = []
    for h, k, s, d, head, tail in zip(spaces, kernel, strides, dilations, pads, pads[count:]):
        if not isinstance(h, int) or not isinstance(k, int) or s < 1 or d < 1:
            return None
        dims.append((h + head + tail - d * (k - 1) - 1) // s + 1)
    return dims


def _transpose(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    order = attributes.get("perm")
    if order is None:
        return dims[::-1]
    return [dims[i] for i in order] if sorted(order) == list(range(len(dims))) else None


def _reshape(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    target = operands[1] if len(operands) == 2 else None
    asked = None if target is None else elements(target)
    if asked is None:
        return None
    if 0 in asked or -1 in asked:
        if (attributes.get("allowzero") and 0 in asked) or asked.count(-1) > 1 or 0 in asked[len(dims) :]:
            return None
        asked = [dims[i] if d == 0 else d for i, d in enumerate(asked)]
        if -1 in asked:
            place = asked.index(-1)
            size = product(dims, asked[:place] + asked[place + 1 :])
            if size is None:
                return None
            asked[place] = size
    return asked


def _flatten(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    axis = attributes.get("axis", 1)
    if not -len(dims) <= axis <= len(dims):
        return None
    axis += len(dims) if axis < 0 else 0
    left, right = product(dims[:axis]), product(dims[axis:])
    return None if left is None or right is None else (left, right)


def _unsqueeze(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    axes = _ints(operands, 1)
    count = len(dims) + len(axes or ())
    places = None if axes is None else _places(axes, count)
    if places is None:
        return None
    left = iter(dims)
    return [1 if axis in places else next(left) for axis in range(count)]


def _squeeze(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    axes = _ints(operands, 1)
    places = None if axes is None else _places(axes, len(dims))
    if places is None or any(isinstance(dims[a], int) and dims[a] != 1 for a in places):
        return None
    return [d for axis, d in enumerate(dims) if axis not in places]


def _reduce(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    axes = _ints(operands, 1) if len(operands) > 1 and operands[1] is not None else []
    places = None if axes is None or "axes" in attributes else _places(axes, len(dims))
    if places is None:
        return None
    if not places:
        if attributes.get("noop_with_empty_axes"):
            return dims
        places = set(range(len(dims)))
    if attributes.get("keepdims", 1):
        return [1 if axis in places else d for axis, d in enumerate(dims)]
    return [d for axis, d in enumerate(dims) if axis not in places]


def _expand(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    target = operands[1] if len(operands) == 2 else None
    asked = None if target is None else elements(target)
    return None if asked is None else broadcast(dims, asked)


def _gather(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    indices, axis = _shape(operands, 1), attributes.get("axis", 0)
    if indices is None or not -len(dims) <= axis < len(dims):
        return None
    axis %= len(dims)
    return [*dims[:axis], *indices, *dims[axis + 1 :]]


def _concat(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    shapes, axis = [_shape(operands, i) for i in range(len(operands))], attributes.get("axis", len(dims))
    if len(dims) < 2 or not -len(dims) <= axis < len(dims):
        return None
    if any(shape is None or len(shape) != len(dims) for shape in shapes):
        return None
    total, sized = sum_of([shape[axis] for shape in shapes]), list(dims)  # type: ignore[index]
    if total is None:
        return None
    sized[axis] = total
    return sized


def _slice(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    starts = _ints(operands, 1)
    ends = elements(operands[2]) if len(operands) > 2 and operands[2] is not None else None
    if starts is None or ends is None:
        return None
    axes, steps = (
        _ints(operands, place) if len(operands) > place and operands[place] is not None else default
        for place, default in ((3, list(range(len(starts)))), (4, [1] * len(starts)))
    )
    if axes is None or steps is None or not len(starts) == len(ends) == len(axes) == len(steps):
        return None
    if _places(axes, len(dims)) is None or 0 in steps:
        return None
    sliced = list(dims)
    for axis, start, end, step in zip(axes, starts, ends, steps):
        dim = sliced[axis]
        if isinstance(dim, int) and isinstance(end, int):
            sliced[axis] = len(slice_indices(dim, start, end, step))
        elif start or step != 1:
            return None
        elif end not in (dim, *_ENDS):
            if isinstance(end, int) or (part := part_up_to(dim, end)) is None:
                return None
            sliced[axis] = part
    return sliced


def _pad(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    pads, half = _ints(operands, 1), len(dims)
    axes = range(half)
    if len(operands) > 3 and operands[3] is not None:
        named = _ints(operands, 3)
        axes, half = named, len(named or ())  # type: ignore[assignment]
    if pads is None or axes is None or len(pads) != 2 * half:
        return None
    padded = list(dims)
    for axis, head, tail in zip(axes, pads, pads[half:]):
        if head + tail:
            dim = padded[axis]
            if not isinstance(dim, int):
                return None
            padded[axis] = dim + head + tail
    return padded


def _resize(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    if len(operands) != 3 or "axes" in attributes:
        return None
    factors = _ints(operands, 2)  # which are floats
    if factors is None or len(factors) != len(dims):
        return None
    sized: list[Dim] = []
    for d, f in zip(dims, factors):
        if f != 1:
            if not isinstance(d, int):
                return None
            exact = int(f) if f % 1 == 0 else Fraction(str(f))  # as the library rounds
            d = d * exact.numerator // exact.denominator
        sized.append(d)
    return sized


def _tile(dims: Dims, operands: Operands, attributes: Attributes, elements: Elements) -> Dims | None:
    counts = elements(operands[1]) if len(operands) == 2 and operands[1] is not None else None
    if counts is None or len(counts) != len(dims):
        return None
    tiled = [d if count == 1 else product([d, count]) for d, count in zip(dims, counts)]
    return None if any(d is None for d in tiled) else tiled  # type: ignore[return-value]


#: Ends of a Slice that mean the end of the axis.
_ENDS = (2**63 - 1, 2**31 - 1)
_ALIKE = (
    *("Abs", "BatchNormalization", "Clip", "Cos", "Erf", "Exp", "Gelu", "HardSigmoid", "Identity"),
    *("LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "Neg", "Reciprocal", "Relu", "ScatterElements"),
    *("ScatterND", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Sqrt", "Tanh"),
)
#: By operator.
SIZES: dict[str, Sizes] = {
    **dict.fromkeys(_ALIKE, _same),
    **dict.fromkeys(("Add", "Div", "Max", "Mean", "Min", "Mul", "Sub", "Sum"), _broadcast),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), _reduce),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), lambda dims, *_: [*dims[:2], *[1] * (len(dims) - 2)]),
    "Concat": _concat,
    "Conv": _conv,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}

#: Operators that are inferred so whatever the type of their operands.
OF_ANY_TYPE = ("Flatten", "Pad", "Reshape", "Resize", "Slice", "Tile")


def fits(node: ir.Node) -> bool:
    """True if the operands of a standard operator are floats whose shapes are known to fit each other."""
    infer, x = SIZES.get(node.op_type), node.inputs[0] if node.inputs else None
    if infer is None or x is None or x.shape is None or x.dtype not in FLOATS:
        return False
    attributes = {a.name: a.value for a in node.attributes.values()}
    return infer(x.shape.dims, node.inputs, attributes, lambda v: _ints([v], 0)) is not None  # type: ignore[arg-type, return-value]


def infer_first(name: str) -> Callable[[osi.ShapeInferenceContext, ir.Node], bool]:
    """A function that infers a node `name` of any type by `SIZES`, and returns False where that cannot."""

    def infer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> bool:
        x = node.inputs[0] if node.inputs else None
        if x is None or x.shape is None or x.dtype is None or ctx.get_symbolic_value(x) is not None:
            return False
        attributes = {a.name: a.value for a in node.attributes.values()}
        dims = SIZES[name](x.shape.dims, node.inputs, attributes, ctx.get_symbolic_value)
        if dims is None:
            return False
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)
        return True

    return infer

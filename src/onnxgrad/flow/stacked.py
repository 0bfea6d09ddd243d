"""The operators that have a stacked form: the same node for many directions, which lie along a new first axis.

Four ideas carry almost all of them. What works element by element broadcasts. What works along axes does so along the
next ones. What treats a batch row by row takes the directions as more rows. And what works on leading axes leaves
trailing ones alone, so the directions go last meanwhile. A convolution takes directions of its filters as
more filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var

#: Writes the stacked form of a node.
Write = Callable[["Step"], Any]


class Unstackable(Exception):
    """A node that has no stacked form here."""


class Step:
    """One node whose operands may be stacks."""

    def __init__(
        self,
        b: Builder,
        node: ir.Node,
        stacks: Mapping[ir.Value, Var],
        plain: Mapping[ir.Value, Var],
        count: Var | list[int],
    ) -> None:
        self.b, self.node, self.count = b, node, count
        self.values = list(node.inputs)
        self.stacked = [v in stacks for v in self.values]
        self.x: list[Any] = [
            None if v is None else stacks[v] if v in stacks else plain.get(v, Var(b, v)) for v in self.values
        ]

    def rank(self, i: int) -> int:
        """The rank of operand `i`, without the direction."""
        value = self.values[i]
        if value is None:
            raise Unstackable
        return rank_of(value)

    @property
    def out_rank(self) -> int:
        """The rank of the result, without the direction."""
        return rank_of(self.node.outputs[0])

    def known(self, i: int) -> list[int]:
        """What the vector operand `i` holds, which must be constant; nothing if it is left out."""
        if i >= len(self.x) or self.x[i] is None:
            return []
        held = None if self.stacked[i] else self.x[i].const
        if held is None:
            raise Unstackable
        return [int(n) for n in held.reshape(-1)]

    def only(self, *which: int) -> Var:
        """The first of the operands `which`, which must all be stacks, and the only ones."""
        if self.stacked != [i in which for i in range(len(self.x))]:
            raise Unstackable
        return self.x[which[0]]

    def lifted(self, i: int, rank: int) -> Var:
        """Operand `i` as one that broadcasts with stacks of this rank."""
        missing = rank - self.rank(i)
        if not self.stacked[i] or missing <= 0:
            return self.x[i]
        return self.b.Unsqueeze(self.x[i], list(range(1, missing + 1)))

    def stack(self, i: int) -> Var:
        """Operand `i` as a stack, whatever it is."""
        return self.x[i] if self.stacked[i] else repeated(self.b, self.x[i], self.count)

    def int_attr(self, name: str, default: int) -> int:
        """An attribute of the node."""
        a = self.node.attributes.get(name)
        return default if a is None else a.as_int()

    def again(self, *operands: Any, **changed: Any) -> Any:
        """The node on other operands, with some attributes changed."""
        attributes: dict[str, Any] = dict(self.node.attributes.items()) | changed
        return self.b.emit(self.node.op_type, *operands, outputs=len(self.node.outputs), **attributes)


def repeated(b: Builder, x: Var, count: Var | list[int]) -> Var:
    """A stack of nothing but `x`."""
    return b.Expand(x, b.join(count, b.shape_of(x)))


def rank_of(value: ir.Value) -> int:
    """Its rank, which must be known."""
    if value.shape is None:
        raise Unstackable
    return len(value.shape)


# --- element by element ----------------------------------------------------------------------------


def _elementwise(s: Step) -> Var:
    rank = max(s.rank(i) for i in range(len(s.x)))
    return s.again(*(s.lifted(i, rank) for i in range(len(s.x))))


def _clip(s: Step) -> Var:
    return s.again(s.only(0), *s.x[1:])


# --- along axes ------------------------------------------------------------------------------------


def _shifted(axes: Sequence[int], rank: int) -> list[int]:
    """The same axes of a stack."""
    return [axis % max(rank, 1) + 1 for axis in axes]


def _along(default: int) -> Write:
    """Along the axis of an attribute, which by default is `default`; only the first operand may be a stack."""

    def write(s: Step) -> Any:
        return s.again(s.only(0), *s.x[1:], axis=_shifted([s.int_attr("axis", default)], s.rank(0))[0])

    return write


def _reduce(s: Step) -> Var:
    x = s.only(0)
    axes = s.known(1)
    if not axes:
        if s.int_attr("noop_with_empty_axes", 0):
            return x
        axes = list(range(s.rank(0)))
    if not axes:  # of a scalar: an axis of one element, whose reduction is that of the scalar
        return s.again(s.b.Unsqueeze(x, [1]), [1], keepdims=0)
    return s.again(x, _shifted(axes, s.rank(0)), keepdims=s.int_attr("keepdims", 1))


def _transpose(s: Step) -> Var:
    perm = s.node.attributes.get("perm")
    axes = list(perm.as_ints()) if perm is not None else list(range(s.rank(0)))[::-1]
    return s.b.Transpose(s.x[0], perm=[0, *(p + 1 for p in axes)])


def _unsqueeze(s: Step) -> Var:
    return s.b.Unsqueeze(s.only(0), _shifted(s.known(1), s.out_rank))


def _squeeze(s: Step) -> Var:
    axes = s.known(1)
    if not axes:
        value = s.values[0]
        assert value is not None
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            raise Unstackable
        axes = [i for i, d in enumerate(value.shape) if d == 1]
    return s.b.Squeeze(s.only(0), _shifted(axes, s.rank(0))) if axes else s.only(0)


def _slice(s: Step) -> Var:
    axes = s.known(3) or list(range(_length(s.x[1])))
    return s.b.Slice(s.only(0), s.x[1], s.x[2], _shifted(axes, s.rank(0)), *s.x[4:])


def _pad(s: Step) -> Var:
    b, x, rank = s.b, s.only(0), s.rank(0)
    pads, axes = s.x[1], s.known(3)
    if axes:  # to sizes for every axis: ONNX Runtime folds a Pad that names its axes wrongly
        given, every = s.known(1), [0] * (2 * rank)
        for i, axis in enumerate(axes):
            every[axis % rank], every[axis % rank + rank] = given[i], given[i + len(axes)]
        pads = b.const(every)
    before, after = (b.Slice(pads, [n], [m], [0]) for n, m in ((0, rank), (rank, 2 * rank)))
    both = b.join([0], _folded(b, before), [0], _folded(b, after))
    return s.again(x, both, *s.x[2:3])


def _cumulate(s: Step) -> Var:
    return s.again(s.only(0), s.b.const(_shifted(s.known(1), s.rank(0))[0]))


def _tile(s: Step) -> Var:
    return s.b.Tile(s.only(0), s.b.join([1], s.x[1]))


def _concat(s: Step) -> Var:
    return s.again(*(s.stack(i) for i in range(len(s.x))), axis=_shifted([s.int_attr("axis", 0)], s.rank(0))[0])


def _compress(s: Step) -> Var:
    if "axis" not in s.node.attributes:
        raise Unstackable
    return _along(0)(s)


def _dft(s: Step) -> Var:
    x = s.only(0)
    if s.b.opset >= 20:  # the axis is an operand; by default it counts from the end
        axis = [a if a < 0 else a + 1 for a in s.known(2)] or [-2]
        return s.again(x, s.x[1] if len(s.x) > 1 else None, s.b.const(axis[0], ir.DataType.INT64))
    return s.again(x, *s.x[1:], axis=_shifted([s.int_attr("axis", 1)], s.rank(0))[0])


def _one_hot(s: Step) -> Var:
    axis = s.int_attr("axis", -1)
    return s.again(s.only(0), *s.x[1:], axis=axis if axis < 0 else axis + 1)


# --- where elements go -----------------------------------------------------------------------------


def shape(s: Step) -> Var:
    """The sizes of one: they are no stack."""
    rank = s.rank(0)
    start, end, _ = slice(s.int_attr("start", 0), s.int_attr("end", rank)).indices(rank)
    return s.b.Shape(s.x[0], start=start + 1, end=max(start, end) + 1)


def size(s: Step) -> Var:
    """The number of elements of one."""
    return s.b.ReduceProd(s.b.Shape(s.x[0], start=1), keepdims=0)


def _reshape(s: Step) -> Var:
    return s.b.Reshape(s.only(0), s.b.join(s.count, s.x[1]), allowzero=s.int_attr("allowzero", 0) or None)


def _flatten(s: Step) -> Var:
    b, x, at = s.b, s.only(0), s.int_attr("axis", 1)
    at = at + s.rank(0) if at < 0 else at
    left, right = b.shape_of(x, 1, at + 1), b.shape_of(x, at + 1)
    sides = [[1] if v.shape == (0,) else b.ReduceProd(v, keepdims=1) for v in (left, right)]
    return b.reshape(x, b.join(s.count, *sides))


def _expand(s: Step) -> Var:
    s.only(0)
    if s.x[1].shape != (s.out_rank,):
        raise Unstackable
    return s.b.Expand(s.lifted(0, s.out_rank), s.b.join(s.count, s.x[1]))


def _gather(s: Step) -> Var:
    axis = s.int_attr("axis", 0) % s.rank(0)
    if not s.stacked[1]:
        return s.b.Gather(s.x[0], s.x[1], axis=axis + 1)
    s.only(1)
    return _first(s.b.Gather(s.x[0], s.x[1], axis=axis), axis)


def _gather_elements(s: Step) -> Var:
    return s.again(s.stack(0), s.stack(1), axis=_shifted([s.int_attr("axis", 0)], s.rank(0))[0])


def _gather_nd(s: Step) -> Var:
    return s.again(s.stack(0), s.stack(1), batch_dims=s.int_attr("batch_dims", 0) + 1)


def _scatter_elements(s: Step) -> Var:
    axis = _shifted([s.int_attr("axis", 0)], s.rank(0))[0]
    return s.again(s.stack(0), s.stack(1), s.stack(2), axis=axis)


def _scatter_nd(s: Step) -> Var:
    if s.stacked[1]:
        raise Unstackable
    return _first(s.again(_last(s.stack(0)), s.x[1], _last(s.stack(2))), s.rank(0))


def _reverse_sequence(s: Step) -> Var:
    return _first(s.again(_last(s.only(0)), s.x[1]), s.rank(0))


def _last(x: Var) -> Var:
    """The directions last."""
    return x.builder.Transpose(x, perm=[*range(1, x.rank), 0])


def _first(x: Var, at: int) -> Var:
    """The directions, which are axis `at`, first again."""
    return x.builder.Transpose(x, perm=[at, *(i for i in range(x.rank) if i != at)]) if at else x


def _length(x: Var) -> int:
    if x.shape is None or not isinstance(x.shape[0], int):
        raise Unstackable
    return x.shape[0]


# --- products --------------------------------------------------------------------------------------


def _matmul(s: Step) -> Var:
    (a, b), (n, m) = s.x, (s.rank(0), s.rank(1))
    if s.stacked == [True, False] and (n > 1 or m <= 2):
        return _product(a if n == 1 else s.lifted(0, max(n, m)), b)
    if s.stacked == [False, True] and m > 1:
        return _product(a, s.lifted(1, max(n, m)))
    if s.stacked == [False, True] and n <= 2:  # a column for each direction: together, the rows of a matrix
        return _product(b, a if n == 1 else s.b.Transpose(a, perm=[1, 0]))
    rank = max(n, m, 2)
    sides = []
    for i, (x, own) in enumerate(((a, n), (b, m))):
        if own == 1:  # a row on the left, a column on the right
            x, own = s.b.Unsqueeze(x, [-2 if i == 0 else -1]), 2
        if s.stacked[i] and rank > own:
            x = s.b.Unsqueeze(x, list(range(1, rank - own + 1)))
        sides.append(x)
    y = _product(*sides)
    gone = [axis for axis, own in ((rank - 1, n), (rank, m)) if own == 1]
    return s.b.Squeeze(y, gone) if gone else y


def _product(x: Var, y: Var) -> Var:
    """x·y. A sum over nothing is zero, but ONNX Runtime leaves a stack of such products as it found the memory."""
    product = x @ y
    size = (x.shape or (0,))[-1]
    if (isinstance(size, int) and size) or max(x.rank, y.rank) < 3:
        return product
    b = x.builder
    return b.Where(b.shape_of(x, x.rank - 1) > 0, product, 0)


def _gemm(s: Step) -> Var:
    turned = []
    for i, name in enumerate(("transA", "transB")):
        perm = [0, 2, 1] if s.stacked[i] else [1, 0]
        turned.append(s.b.Transpose(s.x[i], perm=perm) if s.int_attr(name, 0) else s.x[i])
    alpha, beta = (1.0 if (a := s.node.attributes.get(n)) is None else a.as_float() for n in ("alpha", "beta"))
    product = _product(*turned) if any(s.stacked[:2]) else s.b.Unsqueeze(turned[0] @ turned[1], [0])
    y = product * alpha
    return y if len(s.x) < 3 or s.x[2] is None else y + s.lifted(2, 2) * beta


def _einsum(s: Step) -> Var:
    equation = s.node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, right = equation.partition("->")
    letter = next((c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in equation), None)
    if not arrow or letter is None:
        raise Unstackable
    terms = [letter + t if stacked else t for t, stacked in zip(left.split(","), s.stacked)]
    return s.b.emit("Einsum", *s.x, equation=f"{','.join(terms)}->{letter}{right}")


# --- rows of a batch -------------------------------------------------------------------------------


def _merged(b: Builder, x: Var, axis: int) -> Var:
    """`x` with axes `axis` and `axis` + 1 as one."""
    one = b.shape_of(x, axis, axis + 1) * b.shape_of(x, axis + 1, axis + 2)
    return b.reshape(x, b.join(b.shape_of(x, 0, axis) if axis else [], _folded(b, one), b.shape_of(x, axis + 2)))


def _folded(b: Builder, x: Var) -> Var:
    return x if (known := x.const) is None else b.const(known)


def _parted(b: Builder, x: Var, axis: int, *sizes: Any) -> Var:
    """`x` with axis `axis` as several, of these sizes."""
    return b.reshape(x, b.join(b.shape_of(x, 0, axis) if axis else [], *sizes, b.shape_of(x, axis + 1)))


def _rows(s: Step) -> Var:
    """The directions are more rows of the batch."""
    b, x = s.b, s.only(0)
    if len(s.node.outputs) != 1 or s.int_attr("training_mode", 0):
        raise Unstackable
    return _parted(b, s.again(_merged(b, x, 0), *s.x[1:]), 0, s.count, b.shape_of(x, 1, 2))


def _resize(s: Step) -> Var:
    """Rows as well, where it leaves the batch axis alone."""
    scales, axes = s.x[2] if len(s.x) > 2 else None, s.node.attributes.get("axes")
    held = None if scales is None else scales.const
    if held is None or not held.size or s.known(1):
        raise Unstackable
    at = [a % s.rank(0) for a in axes.as_ints()] if axes is not None else list(range(s.rank(0)))
    if any(a == 0 and scale != 1 for a, scale in zip(at, held)):
        raise Unstackable
    return _rows(s)


def _conv(s: Step) -> Var:
    if s.stacked[:2] == [True, False]:
        return _rows(s)
    if any(s.stacked[2:]) or len([x for x in s.x if x is not None]) > 2:
        raise Unstackable
    return _paired(s) if s.stacked[0] else _filters(s)


def _filters(s: Step) -> Var:
    """The directions are more filters of every group."""
    b, w, groups = s.b, s.x[1], s.int_attr("group", 1)
    if s.node.op_type == "ConvTranspose":  # [K, C, M/g, …]
        each = b.shape_of(w, 2, 3)
        w = _merged(b, _swapped(w), 1)
    else:  # [K, M, C/g, …]
        if groups > 1 and not isinstance((w.shape or (None, None))[1], int):
            raise Unstackable
        each = b.shape_of(w, 1, 2) if groups == 1 else b.const([w.shape[1] // groups])
        if groups > 1:
            w = _merged(b, _swapped(_parted(b, w, 1, [groups], each)), 0)  # [g·K, M/g, …]
        w = _merged(b, w, 0)
    y = s.again(s.x[0], w)
    y = b.Transpose(_parted(b, y, 1, [groups], s.count, each), perm=[2, 0, 1, *range(3, s.out_rank + 2)])
    return _merged(b, y, 2)


def _paired(s: Step) -> Var:
    """The directions are more groups."""
    b, (x, w), count = s.b, s.x[:2], (s.x[0].shape or (None,))[0]
    if not isinstance(count, int):
        raise Unstackable
    each = b.shape_of(w, 1, 2)
    if s.node.op_type == "ConvTranspose":
        each = b.shape_of(w, 2, 3) * s.int_attr("group", 1)
    y = s.again(_merged(b, _swapped(x), 1), _merged(b, w, 0), group=count * s.int_attr("group", 1))
    return _swapped(_parted(b, y, 1, [count], each))


def _swapped(x: Var) -> Var:
    """`x` with its first two axes exchanged."""
    return x.builder.Transpose(x, perm=[1, 0, *range(2, x.rank)])


_ELEMENTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast Ceil Celu Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul
    Neg Not Or Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh
    ThresholdedRelu Where Xor""".split()  # noqa: SIM905
_REDUCE = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905
_LAST = "Hardmax LayerNormalization LogSoftmax LpNormalization Softmax TopK".split()  # noqa: SIM905
_ROWS = """
    AveragePool MaxPool LpPool GlobalAveragePool GlobalMaxPool BatchNormalization InstanceNormalization
    LRN DepthToSpace SpaceToDepth Col2Im""".split()  # noqa: SIM905

WRITE: dict[str, Write] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{f"Reduce{name}": _reduce for name in _REDUCE},
    **dict.fromkeys(_ROWS, _rows),
    **{name: _along(-1) for name in _LAST},
    **{name: _along(0) for name in ("ArgMax", "ArgMin", "Split")},
    "Clip": _clip,
    "Compress": _compress,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "CumProd": _cumulate,
    "CumSum": _cumulate,
    "DFT": _dft,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "ReverseSequence": _reverse_sequence,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": lambda s: s.again(s.only(0), *s.x[1:]),
    "Unsqueeze": _unsqueeze,
}
#: What gives sizes, which are the same in all directions.
SIZES: dict[str, Write] = {"Shape": shape, "Size": size}

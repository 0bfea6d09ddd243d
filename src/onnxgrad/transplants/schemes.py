"""Schemes by which models store weights as integers, and their application to new weights.

A scheme is read from the nodes that dequantize: the type of the numbers, the axis or blocks of scales, zero points.
With the rule for scales (`scale_rules`) the same weights give the same integers again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant_tensor, is_op, is_standard, not_none
from onnxgrad.training.quantization.masters import STORED
from onnxgrad.training.quantization.numbers import dequantize, limits, quantize, spread
from onnxgrad.transplants.match import root_mean_square
from onnxgrad.transplants.scale_rules import Groups, new_scales

_CONTRIB = "com.microsoft"
Tensors = dict[ir.Value, ir.TensorProtocol]


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, which may be the default of an input, or of a Constant; None for other values."""
    if value is not None and value.is_initializer():
        return value.const_value
    return constant_tensor(value)


def array_of(value: ir.Value) -> np.ndarray:
    """The elements of `tensor_of`."""
    return not_none(tensor_of(value)).numpy()


@dataclass
class LinearScheme:
    """w = (q - z)·s: numbers, scales and zero points in tensors of their own.

    Attributes:
        numbers, scale, point: the values that hold them.
        axis: of the scales, if there are several.
        block: elements of the axis with one scale; 0: one scale for each slice.
    """

    numbers: ir.Value
    scale: ir.Value
    point: ir.Value | None
    axis: int
    block: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        return _shape(self.numbers)

    @property
    def is_uniform(self) -> bool:
        """True if there is one scale for all numbers."""
        return int(np.prod(_shape(self.scale))) == 1

    @property
    def bits(self) -> int:
        """The number of bits of an integer."""
        return _dtype(self.numbers).bitwidth

    def _read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, s = array_of(self.numbers), array_of(self.scale)
        return q, s, np.zeros(s.shape, q.dtype) if self.point is None else array_of(self.point)

    def floats(self) -> np.ndarray:
        """The floats that the integers represent."""
        q, s, z = self._read()
        axis = self.axis % max(q.ndim, 1)
        return dequantize(q, s, z if z.size == s.size else np.broadcast_to(z, s.shape), axis, self.block)

    def step(self) -> float:
        """The root mean square of the floats between two adjacent integers: of the scales."""
        q, s, _ = self._read()
        each = np.broadcast_to(spread(s, q.shape, self.axis % max(q.ndim, 1), self.block), q.shape)
        return root_mean_square(each)

    def store(self, after: np.ndarray, before: np.ndarray | None) -> Tensors:
        """The tensors that store `after`; `before` are the floats that the present ones were made from."""
        q, s, z = self._read()
        dtype = _dtype(self.numbers)
        axis = self.axis % max(q.ndim, 1)
        groups = Groups(q.shape, axis, self.block, s.shape)
        s, z = new_scales(groups, before, after, s, z, limits(dtype))
        wide = z if z.size == s.size else np.broadcast_to(z, s.shape)
        found: Tensors = {self.numbers: _tensor(quantize(after, s, wide, dtype, axis, self.block), dtype)}
        found[self.scale] = _like(s, self.scale)
        if self.point is not None:
            found[self.point] = _like(z, self.point)
        return found


@dataclass
class BlockScheme:
    """The packed numbers of a MatMulNBits: W [N, K] = (q - z)·s, in blocks of each row."""

    numbers: ir.Value
    scale: ir.Value
    point: ir.Value | None
    rows: int
    columns: int
    block: int
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        return self.rows, self.columns

    @property
    def _blocks(self) -> int:
        return -(-self.columns // self.block)

    def _read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, s = array_of(self.numbers), array_of(self.scale)
        q = unpack(q.reshape(self.rows, -1), self.bits)[:, : self._blocks * self.block]
        given = None if self.point is None else array_of(self.point)
        if given is None:
            z = np.full((self.rows, self._blocks), 2 ** (self.bits - 1), np.int64)
        elif given.dtype == np.uint8:
            z = unpack(given.reshape(self.rows, -1), self.bits)[:, : self._blocks].astype(np.int64)
        else:
            z = given.reshape(self.rows, self._blocks)
        return q, s.reshape(self.rows, self._blocks), z

    def floats(self) -> np.ndarray:
        """The floats that the integers represent."""
        q, s, z = self._read()
        parts = q.reshape(self.rows, self._blocks, self.block).astype(np.float32) - z[..., None].astype(np.float32)
        return (parts * s[..., None].astype(np.float32)).reshape(self.rows, -1)[:, : self.columns]

    def step(self) -> float:
        """The root mean square of the floats between two adjacent integers: of the scales."""
        return root_mean_square(self._read()[1])

    def store(self, after: np.ndarray, before: np.ndarray | None) -> Tensors:
        """The tensors that store `after`; `before` are the floats that the present ones were made from."""
        old, s, z = self._read()
        columns = np.arange(old.shape[1]) < self.columns
        groups = Groups(self.shape, 1, self.block, s.shape)
        bounds = (0, 2**self.bits - 1)
        s, z = new_scales(groups, before, after, s, z, bounds)
        room = np.pad(after.astype(np.float32), [(0, 0), (0, self._blocks * self.block - self.columns)])
        parts = room.reshape(self.rows, self._blocks, self.block)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.nan_to_num(parts / s[..., None].astype(np.float32)) + z[..., None].astype(np.float32)
        q = np.clip(np.rint(steps), *bounds).astype(np.uint8).reshape(self.rows, -1)
        q = np.where(columns, q, old)
        if before is not None:
            kept = np.repeat(groups.reduce(before == after, np.all), self.block, axis=1)
            q = np.where(kept, old, q)
        packed = pack(q, self.bits).reshape(_shape(self.numbers))
        found: Tensors = {self.numbers: _tensor(packed, ir.DataType.UINT8)}
        found[self.scale] = _like(s, self.scale)
        if self.point is not None:
            given = array_of(self.point)
            if given.dtype == np.uint8:
                points = unpack(given.reshape(self.rows, -1), self.bits).copy()
                points[:, : self._blocks] = z
                z = pack(points, self.bits)
            found[self.point] = _like(z, self.point)
        return found


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in the bytes of each row, the lowest bits first."""
    if bits == 8:
        return packed
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Bytes with the numbers of each row, the lowest bits first."""
    if bits == 8:
        return numbers
    parts = numbers.astype(np.uint8).reshape(*numbers.shape[:-1], -1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts, axis=-1)


@dataclass
class BiasScheme:
    """An int32 bias of an integer kernel, in steps of the product that it is added to: s = s_x·s_w.

    Attributes:
        numbers: the value that holds the integers.
        scale: the value that holds the steps; None if the kernel computes them.
        factors: the scales of the other operands.
    """

    numbers: ir.Value
    scale: ir.Value | None
    factors: tuple[ir.Value, ir.Value]

    bits = 32
    point = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        return _shape(self.numbers)

    def _steps(self) -> np.ndarray:
        first, second = (array_of(v).astype(np.float32).reshape(-1) for v in self.factors)
        return first * second

    def floats(self) -> np.ndarray:
        """The floats that the integers represent."""
        steps = self._steps() if self.scale is None else array_of(self.scale).reshape(-1)
        return (array_of(self.numbers).astype(np.float64) * steps).astype(np.float32)

    def step(self) -> float:
        """The root mean square of the floats between two adjacent integers: of the scales."""
        return root_mean_square(self._steps())

    def store(self, after: np.ndarray, before: np.ndarray | None) -> Tensors:
        """The tensors that store `after` in steps of the present scales of the other operands."""
        steps = self._steps()
        numbers = quantize(after, steps, np.zeros(steps.shape, np.int32), ir.DataType.INT32, 0)
        found: Tensors = {self.numbers: _tensor(numbers, ir.DataType.INT32)}
        return found if self.scale is None else {**found, self.scale: _like(steps, self.scale)}


Scheme = LinearScheme | BlockScheme | BiasScheme

#: Operators that select or rearrange integers: an embedding is dequantized after the lookup.
_MOVES = ("Gather", "Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze")

#: Inputs of operators that hold numbers, scales and zero points, and the axis of scales.
_TRIPLES: dict[tuple[str, str], tuple[int, int, int, int]] = {
    ("", "QLinearMatMul"): (3, 4, 5, -1),
    ("", "QLinearConv"): (3, 4, 5, 0),
    (_CONTRIB, "QLinearConv"): (3, 4, 5, 0),
    (_CONTRIB, "MatMulIntegerToFloat"): (1, 3, 5, -1),
    (_CONTRIB, "DynamicQuantizeMatMul"): (1, 2, 3, -1),
    (_CONTRIB, "QAttention"): (1, 4, 7, -1),
}


def scheme_of(node: ir.Node) -> Scheme | None:
    """The scheme of the weight that `node` dequantizes or multiplies as integers; None for other nodes."""
    found: Scheme | None = None
    domain = "" if is_standard(node) else node.domain
    inputs = (*node.inputs, *(None,) * 9)
    if node.op_type == "DequantizeLinear" and domain in ("", _CONTRIB):
        axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        found = _linear(stored_behind(inputs[0], _MOVES), inputs[1], inputs[2], axis, block) or _bias(node)
        if isinstance(found, LinearScheme) and found.numbers is not inputs[0] and not found.is_uniform:
            found = None  # the axis of the scales is that of the result
    elif node.op_type in ("MatMulInteger", "ConvInteger") and domain == "":
        scale = _scale_behind(node)
        found = _linear(inputs[1], scale, inputs[3], 0 if node.op_type == "ConvInteger" else -1)
    elif (domain, node.op_type) == (_CONTRIB, "QGemm"):
        found = _linear(inputs[3], inputs[4], inputs[5], 1 - node.attributes.get_int("transB", 0))
    elif (domain, node.op_type) == (_CONTRIB, "GatherBlockQuantized"):
        axis, block = node.attributes.get_int("quantize_axis", 1), node.attributes.get_int("block_size", 128)
        found = _linear(inputs[0], inputs[2], inputs[3], axis, block)
    elif (domain, node.op_type) in _TRIPLES:
        numbers, scale_at, point, axis = _TRIPLES[domain, node.op_type]
        found = _linear(inputs[numbers], inputs[scale_at], inputs[point], axis)
    elif (domain, node.op_type) == (_CONTRIB, "MatMulNBits") and inputs[4] is None:
        rows, columns, size, bits = (
            node.attributes.get_int(k, 4 if k == "bits" else 0) for k in ("N", "K", "block_size", "bits")
        )
        held = [v is not None and tensor_of(v) is not None for v in inputs[1:4]]
        if all(held[:2]) and held[2] == (inputs[3] is not None) and bits in (2, 4, 8):
            found = BlockScheme(not_none(inputs[1]), not_none(inputs[2]), inputs[3], rows, columns, size, bits)
    return found


def _bias(node: ir.Node) -> BiasScheme | None:
    """The scheme of the int32 bias that `node` dequantizes for a layer."""
    tensor = tensor_of(node.inputs[0])
    users = [u.node for u in node.outputs[0].uses() if u.idx == 2]
    if tensor is None or tensor.dtype != ir.DataType.INT32 or not users or len(users) < len(node.outputs[0].uses()):
        return None
    makers = [v.producer() if v is not None else None for v in users[0].inputs[:2]]
    scales = [m.inputs[1] for m in makers if m is not None and m.op_type == "DequantizeLinear"]
    return _steps(node.inputs[0], node.inputs[1], scales)


def _steps(numbers: ir.Value | None, scale: ir.Value | None, factors: Sequence[ir.Value | None]) -> BiasScheme | None:
    first, second = (*factors, None, None)[:2]
    if numbers is None or first is None or second is None or None in (tensor_of(first), tensor_of(second)):
        return None
    if tensor_of(numbers) is None or (scale is not None and tensor_of(scale) is None):
        return None
    return BiasScheme(numbers, scale, (first, second))


def implicit_bias(node: ir.Node) -> BiasScheme | None:
    """The scheme of the bias of an integer kernel that computes its steps; None for other nodes."""
    at = {"QLinearConv": (8, 1, 4), "QGemm": (6, 1, 4)}.get(node.op_type)
    inputs = (*node.inputs, *(None,) * 9)
    return None if at is None else _steps(inputs[at[0]], None, [inputs[at[1]], inputs[at[2]]])


def stored_behind(value: ir.Value | None, passing: Collection[str]) -> ir.Value | None:
    """The stored tensor that `value` is made of, by operators `passing` alone; None if there is none."""
    while value is not None and tensor_of(value) is None:
        node = value.producer()
        if node is None or node.op_type not in passing:
            return None
        value = node.inputs[0]
    return value


def _linear(
    numbers: ir.Value | None, scale: ir.Value | None, point: ir.Value | None, axis: int, block: int = 0
) -> LinearScheme | None:
    q, s = tensor_of(numbers), tensor_of(scale)
    if numbers is None or scale is None or q is None or s is None:
        return None
    if (point is not None and tensor_of(point) is None) or q.dtype not in STORED:
        return None
    return LinearScheme(numbers, scale, point, axis, block)


def _scale_behind(node: ir.Node) -> ir.Value | None:
    """The scale of the weight of an integer product: the other factor of its result, beside the scale of the input."""
    value = node.outputs[0]
    for _ in range(4):
        uses = [u.node for u in value.uses()]
        if len(uses) != 1:
            return None
        (reader,) = uses
        if is_op(reader, ("Cast", "Add", "Reshape")):
            value = reader.outputs[0]
        elif is_op(reader, "Mul"):
            other = reader.inputs[1 if reader.inputs[0] is value else 0]
            if tensor_of(other) is not None:
                return other
            maker = None if other is None else other.producer()
            held = [v for v in (maker.inputs if is_op(maker, "Mul") else ()) if tensor_of(v) is not None]
            return held[0] if len(held) == 1 else None
        else:
            return None
    return None


def _shape(value: ir.Value) -> tuple[int, ...]:
    tensor = not_none(tensor_of(value))
    return tuple(int(d) for d in tensor.shape.numpy())


def _dtype(value: ir.Value) -> ir.DataType:
    return ir.DataType(not_none(tensor_of(value)).dtype)


def _tensor(array: np.ndarray, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.Tensor(np.asarray(array, order="C"), dtype=dtype)


def _like(array: np.ndarray, value: ir.Value) -> ir.TensorProtocol:
    return _tensor(array.astype(_dtype(value).numpy()).reshape(_shape(value)), _dtype(value))

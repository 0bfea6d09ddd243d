"""Operators that compute on stored integers, opened for training: as floats that are rounded, and back when saved.

QLinearConv, QGemm, MatMulInteger and their like become DequantizeLinear → Conv → QuantizeLinear, whose weights, biases
and scales train as those of any quantized model (`masters`). Each stays on record as it was written. In the saved model
it is in its place again, with the integers and scales that training has left under the names that it reads.
"""

from __future__ import annotations

import base64
import fnmatch
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Names, Var
from onnxgrad.ir.graph import add_initializer, prune
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.match import constant, is_op, normal_domain, not_none, only_reader, producer
from onnxgrad.ir.schemas import attribute
from onnxgrad.training.quantization.record import Storage

_CONTRIB = "com.microsoft"
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_NUMBERS = (ir.DataType.UINT8, ir.DataType.INT8)
#: Operators that pass quantized numbers on.
_PASSING = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Identity")
#: Operands that are the scale and the zero point of the result.
_RESULT = {"QuantizeLinear": (1, 2), "QLinearConv": (6, 7), "QLinearMatMul": (6, 7), "QGemm": (7, 8)} | {
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), (6, 7)),
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearSigmoid", "QLinearLeakyRelu"), (3, 4)),
    **dict.fromkeys(("QLinearConcat", "QLinearSoftmax"), (0, 1)),
}
_OPENERS: dict[tuple[str, str], Callable[[_Opening, ir.Node, Builder], Sequence[Var] | None]] = {}


def open_operators(model: ir.Model, trainable: Sequence[str] | None = None, freeze: Sequence[str] = ()) -> Storage:
    """Replace operators on stored integers by floats that are rounded, in place. Returns a record of them.

    Matrices of 4 bits take eight times the memory as floats: those stay packed that `trainable` and `freeze` leave out.
    """
    opening = _Opening(model, trainable, freeze)
    for node in list(model.graph):
        opening.visit(node)
    if opening.record.operators:
        prune(model.graph, model.graph.initializers.values())
    return opening.record


class _Opening:
    """One model whose operators are opened."""

    def __init__(self, model: ir.Model, trainable: Sequence[str] | None, freeze: Sequence[str]) -> None:
        self.model, self.graph = model, model.graph
        self.trainable, self.freeze = trainable, freeze
        self.names = Names.of_graph(self.graph)
        self.record = Storage()
        #: the scale and the zero point of quantized numbers
        self.scales: dict[ir.Value, tuple[ir.Value, ir.Value | None]] = {}

    @cached_property
    def infer(self) -> Inference:
        """The inference of the new nodes."""
        return Inference.of(self.graph)

    def trains(self, name: str | None) -> bool:
        """True if patterns name a weight to train."""
        asked = self.trainable is None or any(p == "all" or fnmatch.fnmatchcase(name or "", p) for p in self.trainable)
        return asked and not any(fnmatch.fnmatchcase(name or "", p) for p in self.freeze)

    def visit(self, node: ir.Node) -> None:
        """Open `node`, if it computes on stored integers."""
        key = normal_domain(node.domain), node.op_type
        opener = _OPENERS.get(key)
        passes = is_op(node, _PASSING) and node.inputs[0] is not None and node.inputs[0] in self.scales
        if node.op_type in _RESULT and node.outputs[0].dtype in _NUMBERS:
            places = [(*node.inputs, *[None] * 9)[at] for at in _RESULT[node.op_type]]
            if places[0] is not None:
                self._share_scale(node)
                self.scales[node.outputs[0]] = places[0], places[1]
        if opener is None and not passes:
            return
        builder = Builder(self.graph, self.names, self.infer, before=node, prefix="open")
        found = _passing(self, node, builder) if passes else opener(self, node, builder)  # type: ignore[misc]
        if found is not None:
            self.replace([node], found, builder)

    def replace(self, nodes: Sequence[ir.Node], found: Sequence[Var], builder: Builder) -> None:
        """Put `found` in the place of the results of the last of `nodes`, which go on record."""
        results = nodes[-1].outputs
        texts = [base64.b64encode(ir.serde.serialize_node(n).SerializeToString()).decode() for n in nodes]
        self.record.operators.append(texts)
        for old, new in zip(results, found):
            if old in self.scales:
                self.scales[new.value] = self.scales[old]
            name, old.name = old.name, None
            if new.value.producer() is None or new.value.name in {r.name for r in results}:
                new = builder.Identity(new)
            old.replace_all_uses_with(new.value, replace_graph_outputs=True)
            new.value.name, new.value.type, new.value.shape = name, old.type, old.shape
        for node in reversed(nodes):
            if not any(v.uses() or v.is_graph_output() for v in node.outputs):
                self.graph.remove(node, safe=True)

    def _share_scale(self, node: ir.Node) -> None:
        """Have a reader of quantized numbers read the scale that they were made with, not an equal copy."""
        for at in (0, 3):
            x = node.inputs[at] if len(node.inputs) > at + 1 else None
            known = None if x is None else self.scales.get(x)
            scale = node.inputs[at + 1] if known is not None else None
            if known is not None and scale is not None and scale is not known[0]:
                left, right = constant(scale), constant(known[0])
                if left is not None and right is not None and np.array_equal(left.ravel(), right.ravel()):
                    node.replace_input_with(at + 1, known[0])

    def is_stored(self, value: ir.Value | None) -> bool:
        """True for an initializer that no caller can change."""
        return value is not None and value.is_initializer() and not value.is_graph_input()

    def reshaped(self, value: ir.Value | None, shape: Sequence[int]) -> ir.Value | None:
        """The initializer `value` in another shape while it is open."""
        if value is None or not self.is_stored(value) or value.const_value is None:
            return value
        if tuple(value.const_value.shape) != tuple(shape):
            self._note(value)
            array = value.const_value.numpy().reshape(tuple(shape))
            value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)
            value.shape = ir.Shape(shape)
        return value

    def _note(self, value: ir.Value) -> None:
        held = not_none(value.const_value)
        self.record.forms.setdefault(value.name or "", [int(held.dtype), *(int(d) for d in held.shape)])  # type: ignore[arg-type]

    def nibbles(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """An initializer of bytes as numbers of 4 bits, lowest first, while it is open."""
        held = not_none(value.const_value)
        self._note(value)
        raw = held.numpy().reshape(-1)
        numbers = np.stack([raw & 15, raw >> 4], 1).reshape(shape[0], -1)[:, : shape[1]]
        uint4 = ir.DataType.UINT4
        value.const_value = ir.tensor(numbers.astype(uint4.numpy()), dtype=uint4, name=value.name)
        value.shape, value.type = ir.Shape(shape), ir.TensorType(uint4)
        return value

    def scalar(self, value: ir.Value | None) -> ir.Value | None:
        """A scale or zero point of one element without axes; another one as it is."""
        size = None if value is None or value.const_value is None else value.const_value.size
        return self.reshaped(value, ()) if size == 1 else value

    def floats(self, b: Builder, x: ir.Value | None, s: ir.Value | None, z: ir.Value | None, axis: int = 0) -> Var:
        """(x - z)·s"""
        s, z = self.scalar(s), self.scalar(z)
        several = s is not None and s.shape is not None and len(s.shape) == 1
        if several and z is not None and z.const_value is not None and z.const_value.size == 1:
            assert s is not None
            array = np.broadcast_to(z.const_value.numpy().reshape(()), tuple(int(d) for d in s.shape or ()))  # type: ignore[arg-type]
            z = add_initializer(self.graph, ir.tensor(array.copy(), dtype=z.dtype, name=self.names.fresh("zeros")))
        return b.DequantizeLinear(x, s, z, axis=axis if several else None)

    def numbers(self, b: Builder, y: Var, s: ir.Value | None, z: ir.Value | None) -> Var:
        """Round(y/s) + z"""
        return b.QuantizeLinear(y, self.scalar(s), self.scalar(z))

    def bias(self, b: Builder, value: ir.Value | None, xs: ir.Value | None, ws: ir.Value | None) -> Var | None:
        """A bias of int32 in units of the scale of x times that of w, as floats."""
        if value is None:
            return None
        factors = [constant(v) for v in (xs, ws)]
        steps = (not_none(factors[0]).reshape(()) * not_none(factors[1])).astype(np.float32)
        steps = steps.reshape(()) if steps.size == 1 else steps.reshape(-1)
        scale = add_initializer(self.graph, ir.tensor(steps, name=self.names.fresh(f"{value.name}_scale")))
        return b.DequantizeLinear(value, scale, axis=0 if steps.ndim else None)


def _opens(domain: str, name: str) -> Callable[..., Callable[..., Sequence[Var] | None]]:
    def decorate(function: Callable[..., Sequence[Var] | None]) -> Callable[..., Sequence[Var] | None]:
        _OPENERS[domain, name] = function
        return function

    return decorate


def _passing(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var]:
    x, *others = node.inputs
    assert x is not None
    scale, zero = o.scales[x]
    y = b.append(ir.Node("", node.op_type, [o.floats(b, x, scale, zero).value, *others], node.attributes.values()))[0]
    y.value.shape = node.outputs[0].shape
    found = o.numbers(b, y, scale, zero)
    o.scales[found.value] = scale, zero
    return [found]


def _attributes(node: ir.Node, *names: str) -> dict[str, ir.Attr]:
    return {n: node.attributes[n] for n in names if n in node.attributes}


@_opens("", "QLinearConv")
def _conv(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, xs, xz, w, ws, wz, ys, yz, bias = (*node.inputs, None)[:9]
    if not all(map(o.is_stored, (w, xs, ws, ys))) or (bias is not None and not o.is_stored(bias)):
        return None
    floats = o.floats(b, x, xs, xz), o.floats(b, w, ws, wz, 0), o.bias(b, bias, xs, ws)
    return [o.numbers(b, b.Conv(*floats, **_attributes(node, *_CONV)), ys, yz)]


@_opens("", "QLinearMatMul")
def _matmul(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, xs, xz, w, ws, wz, ys, yz = node.inputs
    if not all(map(o.is_stored, (w, xs, ws, ys))) or w is None or w.shape is None:
        return None
    y = b.MatMul(o.floats(b, x, xs, xz), o.floats(b, w, ws, wz, len(w.shape) - 1))
    return [o.numbers(b, y, ys, yz)]


@_opens(_CONTRIB, "QGemm")
def _gemm(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, xs, xz, w, ws, wz, bias, ys, yz = (*node.inputs, None, None, None)[:9]
    if not all(map(o.is_stored, (w, xs, ws))) or attribute(node, "alpha", 1.0) != 1:
        return None
    turned = attribute(node, "transB", 0)
    floats = o.floats(b, x, xs, xz), o.floats(b, w, ws, wz, 0 if turned else 1), o.bias(b, bias, xs, ws)
    y = b.Gemm(*floats, **_attributes(node, "transA", "transB"))
    return [y if ys is None else o.numbers(b, y, ys, yz)]


@_opens("", "MatMulInteger")
@_opens("", "ConvInteger")
def _integers(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    """Integers in the middle of what the dynamic quantizer writes: cast, and multiplied by both scales."""
    x, w, xz, wz = (*node.inputs, None, None)[:4]
    made = producer(x, "DynamicQuantizeLinear")
    cast = only_reader(node.outputs[0], "Cast")
    product = None if cast is None else only_reader(cast.outputs[0], "Mul")
    if made is None or product is None or cast is None or not o.is_stored(w) or w is None or w.shape is None:
        return None
    factor = product.inputs[1] if product.inputs[0] is cast.outputs[0] else product.inputs[0]
    scaling = producer(factor, "Mul")
    xs = made.outputs[1]
    if scaling is None or xs not in scaling.inputs:
        return None
    ws = scaling.inputs[1] if scaling.inputs[0] is xs else scaling.inputs[0]
    size = None if ws is None or ws.const_value is None else ws.const_value.size
    if not o.is_stored(ws) or (node.op_type == "ConvInteger" and size != 1):
        return None
    inner = Builder(o.graph, o.names, o.infer, before=product, prefix="open")
    weights = o.floats(inner, w, ws, wz, len(w.shape) - 1)
    floats = o.floats(inner, x, xs, xz)
    if node.op_type == "MatMulInteger":
        y = inner.MatMul(floats, weights)
    else:
        y = inner.Conv(floats, weights, **_attributes(node, *_CONV))
    o.replace([node, cast, scaling, product], [y], inner)
    return None


@_opens(_CONTRIB, "DynamicQuantizeMatMul")
@_opens(_CONTRIB, "MatMulIntegerToFloat")
def _to_float(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    if node.op_type == "DynamicQuantizeMatMul":
        x, w, ws, wz, bias = (*node.inputs, None, None)[:5]
        given = None
    else:
        x, w, xs, ws, xz, wz, bias = (*node.inputs, None, None, None)[:7]
        given = x, xs, xz
    if not all(map(o.is_stored, (w, ws))) or w is None or w.shape is None:
        return None
    if given is None:
        given = tuple(v.value for v in b.emit("DynamicQuantizeLinear", x, outputs=3))
    y = b.MatMul(o.floats(b, *given), o.floats(b, w, ws, wz, len(w.shape) - 1))
    return [y if bias is None else b.Add(y, bias)]


@_opens(_CONTRIB, "MatMulNBits")
def _packed(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, w, scales, points, order, bias = (*node.inputs, None, None, None)[:6]
    rows, columns, size = (attribute(node, key, 0) for key in ("N", "K", "block_size"))
    own = all(map(o.is_stored, (w, scales))) and (points is None or o.is_stored(points))
    if not own or order is not None or not size or columns % size or attribute(node, "bits", 4) != 4 or b.opset < 21:
        return None
    if (
        w is None
        or scales is None
        or not o.trains(w.name)
        or (points is not None and points.dtype != ir.DataType.UINT8)
    ):
        return None
    blocks = (rows, columns // size)
    zero = None if points is None else o.nibbles(points, blocks)
    if zero is None:
        middle = np.full(blocks, 8).astype(ir.DataType.UINT4.numpy())
        tensor = ir.tensor(middle, dtype=ir.DataType.UINT4, name=o.names.fresh(f"{w.name}_middle"))
        zero = add_initializer(o.graph, tensor)
    weights = b.DequantizeLinear(
        o.nibbles(w, (rows, columns)), o.reshaped(scales, blocks), zero, axis=1, block_size=size
    )
    y = b.MatMul(x, b.Transpose(weights, perm=[1, 0]))
    return [y if bias is None else b.Add(y, bias)]


#: Operands that are weights, by operator.
_WEIGHTS = {"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0}


@_opens("", "Cast")
def _cast(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    """Integers that are cast and scaled before a layer reads them: weights in 8 bits, and products of floats."""
    w, product = node.inputs[0], only_reader(node.outputs[0], "Mul")
    if w is None or product is None or not o.is_stored(w) or w.dtype not in _NUMBERS or w.shape is None:
        return None
    scale = product.inputs[1] if product.inputs[0] is node.outputs[0] else product.inputs[0]
    readers = product.outputs[0].uses()
    if not o.is_stored(scale) or not readers or any(_WEIGHTS.get(r.op_type) != at for r, at in readers):
        return None
    assert scale is not None
    sizes, shape = [1] * (len(w.shape) - len(scale.shape or ())) + list(scale.shape or ()), list(w.shape)
    axes = [axis for axis, n in enumerate(sizes) if n != 1]
    if len(sizes) != len(shape) or len(axes) > 1 or any(sizes[a] != shape[a] for a in axes):
        return None
    inner = Builder(o.graph, o.names, o.infer, before=product, prefix="open")
    steps = o.reshaped(scale, (int(shape[axes[0]]),)) if axes else scale  # type: ignore[arg-type]
    o.replace([node, product], [o.floats(inner, w, steps, None, axes[0] if axes else 0)], inner)
    return None


@_opens(_CONTRIB, "DynamicQuantizeLSTM")
def _lstm(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    """The recurrence in floats: its kernels round what they multiply by the extrema of each call."""
    x, w, r, bias, lengths, h, c, peephole, ws, wz, rs, rz = node.inputs
    weights = []
    for value, scale, zero in ((w, ws, wz), (r, rs, rz)):
        if not all(map(o.is_stored, (value, scale))) or value is None or value.shape is None or scale is None:
            return None
        count = 1 if scale.const_value is None else scale.const_value.size
        directions = int(value.shape[0])  # type: ignore[arg-type]
        if count not in (1, directions) and directions > 1:
            return None
        if count > 1:
            scale, zero = o.reshaped(scale, (count,)), o.reshaped(zero, (count,))
        axis = 0 if count == directions else 2
        weights.append(b.Transpose(o.floats(b, value, scale, zero, axis), perm=[0, 2, 1]))
    operands = [x, *weights, bias, lengths, h, c, peephole]
    values = [v.value if isinstance(v, Var) else v for v in operands]
    while values and values[-1] is None:
        values.pop()
    made = ir.Node("", "LSTM", values, node.attributes.values(), num_outputs=len(node.outputs))
    return list(b.append(made))


# --- operators without weights, whose scales train -----------------------------------------------


@_opens(_CONTRIB, "QLinearAdd")
@_opens(_CONTRIB, "QLinearMul")
def _pointwise(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, xs, xz, y, ts, tz, ys, yz = (*node.inputs, None)[:8]
    if not all(map(o.is_stored, (xs, ts, ys))):
        return None
    found = b.emit(node.op_type.removeprefix("QLinear"), o.floats(b, x, xs, xz), o.floats(b, y, ts, tz))
    return [o.numbers(b, found, ys, yz)]


@_opens(_CONTRIB, "QLinearSigmoid")
@_opens(_CONTRIB, "QLinearLeakyRelu")
@_opens(_CONTRIB, "QLinearSoftmax")
@_opens(_CONTRIB, "QLinearGlobalAveragePool")
def _unary(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    x, xs, xz, ys, yz = (*node.inputs, None)[:5]
    rank = 0 if x is None or x.shape is None else len(x.shape)
    last = attribute(node, "axis", -1) in (-1, rank - 1)
    if not all(map(o.is_stored, (xs, ys))) or attribute(node, "channels_last", 0) or not last:
        return None
    write = getattr(b, node.op_type.removeprefix("QLinear"))
    own: dict[str, Any] = {"axis": -1} if node.op_type == "QLinearSoftmax" else {}
    found = write(o.floats(b, x, xs, xz), **_attributes(node, "alpha"), **own)
    return [o.numbers(b, found, ys, yz)]


@_opens(_CONTRIB, "QLinearConcat")
def _concat(o: _Opening, node: ir.Node, b: Builder) -> Sequence[Var] | None:
    (ys, yz), parts = node.inputs[:2], [node.inputs[k : k + 3] for k in range(2, len(node.inputs), 3)]
    if not all(o.is_stored(s) for s in (ys, *(p[1] for p in parts))):
        return None
    joined = b.Concat(*(o.floats(b, p[0], p[1], p[2]) for p in parts), **_attributes(node, "axis"))
    return [o.numbers(b, joined, ys, yz)]

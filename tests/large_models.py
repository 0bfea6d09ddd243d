"""Models written with the onnx package alone: a ResNet-50 and a GPT, at any size."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class _Writer:
    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int, scale: float | None = None, value: float | None = None) -> str:
        name = f"w{len(self.weights)}"
        fan = int(np.prod(shape[1:])) or 1
        array = self.rng.standard_normal(shape) * (scale or fan**-0.5) if value is None else np.full(shape, value)
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def ints(self, *values: int) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def __call__(self, op: str, *inputs: str, outputs: int = 1, **attrs: object) -> str:
        names = [f"{op.lower()}{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{op}_{len(self.nodes)}", **attrs))
        return names[0] if outputs == 1 else names  # type: ignore[return-value]

    def model(self, x: onnx.ValueInfoProto, out: str, y: onnx.ValueInfoProto) -> onnx.ModelProto:
        self.nodes[-1].output[0] = y.name
        assert out
        graph = helper.make_graph(self.nodes, "model", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def resnet50(width: int = 64, classes: int = 1000) -> onnx.ModelProto:
    """ResNet-50 in inference form: 53 convolutions, each with its batch norm."""
    m = _Writer()

    def conv(x: str, i: int, o: int, k: int, stride: int = 1) -> str:
        y = m("Conv", x, m.weight(o, i, k, k), kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)
        stats = [m.weight(o, value=v) for v in (1, 0, 0, 1)]
        return m("BatchNormalization", y, *stats)

    x = m("Relu", conv("x", 3, width, 7, 2))
    x = m("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    i = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            skip = x if block else conv(x, i, 4 * inner, 1, stride)
            h = m("Relu", conv(x, i, inner, 1))
            h = m("Relu", conv(h, inner, inner, 3, stride))
            x = m("Relu", m("Add", conv(h, inner, 4 * inner, 1), skip))
            i = 4 * inner
    x = m("Flatten", m("GlobalAveragePool", x))
    y = m("Gemm", x, m.weight(classes, i), m.weight(classes, value=0), transB=1)
    return m.model(
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 64, 64]),
        y,
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", classes]),
    )


def gpt(layers: int = 2, width: int = 32, heads: int = 4, vocab: int = 50, length: int = 8) -> onnx.ModelProto:
    """A decoder-only transformer: learned places, causal mask, pre-norm, GELU."""
    m = _Writer()
    head = width // heads
    mask = numpy_helper.from_array(np.triu(np.full((length, length), -1e9, np.float32), 1), "mask")
    m.weights.append(mask)
    split = m.ints(0, length, heads, head)
    merge = m.ints(0, length, width)
    scale = m.weight(value=head**-0.5)

    def norm(x: str) -> str:
        return m("LayerNormalization", x, m.weight(width, value=1), m.weight(width, value=0), axis=-1)

    def linear(x: str, i: int, o: int) -> str:
        return m("Add", m("MatMul", x, m.weight(i, o)), m.weight(o, value=0))

    x = m("Add", m("Gather", m.weight(vocab, width), "ids"), m.weight(length, width))
    for _ in range(layers):
        h = norm(x)
        q, k, v = (m("Transpose", m("Reshape", linear(h, width, width), split), perm=[0, 2, 1, 3]) for _ in range(3))
        scores = m("Add", m("Mul", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), scale), "mask")
        a = m("Transpose", m("MatMul", m("Softmax", scores), v), perm=[0, 2, 1, 3])
        x = m("Add", x, linear(m("Reshape", a, merge), width, width))
        x = m("Add", x, linear(m("Gelu", linear(norm(x), width, 4 * width)), 4 * width, width))
    y = m("MatMul", norm(x), m.weight(width, vocab))
    return m.model(
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", length]),
        y,
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", length, vocab]),
    )


def float_weights(model: onnx.ModelProto) -> list[str]:
    """The names of the float initializers."""
    return [w.name for w in model.graph.initializer if w.data_type == TensorProto.FLOAT]

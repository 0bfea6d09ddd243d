"""Graphs whose derivation is timed: deep, wide, of many layers, with control flow, and one that is next to nothing.

Weights are initializers that are inputs as well, which every contender can differentiate by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass
class Problem:
    """A model, and by which of its inputs `y` is differentiated."""

    model: onnx.ModelProto
    wrt: list[str]


class _Graph:
    """Nodes of a graph that is being written; values are names."""

    def __init__(self, **inputs: tuple[int | str, ...]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.inputs = dict(inputs)
        self._random = np.random.default_rng(0)

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"{op_type}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names[0]

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        scale = np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 1
        self.weights[name] = (self._random.standard_normal(shape) * scale).astype(np.float32)
        return name

    def ints(self, *numbers: int) -> str:
        name = "ints_" + "_".join(map(str, numbers))
        self.constants[name] = np.array(numbers, np.int64)
        return name

    def done(self, y: str, wrt: list[str] | None = None, shape: tuple[int | str, ...] | None = None) -> Problem:
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        inputs = self.inputs | {name: w.shape for name, w in self.weights.items()}
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(a, n) for n, a in (self.weights | self.constants).items()],
        )
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
        return Problem(model, wrt or list(self.weights))


def chain(length: int) -> Problem:
    """`length` times Tanh."""
    g, value = _Graph(x=(8, 8)), "x"
    for _ in range(length):
        value = g.op("Tanh", value)
    return g.done(value, ["x"], (8, 8))


def branches(count: int) -> Problem:
    """`count` small branches of one input, each with a weight of its own, added up."""
    g = _Graph(x=("N", 8))
    total = ""
    for _ in range(count):
        branch = g.op("Sigmoid", g.op("Mul", "x", g.weight(8)))
        total = g.op("Add", total, branch) if total else branch
    return g.done(total, shape=("N", 8))


def perceptron(layers: int) -> Problem:
    """Dense layers with Relu between them."""
    g, value = _Graph(x=("N", 16)), "x"
    for i in range(layers):
        value = g.op("Gemm", value, g.weight(16, 16), g.weight(16))
        value = g.op("Relu", value) if i < layers - 1 else value
    return g.done(value, shape=("N", 16))


def transformer(layers: int, width: int = 32, heads: int = 4) -> Problem:
    """Pre-norm layers of attention and GELU, as exporters write them out."""
    g = _Graph(x=("N", "T", width))
    split = g.ints(0, 0, heads, width // heads)
    merge, scale = g.ints(0, 0, width), "scale"
    g.constants[scale] = np.float32((width // heads) ** -0.5)
    value = "x"
    for _ in range(layers):
        normal = g.op("LayerNormalization", value, g.weight(width), g.weight(width), axis=-1)
        parts = []
        for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
            part = g.op("Add", g.op("MatMul", normal, g.weight(width, width)), g.weight(width))
            parts.append(g.op("Transpose", g.op("Reshape", part, split), perm=perm))
        scores = g.op("Softmax", g.op("Mul", g.op("MatMul", *parts[:2]), scale), axis=-1)
        mixed = g.op("Transpose", g.op("MatMul", scores, parts[2]), perm=(0, 2, 1, 3))
        mixed = g.op("MatMul", g.op("Reshape", mixed, merge), g.weight(width, width))
        value = g.op("Add", value, g.op("Add", mixed, g.weight(width)))
        normal = g.op("LayerNormalization", value, g.weight(width), g.weight(width), axis=-1)
        inner = g.op("Add", g.op("MatMul", normal, g.weight(width, 4 * width)), g.weight(4 * width))
        outer = g.op("MatMul", g.op("Gelu", inner), g.weight(4 * width, width))
        value = g.op("Add", value, g.op("Add", outer, g.weight(width)))
    return g.done(value, shape=("N", "T", width))


def residual(blocks: tuple[int, ...], width: int = 8) -> Problem:
    """A network of bottlenecks with normalization, as ResNet-152 (3, 8, 36, 3), with fewer channels."""
    g = _Graph(x=(2, 3, 64, 64))

    def conv(value: str, n: int, m: int, kernel: int, stride: int = 1) -> str:
        around = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        value = g.op("Conv", value, g.weight(m, n, kernel, kernel), **around)
        mean, variance = f"mean{len(g.nodes)}", f"variance{len(g.nodes)}"
        g.constants[mean], g.constants[variance] = np.zeros(m, np.float32), np.ones(m, np.float32)
        return g.op("BatchNormalization", value, g.weight(m), g.weight(m), mean, variance)

    value = g.op("Relu", conv("x", 3, width, 7, 2))
    value = g.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    n = width
    for level, count in enumerate(blocks):
        inner = width << level
        for i in range(count):
            stride = 2 if level and not i else 1
            path = g.op("Relu", conv(value, n, inner, 1))
            path = g.op("Relu", conv(path, inner, inner, 3, stride))
            path = conv(path, inner, 4 * inner, 1)
            value = g.op("Relu", g.op("Add", path, value if i else conv(value, n, 4 * inner, 1, stride)))
            n = 4 * inner
    value = g.op("Flatten", g.op("GlobalAveragePool", value))
    return g.done(g.op("Gemm", value, g.weight(n, 10), g.weight(10)), shape=(2, 10))


def convolutional(channels: tuple[int, ...] = (1, 4, 8), size: int = 16) -> Problem:
    """Convolutions, each with Relu and pooling, and a dense layer."""
    g, value = _Graph(x=(2, channels[0], size, size)), "x"
    for n, m in itertools.pairwise(channels):
        value = g.op("Conv", value, g.weight(m, n, 3, 3), g.weight(m), kernel_shape=[3, 3], pads=[1] * 4)
        value = g.op("MaxPool", g.op("Relu", value), kernel_shape=[2, 2], strides=[2, 2])
        size //= 2
    features = channels[-1] * size * size
    return g.done(g.op("Gemm", g.op("Flatten", value), g.weight(features, 10), g.weight(10)), shape=(2, 10))


def scanned(width: int = 8) -> Problem:
    """A Scan of an Elman cell."""
    g = _Graph(x=(12, 4, width), first=(4, width))
    recurrent_weight, weight, bias = g.weight(width, width), g.weight(width, width), g.weight(width)
    array = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["state", recurrent_weight], ["recurrent"]),
        helper.make_node("MatMul", ["slice", weight], ["forward"]),
        helper.make_node("Add", ["recurrent", "forward"], ["both"]),
        helper.make_node("Add", ["both", bias], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next"]),
        helper.make_node("Identity", ["next"], ["result"]),
    ]
    inputs, outputs = (
        [array(n, TensorProto.FLOAT, (4, width)) for n in names] for names in (("state", "slice"), ("next", "result"))
    )
    body = helper.make_graph(nodes, "cell", inputs, outputs)
    g.nodes.append(helper.make_node("Scan", ["first", "x"], ["last", "all"], body=body, num_scan_inputs=1))
    return g.done("all", shape=(12, 4, width))


def recurrent(layers: int, width: int = 16) -> Problem:
    """LSTM layers, one on top of the other."""
    g, value = _Graph(x=(12, 4, width)), "x"
    for _ in range(layers):
        weights = g.weight(1, 4 * width, width), g.weight(1, 4 * width, width), g.weight(1, 8 * width)
        value = g.op("LSTM", value, *weights, hidden_size=width)
        value = g.op("Squeeze", value, g.ints(1))
    return g.done(value, shape=(12, 4, width))


def nested(count: int) -> Problem:
    """Loops in a row, each with a branch in its body."""
    g = _Graph(x=(8, 8))
    g.constants["trips"], g.constants["go"] = np.array(3, np.int64), np.array(True)
    value = "x"
    for i in range(count):
        value = g.op("Loop", "trips", "go", value, body=_body(i, g.weight(8)))
    return g.done(value, shape=(8, 8))


def _body(i: int, weight: str) -> onnx.GraphProto:
    def array(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, (8, 8))

    def branch(name: str, op_type: str) -> onnx.GraphProto:
        inner = [helper.make_node(op_type, [f"scaled{i}"], [f"{name}{i}"])]
        return helper.make_graph(inner, f"{name}_branch{i}", [], [array(f"{name}{i}")])

    nodes = [
        helper.make_node("Mul", [f"held{i}", weight], [f"scaled{i}"]),
        helper.make_node("ReduceSum", [f"scaled{i}"], [f"sum{i}"], keepdims=0),
        helper.make_node("Cast", [f"sum{i}"], [f"positive{i}"], to=TensorProto.BOOL),
        helper.make_node(
            "If",
            [f"positive{i}"],
            [f"next{i}"],
            then_branch=branch("then", "Tanh"),
            else_branch=branch("else", "Sigmoid"),
        ),
        helper.make_node("Identity", [f"going{i}"], [f"on{i}"]),
    ]
    inputs = [helper.make_tensor_value_info(f"trip{i}", TensorProto.INT64, ())]
    inputs += [helper.make_tensor_value_info(f"going{i}", TensorProto.BOOL, ()), array(f"held{i}")]
    outputs = [helper.make_tensor_value_info(f"on{i}", TensorProto.BOOL, ()), array(f"next{i}")]
    return helper.make_graph(nodes, f"body{i}", inputs, outputs)


#: Each problem by what the page calls it.
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "16,000 Tanh in a row": lambda: chain(16_000),
    "4,000 branches, each with a weight": lambda: branches(4_000),
    "transformer, 48 layers": lambda: transformer(48),
    "ResNet-152": lambda: residual((3, 8, 36, 3)),
    "LSTM, 16 layers": lambda: recurrent(16),
    "40 loops with branches": lambda: nested(40),
    "MLP, 2 layers": lambda: perceptron(2),
    "CNN, 2 layers": convolutional,
    "Scan of a cell": scanned,
    "transformer, 1 layer": lambda: transformer(1),
}

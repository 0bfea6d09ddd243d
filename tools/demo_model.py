"""Make ``digits-cnn.onnx``: an untrained classifier for 8×8 grey images, written with onnx alone.

    python -m tools.demo_model [FILE]

Conv–BatchNormalization–Relu three times, two MaxPool, two Gemm; dynamic batch; He initialization with a
fixed seed, so the file is the same byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.demo.digits import MODEL

SEED = 2026


def make_model() -> onnx.ModelProto:
    """The untrained classifier: ``images`` float32[N, 1, 8, 8] → ``scores`` float32[N, 10]."""
    rng = np.random.default_rng(SEED)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, array: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def he(name: str, *shape: int, fan_in: int) -> str:
        return weight(name, rng.standard_normal(shape) * np.sqrt(2 / fan_in))

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def block(x: str, name: str, channels: int, filters: int) -> str:
        kernel = he(f"{name}.weight", filters, channels, 3, 3, fan_in=channels * 9)
        x = node("Conv", [x, kernel], f"{name}", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        norm = [
            weight(f"{name}.norm.scale", np.ones(filters)),
            weight(f"{name}.norm.bias", np.zeros(filters)),
            weight(f"{name}.norm.mean", np.zeros(filters)),
            weight(f"{name}.norm.var", np.ones(filters)),
        ]
        x = node("BatchNormalization", [x, *norm], f"{name}.norm", epsilon=1e-5, momentum=0.9)
        return node("Relu", [x], f"{name}.relu")

    x = block("images", "conv1", 1, 16)
    x = block(x, "conv2", 16, 32)
    x = node("MaxPool", [x], "pool1", kernel_shape=[2, 2], strides=[2, 2])
    x = block(x, "conv3", 32, 48)
    x = node("MaxPool", [x], "pool2", kernel_shape=[2, 2], strides=[2, 2])
    x = node("Flatten", [x], "features")
    hidden = [he("dense1.weight", 192, 64, fan_in=192), weight("dense1.bias", np.zeros(64))]
    x = node("Relu", [node("Gemm", [x, *hidden], "dense1")], "dense1.relu")
    last = [he("dense2.weight", 64, 10, fan_in=64), weight("dense2.bias", np.zeros(10))]
    node("Gemm", [x, *last], "scores")

    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    model.producer_name = "onnxgrad.demo"
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else MODEL
    target.write_bytes(make_model().SerializeToString())

"""Shared code of several examples: a multilayer perceptron of scikit-learn as ONNX, written by hand."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPERATORS = {"identity": "Identity", "tanh": "Tanh", "relu": "Relu", "logistic": "Sigmoid", "softmax": "Softmax"}


def as_onnx(network, scaler, last: str | None = None) -> onnx.ModelProto:
    """``x`` double[N, features] → ``y`` double[N, results] of a fitted MLP behind a StandardScaler."""
    weights = {"mean": scaler.mean_, "scale": scaler.scale_}
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["centered"]),
        helper.make_node("Div", ["centered", "scale"], ["h"]),
    ]
    held, activations = "h", [network.activation] * (len(network.coefs_) - 1) + [last or network.out_activation_]
    for i, (w, b, activation) in enumerate(zip(network.coefs_, network.intercepts_, activations)):
        weights |= {f"w{i}": w, f"b{i}": b}
        out = "y" if i == len(network.coefs_) - 1 else f"h{i}"
        nodes += [
            helper.make_node("MatMul", [held, f"w{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node(OPERATORS[activation], [f"a{i}"], [out]),
        ]
        held = out
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["N", len(scaler.mean_)])],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, ["N", network.n_outputs_])],
        [numpy_helper.from_array(np.asarray(array, np.float64), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])

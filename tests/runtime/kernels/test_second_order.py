"""Derivatives of derivatives: the names of parts hold where a graph that has them is derived again."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad import jvp, vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels

pytestmark = needs_kernels


def network(rng):
    """Two convolutions, batch normalization, ReLU and pooling, with their operands."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n", "", ""], training_mode=1, momentum=0.0),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "u"], ["q"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["q"], ["y"]),
    ]
    shapes = {"x": (2, 3, 8, 8), "w": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "v": (4,), "u": (5, 4, 3, 3)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "network", inputs, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model)), arrays


@pytest.mark.parametrize("derive", [vjp, jvp])
def test_second_derivatives(derive):
    rng = np.random.default_rng(0)
    model, feeds = network(rng)
    first = vjp(model, wrt=["w", "x", "u", "s"], of=["y"])
    second = derive(first, wrt=["w", "x"], of=["w_grad"])
    for value in second.graph.inputs:
        if value.name not in feeds:
            feeds[value.name] = rng.standard_normal(value.shape.numpy()).astype(np.float32)
    kernels = {node.op_type for node in with_kernels(second).graph if node.domain == DOMAIN}
    assert kernels >= {"BatchNorm", "BatchNormGrad", "ConvWeightGrad", "MaxPoolGrad"}
    expected = Session(second, Options(threads=1, target="portable")).run(feeds)
    for threads in (1, 2):
        found = Session(second, Options(threads=threads, target="native")).run(feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=2e-3, atol=2e-4 * abs(array).max(), err_msg=name)

"""A·g + B·x + C for each channel by two convolutions of one tap: the same numbers, where planes are large enough."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad.optimize import optimized
from onnxgrad.runtime import Options, Session


def _sum(channels=3, hw=(16, 17), dtype=TensorProto.FLOAT, factors=None, order=0, seen=False):
    """y = A·g + B·x + C; `order` puts the operands of each operator the other way round."""
    turn = (lambda a, b: [b, a]) if order else (lambda a, b: [a, b])
    nodes = [
        helper.make_node("Mul", turn("g", "A"), ["ag"]),
        helper.make_node("Mul", turn("x", "B"), ["bx"]),
        helper.make_node("Add", turn("ag", "bx"), ["s"]),
        helper.make_node("Add", turn("s", "C"), ["y"]),
    ]
    info = helper.make_tensor_value_info
    inputs = [info(n, dtype, ["N", channels, *hw]) for n in "gx"]
    inputs += [info(n, dtype, [channels, 1, 1] if factors is None else factors) for n in "ABC"]
    outputs = [info("y", dtype, None), *([info("s", dtype, None)] if seen else [])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_same_numbers(order, batch, channels):
    model = _sum(channels, order=order)
    assert [n.op_type for n in optimized(model).graph if n.op_type in ("Conv", "FusedConv", "Mul", "Add")] == [
        "Conv", "FusedConv",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((batch, channels, 16, 17)).astype(np.float32) for n in "gx"}
    feeds |= {n: rng.standard_normal((channels, 1, 1)).astype(np.float32) for n in "ABC"}
    if batch > 1:
        feeds["g"][0, 0, 0, 0], feeds["x"][1, 0, 2, 3] = np.inf, np.nan
    expected, found = (Session(model, Options(layout=how, threads=2)).run(feeds)["y"] for how in ("plain", "auto"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(found).sum() == (batch > 1)


@pytest.mark.parametrize(
    "how",
    [
        {"hw": (8, 8)},
        {"hw": ("H", 17)},
        {"channels": "C", "factors": ["C", 1, 1]},
        {"factors": [3, 16, 1]},
        {"factors": []},
        {"dtype": TensorProto.DOUBLE},
        {"seen": True},
    ],
)
def test_others_are_left_alone(how):
    model = _sum(**how)
    assert optimized(model) is model

"""Dequantization (float32 and less only): y is linear in the scale, so y of unit scales is its Jacobian."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import grad, jvp, vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import reference
from tests.rules.dtypes import session

RNG = np.random.default_rng(0)
Q = RNG.integers(-100, 100, (2, 5, 3)).astype(np.int8)
POINT = np.array([3, -5, 0, 7, 1], np.int8)

WAYS = {
    "one scale": ((), np.array(4, np.int8), {}),
    "one scale in a vector": ((1,), None, {}),
    "no zero point": ((), None, {}),
    "per slice": ((5,), POINT, {"axis": 1}),
    "per slice of the last axis": ((3,), None, {"axis": -1}),
    "blocks": ((2, 5, 1), None, {"axis": 2, "block_size": 3}),
    "a short block": ((2, 3, 3), None, {"axis": 1, "block_size": 2}),
}


def dequantize(shape: tuple, point: np.ndarray | None, attrs: dict, symbolic: bool) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("q", TensorProto.INT8, ["a", "b", "c"] if symbolic else Q.shape),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, [f"s{i}" for i in shape] if symbolic else shape),
    ]
    constants = [] if point is None else [onnx.numpy_helper.from_array(point, "z")]
    node = helper.make_node("DequantizeLinear", ["q", "s", *(c.name for c in constants)], ["y"], **attrs)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b", "c"] if symbolic else Q.shape)]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_dequantize(way: str, symbolic: bool) -> None:
    shape, point, attrs = WAYS[way]
    if symbolic and shape == (1,):
        pytest.skip("a scale of symbolic size is one per slice")
    primal = dequantize(shape, point, attrs, symbolic)
    units = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
    columns = [reference(primal, {"q": Q, "s": unit})["y"] for unit in units]
    u = RNG.standard_normal(Q.shape).astype(np.float32)
    t = RNG.standard_normal(shape).astype(np.float32)
    back, push = vjp(primal, wrt="s"), jvp(primal, wrt="s")
    onnx.checker.check_model(back, full_check=True)
    feeds = {"q": Q, "s": np.full(shape, 0.1, np.float32), signature(back).cotangents["y"]: u}
    got = session(back).run([signature(back).gradients["s"]], feeds)[0]
    np.testing.assert_allclose(got.ravel(), [np.vdot(u, c) for c in columns], rtol=1e-5, atol=1e-4)
    feeds = {"q": Q, "s": feeds["s"], signature(push).input_tangents["s"]: t}
    got = session(push).run([signature(push).output_tangents["y"]], feeds)[0]
    np.testing.assert_allclose(got, np.tensordot(t.ravel(), columns, 1), rtol=1e-5, atol=1e-4)


def test_the_scale_that_is_found_at_run_time_depends_on_the_extrema() -> None:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.UINT8, [4]),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("z", TensorProto.UINT8, []),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    derived = grad(model, wrt="x", of="s")
    (got,) = session(derived).run(None, {"x": np.array([0.5, 2.0, -1.0, 1.0], np.float32)})
    np.testing.assert_allclose(got, [0, 1 / 255, -1 / 255, 0], rtol=1e-6)

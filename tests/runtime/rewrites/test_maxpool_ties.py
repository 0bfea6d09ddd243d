"""Max pooling takes the short way back where no window has a tie, and gives the same numbers either way."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxgrad import signature, vjp
from onnxgrad.ir.builder import Builder
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.maxpool_ties import without_ranking
from tests.runtime.passes import optimized


def _pooled(kernel=(2, 2), strides=(2, 2), hw=(8, 6), batch="N", pads=(0, 0, 0, 0)):
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=kernel, strides=strides, pads=pads)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, *hw])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return vjp(model, wrt="x")


def _both(derived, x, kernel=(2, 2)):
    cotangent, gradient = signature(derived).cotangents["y"], signature(derived).gradients["x"]
    shape = [*x.shape[:2], x.shape[2] // kernel[0], x.shape[3] // kernel[1]]
    feeds = {"x": x, cotangent: np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    model = ir.from_proto(derived)
    made = [Session(model, Options(layout=layout, threads=2)).run(feeds, [gradient]) for layout in ("plain", "auto")]
    return [m[gradient] for m in made]


@pytest.mark.parametrize("how", [{}, {"kernel": (3, 2), "strides": (3, 2), "hw": (9, 4)}, {"batch": 2}])
@pytest.mark.parametrize("ties", ["none", "one", "everywhere", "in one plane"])
def test_same_numbers_with_and_without_ties(how, ties):
    derived = _pooled(**how)
    assert sum(n.op_type == "If" for n in optimized(ir.from_proto(derived)).graph) == 1
    x = np.random.default_rng(0).standard_normal((2, 3, *how.get("hw", (8, 6)))).astype(np.float32)
    if ties == "one":
        x[1, 2, 0, :2] = 9.0
    elif ties == "everywhere":
        x[...] = 0.0
    elif ties == "in one plane":
        x[0, 1] = 0.5
    plain, quick = _both(derived, x, how.get("kernel", (2, 2)))
    np.testing.assert_array_equal(quick, plain)
    assert (plain != 0).sum() == plain.size // np.prod(how.get("kernel", (2, 2)))


@pytest.mark.parametrize("windows", ["one number", "a window", "two numbers", "a window, and a tie"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_infinities_are_compared_as_before(windows, sign):
    """The difference of two is no number, so that their windows are not counted."""
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 6)).astype(np.float32)
    x[0, 1, 2, 3] = sign * np.inf
    if windows != "one number":
        x[0, 1, 2:4, 2:4] = sign * np.inf
    if windows == "two numbers":
        x[0, 1, 2] = 0.25
    if "tie" in windows:
        x[0, 1, 0, :2] = 9.0
    derived = _pooled()
    plain, quick = _both(derived, x)
    np.testing.assert_array_equal(quick, plain)
    assert (plain != 0).sum() == plain.size // 4
    branches = {node.op_type for node in optimized(ir.from_proto(derived)).graph}
    assert "Clip" not in branches  # in the branch for ties alone


@pytest.mark.parametrize("how", [{"kernel": (3, 3)}, {"pads": (1, 0, 1, 0)}, {"hw": ("H", "W")}])
def test_other_windows_are_left_alone(how):
    model = ir.from_proto(_pooled(**how))
    assert optimized(model) is model


def test_the_graph_that_is_given_stays():
    model = ir.from_proto(_pooled())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert optimized(model) is not model
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert without_ranking(Builder(model.graph)) == 1
    assert without_ranking(Builder(model.graph)) == 0

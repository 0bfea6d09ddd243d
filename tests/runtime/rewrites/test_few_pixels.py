"""Convolutions of few pixels as products: the numbers of the operators, for every geometry; others stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad import signature, vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized

#: Operator, channels in and out, sizes, taps, attributes.
SITES = {
    "plain": ("Conv", 48, 96, (3, 2), (3, 3), {"pads": [1, 1, 1, 1]}),
    "no padding": ("Conv", 64, 96, (4, 3), (3, 2), {}),
    "strides": ("Conv", 48, 96, (5, 4), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 3]}),
    "pixels that no window reaches": ("Conv", 96, 96, (6, 5), (2, 2), {"strides": [4, 3]}),
    "dilations": ("Conv", 64, 96, (5, 4), (3, 2), {"pads": [2, 0, 1, 2], "dilations": [2, 3], "strides": [3, 2]}),
    "one axis": ("Conv", 64, 128, (6,), (5,), {"pads": [3, 1]}),
    "three axes": ("Conv", 32, 128, (2, 2, 3), (2, 3, 2), {"pads": [1, 1, 0, 0, 1, 1], "strides": [1, 1, 2]}),
    "transposed": ("ConvTranspose", 96, 48, (2, 3), (3, 3), {"pads": [1, 1, 1, 1]}),
    "transposed strides": (
        "ConvTranspose", 96, 48, (2, 3), (4, 3), {"pads": [1, 0, 2, 1], "strides": [2, 3], "output_padding": [1, 2]}
    ),
    "transposed dilations": ("ConvTranspose", 128, 96, (4,), (3,), {"strides": [3], "dilations": [2]}),
}  # fmt: skip


def _model(site, batch="N"):
    op, inner, outer, size, taps, attributes = site
    weights = [outer, inner // attributes.get("group", 1), *taps] if op == "Conv" else [inner, outer, *taps]
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [batch, inner, *size]), info("w", TensorProto.FLOAT, weights)]
    inputs.append(info("b", TensorProto.FLOAT, [outer]))
    node = helper.make_node(op, [v.name for v in inputs], ["y"], **attributes)
    outputs = [info("y", TensorProto.FLOAT, [batch, outer, *(None for _ in size)])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


def _operators(model):
    return Counter(node.op_type for node in optimized(model).graph)


def _feeds(model, images):
    rng = np.random.default_rng(0)
    shapes = {v.name: [d if isinstance(d, int) else images for d in v.shape] for v in model.graph.inputs}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _agree(model, feeds, tolerance=1e-4):
    names = [v.name for v in model.graph.outputs]
    for threads in (1, 2):
        expected, found = (
            Session(model, Options(target="portable", layout=layout, threads=threads)).run(feeds, names)
            for layout in ("plain", "auto")
        )
        for name in names:
            scale = max(1.0, np.nanmax(np.abs(np.where(np.isfinite(expected[name]), expected[name], 0)), initial=0))
            np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("images", [1, 3, 20])
@pytest.mark.parametrize("name", SITES)
def test_a_convolution(name, images):
    model = _model(SITES[name])
    operators = _operators(model)
    assert operators["Gemm"] + operators["MatMul"] == 1
    assert not operators["Conv"] + operators["ConvTranspose"]
    _agree(model, _feeds(model, images))


@pytest.mark.parametrize("name", SITES)
def test_its_cotangents(name):
    model = vjp(_model(SITES[name]), wrt=["x", "w", "b"])
    operators = _operators(model)
    is_dilated = "dilations" in name  # the cotangent of the weights has another form then
    assert operators["Gemm"] + operators["MatMul"] == 3 - is_dilated
    assert operators["Conv"] + operators["ConvTranspose"] == is_dilated
    _agree(model, _feeds(model, 3))


@pytest.mark.parametrize("images", [0, 1, 5])
@pytest.mark.parametrize(("batch", "size"), [("N", (1, 1)), (5, (2, 3)), (2, (7,)), ("N", (7, 7))])
def test_one_tap(batch, size, images):
    model = vjp(_model(("Conv", 256, 320, size, (1,) * len(size), {}), batch), wrt=["x"])
    operators = _operators(model)
    assert (operators["Gemm"], operators["MatMul"], operators["Conv"]) == (1, 1, 0)
    _agree(model, _feeds(model, images if batch == "N" else batch))


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_one_tap_with_strides(op):
    """Pixels that no window reaches get zeros."""
    model = vjp(_model((op, 320, 256, (4, 3), (1, 1), {"strides": [2, 3], "pads": [0, 1, 1, 1]})), wrt=["x", "w"])
    operators = _operators(model)
    assert not operators["ConvTranspose"] + operators["Conv"]
    _agree(model, _feeds(model, 3))


@pytest.mark.parametrize(("size", "attributes"), [((2, 3), {}), ((1, 1), {"pads": [1] * 4}), ((1, 3), {"group": 2})])
def test_other_cotangents_of_one_tap_stay(size, attributes):
    model = vjp(_model(("Conv", 160, 224, size, (1, 1), attributes)), wrt=["x"])
    assert not _operators(model)["MatMul"]
    _agree(model, _feeds(model, 2))


def test_second_derivatives():
    first = vjp(_model(SITES["strides"]), wrt=["w"], of=["y"])
    gradient = signature(first).gradients["w"]
    model = vjp(first, wrt=["x", signature(first).cotangents["y"]], of=[gradient])
    assert _operators(model)["Gemm"] + _operators(model)["MatMul"] == 3
    _agree(model, _feeds(model, 3))


def test_numbers_that_are_not_finite_reach_the_windows_that_cover_them():
    model = _model(SITES["plain"])
    feeds = _feeds(model, 2)
    feeds["x"][0, 3, 0, 0], feeds["x"][1, 4, 2, 1] = np.inf, np.nan
    _agree(model, feeds)


def test_an_empty_batch_has_no_pixels():
    model = _model(SITES["plain"])
    found = Session(model, Options(target="portable")).run(_feeds(model, 0), ["y"])
    assert found["y"].shape == (0, 96, 3, 2)


@pytest.mark.parametrize(
    ("attributes", "batch", "changes"),
    [
        ({"pads": [1] * 4}, 16, True),
        ({"pads": [1] * 4}, 17, False),  # more pixels than channels
        ({"auto_pad": "SAME_UPPER"}, "N", False),
        ({"pads": [1] * 4, "group": 2}, "N", False),
    ],
)
def test_others_stay(attributes, batch, changes):
    model = _model(("Conv", 96, 96, (3, 2), (3, 3), attributes), batch)
    assert (_operators(model)["Gemm"] == 1) == changes

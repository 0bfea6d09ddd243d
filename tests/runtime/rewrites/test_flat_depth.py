"""Convolutions over three axes as ones over two: the numbers of the operators, for every geometry; others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import passed

#: Channels in and out, sizes, taps, attributes.
SITES = {
    "plain": (16, 32, (4, 5, 6), (3, 3, 3), {"pads": [1] * 6}),
    "few channels": (2, 16, (5, 4, 7), (3, 2, 5), {"pads": [1, 0, 2, 0, 1, 1]}),
    "strides": (16, 16, (7, 6, 9), (3, 2, 3), {"pads": [1] * 6, "strides": [2, 3, 2]}),
    "dilations": (16, 16, (9, 8, 7), (3, 2, 3), {"pads": [2, 1, 0, 1, 0, 2], "dilations": [3, 2, 2]}),
    "planes alone": (16, 16, (2, 5, 4), (1, 3, 3), {}),
    "as deep as the tensor": (32, 16, (4, 5, 5), (4, 2, 2), {}),
}
#: Those whose weights alone have a cotangent over two axes.
FEW = {
    "one channel": (1, 16, (5, 14, 13), (3, 2, 3), {"pads": [1, 0, 2, 0, 1, 1]}),
    "two channels": (2, 3, (6, 13, 12), (2, 3, 2), {}),
    "strides": (1, 3, (7, 28, 6), (3, 2, 3), {"pads": [1] * 6, "strides": [2, 2, 1]}),
    "dilations": (1, 5, (9, 15, 14), (2, 3, 2), {"pads": [2, 1, 0, 1, 0, 2], "dilations": [3, 2, 1]}),
    "more channels in": (12, 5, (4, 6, 5), (3, 3, 2), {"pads": [1] * 6}),
    "pixels left over": (3, 5, (8, 7, 9), (2, 3, 3), {"strides": [3, 3, 2], "pads": [0, 1, 0, 0, 0, 0]}),
}


def _model(site, batch="N"):
    inner, outer, size, taps, attributes = site
    info = helper.make_tensor_value_info
    weights = [outer, inner // attributes.get("group", 1), *taps]
    inputs = [info("x", TensorProto.FLOAT, [batch, inner, *size]), info("w", TensorProto.FLOAT, weights)]
    inputs.append(info("b", TensorProto.FLOAT, [outer]))
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    outputs = [info("y", TensorProto.FLOAT, [batch, outer, *(None for _ in size)])]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), ir_version=10)
    model.opset_import[0].version = 20
    return ir.from_proto(shape_inference.infer_shapes(model))


def _flat(model):
    return passed(("flat_depth",), model)


def _ranks(model):
    return [len(node.outputs[0].shape) for node in model.graph if node.op_type == "Conv"]


def _agree(model, images, spoil=lambda feeds: None):
    rng = np.random.default_rng(0)
    shapes = {v.name: [d if isinstance(d, int) else images for d in v.shape] for v in model.graph.inputs}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    spoil(feeds)
    names = [v.name for v in model.graph.outputs]
    options = Options(target="portable", layout="plain")
    expected, found = (Session(m, options).run(feeds, names) for m in (model, _flat(model)))
    for name in names:
        assert found[name].shape == expected[name].shape
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("name", SITES)
def test_a_convolution(name, images):
    model = _model(SITES[name])
    assert _ranks(_flat(model)) == [4]
    _agree(model, images)


@pytest.mark.parametrize("name", SITES)
def test_its_cotangents(name):
    model = vjp(_model(SITES[name]), wrt=["x", "w", "b"])
    assert 4 in _ranks(_flat(model))
    _agree(model, 2)


@pytest.mark.parametrize("batch", ["N", 2])
@pytest.mark.parametrize("name", FEW)
def test_a_cotangent_of_weights_alone(name, batch):
    model = vjp(_model(FEW[name], batch), wrt=["w"])
    assert sorted(_ranks(_flat(model))) == [4, 5]
    _agree(model, 2)


@pytest.mark.parametrize(
    ("size", "attributes"), [((3, 12, 12), {}), ((3, 6, 12), {}), ((3, 24, 24), {"strides": [2] * 3})]
)
def test_a_cotangent_of_weights_in_blocks(size, attributes):
    """Of large planes alone: of few pixels, most of the time goes into copies."""
    model = vjp(_model((16, 16, size, (3, 3, 3), {"pads": [1] * 6, **attributes})), wrt=["w"])
    assert _ranks(_flat(model)) == ([4, 4] if size[1] == 12 else [4, 5])
    _agree(model, 3)


def test_an_empty_batch_has_no_gradient_of_weights():
    model = vjp(_model(FEW["one channel"]), wrt=["w"])
    with pytest.raises(OnnxGradError, match="the batch is empty"):
        Session(model, Options(target="portable")).run(
            {
                v.name: np.zeros([d if isinstance(d, int) else 0 for d in v.shape], np.float32)
                for v in model.graph.inputs
            }
        )


def test_numbers_that_are_not_finite_reach_the_windows_that_cover_them():
    def spoil(feeds):
        feeds["x"][0, 0, 0, 0, 0], feeds["x"][1, 1, 2, 1, 3] = np.inf, np.nan

    _agree(_model(SITES["plain"]), 2, spoil)


@pytest.mark.parametrize(
    ("channels", "taps", "attributes"),
    [
        (16, (1, 1, 1), {}),
        (16, (3, 1, 1), {}),
        (16, (3, 3, 3), {"group": 2}),
        (16, (3, 3, 3), {"auto_pad": "SAME_UPPER"}),
        (12, (3, 3, 3), {}),
        (1, (3, 3, 3), {}),
    ],
)
def test_others_stay(channels, taps, attributes):
    model = _model((channels, 16, (5, 5, 5), taps, attributes))
    assert _flat(model) is model


def test_planes_stay():
    assert _flat(_model((16, 16, (5, 5), (3, 3), {}))).graph[0].op_type == "Conv"

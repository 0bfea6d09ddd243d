"""The cotangent of weights in blocks of channels: the numbers of the operators, for every geometry; others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.blocked_layout import DOMAIN, block_size
from tests.runtime.passes import passed

pytestmark = pytest.mark.skipif(not block_size(), reason="this processor has no blocked layout")
B = 16  # whole blocks on every processor

#: Channels in and out, sizes, taps, attributes.
SITES = {
    "plain": (2 * B, 2 * B, (12, 13), (3, 3), {"pads": [1, 1, 1, 1]}),
    "more channels in": (3 * B, B, (12, 13), (3, 3), {"pads": [1, 1, 1, 1]}),
    "more channels out": (B, 5 * B, (13, 12), (3, 3), {"pads": [1, 1, 1, 1]}),
    "few channels in": (3, B, (12, 13), (5, 3), {"pads": [2, 0, 2, 2]}),
    "few channels out": (B, 5, (14, 13), (3, 4), {"pads": [1, 1, 1, 1]}),
    "no block in": (B + 4, 3 * B, (14, 14), (3, 3), {}),
    "lopsided": (B, 2 * B, (13, 13), (5, 3), {"pads": [0, 2, 3, 0]}),
    "strides": (2 * B, B, (26, 27), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "strides that leave pixels over": (2 * B, B, (38, 29), (3, 3), {"strides": [3, 2], "pads": [0, 1, 0, 0]}),
    "rows dilated": (B, 2 * B, (14, 13), (3, 3), {"pads": [2, 1, 2, 1], "dilations": [2, 1]}),
}
#: Images that are cut into strips.
LARGE = {
    "two strips": (B, 4 * B, (64, 65), (3, 3), {"pads": [1, 1, 1, 1]}),
    "three strips": (2 * B, 2 * B, (93, 98), (3, 3), {"pads": [1, 1, 1, 1]}),
    "lopsided strips": (B, 4 * B, (69, 66), (5, 3), {"pads": [0, 2, 3, 0]}),
    "rows of strips dilated": (B, 4 * B, (68, 65), (3, 3), {"pads": [0, 1, 0, 1], "dilations": [2, 1]}),
}
#: No place for the rewrite.
OTHERS = {
    "no block of the kernel": (B + 1, B + 1, (12, 13), (3, 3), {"pads": [1, 1, 1, 1]}),
    "one tap": (B, B, (12, 13), (1, 1), {}),
    "one axis": (4 * B, 4 * B, (200,), (3,), {"pads": [1, 1]}),
    "few pixels": (3 * B, 3 * B, (11, 11), (3, 3), {"pads": [1, 1, 1, 1]}),
    "windows apart": (2 * B, 2 * B, (49, 49), (3, 3), {"strides": [4, 4]}),
    "one part for all threads": (B, 2 * B, (24, 28), (1, 3), {}),
    "few products": (B, B, (12, 13), (3, 3), {"pads": [1, 1, 1, 1]}),
    "columns dilated": (2 * B, 2 * B, (16, 18), (3, 3), {"dilations": [1, 2]}),
}


def _model(site, batch="N", wrt=("w",)):
    inner, outer, size, taps, attributes = site
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [batch, inner, *size]), info("w", TensorProto.FLOAT, [outer, inner, *taps])]
    outputs = [info("y", TensorProto.FLOAT, [batch, outer, *(None for _ in size)])]
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], **attributes)], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(vjp(shape_inference.infer_shapes(model), wrt=wrt))


def _correlations(model):
    return sum(n.domain == DOMAIN and n.op_type == "Conv" for n in passed(("weight_blocks",), model).graph)


def _feeds(model, images):
    rng = np.random.default_rng(0)
    shapes = {v.name: [d if isinstance(d, int) else images for d in v.shape] for v in model.graph.inputs}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items() if k != "w"}


def _agree(model, images):
    feeds = _feeds(model, images) | {"w": np.zeros([*model.graph.inputs[1].shape], np.float32)}
    for threads in (1, 2):
        (expected,), (found,) = (
            Session(model, Options(target="portable", layout=layout, threads=threads)).run(feeds, ["w_grad"]).values()
            for layout in ("plain", "auto")
        )
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("images", [1, 6, 34])
@pytest.mark.parametrize("name", SITES)
def test_same_numbers(name, images):
    model = _model(SITES[name])
    assert _correlations(model) == 1
    _agree(model, images)


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("batch", ["N", None])
@pytest.mark.parametrize("name", LARGE)
def test_strips_of_large_images(name, batch, images):
    """Every strip has the rows that its windows reach; images of a prime height stay whole."""
    model = _model(LARGE[name], batch or images)
    changed = passed(("weight_blocks",), model).graph
    assert any(n.op_type == "Gather" for n in changed)
    _agree(model, images)
    inner, outer, (height, width), *rest = LARGE[name]
    whole = _model((inner, outer, (height + 67 - _rows(LARGE[name]), width), *rest))
    assert not any(n.op_type == "Gather" for n in passed(("weight_blocks",), whole).graph)


def _rows(site):
    """The rows of a result."""
    _, _, (height, _), (taps, _), attributes = site
    (above, _, below, _), (dilation, _) = attributes["pads"], attributes.get("dilations", (1, 1))
    return height + above + below - (taps - 1) * dilation


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    model = _model(OTHERS[name])
    assert not _correlations(model)
    _agree(model, 2)


@pytest.mark.parametrize("images", [1, 16, 17])
def test_a_known_number_of_images(images):
    model = _model(SITES["plain"], images)
    assert _correlations(model) == 1
    assert not any(n.op_type == "Mod" for n in passed(("weight_blocks",), model).graph)
    _agree(model, images)


def test_numbers_that_are_not_finite_stay_in_their_channel():
    model = _model(SITES["plain"])
    feeds = _feeds(model, 3) | {"w": np.zeros((2 * B, 2 * B, 3, 3), np.float32)}
    feeds["x"][1, 3, 0, 0] = np.inf
    plain, found = (
        Session(model, Options(target="portable", layout=layout)).run(feeds)["w_grad"] for layout in ("plain", "auto")
    )
    is_finite = np.isfinite(found)
    assert not is_finite[:, 3, :2, :2].any()
    assert np.delete(is_finite, 3, axis=1).all()
    np.testing.assert_allclose(found[is_finite], plain[is_finite], atol=1e-3)


def test_an_empty_batch_stops_the_run():
    model = _model(SITES["plain"])
    feeds = _feeds(model, 0) | {"w": np.zeros((2 * B, 2 * B, 3, 3), np.float32)}
    with pytest.raises(OnnxGradError, match="the batch is empty"):
        Session(model, Options(target="portable")).run(feeds)


def test_the_cotangent_is_reordered_once():
    """The transposed convolution and the cotangent of the weights read the same blocks."""
    changed = passed(("blocked_layout", "weight_blocks"), _model(SITES["plain"], wrt=("x", "w")))
    reordered = [n.inputs[0].name for n in changed.graph if n.op_type == "ReorderInput"]
    assert reordered.count("y_cotangent") == 1


@pytest.mark.parametrize("name", ["plain", "more channels in"])
def test_blocks_of_the_forward_pass_are_not_kept(name):
    """The convolution and the cotangent of its weights, which runs much later, read blocks of their own."""
    changed = passed(("blocked_layout", "weight_blocks"), _model(SITES[name]))
    readers = [{n.op_type for n in v.consumers()} for node in changed.graph if node.op_type == "ReorderInput"
               for v in node.outputs]  # fmt: skip
    assert {"Conv"} in readers
    assert not any({"Conv", "Reshape"} <= of for of in readers)

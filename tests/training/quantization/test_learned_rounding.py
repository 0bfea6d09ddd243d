"""Learned rounding: the error of a layer is what it is taken for, and becomes smaller; weights go up or down by one."""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import BadInput, quantize
from onnxgrad.training.quantization.learned_rounding import _layers, descend, learn_rounding
from onnxgrad.training.quantization.place import Scheme, opened_floats, place_quantizers
from tests.training.adapters.models import with_weights

HEAD = '<ir_version: 10, opset_import: ["": 21]> layer '
#: A layer, the shape of its weight, and that of what it reads.
LAYERS = {
    "MatMul": (HEAD + "(float[N, 5, 7] x) => (float[N, 5, 4] y) { y = MatMul (x, w) }", (7, 4), (5, 7)),
    "Gemm": (HEAD + "(float[N, 7] x) => (float[N, 4] y) { y = Gemm <transB = 1> (x, w) }", (4, 7), (7,)),
    "Conv": (
        HEAD + """(float[N, 4, 9, 8] x) => (float[N, 6, H, W] y) {
            y = Conv <group = 2, strides = [2, 1], dilations = [1, 2], pads = [1, 0, 2, 1]> (x, w) }""",
        (6, 2, 3, 2), (4, 9, 8),
    ),
    "Conv of one axis": (HEAD + "(float[N, 3, 9] x) => (float[N, 5, W] y) { y = Conv (x, w) }", (5, 3, 4), (3, 9)),
}  # fmt: skip


def rows(shape, count=24):
    """Three directions and some noise: with numbers that have nothing to do with one another, the nearest are best."""
    rng = np.random.default_rng(3)
    way = rng.standard_normal((count, 3)) @ rng.standard_normal((3, int(np.prod(shape))))
    return {"x": (way + 0.1 * rng.standard_normal(way.shape)).reshape(count, *shape).astype(np.float32)}


def outputs(model, feeds):
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0]


def calibrated(kind, **scheme):
    text, weight, read = LAYERS[kind]
    model, feeds = with_weights(text, {"w": weight}), rows(read)
    return model, feeds, place_quantizers(opened_floats(model), Scheme(**({"weights": "int4"} | scheme)), [feeds])


@pytest.mark.parametrize("kind", LAYERS)
def test_the_quadratic_form_is_the_error_of_the_layer(kind):
    """tr(Δᵀ·H·Δ) = Σ ‖layer(x; W + Δ) - layer(x; W)‖²: a layer is linear in its weight."""
    model, feeds, ready = calibrated(kind)
    (layer,) = _layers(ready)
    change = np.random.default_rng(0).standard_normal(LAYERS[kind][1]).astype(np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(change, "w"))
    columns = layer.columns(change.astype(np.float64))
    form, _ = layer.squares(feeds["x"])
    expected = np.square(outputs(model, feeds).astype(np.float64)).sum()
    np.testing.assert_allclose(np.einsum("gio,gij,gjo->", columns, form, columns), expected, rtol=1e-5)
    np.testing.assert_array_equal(layer.back(layer.columns(change)), change)


@pytest.mark.parametrize("scheme", [{}, {"per_channel": False}, {"weights": "uint4"}], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_error_is_smaller_and_weights_are_next_to_what_they_were(kind, scheme):
    model, feeds, ready = calibrated(kind, **scheme)
    exact, nearest = outputs(model, feeds), outputs(ready, feeds)
    (layer,) = _layers(ready)
    before = layer.master.const_value.numpy()
    scale = next(n for n in ready.graph if n is layer.rounding).inputs[1].const_value.numpy()
    learn_rounding(ready, [feeds])
    after = layer.master.const_value.numpy()
    assert (before != after).any()
    assert np.abs(after - before).max() <= scale.max() * 1.001, "up or down by less than a step"
    ratio = np.square(outputs(ready, feeds) - exact).sum() / np.square(nearest - exact).sum()
    assert ratio < 0.97


def test_blocks_of_rows():
    text, feeds = HEAD + "(float[N, 32] x) => (float[N, 6] y) { y = MatMul (x, w) }", rows((32,), 200)
    model = with_weights(text, {"w": (32, 6)})
    exact = outputs(model, feeds)
    off = [
        np.square(outputs(quantize(model, feeds, weights="int4", block_size=16, rounding=how), feeds) - exact).sum()
        for how in ("nearest", "learned")
    ]
    assert off[1] < 0.8 * off[0]


def test_nothing_is_better_by_one_weight_alone():
    """And it is not far from the best of all choices."""
    rng = np.random.default_rng(0)
    exact, steps = rng.standard_normal((8, 3)) * 3, np.full((8, 3), 0.5)
    x = rng.standard_normal((30, 8)) @ rng.standard_normal((8, 8))
    h = x.T @ x
    found = descend(exact, steps, h)

    def error(whole):
        off = (whole - exact) * steps
        return np.einsum("io,ij,jo->o", off, h, off)

    choices = np.array(list(itertools.product((0, 1), repeat=8)))
    best = np.min([error(np.floor(exact) + choice[:, None]) for choice in choices], axis=0)
    assert ((found == np.floor(exact)) | (found == np.ceil(exact))).all()
    for i in range(8):
        flipped = found.copy()
        flipped[i] = np.where(found[i] == np.floor(exact[i]), np.ceil(exact[i]), np.floor(exact[i]))
        assert (error(flipped) >= error(found) - 1e-9).all()
    assert (error(found) <= error(np.rint(exact))).all()
    assert error(found).sum() < error(np.rint(exact)).sum()
    assert error(found).sum() < 2 * best.sum()


def test_weights_that_two_layers_read_are_rounded_to_the_nearest():
    text = HEAD + "(float[N, 5] x) => (float[N, 5] y) { h = MatMul (x, w)  r = Relu (h)  y = MatMul (r, w) }"
    model, feeds = with_weights(text, {"w": (5, 5)}), rows((5,))
    plain, learned = (outputs(quantize(model, feeds, rounding=how), feeds) for how in ("nearest", "learned"))
    np.testing.assert_array_equal(plain, learned)


def test_other_ways_are_refused():
    with pytest.raises(BadInput, match="did you mean 'learned'"):
        quantize(with_weights(LAYERS["MatMul"][0], {"w": (7, 4)}), rows((5, 7)), rounding="learn")

"""Transposed convolutions with strides in phases: the numbers of a sum over taps in float64."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.shape_inference import infer_shapes

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.blocked_layout import block_size
from onnxgrad.runtime.rewrites.phases import PHASES
from onnxgrad.runtime.setting import Setting

BLOCK = block_size() or 16


def _model(shape, weights, kind=TensorProto.FLOAT, **attributes):
    shapes = [shape, weights, [weights[1] * attributes.get("group", 1)]]
    ends = [helper.make_tensor_value_info(n, kind, s) for n, s in zip("xwb", shapes)]
    y = helper.make_tensor_value_info("y", kind, [None] * 4)
    graph = helper.make_graph([helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)], "g", ends, [y])
    return infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def _applies(model):
    return PHASES.applies(ir.from_proto(model), Setting(ir.from_proto(model).graph, "portable"))


def _expected(x, w, b, group, strides, pads, output_padding):
    """Each pixel adds the taps, times its numbers, to the result."""
    (n, c, *size), (_, out, *taps) = x.shape, w.shape
    y = np.zeros([n, out * group, *((p - 1) * s + k + o for p, s, k, o in zip(size, strides, taps, output_padding))])
    x, w = x.astype(float).reshape(n, group, c // group, *size), w.astype(float).reshape(group, c // group, out, *taps)
    for i, j in itertools.product(*map(range, taps)):
        places = (slice(t, t + (p - 1) * s + 1, s) for t, p, s in zip((i, j), size, strides))
        y[:, :, *places] += np.einsum("ngchw,gco->ngohw", x, w[..., i, j]).reshape(n, group * out, *size)
    ends = (total - tail for total, tail in zip(y.shape[2:], pads[2:]))
    return y[:, :, *map(slice, pads[:2], ends)] + b.reshape(-1, 1, 1)


#: of ConvTranspose: multiples of a block of channels of the operand, of the result (0: one each), sizes, attributes.
CASES = {
    "4×4": (2, 1, (5, 7), (4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "cotangent of 3×3": (4, 2, (3, 4), (3, 3), {"strides": [2, 2], "pads": [1, 1, 0, 0]}),
    "one pixel": (8, 1, (1, 1), (2, 2), {"strides": [2, 2]}),
    "along one axis": (2, 1, (5, 3), (6, 3), {"strides": [3, 1], "pads": [2, 1, 1, 1]}),
    "three by two": (4, 1, (2, 3), (5, 4), {"strides": [3, 2], "pads": [1, 1, 1, 1]}),
    "output padding": (4, 1, (4, 4), (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    "one channel each": (2, 0, (4, 3), (3, 3), {"strides": [2, 2], "pads": [1, 1, 0, 0]}),
}


@pytest.mark.skipif(not block_size(), reason="ONNX Runtime has no blocks of channels here")
@pytest.mark.parametrize("batch", [3, "N"])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name, batch):
    parts, out, size, taps, attributes = CASES[name]
    channels = parts * BLOCK
    group = 1 if out else channels
    model = _model([batch, channels, *size], [channels, out * BLOCK or 1, *taps], group=group, **attributes)
    assert _applies(model)
    rng = np.random.default_rng(0)
    for n in (3, 1, 0)[: 1 if batch == 3 else 3]:
        shapes = [n, channels, *size], [channels, out * BLOCK or 1, *taps], [out * BLOCK or channels]
        x, w, b = (rng.standard_normal(s).astype(np.float32) for s in shapes)
        y = Session(model, Options(target="portable")).run({"x": x, "w": w, "b": b})["y"]
        settings = {"pads": [0] * 4, "output_padding": [0, 0]} | attributes
        np.testing.assert_allclose(y, _expected(x, w, b, group, **settings), rtol=1e-4, atol=1e-4)


STRIDES = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
OTHERS = {
    "unknown size": (["N", 2 * BLOCK, "H", 7], [2 * BLOCK, BLOCK, 4, 4], STRIDES),
    "no stride": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK, 4, 4], {}),
    "rows left over": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK, 5, 5], STRIDES),
    "places without taps": (["N", 4 * BLOCK, 7, 7], [4 * BLOCK, BLOCK, 2, 4], {"strides": [3, 2]}),
    "dilations": (["N", 4 * BLOCK, 7, 7], [4 * BLOCK, BLOCK, 3, 3], {"strides": [2, 2], "dilations": [3, 3]}),
    "no whole block": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK + 1, 4, 4], STRIDES),
    "no whole block of the operand": (["N", 2 * BLOCK + 1, 7, 7], [2 * BLOCK + 1, BLOCK, 4, 4], STRIDES),
    "few products": (["N", BLOCK, 7, 7], [BLOCK, BLOCK, 2, 2], {"strides": [2, 2]}),
    "two groups": (["N", 4 * BLOCK, 7, 7], [4 * BLOCK, BLOCK, 4, 4], {**STRIDES, "group": 2}),
    "two channels each": (["N", BLOCK, 7, 7], [BLOCK, 2, 4, 4], {**STRIDES, "group": BLOCK}),
    "cut off": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK, 4, 4], {"strides": [2, 2], "pads": [4, 4, 4, 4]}),
    "a shape asked for": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK, 4, 4], {**STRIDES, "output_shape": [14, 14]}),
    "same": (["N", 2 * BLOCK, 7, 7], [2 * BLOCK, BLOCK, 4, 4], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_alone(name):
    shape, weights, attributes = OTHERS[name]
    assert not _applies(_model(shape, weights, **attributes))


def test_float64_is_left_alone():
    assert not _applies(_model(["N", 64, 7, 7], [64, 32, 4, 4], TensorProto.DOUBLE, **STRIDES))


@pytest.mark.skipif(not block_size(), reason="ONNX Runtime has no blocks of channels here")
def test_derivatives():
    """Of a result that is read twice, with an operand that other convolutions read in blocks as well."""
    derived = vjp(_model([2, 2 * BLOCK, 6, 6], [2 * BLOCK, BLOCK, 4, 4], **STRIDES), wrt=["x", "w"])
    shapes = {
        "x": (2, 2 * BLOCK, 6, 6),
        "w": (2 * BLOCK, BLOCK, 4, 4),
        "b": (BLOCK,),
        "y_cotangent": (2, BLOCK, 12, 12),
    }
    feeds = {k: np.random.default_rng(len(k)).standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    found, plain = (Session(derived, Options(target="portable", without=w)).run(feeds) for w in ((), ("phases",)))
    for name, wanted in plain.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4)

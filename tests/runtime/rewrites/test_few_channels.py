"""Convolutions to few channels as transposed ones: the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.few_channels import FEW_CHANNELS
from onnxgrad.runtime.setting import Setting


def _model(shape, weights, has_bias=False, **attributes):
    names = ["x", "w", "b"][: 2 + has_bias]
    shapes = [shape, weights, weights[:1]]
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes)]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))
    graph = helper.make_graph([helper.make_node("Conv", names, ["y"], **attributes)], "g", floats, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _applies(model):
    return FEW_CHANNELS.applies(ir.from_proto(model), Setting(ir.from_proto(model).graph, "portable"))


def _same(model, feeds):
    """All results are those without the rewrite, and float64 is as near to it."""
    found, plain = (
        Session(model, Options(target="portable", threads=1, without=without)).run(feeds)
        for without in ((), ("few_channels",))
    )
    for name, wanted in plain.items():
        assert found[name].shape == wanted.shape
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "weights", "attributes"),
    [
        (["N", 16, 9, 7], [1, 16, 5, 3], {"pads": [2, 1, 2, 1]}),
        (["N", 10, "H", "W"], [2, 10, 3, 3], {}),
        (["N", 16, 12, 11], [3, 16, 3, 3], {"dilations": [2, 1], "pads": [4, 0, 1, 2]}),
        (["N", 7, 20], [1, 7, 4], {"pads": [3, 0]}),
        (["N", 11, 5, 6, 4], [2, 11, 1, 3, 2], {"pads": [0, 1, 0, 0, 1, 1]}),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_same_numbers(shape, weights, attributes, has_bias):
    model = _model(shape, weights, has_bias, **attributes)
    assert _applies(model)
    rng = np.random.default_rng(0)
    for n in (3, 1):
        x = rng.standard_normal([{"N": n, "H": 9, "W": 8}.get(d, d) for d in shape]).astype(np.float32)
        w, b = (rng.standard_normal(s).astype(np.float32) for s in (weights, weights[:1]))
        _same(model, {"x": x, "w": w} | ({"b": b} if has_bias else {}))


@pytest.mark.parametrize(
    ("shape", "weights", "attributes"),
    [
        (["N", 16, 9, 7], [4, 16, 3, 3], {}),  # more than a fifth
        (["N", 16, 9, 7], [1, 16, 2, 1], {}),  # two taps
        (["N", 16, 9, 7], [1, 16, 3, 3], {"strides": [2, 1]}),
        (["N", 16, 9, 7], [1, 16, 3, 3], {"pads": [3, 0, 0, 0]}),  # beyond the windows
        (["N", 20, 9, 7], [2, 10, 3, 3], {"group": 2}),
        (["N", 16, 9, 7], [1, 16, 3, 3], {"auto_pad": "SAME_UPPER"}),
        (["N", "C", 9, 7], [1, "C", 3, 3], {}),
    ],
)
def test_others_are_left_alone(shape, weights, attributes):
    assert not _applies(_model(shape, weights, **attributes))


def test_the_cotangent_of_a_picture():
    """Its weights were turned round already: back, they are those that were given."""
    model = vjp(_model(["N", 1, 9, 8], [16, 1, 3, 5], pads=[1, 2, 1, 2]), wrt="x")
    assert _applies(model)
    rng = np.random.default_rng(0)
    feeds = {"x": (2, 1, 9, 8), "w": (16, 1, 3, 5), "y_cotangent": (2, 16, 9, 8)}
    _same(model, {name: rng.standard_normal(size).astype(np.float32) for name, size in feeds.items()})

"""Means over windows in blocks of channels: the numbers of AveragePool, for every geometry; others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.blocked_layout import DOMAIN, block_size
from tests.runtime.passes import passed

pytestmark = pytest.mark.skipif(not block_size(), reason="this processor has no blocked layout")

#: Channels, sizes, attributes.
SITES = {
    "side by side": (32, (7, 6), {"kernel_shape": [3, 3], "pads": [1] * 4}),
    "tiles": (16, (8, 6), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "counted padding": (20, (7, 6), {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "count_include_pad": 1}),
    "lopsided": (4, (9, 5), {"kernel_shape": [4, 2], "pads": [0, 1, 3, 0], "strides": [3, 2]}),
    "one axis": (12, (9,), {"kernel_shape": [4], "pads": [1, 2], "strides": [2]}),
    "pixels left over": (36, (8, 9), {"kernel_shape": [3, 3], "strides": [2, 4]}),
}
OTHERS = {
    "channels": (6, (7, 6), {"kernel_shape": [3, 3]}),
    "three axes": (16, (5, 4, 3), {"kernel_shape": [3, 2, 2]}),
    "rounded up": (16, (8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "dilations": (16, (8, 8), {"kernel_shape": [2, 2], "dilations": [2, 1]}),
    "automatic padding": (16, (8, 8), {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}),
}


def _model(site):
    channels, size, attributes = site
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("AveragePool", ["x"], ["y"], **attributes)],
        "g",
        [info("x", TensorProto.FLOAT, ["N", channels, *size])],
        [info("y", TensorProto.FLOAT, ["N", channels, *(None for _ in size)])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


def _is_blocked(model):
    return any(node.domain == DOMAIN for node in passed(("average_pools",), model).graph)


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("name", SITES)
def test_same_numbers(name, images):
    model = _model(SITES[name])
    assert _is_blocked(model)
    channels, size, _ = SITES[name]
    x = np.random.default_rng(0).standard_normal((images, channels, *size)).astype(np.float32)
    for threads in (1, 2):
        expected, found = (
            Session(model, Options(target="portable", layout=layout, threads=threads)).run({"x": x})["y"]
            for layout in ("plain", "auto")
        )
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    assert not _is_blocked(_model(OTHERS[name]))


def test_numbers_that_are_not_finite_stay_in_their_windows():
    model = _model(SITES["side by side"])
    x = np.zeros((2, 32, 7, 6), np.float32)
    x[0, 3, 2, 2], x[1, 4, 0, 5] = np.inf, np.nan
    plain, found = (
        Session(model, Options(target="portable", layout=layout)).run({"x": x})["y"] for layout in ("plain", "auto")
    )
    np.testing.assert_array_equal(found, plain)

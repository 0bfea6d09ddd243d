"""Pixels picked from blocks of channels: the numbers of the Slice, and only of one from first pixel to last."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.blocked_layout import block_size
from onnxgrad.runtime.rewrites.strided_blocks import _works
from tests.runtime.passes import optimized

pytestmark = pytest.mark.skipif(not block_size() or not _works(), reason="this processor has no blocked layout")
B = block_size() or 16
FAR = 1 << 62


def _model(hw=(8, 6), starts=(0, 0), ends=(FAR, FAR), axes=(2, 3), steps=(2, 2), first=False, taps=3):
    """A convolution and a strided Slice of the same operand; `first`: the Slice comes before."""
    names = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[taps // 2] * 4, strides=[2, 2]),
        helper.make_node("Slice", ["x", *names], ["z"]),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, ["N", B, *hw]), info("w", TensorProto.FLOAT, [B, B, taps, taps])]
    graph = helper.make_graph(
        nodes[::-1] if first else nodes, "g", inputs, [info(n, TensorProto.FLOAT, None) for n in "yz"],
        [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in names.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


def _slices(model):
    return sum(n.op_type == "Slice" for n in optimized(model).graph)


@pytest.mark.parametrize(
    "how", [{}, {"hw": (7, 9)}, {"steps": (3, 2)}, {"steps": (1, 2)}, {"ends": (7, 5)}, {"axes": (-2, -1)}]
)
def test_same_numbers(how):
    model = _model(**how)
    assert _slices(model) == 0
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, B, *how.get("hw", (8, 6)))).astype(np.float32)}
    feeds["w"] = rng.standard_normal((B, B, 3, 3)).astype(np.float32)
    feeds["x"][0, 0, 0, :3] = np.inf, -np.inf, np.nan
    for threads in (1, 2):
        expected, found = (
            Session(model, Options(layout=layout, threads=threads)).run(feeds, ["z"])["z"]
            for layout in ("plain", "auto")
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "how",
    [
        {"starts": (1, 0)},
        {"ends": (4, FAR)},
        {"ends": (-1, FAR)},
        {"axes": (1, 3)},
        {"axes": (3, 2)},
        {"steps": (-1, 2), "starts": (0, 0)},
        {"hw": ("H", "W")},
        {"first": True},
        {"taps": 1},
    ],
)
def test_others_are_left_alone(how):
    assert _slices(_model(**how)) == 1

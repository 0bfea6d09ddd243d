"""Scalars with as many axes as the tensors that they meet: the same numbers, to the bit."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.ranked_scalars import RANKED_SCALARS
from onnxgrad.runtime.setting import Setting
from tests.runtime.passes import optimized


def _model(shape, scalar, body):
    shape = f"float[{shape}]"
    text = f'<ir_version: 10, opset_import: ["": 20]> g ({shape} x, {scalar} s) => (y, z) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True))


@pytest.mark.parametrize("shape", ["3, 2, 1", "N, 1", "3, M, 1, 1"])
@pytest.mark.parametrize("scalar", ["float", "float[1]"])
def test_same_numbers(shape, scalar):
    model = _model(
        shape, scalar, "a = Mul(x, s) two = Constant<value_float=2.5>() b = Sub(two, a) y = Div(s, b) z = Pow(x, two)"
    )
    changed = optimized(model)
    rank = len(shape.split(","))
    for node in changed.graph:
        if node.op_type in ("Mul", "Sub", "Div", "Pow"):
            assert [len(v.shape) for v in node.inputs] == [rank, rank]
    assert [n.op_type for n in changed.graph].count("Reshape") == 1  # of s, for both that read it
    rng = np.random.default_rng(0)
    feeds = {"x": np.abs(rng.standard_normal((3, 2, 1, 1)[:rank] if rank > 2 else (5, 1), np.float32))}
    feeds["s"] = np.full((1,) * (scalar != "float"), 0.7, np.float32)
    auto, plain = (Session(model, Options(layout=how)).run(feeds) for how in ("auto", "plain"))
    for name in "yz":
        np.testing.assert_array_equal(auto[name], plain[name])
        assert auto[name].shape == feeds["x"].shape


@pytest.mark.parametrize(
    ("shape", "scalar"),
    [("3, 2", "float"), ("1, 3", "float"), ("3, 1", "float[1, 1]"), ("3, 1", "float[2]"), ("1", "float")],
)
def test_others_are_left_alone(shape, scalar):
    model = _model(shape, scalar, "y = Mul(x, s) z = Add(y, s)")
    assert not RANKED_SCALARS.applies(model, Setting(model.graph))
    assert optimized(model) is model

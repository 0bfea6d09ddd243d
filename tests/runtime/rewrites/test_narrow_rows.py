"""Columns spread over narrow rows by a product: the same numbers, to the bit."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of

pytestmark = pytest.mark.target("portable")


def _model(x, y, body, dtype="float"):
    shapes = f"{dtype}[{x}] x, {dtype}[{y}] y"
    text = f'<ir_version: 10, opset_import: ["": 20]> g ({shapes}) => (z) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True))


def _passed(model, target="portable"):
    passed = passes_of(model, Options(target=target))
    assert not passed.failed
    return passed.model.graph


def _products(model, target="portable"):
    return sum(node.op_type == "MatMul" for node in _passed(model, target))


def _check(model, x, y, sizes):
    assert _products(model) == 1  # for all readers
    rng = np.random.default_rng(0)
    shapes = [[sizes[d] if d in sizes else int(d) for d in s.split(", ")] for s in (x, y)]
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in zip("xy", shapes)}
    flat = feeds["x"].reshape(-1)
    flat[:5] = [np.inf, -np.inf, np.nan, 1e-38, -0.0][: flat.size]
    auto, plain = (Session(model, Options(layout=how)).run(feeds) for how in ("auto", "plain"))
    np.testing.assert_array_equal(auto["z"], plain["z"])
    assert auto["z"].shape == plain["z"].shape


@pytest.mark.parametrize(
    ("x", "y", "sizes"),
    [
        ("N, 64, 1", "64, 10", {"N": 5}),
        ("N, 64, 1", "N, 64, 2", {"N": 0}),
        ("N, 64, 1", "N, 64, 3", {"N": 1}),
        ("2048, 1", "2048, 16", {}),
        ("N, M, 8, 1", "M, 8, 3", {"N": 2, "M": 3}),
        ("N, 1, 40, 7, 1", "N, 3, 40, 7, 5", {"N": 2}),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        "z = Sub(x, y)",
        "z = Mul(y, x)",
        "z = Div(x, y)",
        "z = Max(x, y)",
        "a = GreaterOrEqual(x, y) b = Less(y, x) c = Xor(a, b) z = Cast<to=1>(c)",
    ],
)
def test_same_numbers(x, y, sizes, body):
    _check(_model(x, y, body), x, y, sizes)


@pytest.mark.parametrize(
    ("x", "y", "sizes"),
    [
        ("N, 64, 1", "N, 1, 10", {"N": 3}),
        ("N, 3, 32, 1", "1, 2", {"N": 0}),
        ("N, 100, 3, 1", "8", {"N": 2}),
        ("N, 64, 1", "N, 1, 1, 10", {"N": 2}),
    ],
)
def test_a_column_times_a_row_is_one_product(x, y, sizes):
    _check(_model(x, y, "z = Mul(y, x)"), x, y, sizes)
    assert "Mul" not in {n.op_type for n in _passed(_model(x, y, "z = Mul(x, y)"))}


@pytest.mark.parametrize(
    ("x", "y", "body", "dtype"),
    [
        ("N, 64, 1", "N, 64, 10", "z = Div(y, x)", "float"),  # a zero keeps its sign
        ("N, 64, 1", "N, 64, 17", "z = Add(x, y)", "float"),
        ("N, 64, 1", "N, 64, 1", "z = Add(x, y)", "float"),
        ("N, 64, 1", "N, 64, M", "z = Add(x, y)", "float"),
        ("N, 63, 1", "N, 63, 10", "z = Add(x, y)", "float"),  # few rows
        ("N, 64, 1", "10", "z = Add(x, y)", "float"),  # the spans stay short
        ("N, 64, 1", "N, 1, 10", "z = Add(x, y)", "float"),
        ("N, 64, 1", "M, 2, 10", "z = Add(x, y)", "float"),
        ("N, 100, 3, 1", "N, 100, 1, 8", "z = Mul(x, y)", "float"),  # many small products
        ("N, 64, 1", "N, 64, 10", "z = Add(x, y)", "double"),
        ("N, 64, 1", "N, 64, 10", "z = Add(x, y)", "float16"),
    ],
)
def test_others_are_left_alone(x, y, body, dtype):
    model = _model(x, y, body, dtype)
    assert _products(model) == 0


def test_kernels_keep_their_operators():
    model = _model("N, 64, 1", "N, 64, 10", "z = Add(x, y)")
    assert _products(model) == 1
    assert _products(model, "native") == 0

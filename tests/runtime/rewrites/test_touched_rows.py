"""Rows of an embedding added to moments: the bits of sums with a whole table, where rows meet and where they do not."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of

pytestmark = pytest.mark.target("portable")

ADAM = """
    a = Mul (v, alpha) b = Mul (grad, alpha) w = Add (a, b) square = Mul (grad, grad) part = Mul (alpha, square)
    c = Mul (h, alpha) z = Add (part, c)"""
SGD = "part = Mul (alpha, grad) w = Sub (v, part) z = Identity (h)"


def _model(body, dtype="float", shape="4000, 32", start="0"):
    width, ones = shape.partition(",")[2], ", 1" * shape.count(",")
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g ({dtype}[{shape}] v, {dtype}[{shape}] h, {dtype} alpha, int64[E{ones}] ids, {dtype}[E, {width}] rows)
            => ({dtype}[{shape}] w, {dtype}[{shape}] z) {{
            zero = Constant <value = {dtype}[1] {{{start}}}> () size = Constant <value_ints = [{shape}]> ()
            zeros = Expand (zero, size) shape = Shape (rows) places = Expand (ids, shape)
            grad = ScatterElements <axis = 0, reduction = "add"> (zeros, places, rows)
            {body}
        }}"""
    model = onnx.parser.parse_model(text)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True))
    next(v for n in model.graph for v in n.outputs if v.name == "places").shape = model.graph.inputs[4].shape
    return model


def _operators(model, target="portable"):
    passed = passes_of(model, Options(target=target))
    assert not passed.failed
    return [node.op_type for node in passed.model.graph]


def _check(model, ids):
    rng = np.random.default_rng(0)
    feeds = {"ids": np.array(ids, np.int64).reshape(-1, *[1] * (len(model.graph.inputs[0].shape) - 1))}
    for x in model.graph.inputs:
        if x.name != "ids":
            shape = [len(ids) if d == "E" else d for d in x.shape]
            feeds[x.name] = np.asarray(rng.standard_normal(shape), x.dtype.numpy())
    auto, plain = (Session(model, Options(layout=how, threads=2)).run(feeds) for how in ("auto", "plain"))
    for name in ("w", "z"):
        np.testing.assert_array_equal(auto[name], plain[name])


@pytest.mark.parametrize(
    ("shape", "dtype", "body", "count"),
    [
        ("4000, 32", "float", ADAM, 2),
        ("800, 16, 9", "double", ADAM, 2),
        ("12500, 8", "float", SGD, 1),
    ],
)
def test_same_bits(shape, dtype, body, count):
    model, size = _model(body, dtype, shape), int(shape.partition(",")[0])
    assert _operators(model).count("ScatterND") == count
    for ids in ([], [0, size - 1, -1], [-1, -size, size - 1] * 3, np.random.default_rng(1).integers(-size, size, 999)):
        _check(model, ids)
    with pytest.raises(BadInput):
        _check(model, [0, 0, size])


def test_two_of_one_table():
    """The sum of two tables is one of them, with the rows of the other."""
    model = _model("""
        other = ScatterElements <axis = 0, reduction = "add"> (zeros, places, rows)
        once = Mul (other, alpha) both = Add (grad, once) w = Add (v, both) z = Mul (both, h)""")
    assert _operators(model).count("ScatterND") == 1
    _check(model, [5, 7, 5, 3999, 0, -1])


@pytest.mark.parametrize(
    "body",
    [
        "w = Add (v, grad) z = Sub (grad, h)",  # of the other sign
        "w = Add (v, grad) z = Identity (grad)",
        "w = Add (v, grad) z = Mul (h, grad)",
        "w = Mul (alpha, grad) z = Add (h, w)",
        "w = Add (v, grad) one = Add (grad, alpha) z = Add (one, h)",  # not zero elsewhere
        "w = Add (v, grad) once = Mul (alpha, grad) twice = Add (once, grad) z = Add (twice, h)",
        "w = Add (v, grad) row = Gather <axis = 0> (h, zeroth) z = Add (grad, row)",  # is broadcast
    ],
)
def test_tables_that_are_read_whole_are_left_alone(body):
    model = _model(f"zeroth = Constant <value_int = 0> () {body}")
    assert "ScatterND" not in _operators(model)


@pytest.mark.parametrize(
    ("how", "target"),
    [
        ({"shape": "3000, 32"}, "portable"),
        ({"shape": "60000, 4"}, "portable"),
        ({"start": "1"}, "portable"),
        ({"dtype": "float16"}, "portable"),
        ({}, "native"),
    ],
)
def test_others_are_left_alone(how, target):
    assert "ScatterND" not in _operators(_model(ADAM, **how), target)

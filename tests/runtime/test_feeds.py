"""Feeds of a session count by their numbers, for any memory layout, or are refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import BadInput, Function
from onnxgrad.backend import prepare
from onnxgrad.runtime import Resident, Session, Slot

_X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _identity(dtype: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({dtype}[N, 3] x) => ({dtype}[N, 3] y) {{ y = Identity (x) }}'
    )


def _accumulator() -> ir.Model:
    return ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 3] s, float[N, 3] x) => (float[2, 3] t, float[N, 3] y) { t = Add (s, x) y = Identity (x) }""")
    )


def _resident(array):
    machine = Resident(_accumulator(), {"s": Slot("s", "t", np.zeros((2, 3), np.float32))}, ["y"])
    return machine.step({"x": array})["y"]


RUNS = {
    "Session": lambda array: Session(_identity()).run({"x": array})["y"],
    "Function": lambda array: Function(_identity())(array),
    "Backend": lambda array: prepare(_identity()).run([array])[0],
    "Resident": _resident,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "lying",
    [
        _X.astype(">f4"),
        np.repeat(_X, 2, axis=1)[:, ::2],
        np.asfortranarray(_X),
        _X[::-1][::-1],
        np.frombuffer(b"x" + _X.tobytes(), np.float32, offset=1).reshape(2, 3),
        np.asarray(_X).view(np.matrix),
    ],
    ids=["big-endian", "strided", "by columns", "backwards", "between words", "matrix"],
)
def test_an_array_counts_as_its_numbers(run, lying):
    np.testing.assert_array_equal(lying, _X)
    np.testing.assert_array_equal(RUNS[run](lying), _X)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "wrong",
    [
        np.ma.masked_array(_X, _X > 3),
        _X.astype(object),
        np.array([[b"a", b"b", b"c"]]),
        np.zeros((2, 3), "M8[s]"),
        np.zeros((2, 3), [("a", "f4")]),
        _X.astype("U"),
        _X.astype(complex),
    ],
    ids=["masked", "objects", "bytes", "dates", "records", "text", "complex"],
)
def test_what_is_no_such_array_is_refused(run, wrong):
    with pytest.raises(BadInput):
        RUNS[run](wrong)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="no wider float here")
@pytest.mark.parametrize("run", ["Session", "Resident", "Backend"])
def test_floats_that_onnx_has_not(run):
    with pytest.raises(BadInput, match="which no tensor of ONNX does"):
        RUNS[run](_X.astype(np.longdouble))


def test_types_that_numpy_lacks_are_fed():
    x = _X.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(Session(_identity("bfloat16")).run({"x": x})["y"], x)


def test_state_of_another_byte_order():
    """A checkpoint of a machine with another byte order is refused, not misread."""
    with pytest.raises(BadInput, match="starts as float32 of the other byte order"):
        Resident(_accumulator(), {"s": Slot("s", "t", np.zeros((2, 3), ">f4"))}, ["y"])
    machine = Resident(_accumulator(), {}, ["t"], held={"s": _X.astype(">f4")})
    np.testing.assert_array_equal(machine.step({"x": _X})["t"], 2 * _X)


@pytest.mark.parametrize("text", [np.array(["a", "bc", ""]), np.array(["a", "bc", ""]).astype(">U2")])
def test_text_in_either_byte_order(text):
    found = prepare(_identity("string")).run([text[None]])[0]
    assert found.tolist() == [["a", "bc", ""]]


@pytest.mark.parametrize("wrong", [np.array([["a", None, "c"]], object), np.array([[b"a", b"bc", b""]])])
def test_what_is_no_text(wrong):
    """Bytes were read beyond their end, and None became the word."""
    with pytest.raises(BadInput, match="input 'x' holds"):
        prepare(_identity("string")).run([wrong])

"""Fourier transforms by products with a matrix: the numbers of numpy's."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized

#: Shape of x, axis, length (None: as it is), and what numpy computes of it along that axis.
CASES = {
    "real": (("N", 3, 20, 1), 2, None, "", lambda z: np.fft.fft(z, axis=2)),
    "half of a real one": (("N", 21, 3, 1), 1, None, "onesided = 1", lambda z: np.fft.rfft(z.real, axis=1)),
    "complex": (("N", 12, 2), -2, None, "", lambda z: np.fft.fft(z, axis=1)),
    "back": (("N", 12, 5, 2), 1, None, "inverse = 1", lambda z: np.fft.ifft(z, axis=1)),
    "longer": (("N", 7, 2), 1, 10, "", lambda z: np.fft.fft(z, 10, axis=1)),
    "shorter": (("N", 7, 2), 1, 4, "inverse = 1", lambda z: np.fft.ifft(z, 4, axis=1)),
    "of the first axis": ((9, 2, 2), 0, None, "", lambda z: np.fft.fft(z, axis=0)),
    "back from a half": (("N", 6, 2), 1, 11, "inverse = 1, onesided = 1", lambda z: np.fft.irfft(z, 11, axis=1) + 0j),
}


def _model(shape, axis, length, attributes):
    second = "length" if length else ""
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[{",".join(map(str, shape))}] x) => (float[] y)
        <int64 axis = {{{axis}}}, int64 length = {{{length or 1}}}> {{
            a = Abs (x) z = Add (x, a) f = DFT <{attributes}> (z, {second}, axis) y = Neg (f) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text.replace("<> ", " "))))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers_of_numpy(case):
    shape, axis, length, attributes, expected = case
    model = _model(shape, axis, length, attributes)
    assert "DFT" not in [n.op_type for n in optimized(model).graph]
    x = np.random.default_rng(0).standard_normal([4 if d == "N" else d for d in shape]).astype(np.float32)
    z = x + abs(x)
    y = expected(z[..., 0] + (1j * z[..., 1] if shape[-1] == 2 else 0))
    y = np.stack([y.real, y.imag], -1)
    got = -Session(model, Options(threads=1)).run({"x": x})["y"]
    assert got.shape[:-1] == y.shape[:-1]
    np.testing.assert_allclose(got, y[..., : got.shape[-1]], rtol=2e-6, atol=1e-5)
    assert got.shape[-1] == 2 or "onesided" in attributes


def test_long_transforms_and_open_lengths_stay():
    for shape, length in ((("N", 700, 1), None), (("N", "T", 1), None)):
        model = _model(shape, 1, length, "")
        assert "DFT" in [n.op_type for n in optimized(model).graph]

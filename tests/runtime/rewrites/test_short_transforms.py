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


@pytest.mark.parametrize(
    ("given", "onesided", "parts", "is_known"),
    [("window, length", 1, 1, True), ("window", 0, 1, True), (", length", 1, 1, True), ("window", 0, 2, False)],
)
@pytest.mark.parametrize("batch", [3, 0])
def test_frames_of_a_sound(batch, given, onesided, parts, is_known):
    window = np.random.default_rng(1).random(8).astype(np.float32)
    text = f"""g (float[N,33,{parts}] x) => (float[] y) {{
        f = STFT <onesided = {onesided}> (x, step, {given}) y = Neg (f) }}"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    constants = {"step": np.array(5), "window": window, "length": np.array(8)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in constants.items())
    model = ir.from_proto(model)
    assert ("STFT" not in [n.op_type for n in optimized(model).graph]) == is_known
    x = np.random.default_rng(0).standard_normal((batch, 33, parts)).astype(np.float32)
    z = x[..., 0] + (1j * x[..., 1] if parts == 2 else 0)
    framed = np.stack([z[:, i : i + 8] for i in range(0, 26, 5)], 1) * (window if "window" in given else 1)
    spectra = np.fft.fft(framed)[..., : 5 if onesided else 8]
    if is_known or batch:
        y = Session(model, Options(threads=1, target="portable")).run({"x": x})["y"]
        np.testing.assert_allclose(-y, np.stack([spectra.real, spectra.imag], -1), rtol=2e-6, atol=1e-5)


def test_long_transforms_and_open_lengths_stay():
    for shape, length in ((("N", 700, 1), None), (("N", "T", 1), None)):
        model = _model(shape, 1, length, "")
        assert "DFT" in [n.op_type for n in optimized(model).graph]


def _run(text, constants, x, results=("y",)):
    """The operators of the rewritten model, and what it computes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in constants.items())
    model = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))
    found = Session(model, Options(threads=1, target="portable")).run({"x": x})
    return [n.op_type for n in optimized(model).graph], [found[name] for name in results]


def _complex(z):
    return z[..., 0] + 1j * z[..., 1]


AXES = {"one": np.array(1), "two": np.array(2), "zero": np.array(0), "last": np.array([-1])}


@pytest.mark.parametrize("shape", [(3, 6, 5, 2), (2, 8, 40, 2)])
def test_constants_around_it_are_in_the_matrix(shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    weights = rng.standard_normal((shape[1], 1, 2)).astype(np.float32)
    conjugate, norm = np.array([1, -1], np.float32), np.array([[[[2.5]]]], np.float32)
    dims = ",".join(map(str, ("N", *shape[1:])))
    operators, (y,) = _run(
        f"""g (float[{dims}] x) => (float[{dims}] y) {{
            a = Mul (conjugate, x) c = Mul (a, w) f = DFT <inverse = 1> (c, , one) d = Div (f, norm)
            e = Mul (d, conjugate) y = Abs (e) }}""",
        {"one": AXES["one"], "conjugate": conjugate, "w": weights, "norm": norm},
        x,
    )
    assert not {"Mul", "Div", "DFT"} & set(operators)
    wanted = np.fft.ifft(_complex(x * conjugate * weights), axis=1) / 2.5
    np.testing.assert_allclose(y, abs(np.stack([wanted.real, -wanted.imag], -1)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [(6, 5), (7, 40)])
@pytest.mark.parametrize("axes", [("two", "one"), ("one", "two")])
def test_of_a_real_plane_only_the_real_part(size, axes):
    x = np.random.default_rng(0).standard_normal((3, *size)).astype(np.float32)
    dims = f"N,{size[0]},{size[1]}"
    operators, (y,) = _run(
        f"""g (float[{dims}] x) => (float[{dims}] y) {{
            r = Unsqueeze (x, last) s = Shape (r) i = ConstantOfShape (s) z = Concat <axis = -1> (r, i)
            f = DFT (z, , {axes[0]}) h = DFT (f, , {axes[1]}) p = Gather <axis = -1> (h, zero) y = Add (p, x) }}""",
        AXES,
        x,
    )
    assert not {"Concat", "Gather", "DFT"} & set(operators)
    assert operators.count("Transpose") <= (size[1] < 32) * 2
    np.testing.assert_allclose(y, np.fft.fft2(x).real + x, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("size", [(6, 5), (7, 40), (6, "M")])
def test_parts_are_read_and_written_as_planes(size):
    rng = np.random.default_rng(0)
    dims = f"N,{size[0]},{size[1]}"
    x = rng.standard_normal((3, size[0], 9 if size[1] == "M" else size[1])).astype(np.float32)
    operators, (p, q) = _run(
        f"""g (float[{dims}] x) => (float[{dims}] p, float[{dims}] q) {{
            a = Abs (x) r = Unsqueeze (x, last) i = Unsqueeze (a, last) z = Concat <axis = -1> (r, i)
            f = DFT (z, , one) b = Gather <axis = -1> (f, zero) c = Gather <axis = 3> (f, one)
            p = Neg (b) q = Neg (c) }}""",
        AXES,
        x,
        ("p", "q"),
    )
    assert ("Transpose" in operators) == (size[1] != 40)
    wanted = -np.fft.fft(x + 1j * abs(x), axis=1)
    np.testing.assert_allclose(p, wanted.real, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(q, wanted.imag, rtol=2e-6, atol=1e-5)


def test_zeros_and_what_is_left_out():
    x = np.random.default_rng(0).standard_normal((3, 6, 5, 1)).astype(np.float32)
    operators, (y,) = _run(
        """g (float[N,6,5,1] x) => (float[N,4,5,1] y) {
            z = Pad (x, pads) f = DFT (z, , one) c = Slice (f, from, to, axes, steps)
            p, q = Split <axis = 3, num_outputs = 2> (c) y = Neg (p) }""",
        {
            **AXES,
            "pads": np.array([0, 1, 0, 1, 0, 2, 0, 0]),
            "from": np.array([1]),
            "to": np.array([9]),
            "axes": np.array([1]),
            "steps": np.array([2]),
        },
        x,
    )
    assert not {"Pad", "Slice", "Split", "DFT"} & set(operators)
    z = np.pad(x[..., 0] * 1j, ((0, 0), (1, 2), (0, 0)))
    np.testing.assert_allclose(y[..., 0], -np.fft.fft(z, axis=1).real[:, 1:9:2], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "f = DFT (x, , one) d = Div (f, none) y = Neg (d)",  # infinite and NaN, as before
        "f = DFT (x, , one) d = Mul (f, other) y = Neg (d)",  # along another axis
        "f = DFT (x, , one) d = Mul (f, k) e = Neg (f) y = Add (d, e)",  # read twice
        "a = Pad (x, across) f = DFT (a, , one) y = Slice (f, from, to, two)",
    ],
)
def test_other_operators_stay(body):
    x = np.random.default_rng(0).standard_normal((3, 8, 5, 2)).astype(np.float32)
    constants = {
        **AXES,
        "two": np.array([2]),
        "none": np.zeros(2, np.float32),
        "other": np.arange(5, dtype=np.float32)[:, None],
        "k": np.float32(3).reshape(1),
        "across": np.array([0, 0, 1, 0, 0, 0, 0, 0]),
        "from": np.array([1]),
        "to": np.array([6]),
    }
    graph = f"g (float[N,8,5,2] x) => (float[N,8,5,2] y) {{ {body} }}"
    operators, (y,) = _run(graph, constants, x)
    assert {"Mul", "Div", "Slice"} & set(operators)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {graph}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in constants.items())
    plain = Session(model, Options(layout="plain", target="portable")).run({"x": x})["y"]
    np.testing.assert_allclose(y, plain, rtol=2e-6, atol=1e-5)

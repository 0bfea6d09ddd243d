"""Graphs of arithmetic on numpy: the same bits as on ONNX Runtime, and nothing that the tape holds is written over."""

from __future__ import annotations

import numpy as onp
import onnx
import onnx_ir as ir
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad.eager.core import arithmetic
from onnxgrad.eager.core.arithmetic import Arithmetic, is_arithmetic
from onnxgrad.eager.core.executable import Executable
from onnxgrad.eager.core.plans import plans

rng = onp.random.default_rng(0)
N = 96  # 72 kB


def graph(body: str) -> ir.Model:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (double[{N},{N}] a, double[{N},{N}] b, double[{N}] r, double s) => (double[{N},{N}] y, double[{N},{N}] z)
        <double two = {{2.0}}, int64[2] shape = {{{N}, {N}}}, int64[1] at = {{0}}> {{ {body} }}"""
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    return ir.from_proto(proto)


@pytest.mark.parametrize(
    "body",
    [
        "h = Mul (a, b) k = Add (h, r) l = Sub (k, h) m = Neg (l) n = Div (m, k) y = Identity (n) z = Identity (k)",
        "h = Mul (a, a) y = Mul (h, h) z = Neg (y)",
        "t = Mul (s, two) u = Unsqueeze (t, at) e = Expand (u, shape) h = Add (e, a) y = Mul (h, e) z = Identity (e)",
        "h = Add (a, b) i = Identity (h) k = Neg (h) l = Neg (k) m = Neg (l) y = Add (m, i) z = Identity (a)",
        "h = Add (r, s) k = Mul (h, h) l = Mul (k, a) y = Sub (l, b) z = Mul (l, two)",
        "h = Neg (a) y = Identity (h) z = Identity (h)",
        "h = Neg (a) k = Neg (b) l = Add (h, k) m = Neg (r) y = Add (m, l) z = Mul (h, y)",
    ],
)
@pytest.mark.parametrize("piece", [1 << 16, 1000])
def test_same_bits_as_onnx_runtime(body, piece, monkeypatch):
    monkeypatch.setattr(arithmetic, "PIECE", piece)
    model = graph(body)
    assert is_arithmetic(model.graph)
    runs = Arithmetic(model.graph)
    values = [rng.standard_normal(s) for s in ((N, N), (N, N), (N,), ())]
    before = [v.copy() for v in values]
    expected = Executable(model)(values)
    first = runs(values)
    held = [y.copy() for y in first]
    runs([v + 1 for v in values])  # a second call leaves the results of the first alone
    for y, again, z in zip(first, held, expected, strict=True):
        assert y.tobytes() == again.tobytes() == z.tobytes()
    assert all((v == w).all() for v, w in zip(values, before, strict=True))


@pytest.mark.parametrize(
    "body",
    [
        "y = Exp (a) z = Neg (a)",  # not arithmetic
        "h = Reshape (a, shape) y = MatMul (h, b) z = Neg (a)",
    ],
)
def test_what_is_left_to_onnx_runtime(body):
    assert not is_arithmetic(graph(body).graph)


def test_gradients_of_the_right_size_take_it():
    def f(x):
        for _ in range(3):
            x = np.tanh(x) * 1.1 + x * np.exp(-x * x)
        return np.sum(x * x)

    for size, taken in ((4, False), (128, True), (600, True), (1030, False)):
        x = rng.standard_normal((size, size))
        g = og.grad(f)(x)
        plan = next(reversed(plans._held.values()))
        assert isinstance(plan.run, Arithmetic) == taken
        direction = rng.standard_normal(x.shape)
        eps = 1e-6
        slope = (float(f(np.asarray(x + eps * direction))) - float(f(np.asarray(x - eps * direction)))) / (2 * eps)
        onp.testing.assert_allclose(onp.sum(onp.asarray(g) * direction), slope, rtol=1e-6)
    second = og.grad(lambda x: np.sum(og.grad(f)(x) ** 2))(rng.standard_normal((100, 100)))
    assert onp.isfinite(onp.asarray(second)).all()

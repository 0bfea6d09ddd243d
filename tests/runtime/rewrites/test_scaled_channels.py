"""Sums of scaled channels against float64, and the sums that stay."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of

PORTABLE = Options(target="portable")


def model(body, shape=("N", 3, 90, 80), column="3, 1, 1", outputs="y", kind="float"):
    dims = ", ".join(map(str, shape))
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g ({kind}[{dims}] x, {kind}[{dims}] z, {kind}[{column}] a, {kind}[{column}] b, {kind}[{column}] c) => ({outputs})
    {{ {body} }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def passed(given):
    found = passes_of(given, PORTABLE)
    assert not found.failed
    return found


def feeds_of(shape=(2, 3, 90, 80), column=(3, 1, 1), dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = {"x": shape, "z": shape, "a": column, "b": column, "c": column}
    return {name: rng.standard_normal(size).astype(dtype) for name, size in sizes.items()}


SUMS = {
    "xa = Mul (x, a) y = Add (xa, c)": lambda x, z, a, b, c: x * a + c,
    "xa = Mul (a, x) y = Sub (c, xa)": lambda x, z, a, b, c: c - x * a,
    "xa = Mul (x, a) y = Sub (xa, c)": lambda x, z, a, b, c: x * a - c,
    "xa = Mul (x, a) y = Add (z, xa)": lambda x, z, a, b, c: z + x * a,
    "xa = Mul (x, a) y = Sub (z, xa)": lambda x, z, a, b, c: z - x * a,
    "xa = Mul (x, a) zb = Mul (z, b) s = Add (xa, zb) y = Add (s, c)": lambda x, z, a, b, c: x * a + z * b + c,
    "xa = Mul (x, a) zb = Mul (z, b) s = Sub (zb, c) y = Sub (xa, s)": lambda x, z, a, b, c: x * a - (z * b - c),
    "xa = Mul (x, a) s = Add (xa, c) t = Sub (b, z) y = Sub (s, t)": lambda x, z, a, b, c: x * a + c - (b - z),
}


@pytest.mark.parametrize("body", SUMS)
def test_sums(body):
    given, feeds = model(body), feeds_of()
    found = passed(given)
    assert {n.op_type for n in found.model.graph} <= {"Conv", "FusedConv", "Neg", "Add", "Reshape"}
    assert all(n.outputs[0].shape[0] == 3 for n in found.model.graph if n.op_type == "Add")  # of columns alone
    (y,) = Session(given, PORTABLE).run(feeds).values()
    np.testing.assert_allclose(
        y, SUMS[body](**{k: v.astype(np.float64) for k, v in feeds.items()}), rtol=1e-5, atol=1e-6
    )


LAST = list(SUMS)[5]


@pytest.mark.parametrize(
    ("shape", "column"),
    [
        ((2, 110, 200), (110, 1)),
        ((2, 94, 6, 6, 6), (1, 94, 1, 1, 1)),
        ((1, 1, 200, 100), (1, 1, 1)),
        ((0, 3, 90, 80), (3, 1, 1)),
    ],
)
def test_shapes(shape, column):
    given = model(LAST, ("N", *shape[1:]), ", ".join(map(str, column)))
    assert "scaled_channels" in passed(given).applied
    feeds = feeds_of(shape, column)
    (y,) = Session(given, PORTABLE).run(feeds).values()
    np.testing.assert_allclose(y, SUMS[LAST](**feeds), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (LAST, {"shape": ("N", 3, 80, 80)}),  # few numbers
        (LAST, {"shape": (4, 3, 90, 80)}),
        (LAST, {"shape": ("N", 512, 8, 8), "column": "512, 1, 1"}),  # few pixels
        (LAST, {"shape": ("N", 3, "H", 800)}),
        (LAST, {"shape": ("N", 160, 160), "column": "1, 160, 160"}),  # not channels
        (LAST, {"kind": "double"}),
        ("y = Add (x, c)", {}),
        ("s = Add (x, z) y = Add (s, c)", {}),
        ("e = Shape (x) ce = Expand (c, e) xa = Mul (x, a) y = Add (xa, ce)", {}),
        ("xa = Mul (x, z) y = Add (xa, c)", {}),
        ("xa = Mul (x, a) y = Add (xa, c)", {"outputs": "y, xa"}),
        ("xa = Mul (x, a) xc = Add (xa, c) y = Mul (xc, xa)", {}),
        ("xa = Mul (x, a) y = Sub (xa, z)", {}),
        ("xa = Mul (a, b) y = Add (xa, c)", {}),
    ],
)
def test_other_sums_stay(body, changes):
    assert "scaled_channels" not in passed(model(body, **changes)).applied


@pytest.mark.parametrize("outputs", ["y", "y, s"])
def test_a_sum_that_is_read_twice(outputs):
    body = "xa = Mul (x, a) s = Add (xa, c) zb = Mul (z, b) t = Add (s, zb) y = Mul (t, s)"
    feeds, given = feeds_of(), model(body, outputs=outputs)
    assert "Add" not in {node.op_type for node in passed(given).model.graph}
    found = Session(given, PORTABLE).run(feeds)
    x, z, a, b, c = feeds.values()
    np.testing.assert_allclose(found["y"], (x * a + c + z * b) * (x * a + c), rtol=1e-5, atol=1e-5)
    if outputs != "y":
        np.testing.assert_allclose(found["s"], x * a + c, rtol=1e-5, atol=1e-6)


def test_batch_normalization():
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 3, 90, 80] x, float[3] s, float[3] b, float[3] m, float[3] v) => (y, mean, variance)
    { y, mean, variance = BatchNormalization <training_mode = 1, momentum = 0.> (x, s, b, m, v) }"""
    given = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    derived = vjp(given, wrt=["x", "s"], of=["y"])
    assert "scaled_channels" in passed(derived).applied
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((4, 3, 90, 80)) for _ in range(2))
    s = rng.standard_normal(3)
    feeds = {"x": x + 10, "s": s, "b": s, "m": s, "v": s * s, "y_cotangent": g}
    found = Session(derived, PORTABLE).run({k: v.astype(np.float32) for k, v in feeds.items()})
    d, axes, column = x - x.mean((0, 2, 3), keepdims=True), (0, 2, 3), s.reshape(-1, 1, 1)
    r = 1 / np.sqrt((d * d).mean(axes, keepdims=True) + 1e-5)
    dx = r * column * (g - g.mean(axes, keepdims=True) - d * r * (g * d * r).mean(axes, keepdims=True))
    np.testing.assert_allclose(found["x_grad"], dx, rtol=1e-4, atol=1e-5)

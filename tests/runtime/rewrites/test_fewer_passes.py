"""Fewer passes over memory: the numbers of formulas in float64, and the graphs that stay."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of


def model(ends, body, constants="", opset=20):
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({ends}) => (y) {constants} {{ {body} }}'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def passed(given, target="portable"):
    found = passes_of(given if isinstance(given, ir.Model) else ir.from_proto(given), Options(target=target))
    assert not found.failed
    return found


def run(derived, feeds, dtype=np.float32):
    """The numbers with the pass; those without it are the same but for rounding."""
    feeds = {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    with_it, without = (
        Session(derived, Options(target="portable", without=names)).run(feeds) for names in ((), ("fewer_passes",))
    )
    for name, expected in without.items():
        np.testing.assert_allclose(with_it[name], expected, rtol=1e-4, atol=1e-5)
    return with_it


SCORES = "kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) p = Softmax (s)"
ATTENTION = f"{SCORES} y = MatMul (p, v)"


def attention(batch, keys, size, extra="", kind="float"):
    shape = f"{kind}[{batch}, {keys}, {size}]"
    return model(f"{shape} q, {shape} k, {shape} v{extra}", ATTENTION)


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize(("rows", "keys", "size"), [(3, 7, 4), (1, 2, 1), (0, 5, 3)])
def test_attention(rows, keys, size, kind):
    derived = vjp(ir.from_proto(attention("N", keys, size, kind=kind)), wrt=["q", "k", "v"])
    assert "fewer_passes" in passed(derived).applied
    q, k, v, g = (normal(rows, keys, size, seed=i) for i in range(4))
    found = run(derived, {"q": q, "k": k, "v": v, "y_cotangent": g}, np.float32 if kind == "float" else np.float64)
    p = np.exp(q @ k.swapaxes(1, 2))
    p /= p.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    tolerance = 2e-5 if kind == "float" else 1e-12
    np.testing.assert_allclose(found["q_grad"], ds @ k, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found["k_grad"], ds.swapaxes(1, 2) @ q, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found["v_grad"], p.swapaxes(1, 2) @ g, rtol=tolerance, atol=tolerance)


P = "float[2, 5, 6] p, float[2, 6, 3] v, float[2, 5, 3] dy"
VT = "vt = Transpose <perm = [0, 2, 1]> (v)"
PRODUCT = f"{VT} dp = MatMul (dy, vt) m = Mul (p, dp)"
SUM = "last = Constant <value = int64[1] {-1}> () s = ReduceSum (m, last)"
Y, END = "o = MatMul (p, v)", "y = Add (s, o)"
LATER = "r = ReduceMax <keepdims = 0> (s) w = Add (v, r) o = MatMul (p, w)"
#: ends, operators, True if the sum is over the shorter rows.
SUMS = {
    "as attention has it": (P, f"{Y} {PRODUCT} {SUM} {END}", True),
    "exchanged": (P, f"{Y} {PRODUCT} {SUM} {END}".replace("(p, dp)", "(dp, p)"), True),
    "one v for all": (P.replace("[2, 6, 3]", "[6, 3]"), f"{Y} {PRODUCT} {SUM} {END}".replace("0, 2, 1", "1, 0"), True),
    "before y": (P, f"{PRODUCT} {SUM} {Y} {END}", False),
    "y that reads the sum": (P, f"{PRODUCT} {SUM} {LATER} {END}", False),
    "without y": (P, f"{PRODUCT} {SUM} y = Add (s, dy)", False),
    "another v": (P + ", float[2, 6, 3] w", f"o = MatMul (p, w) {PRODUCT} {SUM} {END}", False),
    "another axis": (P, f"{Y} {PRODUCT} {SUM} r = ReduceMax (s) y = Add (r, o)".replace("-1", "1"), False),
    "a vector": (P, f"{Y} {PRODUCT} {SUM} r = ReduceMax (s) y = Add (r, o)".replace("(m", "<keepdims=0> (m"), False),
    "read twice": (P, f"{Y} {PRODUCT} {SUM} r = ReduceMax (m) t = Add (s, r) y = Add (t, o)", False),
    "longer rows": (P.replace("3]", "7]"), f"{Y} {PRODUCT} {SUM} {END}", False),
    "broadcast rows": (P.replace("2, 5, 6", "2, 1, 6"), f"{Y} {PRODUCT} {SUM} {END}", False),
}  # fmt: skip


@pytest.mark.parametrize(("ends", "body", "applies"), SUMS.values(), ids=SUMS)
def test_which_sums(ends, body, applies):
    given = ir.from_proto(model(ends, body))
    assert ("ReduceSum" not in {n.op_type for n in passed(given).model.graph}) == applies
    run(given, {v.name: normal(*(int(d) for d in v.shape), seed=i) for i, v in enumerate(given.graph.inputs)})


LOSS = "y = SoftmaxCrossEntropyLoss <{}> (x, t{})"


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 2, -1])
@pytest.mark.parametrize("rows", [1, 6])
def test_losses(reduction, weighted, ignored, rows):
    how = f'reduction = "{reduction}"' + ("" if ignored is None else f", ignore_index = {ignored}")
    body = LOSS.format(how, ", w" if weighted else "")
    given = model(f"float[N, 4] x, int64[N] t{', float[4] w' if weighted else ''}", body)
    derived = vjp(ir.from_proto(given), wrt=["x"])
    assert ("fewer_passes" in passed(derived).applied) == (not weighted and ignored is None)
    x, t, w = normal(rows, 4), np.arange(rows) % 4, abs(normal(4, seed=2)) + 0.1
    t[rows // 2] = 1 if ignored is None else ignored
    t[0] = 3
    size = (rows,) if reduction == "none" else ()
    g = normal(*size, seed=3) if size else np.array(0.7)
    feeds = {"x": x, "t": t, "y_cotangent": g} | ({"w": w} if weighted else {})
    found = run(derived, feeds)
    each = np.where(t == ignored, 0, (w if weighted else np.ones(4))[t])
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    losses = -np.log(p[np.arange(rows), t]) * each
    share = g * each / (each.sum() if reduction == "mean" else 1)
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / each.sum()}[reduction]
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["x_grad"], share[..., None] * (p - np.eye(4)[t]), rtol=1e-5, atol=1e-6)


def test_a_loss_with_its_logarithms():
    given = model("float[5, 4] x, int64[5] t", LOSS.format('reduction = "sum"', "").replace("y =", "l, y ="))
    found = run(given, {"x": normal(5, 4), "t": np.arange(5) % 4})
    x = normal(5, 4)
    np.testing.assert_allclose(found["y"], x - np.log(np.exp(x).sum(1, keepdims=True)), rtol=1e-5, atol=1e-6)


def test_a_loss_of_planes_stays():
    given = ir.from_proto(model("float[2, 4, 3] x, int64[2, 3] t", LOSS.replace(" <{}>", "").format("")))
    assert "fewer_passes" not in passed(given).applied


@pytest.mark.parametrize("shape", [(4, 5), (1,), (0, 3)])
def test_gelu(shape):
    derived = vjp(ir.from_proto(model(f"float[{', '.join('AB'[: len(shape)])}] x", "y = Gelu (x)")), wrt=["x"])
    assert "HardSigmoid" in {n.op_type for n in passed(derived).model.graph}
    x, g = normal(*shape) * 3, normal(*shape, seed=1)
    found = run(derived, {"x": x, "y_cotangent": g})["x_grad"]
    phi = np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)) / 2 + 0.5
    np.testing.assert_allclose(found, g * (phi + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)), rtol=1e-4, atol=1e-6)
    odd = np.float32([np.inf, -np.inf, np.nan, 1e30, -1e30])
    if len(shape) == 1:
        given = Session(derived, Options(target="portable")).run({"x": odd, "y_cotangent": np.ones(5, np.float32)})
        np.testing.assert_array_equal(given["x_grad"], np.float32([np.nan, np.nan, np.nan, 1, 0]))


HALF = "e = Erf (x) one = Constant <value = KIND {1}> () half = Constant <value = KIND {0.5}> ()"
#: ends, operators, True if a HardSigmoid replaces them.
HALVES = {
    "as Gelu has it": ("float[3] x", "a = Add (e, one) y = Mul (a, half)", True),
    "exchanged": ("float[3] x", "a = Add (one, e) y = Mul (half, a)", True),
    "float64": ("double[3] x", "a = Add (e, one) y = Mul (a, half)", False),
    "read twice": ("float[3] x", "a = Add (e, one) h = Mul (a, half) y = Add (h, a)", False),
    "another number": ("float[3] x", "a = Add (e, half) y = Mul (a, half)", False),
}


@pytest.mark.parametrize(("ends", "body", "applies"), HALVES.values(), ids=HALVES)
def test_which_halves(ends, body, applies):
    kind = ends.partition("[")[0]
    given = ir.from_proto(model(ends, f"{HALF.replace('KIND', kind)} {body}"))
    assert ("HardSigmoid" in {n.op_type for n in passed(given).model.graph}) == applies
    dtype = np.float32 if kind == "float" else np.float64
    run(given, {"x": np.array([-5, 0.3, np.nan])}, dtype)


def test_kernels_have_them():
    derived = vjp(ir.from_proto(model("float[4] x", "y = Gelu (x)")), wrt=["x"])
    assert "fewer_passes" not in passed(derived, "native").applied


SOFTMAX = {  # of x: its type and dimensions, and the axis
    "pixels of any number": ("float", ["N", 3, "H", "W"], 1),
    "pixels": ("float", [2, 5, 16, 17], 1),
    "steps": ("double", ["N", 4, 300], -2),
    "an axis between": ("float", [2, 3, 2, 256], 2),
    "one class": ("float", ["N", 1, "H", "W"], 1),
}


def maps(dims):
    """Scores of all kinds: equal ones, large ones, classes that are impossible, and no class that is possible."""
    x = normal(*({"N": 2, "H": 7, "W": 5}.get(d, d) for d in dims))
    x[0] = 3.0
    flat = x[-1].reshape(-1)
    flat[::7], flat[1::11], flat[2::13] = -np.inf, 900.0, -90.0
    return x


def softmax(x, axis):
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(axis, keepdims=True))
        return powers / powers.sum(axis, keepdims=True)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_along_a_short_axis(name, operator):
    kind, dims, axis = SOFTMAX[name]
    given = model(f"{kind}[{','.join(map(str, dims))}] x", f"y = {operator} <axis = {axis}> (x)")
    found = passed(given)
    assert "fewer_passes" in found.applied
    dtype = np.float32 if kind == "float" else np.float64
    x = maps(dims).astype(dtype)
    y = Session(given, Options(target="portable")).run({"x": x})["y"]
    assert y.dtype == dtype
    with np.errstate(divide="ignore"):
        expected = softmax(x.astype(float), axis)
        expected = np.log(expected) if operator == "LogSoftmax" else expected
    close = {"rtol": 2e-5, "atol": 1e-6} if kind == "float" else {"rtol": 1e-12, "atol": 1e-12}
    large = expected > -100  # below, the reference has no digits left
    np.testing.assert_allclose(y[large], expected[large], **close)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    if "N" in dims:
        assert Session(given, Options(target="portable")).run({"x": x[:0]})["y"].shape == x[:0].shape


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ["", "ignore_index = 1", 'reduction = "none"', 'reduction = "sum"'])
def test_loss_of_pixels(way, weighted):
    """With the logarithms of probabilities read twice; those with weights stay."""
    constants = "<float[3] w = {1, 0.5, 2}>" if weighted else ""
    loss = f"l, p = SoftmaxCrossEntropyLoss {f'<{way}>' if way else ''} (x, t{', w' if weighted else ''})"
    body = f"{loss} q = Exp (p) s = ReduceSum <keepdims = 0> (q) y = Add (l, s)"
    given = model("float[N, 3, H, W] x, int64[N, H, W] t", body, constants)
    assert ("fewer_passes" in passed(given).applied) == (not weighted and "ignore" not in way)
    x, t = normal(2, 3, 6, 5).astype(np.float32), np.random.default_rng(1).integers(0, 3, (2, 6, 5))
    found = run(given, {"x": x, "t": t})["y"]
    p = softmax(x.astype(float), 1)
    chosen = np.take_along_axis(p, t[:, None], 1)[:, 0]
    w = np.array([1, 0.5, 2] if weighted else [1, 1, 1])[t] * (t != 1 if "ignore" in way else 1)
    loss = -w * np.log(chosen)
    loss = loss if "none" in way else loss.sum() if "sum" in way else loss.sum() / w.sum()
    np.testing.assert_allclose(found, loss + p.sum(), rtol=1e-5)


#: of scores and labels: type, dimensions behind the classes, their number, True if labels are compared with classes.
PIXELS = {
    "of any number": ("float", "H, W", 3, True),
    "steps": ("float", "300", 16, True),
    "one class": ("float", "H, W", 1, True),
    "few steps": ("float", "30", 3, False),
    "many classes": ("float", "H, W", 17, False),
    "float64": ("double", "H, W", 3, False),
}


@pytest.mark.parametrize("name", PIXELS)
@pytest.mark.parametrize("way", ["", "ignore_index = 0", 'reduction = "none"'])
def test_cotangent_of_a_loss_of_pixels(name, way):
    kind, dims, classes, compared = PIXELS[name]
    labels = "int32" if way else "int64"
    body = f"y = SoftmaxCrossEntropyLoss {f'<{way}>' if way else ''} (x, t, w)"
    ends = f"{kind}[N, {classes}, {dims}] x, {labels}[N, {dims}] t, {kind}[{classes}] w"
    derived = vjp(ir.from_proto(model(ends, body)), wrt=["x"])
    assert ("ScatterElements" not in {n.op_type for n in passed(derived).model.graph}) == compared
    rng, behind = np.random.default_rng(0), [{"H": 6, "W": 5}.get(d) or int(d) for d in dims.split(", ")]
    t = rng.integers(0, classes, (2, *behind)).astype(labels)
    t[-1, 0] = classes - 1
    x, w, g = maps([2, classes, *behind]), rng.random(classes) + 0.5, normal(2, *behind) if "none" in way else 0.7
    x[~np.isfinite(x)] = -95.0
    found = run(
        derived, {"x": x, "t": t, "w": w, "y_cotangent": np.array(g)}, np.dtype(kind.replace("float", "single"))
    )
    each = w[t] * (t != 0 if "ignore" in way else 1)
    k = g * each / (1 if "none" in way else each.sum() or 1)
    expected = np.expand_dims(k, 1) * (softmax(x, 1) - np.moveaxis(np.eye(classes)[t], -1, 1))
    np.testing.assert_allclose(found["x_grad"], expected, rtol=1e-4, atol=1e-6)


def test_labels_from_the_end():
    """A negative label is that class from the end in the loss, and in its cotangent, with the pass and without."""
    derived = vjp(
        ir.from_proto(model("float[N, 3, H, W] x, int64[N, H, W] t", LOSS.replace(" <{}>", "").format(""))), wrt=["x"]
    )
    t = np.array([[[-1, -2, -3, 0, 2, 1]]])
    assert abs(run(derived, {"x": normal(1, 3, 1, 6), "t": t, "y_cotangent": np.array(1.0)})["x_grad"]).min() > 1e-4


@pytest.mark.parametrize(
    "ends",
    [
        ("float[N, 33, H, W] x", 1),  # many classes
        ("float[N, C, H, W] x", 1),  # of any number
        ("float[N, 3, 255] x", 1),  # few pixels
        ("float[N, 3, L] x", 1),  # of any number
        ("float[N, 3, 300] x", 2),  # the last axis
        ("float[3, N, 300] x", 0),  # that of the rows
        ("float16[N, 3, H, W] x", 1),
    ],
)
def test_other_softmax_stays(ends):
    assert "fewer_passes" not in passed(model(ends[0], f"y = Softmax <axis = {ends[1]}> (x)")).applied


def test_the_loss_and_its_cotangent_pick_once():
    """So a label out of range fails before an update, wherever the loss is computed."""
    derived = vjp(ir.from_proto(model("float[N, 4] x, int64[N] t", LOSS.format('reduction = "mean"', ""))), wrt=["x"])
    operators = [n.op_type for n in passed(derived).model.graph]
    assert operators.count("GatherElements") == 1
    assert "NegativeLogLikelihoodLoss" not in operators

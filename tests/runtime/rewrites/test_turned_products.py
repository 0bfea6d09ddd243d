"""Products in the other order, and sums of products: the same numbers from fewer operators."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized


def model(ends, body, constants=""):
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({ends}) => (y) {constants} {{ {body} }}'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def count(graph, op_type):
    return sum(node.op_type == op_type for node in graph)


def check(derived, feeds):
    """The rewritten model; its numbers are those of the operators."""
    found = optimized(derived)
    plain, new = (Session(derived, Options(layout=how, target="portable")).run(feeds) for how in ("plain", "auto"))
    for name, expected in plain.items():
        np.testing.assert_allclose(new[name], expected, rtol=1e-5, atol=1e-5)
    return found


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_weights_that_an_exporter_transposes(rows):
    """The gradient is xᵀ·g turned: gᵀ·x."""
    layer = "wt = Transpose <perm = [1, 0]> (w) h = MatMul (x, wt) y = Tanh (h)"
    derived = vjp(ir.from_proto(model("float[N, 3, 6] x, float[4, 6] w", layer)), wrt=["w"])
    feeds = {"x": normal(rows, 3, 6), "w": normal(4, 6, seed=1), "y_cotangent": normal(rows, 3, 4, seed=2)}
    found = check(derived, feeds)
    assert count(derived.graph, "Transpose") == count(found.graph, "Transpose") + 1
    y = np.tanh(feeds["x"].astype(float) @ feeds["w"].T)
    g = feeds["y_cotangent"] * (1 - y**2)
    gradient = Session(derived, Options(target="portable")).run(feeds)["w_grad"]
    np.testing.assert_allclose(gradient, np.einsum("ntj,nti->ji", g, feeds["x"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "t"), [(3, 4), (2, 1), (0, 4), (3, 0)])
def test_products_of_all_pairs(n, t):
    """x·xᵀ: (g + gᵀ)·x, one product beside the primal."""
    pairs = "xt = Transpose <perm = [0, 2, 1]> (x) y = MatMul (x, xt)"
    derived = vjp(ir.from_proto(model("float[N, T, 5] x", pairs)), wrt=["x"])
    feeds = {"x": normal(n, t, 5), "y_cotangent": normal(n, t, t, seed=2)}
    found = check(derived, feeds)
    assert (count(derived.graph, "MatMul"), count(found.graph, "MatMul")) == (3, 2)
    g = feeds["y_cotangent"].astype(float)
    gradient = Session(derived, Options(target="portable")).run(feeds)["x_grad"]
    np.testing.assert_allclose(gradient, (g + g.swapaxes(1, 2)) @ feeds["x"], rtol=1e-5, atol=1e-5)


A, B = "float[2, 3, 4] a", "float[2, 3, 5] b"
AGAIN = "y = Transpose <perm = [0, 2, 1]> (p)"
SUM = "p = MatMul (c, x) q = MatMul (d, x) y = Add (p, q)"
LAST = "t = Transpose <perm = [0, 2, 1]>"
#: ends, operators, and how many Transpose are left.
TURNED = {
    "left": (f"{A}, {B}", f"{LAST} (a) p = MatMul (t, b) {AGAIN}", 1),
    "right": ("float[2, 4, 3] a, float[2, 5, 3] b", f"{LAST} (b) p = MatMul (a, t) {AGAIN}", 1),
    "of a Gemm": (
        "float[3, 4] a, float[3, 5] b",
        "p = Gemm <transA = 1, alpha = 2.0> (a, b) y = Transpose <perm = [1, 0]> (p)",
        0,
    ),
    "of a Gemm, right": ("float[4, 3] a, float[5, 3] b", "p = Gemm <transB = 1> (a, b) y = Transpose (p)", 0),
    "a matrix for all": (f"{A}, float[3, 5] b", f"{LAST} (a) p = MatMul (t, b) {AGAIN}", 1),
    # left as they are
    "other axes": (f"{A}, {B}", f"{LAST} (a) p = MatMul (t, b) y = Transpose <perm = [1, 0, 2]> (p)", 2),
    "read twice": (
        f"{A}, {B}",
        f"{LAST} (a) p = MatMul (t, b) q = Transpose <perm = [0, 2, 1]> (p) u = Relu (p) "
        "v = Transpose <perm = [0, 2, 1]> (u) y = Add (q, v)",
        3,
    ),
    "both transposed": (
        "float[3, 4] a, float[5, 3] b",
        "p = Gemm <transA = 1, transB = 1> (a, b) y = Transpose (p)",
        1,
    ),
    "none transposed": ("float[4, 3] a, float[3, 5] b", "p = Gemm (a, b) y = Transpose (p)", 1),
    "with a bias": ("float[3, 4] a, float[3, 5] b, float[5] c", "p = Gemm <transA = 1> (a, b, c) y = Transpose (p)", 1),
    "a vector": (f"{A}, float[3] b", f"{LAST} (a) p = MatMul (t, b) y = Transpose (p)", 2),
}


def inputs(m):
    return {v.name: normal(*(int(d) for d in v.shape), seed=i) for i, v in enumerate(m.graph.inputs)}


@pytest.mark.parametrize(("ends", "body", "left"), TURNED.values(), ids=TURNED)
def test_which_are_turned(ends, body, left):
    m = ir.from_proto(model(ends, body))
    assert count(check(m, inputs(m)).graph, "Transpose") == left


C, D = "float[4, 3, 3] c", "float[4, 3, 3] d"
#: ends, operators, and how many products are left.
SHARED = {
    "one operand": (f"{C}, {D}, float[4, 3, 5] x", SUM, 1),
    "two operands": (
        f"{C}, {D}, float[4, 3, 5] x, float[4, 3, 5] z",
        "p = MatMul (c, x) q = MatMul (d, z) y = Add (p, q)",
        2,
    ),
    "of two shapes": ("float[1, 3, 3] c, float[4, 3, 3] d, float[4, 3, 5] x", SUM, 2),
    "read twice": (
        f"{C}, {D}, float[4, 3, 5] x",
        "p = MatMul (c, x) q = MatMul (d, x) s = Add (p, q) y = Mul (s, p)",
        2,
    ),
    "twice the same": (f"{C}, float[4, 3, 5] x", "p = MatMul (c, x) y = Add (p, p)", 1),
}


@pytest.mark.parametrize(("ends", "body", "left"), SHARED.values(), ids=SHARED)
def test_which_are_added_before(ends, body, left):
    m = ir.from_proto(model(ends, body))
    assert count(check(m, inputs(m)).graph, "MatMul") == left

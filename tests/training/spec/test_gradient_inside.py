"""Gradient nodes inside branches, bodies and functions, and through sequences."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import lower_gradients
from tests.training.spec.test_gradient_node import FUNCTION, A, B, C, evaluated, model, refused

# --- inside branches, bodies and functions ----------------------------------------------------------


def test_in_branches():
    """d = dy/da in one branch, of a y inside it; in the other, of one outside it."""
    proto = model("""g (float[2] a, float[2] b, bool p) => (float[2] o) {
        y = Mul (a, b)
        o = If (p) <then_branch = t () => (float[2] d) {
                        x = Exp (y)
                        d = Gradient <xs = ["a", "b"], y = "x"> (a, b)
                    },
                    else_branch = f () => (float[2] e) {
                        z, e = Gradient <xs = ["a", "b"], y = "y"> (a, b)
                    }>
    }""")
    np.testing.assert_allclose(evaluated(proto, a=A, b=B, p=np.array(True))["o"], B * np.exp(A * B), rtol=1e-6)
    np.testing.assert_array_equal(evaluated(proto, a=A, b=B, p=np.array(False))["o"], A)


#: n steps from s on the squared distance from t.
DESCENT = """go = Constant <value = bool {1}> ()
        last = Loop (n, go, s) <body = body (int64 i, bool c, float[2] x) => (bool c2, float[2] next) {
            c2 = Identity (c)
            r = Sub (x, t)
            y = Mul (r, r)
            d = Gradient <xs = ["x"], zs = ["t"], y = "y"> (x, t)
            rate = Constant <value = float {0.1}> ()
            step = Mul (rate, d)
            next = Sub (x, step)
        }>"""


def test_gradient_descent_in_a_loop():
    """Each step: x ← x - 0.1·d(Σ(x - t)²)/dx."""
    proto = model(f"""g (float[2] s, float[2] t, int64 n) => (float[2] last) {{
        {DESCENT}
    }}""")
    x = A.copy()
    for _ in range(4):
        x -= 0.1 * 2 * (x - B)
    np.testing.assert_allclose(evaluated(proto, s=A, t=B, n=np.array(4))["last"], x, rtol=1e-5)


def test_derivative_of_a_loop_that_holds_a_gradient():
    """After one step from s: s - 0.2(s - t), of which d/ds = 0.8; after three 0.8³."""
    proto = model(f"""g (float[2] s, float[2] t, int64 n) => (float[2] o) {{
        {DESCENT}
        o = Gradient <xs = ["s"], zs = ["t", "n"], y = "last"> (s, t, n)
    }}""")
    found = evaluated(proto, reference=False, s=A, t=B, n=np.array(3))  # it runs no Scan backwards
    np.testing.assert_allclose(found["o"], [0.8**3] * 2, rtol=1e-5)


def test_in_a_scan():
    proto = model("""g (float[2] w, float[N, 2] xs) => (float[N, 2] o) {
        o = Scan <num_scan_inputs = 1, body = body (float[2] x) => (float[2] d) {
            p = Mul (x, w)
            y = Exp (p)
            d = Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x)
        }> (xs)
    }""")
    xs = np.float32([[1, 2], [0.5, -1], [0, 0.3]])
    np.testing.assert_allclose(evaluated(proto, w=C, xs=xs)["o"], xs * np.exp(C * xs), rtol=1e-5)


def test_in_a_function_whose_names_go_away():
    """Called twice; the second time with one tensor for both variables: 2ab, not 3a²."""
    proto = model(
        """g (float[2] u, float[2] v) => (float[2] y, float[2] d, float[2] e) {
            y, d = local.slope (u, v)
            y2, e = local.slope (u, u)
        }""",
        FUNCTION,
    )
    found = evaluated(proto, u=A, v=B)
    np.testing.assert_allclose(found["y"], A * A * B, rtol=1e-6)
    np.testing.assert_allclose(found["d"], 2 * A * B, rtol=1e-6)
    np.testing.assert_allclose(found["e"], 2 * A * A, rtol=1e-6)


def test_function_is_called_with_what_is_computed_from_one_tensor():
    """Inside the function a and b are independent, whatever the call makes them."""
    proto = model(
        """g (float[2] u) => (float[2] d) {
            v = Exp (u)
            y, d = local.slope (u, v)
        }""",
        FUNCTION,
    )
    np.testing.assert_allclose(evaluated(proto, u=A)["d"], 2 * A * np.exp(A), rtol=1e-6)


def test_second_order_through_a_function():
    proto = model(
        """g (float[2] u, float[2] v) => (float[2] o) {
            y, d = local.slope (u, v)
            o = Gradient <xs = ["u"], zs = ["v"], y = "d"> (u, v)
        }""",
        FUNCTION,
    )
    np.testing.assert_allclose(evaluated(proto, u=A, v=B)["o"], 2 * B, rtol=1e-6)


def test_skipped_output_in_a_function():
    proto = model(
        """g (float[2] u, float[2] v) => (float[2] o) { o = local.second (u, v) }""",
        """<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        second (a, b) => (d) {
            y = Mul (a, b)
            x, d = Gradient <xs = ["a", "b"], y = "y"> (a, b)
        }""",
    )
    proto.functions[0].node[1].output[0] = ""
    np.testing.assert_allclose(evaluated(proto, u=A, v=B)["o"], A, rtol=1e-6)


def test_through_sequences_and_optionals():
    """Paths through containers, at the tensors themselves and at others; a sequence may be one of zs."""
    text = """g (float[2] a, float[2] b, float[2] c) => (float[2] d, float[2] e, float[2] f) {{
        s = SequenceConstruct (a, b)
        zero = Constant <value = int64 {{0}}> ()
        one = Constant <value = int64 {{1}}> ()
        p = SequenceAt (s, zero)
        q = SequenceAt (s, one)
        o = Optional (q)
        r = OptionalGetElement (o)
        y = Mul (p, r)
        d, e = Gradient <xs = ["a", "b"], y = "y"> ({fed}, b)
        t = SequenceConstruct (c, c)
        w = SequenceAt (t, one)
        z = Mul (w, a)
        f = Gradient <xs = ["a"], zs = ["t"], y = "z"> (a, t)
    }}"""
    for fed, at in (("a", A), ("c", C)):
        found = evaluated(model(text.format(fed=fed)), reference=False, a=A, b=B, c=C)  # which has bugs in sequences
        np.testing.assert_allclose(found["d"], B, rtol=1e-6)
        np.testing.assert_allclose(found["e"], at, rtol=1e-6)
        np.testing.assert_allclose(found["f"], C, rtol=1e-6)


def test_third_order_in_a_loop():
    """x ← x - 0.05·d³(x⁴)/dx³, which is 24x."""
    proto = model("""g (float[2] a, int64 n) => (float[2] r) {
        go = Constant <value = bool {1}> ()
        r = Loop (n, go, a) <body = body (int64 i, bool c, float[2] x) => (bool c2, float[2] next) {
            c2 = Identity (c)
            x2 = Mul (x, x)
            x4 = Mul (x2, x2)
            g1 = Gradient <xs = ["x"], y = "x4"> (x)
            g2 = Gradient <xs = ["x"], y = "g1"> (x)
            g3 = Gradient <xs = ["x"], y = "g2"> (x)
            k = Constant <value = float {0.05}> ()
            s = Mul (g3, k)
            next = Sub (x, s)
        }>
    }""")
    np.testing.assert_allclose(evaluated(proto, a=A, n=np.array(3))["r"], A * (1 - 1.2) ** 3, rtol=1e-5)


def test_y_of_an_outer_graph():
    """A branch asks for the derivative of what was computed outside of it; one branch in its own way."""
    proto = model("""g (bool c, float[2] a, float[2] b) => (float[2] d) {
        y = Mul (a, b)
        y2 = Mul (y, a)
        d = If (c) <
            then_branch = t () => (float[2] dt) { dt = Gradient <xs = ["a"], zs = ["b"], y = "y2"> (a, b) },
            else_branch = e () => (float[2] de) { de = Gradient <xs = ["b"], zs = ["a"], y = "y2"> (b, a) }>
    }""")
    np.testing.assert_allclose(evaluated(proto, c=np.array(True), a=A, b=B)["d"], 2 * A * B, rtol=1e-6)
    np.testing.assert_allclose(evaluated(proto, c=np.array(False), a=A, b=B)["d"], A * A, rtol=1e-6)


def test_through_a_gradient_at_other_tensors():
    """d1 = cos(c), because y = sin(a) is evaluated at c: a second Gradient sees that, and what it depends on."""
    text = """g (double[2] a, double[2] c) => (double[2] t{more}) {{
        y = Sin (a)
        d1 = Gradient <xs = ["a"], y = "y"> (c)
        s = Mul (d1, a)
        t{more_out} = Gradient <xs = ["a"{more_x}], y = "s"> (a{more_in})
    }}"""
    proto = model(text.format(more=", double[2] u", more_out=", u", more_x=', "c"', more_in=", c"))
    found = evaluated(proto, a=A.astype(float), c=B.astype(float))
    np.testing.assert_allclose(found["t"], np.cos(B), rtol=1e-6)
    np.testing.assert_allclose(found["u"], -np.sin(B) * A, rtol=1e-6)
    message = refused(text.format(more="", more_out="", more_x="", more_in=""))
    assert "'s' depends on 'c' too (c → Gradient → d1 → Mul → s)" in message


def test_function_in_a_function():
    """Also where both inputs are one tensor."""
    proto = model(
        "g (float[2] a, float[2] b) => (float[2] d) { d = local.outer (a, b) }",
        """<domain: "local", opset_import: ["": 21, "local": 1]> outer (p, q) => (r) { r = local.inner (p, q) }
        <domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]> inner (u, v) => (w) {
            y = Mul (u, v)
            z = Mul (y, u)
            w = Gradient <xs = ["u"], zs = ["v"], y = "z"> (u, v)
        }""",
    )
    np.testing.assert_allclose(evaluated(proto, a=A, b=B)["d"], 2 * A * B, rtol=1e-6)
    proto.graph.node[0].input[1] = "a"
    np.testing.assert_allclose(evaluated(proto, a=A, b=B)["d"], 2 * A * A, rtol=1e-6)
    del proto.functions[1].opset_import[1]
    with pytest.raises(BadInput, match=r"Gradient node 'w': no version of ai.onnx.preview.training is imported"):
        lower_gradients(proto)


def test_y_of_another_function():
    message = refused(
        """g (float[2] a, float[2] b) => (float[2] d) {
            y = Mul (a, b)
            d = local.f (a, b)
        }""",
        """<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        f (p, q) => (r) { r = Gradient <xs = ["p"], zs = ["q"], y = "y"> (p, q) }""",
    )
    assert "Gradient node 'r': no value named 'y'" in message

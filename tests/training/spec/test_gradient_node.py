"""Gradient wherever it may stand, at whatever it is fed: against closed forms, on two runtimes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxgrad.errors import BadInput, NoDerivative
from onnxgrad.training import lower_gradients
from tests.training.nets import run

HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1, "local": 1]>'
GRADIENT = "ai.onnx.preview.training.Gradient"


def model(text: str, functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(HEAD + text.replace("Gradient", GRADIENT) + functions.replace("Gradient", GRADIENT))


def evaluated(proto: onnx.ModelProto, reference: bool = True, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """The results of the lowered model in ONNX Runtime; the reference evaluator agrees."""
    lowered = lower_gradients(proto)
    onnx.checker.check_model(lowered, full_check=True)
    assert all(n.domain == "" for g in ir.from_proto(lowered).graphs() for n in g)
    found = run(lowered, feeds)
    names = [o.name for o in proto.graph.output]
    assert list(found) == names
    if not reference:
        return found
    for name, value in zip(names, ReferenceEvaluator(lowered).run(names, feeds)):
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    return found


A, B, C = (np.array(v, np.float32) for v in ([0.5, -0.3], [1.5, 2.0], [0.7, 0.2]))


# --- substitution -----------------------------------------------------------------------------------


def test_gradient_at_other_tensors():
    """y = exp(a)·b; fed with c for a: d/da at c = exp(c)·b."""
    proto = model("""g (float[2] a, float[2] b, float[2] c) => (float[2] y, float[2] d, float[2] e) {
        x = Exp (a)
        y = Mul (x, b)
        d, e = Gradient <xs = ["a", "b"], y = "y"> (c, b)
    }""")
    found = evaluated(proto, a=A, b=B, c=C)
    np.testing.assert_allclose(found["y"], np.exp(A) * B, rtol=1e-6)
    np.testing.assert_allclose(found["d"], np.exp(C) * B, rtol=1e-6)
    np.testing.assert_allclose(found["e"], np.exp(C), rtol=1e-6)


def test_cut_that_is_fed_with_something_else():
    """The picture of the specification: dY/dH where H = H_1, beside dY/dZ where Z = Z_1."""
    proto = model("""g (float[2] w, float[2] x, float[2] z, float[2] h1, float[2] z1) => (float[2] p, float[2] q) {
        h = Mul (w, x)
        s = Mul (h, h)
        y = Mul (s, z)
        p, q = Gradient <xs = ["h", "z"], y = "y"> (h1, z1)
    }""")
    found = evaluated(proto, w=A, x=B, z=C, h1=2 * C, z1=A)
    np.testing.assert_allclose(found["p"], 2 * (2 * C) * A, rtol=1e-6)
    np.testing.assert_allclose(found["q"], (2 * C) ** 2, rtol=1e-6)


def test_one_tensor_fed_for_two_variables():
    """y = a²·b at a = b = c: two variables, not one: 2c² and c², not 3c²."""
    proto = model("""g (float[2] a, float[2] b, float[2] c) => (float[2] d, float[2] e) {
        s = Mul (a, a)
        y = Mul (s, b)
        d, e = Gradient <xs = ["a", "b"], y = "y"> (c, c)
    }""")
    found = evaluated(proto, a=A, b=B, c=C)
    np.testing.assert_allclose(found["d"], 2 * C * C, rtol=1e-6)
    np.testing.assert_allclose(found["e"], C * C, rtol=1e-6)


def test_variables_fed_with_each_other():
    """y = a²·b at a ↔ b, and at a = b = a."""
    proto = model("""g (float[2] a, float[2] b) => (float[2] d, float[2] e, float[2] f, float[2] h) {
        s = Mul (a, a)
        y = Mul (s, b)
        d, e = Gradient <xs = ["a", "b"], y = "y"> (b, a)
        f, h = Gradient <xs = ["a", "b"], y = "y"> (a, a)
    }""")
    found = evaluated(proto, a=A, b=B)
    np.testing.assert_allclose(found["d"], 2 * B * A, rtol=1e-6)
    np.testing.assert_allclose(found["e"], B * B, rtol=1e-6)
    np.testing.assert_allclose(found["f"], 2 * A * A, rtol=1e-6)
    np.testing.assert_allclose(found["h"], A * A, rtol=1e-6)


def test_fed_with_what_is_computed_on_the_way():
    """y = a³ by way of s = a², fed with s: d/da at a² is 3a⁴, and nothing of how s came about."""
    proto = model("""g (float[2] a) => (float[2] d) {
        s = Mul (a, a)
        y = Mul (s, a)
        d = Gradient <xs = ["a"], y = "y"> (s)
    }""")
    np.testing.assert_allclose(evaluated(proto, a=A)["d"], 3 * A**4, rtol=1e-6)


def test_tensors_of_another_shape():
    """Fed tensors may have another batch size than the model."""
    proto = model("""g (float[N, 2] x, float[2] w, float[M, 2] other) => (float[M, 2] dx, float[2] dw) {
        t = Mul (x, w)
        y = Exp (t)
        dx, dw = Gradient <xs = ["x", "w"], y = "y"> (other, w)
    }""")
    other = np.float32([[1, 2], [0.5, -1], [0, 0.3]])
    found = evaluated(proto, x=np.zeros((5, 2), np.float32), w=C, other=other)
    np.testing.assert_allclose(found["dx"], C * np.exp(C * other), rtol=1e-5)
    np.testing.assert_allclose(found["dw"], (other * np.exp(C * other)).sum(0), rtol=1e-5)


def test_constants_and_zs_that_are_substituted():
    """zs may be fed with something else; what depends on no substituted tensor is not computed twice."""
    proto = model("""g (float[2] a, float[2] b, int64[2] i, int64[2] k, float[2] c) => (float[2] y, float[2] d) {
        u = Exp (a)
        f = CastLike (i, a)
        v = Mul (u, f)
        y = Mul (v, b)
        d = Gradient <xs = ["a"], zs = ["i", "b"], y = "y"> (a, k, b)
    }""")
    found = evaluated(proto, a=A, b=B, c=C, i=np.array([1, 2]), k=np.array([3, 5]))
    np.testing.assert_allclose(found["d"], np.exp(A) * B * [3, 5], rtol=1e-6)
    lowered = lower_gradients(proto)
    assert [n.op_type for n in lowered.graph.node].count("Exp") == 1


def test_identical_tensors_duplicate_nothing():
    text = """g (float[2] a, float[2] b, float[2] c) => (float[2] y, float[2] d) {{
        x = Exp (a)
        y = Mul (x, b)
        d = Gradient <xs = ["a"], zs = ["b"], y = "y"> ({fed}, b)
    }}"""
    same, other = (lower_gradients(model(text.format(fed=fed))) for fed in "ac")
    assert [n.op_type for n in same.graph.node].count("Exp") == 1
    assert [n.op_type for n in other.graph.node].count("Exp") == 2


def test_substitution_through_control_flow():
    """y = 2a or a·b, in a branch that captures a: its copy reads what is fed."""
    proto = model("""g (float[2] a, float[2] b, float[2] c, bool p) => (float[2] d, float[2] e) {
        y = If (p) <then_branch = t () => (float[2] o) { o = Mul (a, a) },
                    else_branch = f () => (float[2] o2) { o2 = Mul (a, b) }>
        d, e = Gradient <xs = ["a", "b"], zs = ["p"], y = "y"> (c, b, p)
    }""")
    found = evaluated(proto, a=A, b=B, c=C, p=np.array(True))
    np.testing.assert_allclose(found["d"], 2 * C, rtol=1e-6)
    np.testing.assert_allclose(found["e"], [0, 0])
    found = evaluated(proto, a=A, b=B, c=C, p=np.array(False))
    np.testing.assert_allclose(found["d"], B, rtol=1e-6)
    np.testing.assert_allclose(found["e"], C, rtol=1e-6)


def test_higher_order_at_other_tensors():
    """y = a³: dy/da at c is 3c²; of that d/dc is 6c, and of that 6."""
    proto = model("""g (double[2] a, double[2] c) => (double[2] d, double[2] e, double[2] f, double[2] h) {
        s = Mul (a, a)
        y = Mul (s, a)
        d = Gradient <xs = ["a"], y = "y"> (c)
        e = Gradient <xs = ["c"], y = "d"> (c)
        f = Gradient <xs = ["c"], y = "e"> (c)
        h = Gradient <xs = ["c"], y = "d"> (a)
    }""")
    a, c = A.astype(np.float64), C.astype(np.float64)
    found = evaluated(proto, a=a, c=c)
    np.testing.assert_allclose(found["d"], 3 * c * c)
    np.testing.assert_allclose(found["e"], 6 * c)
    np.testing.assert_allclose(found["f"], [6, 6])
    np.testing.assert_allclose(found["h"], 6 * a)


def test_y_that_is_x():
    proto = model("""g (float[2] a) => (float[2] d) {
        d = Gradient <xs = ["a"], y = "a"> (a)
    }""")
    np.testing.assert_array_equal(evaluated(proto, a=A)["d"], [1, 1])


# --- cuts -------------------------------------------------------------------------------------------


def test_a_cut_of_one_output_of_a_node():
    """u, v = Split(a): with u and v cut, a has no part in it."""
    proto = model("""g (float[4] a) => (float[2] d, float[2] e) {
        u, v = Split <num_outputs = 2> (a)
        y = Mul (u, v)
        d, e = Gradient <xs = ["u", "v"], y = "y"> (u, v)
    }""")
    a = np.float32([1, 2, 3, 5])
    found = evaluated(proto, a=a)
    np.testing.assert_array_equal(found["d"], [3, 5])
    np.testing.assert_array_equal(found["e"], [1, 2])


FUNCTION = """
<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
slope (a, b) => (y, d) {
    s = Mul (a, a)
    y = Mul (s, b)
    d, unused = Gradient <xs = ["a", "b"], y = "y"> (a, b)
}"""


# --- types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float", "double"])
def test_types(dtype):
    proto = model(f"""g ({dtype}[2] a, {dtype}[2] b) => ({dtype}[2] d, {dtype}[2] e) {{
        y = Mul (a, b)
        d = Gradient <xs = ["a"], zs = ["b"], y = "y"> (a, b)
        z = Mul (d, d)
        e = Gradient <xs = ["b"], zs = ["a"], y = "z"> (b, a)
    }}""")
    held = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    a, b = np.array([0.5, 2], held), np.array([1.5, -3], held)
    found = evaluated(proto, a=a, b=b)
    assert found["e"].dtype == held
    np.testing.assert_array_equal(found["d"], b)
    np.testing.assert_array_equal(found["e"], 2 * b)


# --- what is refused --------------------------------------------------------------------------------


def refused(text: str, functions: str = "") -> str:
    with pytest.raises(BadInput) as caught:
        lower_gradients(model(text, functions))
    return str(caught.value)


def test_the_path_between_dependent_variables_is_named():
    message = refused("""g (float[2] a, float[2] b) => (float[2] d) {
        e = Exp (a)
        h = Mul (e, b)
        y = Mul (h, a)
        d = Gradient <xs = ["h"], zs = ["a"], y = "y"> (h, a)
    }""")
    assert "'h' is computed from 'a' (a → Exp → e → Mul → h)" in message
    message = refused("""g (float[2] a, bool p) => (float[2] d) {
        h = If (p) <then_branch = t () => (float[2] o) { o = Exp (a) },
                    else_branch = f () => (float[2] o2) { o2 = Neg (a) }>
        y = Mul (h, a)
        d = Gradient <xs = ["h"], zs = ["a"], y = "y"> (h, a)
    }""")
    assert "'h' is computed from 'a' (a → If → h)" in message


def test_the_missing_leaf_is_named():
    body = """go = Constant <value = bool {1}> ()
        n = Constant <value = int64 {2}> ()
        o = Loop (n, go, a) <body = body (int64 i, bool c, float[2] x) => (bool c2, float[2] next) {
            c2 = Identity (c)
            y = Mul (x, a)
            next = Gradient <xs = ["a"], y = "y"> (a)
        }>"""
    message = refused("g (float[2] a) => (float[2] o) {" + body + "}")
    assert "'y' depends on 'x' too (x → Mul → y)" in message
    assert "name it in zs" in message
    message = refused(
        "g (float[2] a) => (float[2] d) { d = local.f (a, a) }",
        """<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        f (a, b) => (d) {
            y = Mul (a, b)
            d = Gradient <xs = ["a"], y = "y"> (a)
        }""",
    )
    assert "'y' depends on 'b' too" in message


def test_initializers_need_not_be_listed():
    proto = model("""g (float[2] a) => (float[2] d)
        <float[2] w = {2, 3}> {
        y = Mul (a, w)
        d = Gradient <xs = ["a"], y = "y"> (a)
    }""")
    np.testing.assert_array_equal(evaluated(proto, a=A)["d"], [2, 3])


def test_names_of_other_scopes_are_unknown():
    message = refused("""g (float[2] a, bool p) => (float[2] o) {
        o = If (p) <then_branch = t () => (float[2] d) {
                        y = Exp (a)
                        d = Neg (y)
                    },
                    else_branch = f () => (float[2] e) { e = Gradient <xs = ["a"], y = "y"> (a) }>
    }""")
    assert "no value named 'y'" in message


def test_path_without_a_derivative():
    """A random draw has none; a y that is constant along the way has the derivative zero."""
    with pytest.raises(NoDerivative, match="Bernoulli"):
        lower_gradients(
            model("""g (float[2] a) => (float[2] d) {
                b = Bernoulli (a)
                y = Mul (b, a)
                d = Gradient <xs = ["a"], y = "y"> (a)
            }""")
        )
    proto = model("""g (float[2] a) => (float[2] d) {
        y = Floor (a)
        d = Gradient <xs = ["a"], y = "y"> (a)
    }""")
    np.testing.assert_array_equal(evaluated(proto, a=A)["d"], [0, 0])


def test_callers_model_is_not_changed():
    proto = model(
        """g (float[2] u, float[2] v) => (float[2] y, float[2] d) {
            y, d = local.slope (u, v)
        }""",
        FUNCTION,
    )
    before = proto.SerializeToString(deterministic=True)
    lower_gradients(proto)
    assert proto.SerializeToString(deterministic=True) == before
    held = ir.from_proto(proto)
    lowered = lower_gradients(held)
    assert isinstance(lowered, ir.Model)
    assert ir.to_proto(held).SerializeToString(deterministic=True) == ir.to_proto(
        ir.from_proto(proto)
    ).SerializeToString(deterministic=True)


@pytest.mark.parametrize("version", [None, 2])
def test_version_of_the_domain(version):
    proto = model("""g (float[2] a) => (float[2] d) {
        y = Mul (a, a)
        d = Gradient <xs = ["a"], y = "y"> (a)
    }""")
    del proto.opset_import[1]
    if version:
        proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.preview.training", version))
    with pytest.raises(BadInput, match=f"{'version 2' if version else 'no version'} of ai.onnx.preview.training"):
        lower_gradients(proto)

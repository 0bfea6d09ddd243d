"""One decorator registers an operator: derivatives of any order, batching, jets, sparsity and loops follow."""

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

from onnxgrad import jet, jvp, laplacian, signature, sparse_jacobian, vjp, vmap
from onnxgrad.ir import operators
from onnxgrad.rules import elementwise
from onnxgrad.rules.registry import registry
from tests.models import nodes_of

DOMAIN, ALPHA = "com.microsoft", 1.5
X = np.array([-1.25, 0.5, 2.0])


@pytest.fixture(autouse=True)
def quick_gelu():
    """QuickGelu, for which ONNX Runtime has a kernel and onnxgrad has no rule, while a test runs."""
    key = DOMAIN, "QuickGelu"
    assert registry.get(*key, 1) is None

    @elementwise("QuickGelu", domain=DOMAIN, total=True)
    def rule(op, g, x, y):
        """y = x·s with s = σ(αx): g·(s + α·y·(1 - s))"""
        alpha = op.attr("alpha", 1.702)
        s = op.Sigmoid(x * alpha)
        return g * (s + (y * alpha) * (1 - s))

    yield
    del registry._rules[key], operators._TRAITS[key]


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18, "{DOMAIN}": 1]> {text}')


ONE = model(f"g (float[3] x) => (float[3] y) {{ y = {DOMAIN}.QuickGelu <alpha = {ALPHA}> (x) }}")


def run(derived, **feeds):
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {name: np.asarray(x, x.dtype if x.dtype.kind in "bi" else np.float32) for name, x in feeds.items()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def derivatives(x):
    """The value and the first two derivatives of x·σ(αx), in float64."""
    s = 1 / (1 + np.exp(-ALPHA * x))
    slope = ALPHA * s * (1 - s)
    bend = ALPHA * slope * (1 - 2 * s)
    return x * s, s + x * slope, 2 * slope + x * bend


def operators_of(graph):
    return [node.op_type for node in nodes_of(graph)]


def test_gradient_and_tangent():
    _, slope, _ = derivatives(X)
    g = np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(run(vjp(ONE, wrt="x", of="y"), x=X, y_cotangent=g)["x_grad"], g * slope, rtol=1e-5)
    np.testing.assert_allclose(run(jvp(ONE, wrt="x", of="y"), x=X, x_tangent=g)["y_tangent"], g * slope, rtol=1e-5)


def test_its_shape_is_that_of_its_operands():
    """Also in a domain of which nothing else is known."""

    @elementwise("Doubled", domain="com.example")
    def doubled(op, g, x, z):
        """y = 2x + z: (2g, g)"""
        return 2 * g, g

    text = """<ir_version: 9, opset_import: ["": 18, "com.example": 1]> g (float[N, 3] x, float[3] b) => (float y) {
        z = com.example.Doubled (x, b) y = ReduceSum <keepdims = 0> (z) }"""
    derived = vjp(onnx.parser.parse_model(text), wrt=["x", "b"], of="y")
    (z,) = [v for v in derived.graph.value_info if v.name == "z"]
    assert [d.dim_param or d.dim_value for d in z.type.tensor_type.shape.dim] == ["N", 3]
    assert not {"If", "Size"} & set(operators_of(derived.graph))
    del registry._rules["com.example", "Doubled"], operators._TRAITS["com.example", "Doubled"]


def test_batching_keeps_one_node():
    derived = vmap(ONE)
    assert operators_of(derived.graph) == ["QuickGelu"]
    np.testing.assert_allclose(run(derived, x=np.stack([X, -X]))["y"], derivatives(np.stack([X, -X]))[0], rtol=1e-5)


def test_it_is_total_so_a_branch_by_row_is_a_where():
    text = f"""g (bool c, float[3] x) => (float[3] y) {{ y = If (c)
        <then_branch = t () => (float[3] a) {{ a = {DOMAIN}.QuickGelu <alpha = {ALPHA}> (x) }},
         else_branch = e () => (float[3] b) {{ b = Neg (x) }}> }}"""
    derived = vmap(model(text))
    assert not {"If", "Scan"} & set(operators_of(derived.graph))
    got = run(derived, c=np.array([True, False]), x=np.stack([X, X]))["y"]
    np.testing.assert_allclose(got, np.stack([derivatives(X)[0], -X]), rtol=1e-5)


def test_jets_and_laplacian():
    _, slope, bend = derivatives(X)
    a, b = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.1, -1.0])
    got = run(jet(ONE, wrt="x", of="y", order=2), x=X, x_1=a, x_2=b)
    np.testing.assert_allclose(got["y_1"], slope * a, rtol=1e-5)
    np.testing.assert_allclose(got["y_2"], slope * b + bend * a * a, rtol=1e-4)
    np.testing.assert_allclose(run(laplacian(ONE, wrt="x", of="y"), x=X)["y_laplacian"], bend, rtol=1e-4)


def test_the_pattern_of_its_jacobian_is_a_diagonal():
    derived = sparse_jacobian(ONE, wrt="x", of="y")
    ((entries, where),) = signature(derived).patterns.items()
    got = run(derived, x=X)
    np.testing.assert_array_equal(got[where["indices"]], [0, 1, 2])
    np.testing.assert_allclose(got[entries], derivatives(X)[1], rtol=1e-5)


LOOP = model(f"""g (float[3] h, float[4, 3] x) => (float[3] z) {{ z = Scan <num_scan_inputs = 1,
    body = b (float[3] s, float[3] v) => (float[3] n) {{
        p = Add (s, v) q = {DOMAIN}.QuickGelu <alpha = {ALPHA}> (p) n = Tanh (q) }}> (h, x) }}""")


def test_its_slope_is_computed_for_all_steps_before_the_backward_loop():
    derived = vjp(LOOP, wrt="h", of="z")
    _, backward = [n for n in derived.graph.node if n.op_type == "Scan"]
    assert "Sigmoid" not in operators_of(backward.attribute[0].g)
    assert "Sigmoid" in [n.op_type for n in derived.graph.node]
    rng = np.random.default_rng(0)
    h, x = rng.standard_normal(3), rng.standard_normal((4, 3))
    want, s = np.ones(3), h
    for v in x:
        q, slope, _ = derivatives(s + v)
        s = np.tanh(q)
        want = want * slope * (1 - s * s)
    got = run(derived, h=h, x=x, z_cotangent=np.ones(3))["h_grad"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_an_operator_whose_rule_writes_it_again_leaves_the_backward_loop_by_its_class():
    key = DOMAIN, "QuickGelu"
    operators.declare("QuickGelu", domain=DOMAIN, kind=None)

    def again(op, g, x):
        """g·(the operator of x): no derivative, but what a loop is to move"""
        return g * op.replay(x)

    inside = []
    for kind in (None, operators.Kind.ELEMENTWISE):
        elementwise("QuickGelu", domain=DOMAIN, kind=kind)(again)
        derived = vjp(LOOP, wrt="h", of="z")
        _, backward = [n for n in derived.graph.node if n.op_type == "Scan"]
        inside.append(operators_of(backward.attribute[0].g).count(key[1]))
    assert inside == [1, 0]

"""Jets against tangents of tangents along a path that is written out, and against JAX; Laplacians against Hessians."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from onnx import helper, numpy_helper

from onnxgrad import BadInput, Function, custom_rules, custom_vjp, hessian, jacobian, jet, jvp, laplacian, signature
from tests.models import assert_no_traps, nodes_of
from tests.transforms.numbers import net, session
from tests.transforms.programs import SHAPES, programs

SMALL = settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))  # fmt: skip
rng = np.random.default_rng(8)
normal = rng.standard_normal


def parsed(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')


def along_a_path(source: onnx.ModelProto, names, feeds, path) -> onnx.ModelProto:
    """`source` as a function of time: each input of `names` is the polynomial with these derivatives at 0."""
    moving = onnx.ModelProto.FromString(source.SerializeToString())
    graph, before = moving.graph, []
    kind = next(v.type.tensor_type.elem_type for v in graph.input if v.name in names)
    for name in names:
        terms = [feeds[name], *path[name]]
        last = ""
        for k, term in reversed(list(enumerate(terms))):
            held = f"{name}_term_{k}"
            graph.initializer.append(numpy_helper.from_array(term / math.factorial(k), held))
            if last:
                here = name if k == 0 else f"{name}_sum_{k}"
                before.append(helper.make_node("Mul", [last, "t"], [f"{name}_times_{k}"]))
                before.append(helper.make_node("Add", [f"{name}_times_{k}", held], [here]))
                held = here
            last = held
    nodes = [*before, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [v for v in graph.input if v.name not in names]
    del graph.input[:]
    graph.input.extend([*kept, helper.make_tensor_value_info("t", kind, [])])
    return moving


def one_after_the_other(source, names, feeds, path, order):
    """The derivatives of y along the path: the tangent of the tangent of …"""
    moving = along_a_path(source, names, feeds, path)
    found, of = [], "y"
    dtype = next(iter(path.values()))[0].dtype
    ones = {}
    for _ in range(order):
        moving = jvp(moving, wrt="t", of=of)
        made = signature(moving)
        of = made.output_tangents[of]
        ones[made.input_tangents["t"]] = np.ones((), dtype)
        found.append(session(moving)(feeds | ones | {"t": np.zeros((), dtype)})[of])
    return found


def check(source, names=("x",), order=4, rtol=1e-9, shift=0.0, scale=1.0):
    feeds = {}
    for v in source.graph.input:
        shape = [d.dim_value for d in v.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)
        feeds[v.name] = (shift + scale * normal(shape)).astype(kind) if kind != np.bool_ else normal(shape) > 0
    path = {n: [normal(feeds[n].shape).astype(feeds[n].dtype) for _ in range(order)] for n in names}
    derived = jet(source, wrt=list(names), of="y", order=order)
    onnx.checker.check_model(derived, full_check=True)
    assert_no_traps(derived, source)
    given = {f"{n}_{k}": d for n, terms in path.items() for k, d in enumerate(terms, 1)}
    got = session(derived)(feeds | given)
    for k, want in enumerate(one_after_the_other(source, names, feeds, path, order), 1):
        assert got[f"y_{k}"].shape == want.shape
        np.testing.assert_allclose(got[f"y_{k}"], want, rtol=rtol, atol=rtol * max(1, np.abs(want).max()))
    return derived


X = "double[2, 3] x"
#: operators: inputs, constants, statements; and what moves the point to where the function is smooth
CASES = {
    **{op: (X, "", f"y = {op}(x)") for op in ("Exp", "Sin", "Cos", "Tanh", "Sigmoid")},
    **{op: (X.replace("double", "float"), "", f"y = {op}(x)") for op in ("Erf", "Atan", "Sinh", "Cosh", "Elu")},
    **{op: (X, "", f"a = Mul(x, x) b = Add(a, c) y = {op}(b)") for op in ("Log", "Sqrt", "Reciprocal")},
    "Mul": (X + ", double[3] v", "", "y = Mul(x, v)"),
    "Mul of itself": (X, "", "a = Mul(x, x) y = Mul(a, x)"),
    "Div": (X + ", double[3] v", "", "s = Exp(v) y = Div(x, s)"),
    "Div by a constant": (X, "", "y = Div(x, c)"),
    "Pow 3": (X, "double r = {3}", "y = Pow(x, r)"),
    **{f"Pow {r}": (X, f"double r = {{{r}}}", "s = Exp(x) y = Pow(s, r)") for r in (0.7, -2)},
    "Pow of two": (X + ", double[3] v", "", "s = Exp(x) y = Pow(s, v)"),
    "MatMul": (X + ", double[3, 2] v", "", "s = Sin(x) y = MatMul(s, v)"),
    "Gemm": ("double[2, 3] x, double[3, 2] v, double[2] b", "",
             "s = Sin(x) c1 = Sin(b) y = Gemm <alpha = 0.5, beta = 2.0> (s, v, c1)"),
    "Einsum of three": ("double[3] x, double[3] v", "", 'y = Einsum <equation = "i,i,i->i"> (x, v, x)'),
    "Softmax": (X, "", "y = Softmax <axis = 0> (x)"),
    "LogSoftmax": (X, "", "y = LogSoftmax(x)"),
    "Softmax and the sum of squares": (X, "", "s = Softmax(x) q = Mul(s, x) y = ReduceSumSquare <keepdims = 0> (q)"),
    "Add, broadcast": (X + ", double[3] v", "", "s = Sin(v) y = Add(x, s)"),
    "Concat": (X, "", "s = Sin(x) k = Cos(c) y = Concat <axis = 0> (s, cc, x)"),
    "Relu": (X, "", "s = Sin(x) r = Relu(s) y = Mul(r, r)"),
    "Max": (X, "", "s = Sin(x) k = Cos(x) m = Max(s, k) y = Mul(m, x)"),
    "ReduceMax": (X, "", "s = Sin(x) m = ReduceMax <keepdims = 0> (s, a0) y = Exp(m)"),
    "Gather and ReduceMean": (X, "", "s = Sin(x) g = Gather <axis = 1> (s, i) y = ReduceMean <keepdims = 0> (g, a0)"),
    "LayerNormalization": (X, "", "y = LayerNormalization(x, c3)"),
    "CumSum": (X, "", "s = Sin(x) y = CumSum(s, i0)"),
    "Det": ("float[2, 2] x", "", "y = Det(x)"),
    "If": (X, "bool yes = {1}", "y = If (yes) <then_branch = t () => (double[2, 3] a) { b = Sin(x) a = Mul(b, x) }, "
           "else_branch = e () => (double[2, 3] d) { d = Neg(x) }>"),
    "Loop": ("double[3] x", "int64 n = {3}, bool yes = {1}",
             "y = Loop (n, yes, x) <body = b (int64 i, bool k, double[3] s) => (bool m, double[3] next) "
             "{ m = Identity(k) h = Sin(s) next = Mul(h, x) }>"),
    "Scan": ("double[3] x, double[2, 3] v", "", "y, ys = Scan <num_scan_inputs = 1, body = b (double[3] s, double[3] p)"
             " => (double[3] next, double[3] q) { h = Mul(s, p) next = Sin(h) q = Add(next, p) }> (x, v)"),
}  # fmt: skip
CONSTANTS = "double c = {1.5}, double[3] c3 = {1, 2, 3}, double[1, 3] cc = {1, 2, 3}, int64[1] a0 = {0}, " \
            "int64[2] i = {2, 0}, int64 i0 = {0}"  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_operators(case):
    inputs, constants, body = CASES[case]
    names = [part.split()[-1] for part in inputs.split(", ") if part[-1].isalpha()]
    out = inputs.split("[")[0] + " y"  # some operators have kernels for float32 only
    held = ", ".join(filter(None, (CONSTANTS, constants)))
    source = parsed(f"({inputs}) => ({out}) <{held}> {{ {body} }}")
    del source.graph.output[0].type.tensor_type.shape.dim[:]
    source.graph.output[0].type.tensor_type.ClearField("shape")
    slow = case in ("Loop", "Scan")
    check(source, names, order=3 if slow else 4, rtol=1e-3 if out == "float y" else 1e-9)


def test_float32_operators_with_kernels_for_nothing_else():
    for body, rtol in (("y = Conv <pads = [1, 1]> (x, v)", 1e-4), ("s = Conv(x, v) y = Softplus(s)", 1e-4),
                       ("s = Sin(x) y = MaxPool <kernel_shape = [2]> (s)", 1e-3)):  # fmt: skip
        source = parsed(f"(float[1, 2, 6] x, float[2, 2, 3] v) => (float[a, b, c] y) {{ {body} }}")
        check(source, ["x", "v"] if "v" in body else ["x"], order=3, rtol=rtol)


def test_closed_forms():
    """Along a straight line y_k is the k-th derivative: of eˣ, 1/x, √x and tanh at 0."""
    line = {"x_1": np.ones(1)} | {f"x_{k}": np.zeros(1) for k in range(2, 8)}
    wanted = {
        "Exp": (1.0, [math.e] * 7),
        "Reciprocal": (2.0, [(-1) ** k * math.factorial(k) / 2 ** (k + 1) for k in range(1, 8)]),
        "Sqrt": (1.0, [1 / 2, -1 / 4, 3 / 8, -15 / 16, 105 / 32, -945 / 64, 10395 / 128]),
        "Tanh": (0.0, [1, 0, -2, 0, 16, 0, -272]),
    }
    for op, (at, want) in wanted.items():
        derived = jet(parsed(f"(double[1] x) => (double[1] y) {{ y = {op}(x) }}"), wrt="x", order=7)
        got = session(derived)(line | {"x": np.array([at])})
        np.testing.assert_allclose([got[f"y_{k}"][0] for k in range(1, 8)], want, rtol=1e-13, atol=1e-13)


def test_a_power_at_zero():
    """x³ has derivatives at 0; the recurrence of a general power divides by x there."""
    derived = jet(parsed("(double[1] x) => (double[1] y) <double r = {3}> { y = Pow(x, r) }"), wrt="x", order=4)
    got = session(derived)({"x": np.zeros(1), "x_1": np.ones(1), **{f"x_{k}": np.zeros(1) for k in (2, 3, 4)}})
    assert [got[f"y_{k}"][0] for k in (1, 2, 3, 4)] == [0, 0, 6, 0]


ODE = """(double[3] x) => (double[3] y) <double[1] s = {10}, double[1] r = {28}, double[1] b = {2.5}> {
    u, v, w = Split <num_outputs = 3> (x)
    vu = Sub(v, u) du = Mul(s, vu) rw = Sub(r, w) urw = Mul(u, rw) dv = Sub(urw, v)
    uv = Mul(u, v) bw = Mul(b, w) dw = Sub(uv, bw) y = Concat <axis = 0> (du, dv, dw) }"""


def test_the_fifth_derivative_of_a_solution():
    """x' = f(x): the derivatives of the solution from those of f along it, order by order."""
    check(parsed(ODE), order=5)
    x = normal(3)
    path: list[np.ndarray] = [Function(parsed(ODE))(x)]
    for k in range(1, 5):
        f = Function(parsed(ODE)).jet(wrt="x", order=k)
        found = f(x, *path)
        path.append(found if k == 1 else found[k])
    h = 1e-2
    ahead = x + sum(d * h ** (k + 1) / math.factorial(k + 1) for k, d in enumerate(path))
    steps, now = 1000, x.copy()
    f = Function(parsed(ODE))
    for _ in range(steps):  # the classical method of fourth order, in small steps
        d = h / steps
        k1 = f(now)
        k2 = f(now + d / 2 * k1)
        k3 = f(now + d / 2 * k2)
        k4 = f(now + d * k3)
        now = now + d / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    np.testing.assert_allclose(ahead, now, atol=1e-6)


def test_the_number_of_nodes_grows_with_the_square_of_the_order():
    source = parsed("(double[3] x) => (double[3] y) { a = Sin(x) b = Exp(a) c = Mul(a, b) d = Tanh(c) y = Div(d, b) }")
    counts = [len(jet(source, wrt="x", order=k).graph.node) for k in (4, 8, 16)]
    assert counts[1] / counts[0] < 4.5
    assert counts[2] / counts[1] < 4.5


@given(programs(symbolic=False))
@SMALL
@pytest.mark.filterwarnings("ignore::onnxgrad.ZeroDerivative")
def test_random_programs(program):
    check(program.model, ["x", "v"], order=3, rtol=1e-8)


def test_against_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    from jax.experimental.jet import jet as jax_jet

    jnp = jax.numpy

    def f(x, w):
        return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w)) * jnp.sqrt(1 + jnp.exp(jnp.sin(x @ w))), axis=-1)

    source = parsed("""(double[2, 3] x, double[3, 4] w) => (double[2] y) <double one = {1}, int64[1] last = {-1}> {
        h = MatMul(x, w) t = Tanh(h) p = Softmax(t) s = Sin(h) e = Exp(s) o = Add(one, e) r = Sqrt(o) q = Mul(p, r)
        y = ReduceSum <keepdims = 0> (q, last) }""")
    x, w = normal((2, 3)), normal((3, 4))
    xs, ws = ([normal(a.shape) for _ in range(5)] for a in (x, w))
    _, want = jax_jet(f, (x, w), (xs, ws))
    got = Function(source).jet(wrt=["x", "w"], order=5)(x, w, *xs, *ws)
    for k, d in enumerate(want, 1):
        np.testing.assert_allclose(got[k], d, rtol=1e-10, atol=1e-10)


def test_names_and_what_cannot_be():
    source = parsed("(double[3] x, double[3] x_1) => (double[3] y, double[3] z) { y = Mul(x, x_1) z = Sin(x_1) }")
    with pytest.warns(match="'z' is zero"):
        derived = jet(source, wrt="x", order=2)
    assert signature(derived).path == {"x": ["x_1_1", "x_2"]}
    assert signature(derived).jets == {"y": ["y_1", "y_2"], "z": ["z_1", "z_2"]}
    assert [v.name for v in derived.graph.output] == ["y", "z", "y_1", "y_2", "z_1", "z_2"]
    for wrong in (0, 1.0, True, "2"):
        with pytest.raises(BadInput, match="`order` is a number"):
            jet(source, wrt="x", order=wrong)
    with pytest.raises(BadInput, match="by one value"):
        laplacian(source, wrt=["x", "x_1"])
    with pytest.raises(BadInput, match="no axis 3"):
        laplacian(source, wrt="x", batch=3)


# --- Laplacians ------------------------------------------------------------------------------------


def trace(source, feeds, of="y"):
    """The Laplacian by all second derivatives."""
    twice = jacobian(jacobian(source, wrt="x", of=of), wrt="x", of=f"{of}_x_jacobian")
    size = feeds["x"].size
    found = session(twice)(feeds)[f"{of}_x_jacobian_x_jacobian"]
    shape = found.shape[: found.ndim - 2 * feeds["x"].ndim]
    return np.trace(found.reshape(*shape, size, size), axis1=-2, axis2=-1)


@given(programs(symbolic=False))
@SMALL
@pytest.mark.filterwarnings("ignore::onnxgrad.ZeroDerivative")
def test_laplacians_of_random_programs(program):
    feeds = {n: normal(s) for n, s in SHAPES.items()}
    derived = laplacian(program.model, wrt="x", of="y")
    onnx.checker.check_model(derived, full_check=True)
    assert_no_traps(derived, program.model)
    got = session(derived)(feeds)["y_laplacian"]
    np.testing.assert_allclose(got, trace(program.model, feeds), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", ["LayerNormalization", "Loop", "Pow 0.7", "LogSoftmax", "Einsum of three"])
def test_laplacians_of_operators(case):
    inputs, constants, body = CASES[case]
    held = ", ".join(filter(None, (CONSTANTS, constants)))
    source = parsed(f"({inputs}) => (double y) <{held}> {{ {body} }}")
    source.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {v.name: normal([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in source.graph.input}
    got = session(laplacian(source, wrt="x", of="y"))(feeds)["y_laplacian"]
    np.testing.assert_allclose(got, trace(source, feeds), rtol=1e-9, atol=1e-10)


def test_a_laplacian_through_a_loop_that_reads_x_for_nothing():
    source = parsed("""(double[N] x, double[N] w) => (double[N] y) <int64 n = {2}> {
        l = Loop (n, , w) <body = b (int64 i, bool p, double[N] a) => (bool q, double[N] c) {
            q = Identity(p) u = Mul(x, a) c = Tanh(a) }>
        s = Sin(x) y = Mul(s, l) }""")
    x, w = normal((2, 4))
    got = Function(laplacian(source, wrt="x"), outputs=["y_laplacian"])(x, w)
    np.testing.assert_allclose(got, -np.sin(x) * np.tanh(np.tanh(w)), rtol=1e-12)


@pytest.mark.parametrize("batch", ["N", 5])
def test_laplacians_of_rows(batch):
    source = net([3, 8, 8, 2], batch=batch)
    x = normal((5, 3))
    f = Function(source).laplacian(wrt="x", batch=0)
    want = [trace(net([3, 8, 8, 2], batch=None), {"x": row}) for row in x]
    np.testing.assert_allclose(f(x), want, rtol=1e-10)
    nodes = nodes_of(laplacian(source, wrt="x", batch=0).graph)
    products = sum(n.op_type == "MatMul" and n.input[1].startswith("w") for n in nodes)
    assert products == 3 + 2 + 2  # of values; of first derivatives, not in the last layer; of sums, not in the first
    if batch == "N":
        assert f(np.zeros((0, 3))).shape == (0, 2)


def test_a_laplacian_adds_nothing_that_looks_like_a_weight():
    """A trainer takes initializers that products read for weights."""
    source = net([2, 4, 1])
    before = {t.name for t in source.graph.initializer}
    added = [t for t in laplacian(source, wrt="x", batch=0).graph.initializer if t.name not in before]
    assert not [t for t in added if len(t.dims) and t.data_type in (1, 11)]


def test_a_laplacian_is_a_model_that_can_be_differentiated():
    source = net([2, 4, 1])
    x = normal((3, 2))
    f = Function(laplacian(source, wrt="x", batch=0))
    got = f.grad(wrt="w0", of="y_laplacian")(x)
    held = {t.name: numpy_helper.to_array(t) for t in source.graph.initializer}
    step = 1e-6

    def total(w):
        moved = onnx.ModelProto.FromString(source.SerializeToString())
        next(t for t in moved.graph.initializer if t.name == "w0").CopyFrom(numpy_helper.from_array(w, "w0"))
        return session(laplacian(moved, wrt="x", batch=0))({"x": x})["y_laplacian"].sum()

    move = np.zeros_like(held["w0"])
    move[1, 2] = step
    want = (total(held["w0"] + move) - total(held["w0"] - move)) / (2 * step)
    np.testing.assert_allclose(got[1, 2], want, rtol=1e-6)
    scalar = net([3, 4, 1], batch=None)
    whole = session(hessian(scalar, wrt="x"))({"x": x[0].repeat(2)[:3]})["x_x_hessian"]
    np.testing.assert_allclose(Function(scalar).laplacian(wrt="x")(x[0].repeat(2)[:3]), [np.trace(whole)], rtol=1e-12)


@pytest.mark.parametrize("operator", ["Sin", "Relu"])  # with a recurrence, and piecewise linear
def test_a_rule_of_the_user_stands_for_the_operator(operator):
    source = parsed(f"(double[3] x) => (double[3] y) {{ y = {operator} (x) }}")
    x, a, b = np.array([0.3, -0.2, 1.0]), np.array([1.0, 2.0, -0.5]), np.array([0.4, -1.0, 0.2])
    with custom_rules(custom_vjp(operator, lambda op, g, x: g * x * x)):
        derived, sums = jet(source, wrt="x", of="y", order=2), laplacian(source, wrt="x", of="y")
    got = session(derived)({"x": x, "x_1": a, "x_2": b})
    np.testing.assert_allclose(got["y_1"], x * x * a, rtol=1e-12)
    np.testing.assert_allclose(got["y_2"], x * x * b + 2 * x * a * a, rtol=1e-12)
    np.testing.assert_allclose(session(sums)({"x": x})["y_laplacian"], 2 * x, rtol=1e-12)

"""vmap against the loop over rows that it stands for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from onnxgrad import BadInput, Function, UnknownName, grad, per_example_grad, signature, vmap
from tests.control_flow.test_random_programs import model as control_model
from tests.control_flow.test_random_programs import programs as control_programs
from tests.models import assert_sound, nodes_of
from tests.transforms.numbers import net, session
from tests.transforms.programs import SHAPES, WEIGHTS, programs

SMALL = settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))  # fmt: skip
rng = np.random.default_rng(3)
normal = rng.standard_normal


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def operators(source) -> list[str]:
    return [n.op_type for n in nodes_of((source if isinstance(source, onnx.ModelProto) else ir.to_proto(source)).graph)]


def by_rows(source, in_axes, feeds, rows):
    """The results of a loop over rows."""
    f = session(source)

    def row(k):
        return {n: a if in_axes.get(n) is None else np.take(a, k, axis=in_axes[n]) for n, a in feeds.items()}

    each = [f(row(k)) for k in range(rows)]
    return {name: np.stack([e[name] for e in each]) for name in each[0]}


def check(source, in_axes, feeds, rows=4, rtol=1e-12):
    mapped = vmap(source, in_axes)
    assert_sound(mapped)
    got, want = session(mapped)(feeds), by_rows(source, in_axes, feeds, rows)
    assert list(got) == list(want)
    for name, a in want.items():
        assert got[name].shape == a.shape
        np.testing.assert_allclose(got[name], a, rtol=rtol, atol=rtol)
    return mapped


LINEAR = "g (double[3] x, double[3, 2] w) => (double[2] y) { h = MatMul(x, w) y = Tanh(h) }"
IF = """g (double[3] x, double[3] v) => (double[3] y) {
    s = ReduceSum <keepdims = 0> (x) z = Constant <value = double {0.0}> () c = Greater(s, z)
    y = If (c) <then_branch = t () => (double[3] a) { h = %s (x) a = Mul(h, v) },
                else_branch = e () => (double[3] b) { b = Neg(x) }> }"""
LOOP = """g (double[3] x, int64 n) => (double[3] y) {
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool c, double[3] s) => (bool more, double[3] next) {
        h = %s (s) next = Add(h, x) q = ReduceSum <keepdims = 0> (next)
        lim = Constant <value = double {9.0}> () more = Less(q, lim) }> }"""
SCAN = """g (double[3] x, double[5, 3] xs) => (double[3] y, double[5, 3] ys) {
    y, ys = Scan <num_scan_inputs = 1, body = b (double[3] s, double[3] p) => (double[3] next, double[3] q) {
        h = Mul(s, p) next = Sin(h) q = Add(next, p) }> (x, xs) }"""


@pytest.mark.parametrize(
    ("in_axes", "shapes"),
    [({"x": 0}, [(4, 3), (3, 2)]), ({"x": 0, "w": None}, [(4, 3), (3, 2)]), ({"w": 1}, [(3,), (3, 4, 2)]),
     ({"x": 1, "w": -1}, [(3, 4), (3, 2, 4)]), ({"x": 0, "w": 0}, [(4, 3), (4, 3, 2)])],
)  # fmt: skip
def test_products(in_axes, shapes):
    mapped = check(parsed(LINEAR), in_axes, dict(zip("xw", map(normal, shapes))))
    assert "Scan" not in operators(mapped)


@pytest.mark.parametrize(("op", "way"), [("Tanh", "Where"), ("Exp", "Scan")])
def test_a_condition_that_differs_between_rows(op, way):
    """Both branches under a Where if they are total; else each row takes its own."""
    mapped = check(parsed(IF % op), {"x": 0}, {"x": normal((4, 3)), "v": normal(3)})
    assert way in operators(mapped)
    assert ("If" in operators(mapped)) == (way == "Scan")


def test_the_derivative_of_what_a_row_discards_is_not_seen():
    """√s has no finite slope at 0, where the row takes the other branch: 0·∞ would be NaN."""
    source = parsed("""g (double s) => (double y) { z = Constant <value = double {0.0}> () c = Greater(s, z)
        y = If (c) <then_branch = t () => (double a) { a = Sqrt(s) },
                    else_branch = e () => (double b) { b = Mul(s, s) }> }""")
    got = session(grad(vmap(source, {"s": 0}), wrt="s"))({"s": np.array([4.0, 0.0, -1.0])})["s_grad"]
    np.testing.assert_array_equal(got, [0.25, 0.0, -2.0])


@pytest.mark.parametrize("op", ["Sin", "Exp"])
@pytest.mark.parametrize(
    ("in_axes", "x", "n"),
    [({"x": 0, "n": 0}, (4, 3), [0, 1, 5, 2]), ({"x": 0}, (4, 3), 3), ({"n": 0}, 3, [0, 7, 1, 2])],
)
def test_loops_that_are_longer_for_some_rows(op, in_axes, x, n):
    mapped = check(parsed(LOOP % op), in_axes, {"x": normal(x), "n": np.array(n)})
    assert ("Scan" in operators(mapped)) == (op == "Exp")  # Sin is total: the Loop runs to the longest
    feeds = {"x": normal(x), "n": np.array(n)}
    derived = grad(parsed(LOOP % op), wrt="x")
    want = by_rows(derived, in_axes, feeds, 4)["x_grad"]
    np.testing.assert_allclose(session(vmap(derived, in_axes))(feeds)["x_grad"], want, rtol=1e-11)
    got = session(grad(mapped, wrt="x"))(feeds)["x_grad"]
    np.testing.assert_allclose(got, want if "x" in in_axes else want.sum(0), rtol=1e-11)


@pytest.mark.parametrize("in_axes", [{"x": 0}, {"xs": 1}, {"x": 1, "xs": 0}])
def test_scans(in_axes):
    shapes = {"x": [3], "xs": [5, 3]}
    for name, axis in in_axes.items():
        shapes[name].insert(axis, 4)
    mapped = check(parsed(SCAN), in_axes, {n: normal(s) for n, s in shapes.items()})
    assert operators(mapped).count("Scan") == 1


def test_functions_are_seen_through():
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "own": 1]>
        g (double[3] x) => (double[3] y) { h = own.twice(x) y = own.twice(h) }
        <domain: "own", opset_import: ["": 21]> twice (a) => (b) { s = Sin(a) b = Add(s, a) }""")
    assert "Scan" not in operators(check(source, {"x": 0}, {"x": normal((4, 3))}))


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_take_rows_as_a_batch(op):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    source = parsed(f"""g (float[5, 2, 3] x, float[1, {gates * 4}, 3] w, float[1, {gates * 4}, 4] r, float[1, 2, 4] h)
        => (float[5, 1, 2, 4] y, float[1, 2, 4] last) {{ y, last = {op} <hidden_size = 4> (x, w, r, , , h) }}""")
    feeds = {"x": normal((4, 5, 2, 3)), "w": normal((1, gates * 4, 3)), "r": normal((1, gates * 4, 4)),
             "h": normal((4, 1, 2, 4))}  # fmt: skip
    feeds = {n: a.astype(np.float32) for n, a in feeds.items()}
    assert op in operators(check(source, {"x": 0, "h": 0}, feeds, rtol=1e-6))
    feeds["w"] = normal((4, 1, gates * 4, 3)).astype(np.float32)
    assert op not in operators(check(source, {"x": 0, "h": 0, "w": 0}, feeds, rtol=1e-5))


#: Operators whose stacked forms no derivative asks for.
OTHERS = {
    "PRelu": ("float[2, 3] x, float[3] s", "float[2, 3]", "PRelu(x, s)", [{"x": 0}, {"x": 0, "s": 0}]),
    "RMSNormalization": ("float[2, 3] x, float[3] s", "float[2, 3]", "RMSNormalization(x, s)", [{"x": 0}]),
    "GroupNormalization": ("float[2, 4, 3] x, float[4] s, float[4] b", "float[2, 4, 3]",
                           "GroupNormalization <num_groups = 2> (x, s, b)", [{"x": 0}]),
    "DequantizeLinear": ("uint8[2, 3] q, float[3] s, uint8[3] z", "float[2, 3]",
                         "DequantizeLinear <axis = 1> (q, s, z)",
                         [{"q": 0}]),
    "QuantizeLinear": ("float[2, 3] x, float[2] s, uint8[2] z", "uint8[2, 3]", "QuantizeLinear <axis = 0> (x, s, z)",
                       [{"x": 0}]),
    "Clip": ("double[2, 3] x, double lo", "double[2, 3]", "Clip(x, lo)", [{"x": 0}, {"x": 0, "lo": 0}]),
    "Det": ("float[5, 3, 3] x", "float[5]", "Det(x)", [{"x": 0}]),
    "MeanVarianceNormalization": ("float[2, 4, 3, 3] x", "float[2, 4, 3, 3]", "MeanVarianceNormalization(x)",
                                  [{"x": 0}]),
    "BitwiseAnd": ("int32[2, 3] p, int32[3] q", "int32[2, 3]", "BitwiseAnd(p, q)", [{"p": 0}, {"q": 0}]),
}  # fmt: skip


@pytest.mark.parametrize("op", OTHERS)
def test_other_operators(op):
    inputs, out, call, ways = OTHERS[op]
    opset = 23 if op == "RMSNormalization" else 21
    source = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({out} y) {{ y = {call} }}'
    )
    for in_axes in ways:
        feeds = {}
        for v in source.graph.input:
            dims = [d.dim_value for d in v.type.tensor_type.shape.dim]
            kind = onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)
            feeds[v.name] = np.abs(5 * normal([4, *dims] if v.name in in_axes else dims)).astype(kind)
        mapped = check(source, in_axes, feeds, rtol=1e-6 if "float" in out else 1e-12)
        assert ("Scan" in operators(mapped)) == (op == "Clip" and "lo" in in_axes)


@given(programs(), st.sampled_from([{"x": 0}, {"v": 1}, {"x": 2, "v": 0}, {"w": 0}, {"c": 0, "x": 1}]))
@SMALL
@pytest.mark.filterwarnings("ignore::onnxgrad.ZeroDerivative")
def test_random_programs_and_their_gradients(program, in_axes):
    shapes = {n: list(s) for n, s in SHAPES.items()}
    feeds = {n: normal(np.insert(np.array(s, int), in_axes[n], 4) if n in in_axes else s) for n, s in shapes.items()}
    derived = grad(program.model, wrt=["x", "v"], of="y")
    for source in (program.model, derived):
        there = {v.name for v in (*source.graph.input, *source.graph.initializer)}
        in_axes = {n: axis for n, axis in in_axes.items() if n in there}
        if not in_axes:  # only weights that the gradient does not read
            continue
        mapped = vmap(source, in_axes)
        assert_sound(mapped)
        held = {n: normal(np.insert(np.array(np.shape(w), int), in_axes[n], 4)) for n, w in WEIGHTS.items()
                if n in in_axes}  # fmt: skip
        got = session(mapped)(feeds | held)
        rows = []
        for k in range(4):
            row = onnx.ModelProto.FromString(source.SerializeToString())
            for t in row.graph.initializer:
                if t.name in held:
                    t.CopyFrom(onnx.numpy_helper.from_array(np.take(held[t.name], k, in_axes[t.name]), t.name))
            at = {n: np.take(a, k, in_axes[n]) if n in in_axes else a for n, a in feeds.items()}
            rows.append(session(row)(at))
        for name, a in got.items():
            np.testing.assert_allclose(a, np.stack([r[name] for r in rows]), rtol=1e-9, atol=1e-11)


@given(control_programs(), st.sampled_from([{"x": 0}, {"x": 0, "n": 0}, {"w": 0}]))
@SMALL
def test_random_control_flow(text, in_axes):
    source = control_model(text)
    feeds = {"x": normal((4, 2) if "x" in in_axes else 2), "w": normal((4, 2) if "w" in in_axes else 2)}
    feeds = {n: (0.5 * a).astype(np.float32) for n, a in feeds.items()}
    feeds["n"] = np.array([2, 1, 3, 2]) if "n" in in_axes else np.array(2)
    mapped = vmap(source, in_axes)
    want = by_rows(source, in_axes, feeds, 4)["y"]
    np.testing.assert_allclose(session(mapped)(feeds)["y"], want, rtol=1e-4, atol=1e-5)


def test_twice():
    source = parsed("g (double[3] a, double[3] b) => (double d) { p = Mul(a, b) s = Sin(p)"
                    " d = ReduceSum <keepdims = 0> (s) }")  # fmt: skip
    table = vmap(vmap(source, {"b": 0}), {"a": 0})
    assert [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in table.graph.input] == [
        ["batch_1", 3], ["batch", 3]]  # fmt: skip
    a, b = normal((4, 3)), normal((5, 3))
    np.testing.assert_allclose(session(table)({"a": a, "b": b})["d"], np.sin(a[:, None] * b).sum(-1), rtol=1e-12)


def test_gradients_of_rows_are_gradients_of_examples():
    one, batch = net([3, 4, 2], batch=None), net([3, 4, 2])
    x = normal((6, 3))
    want = session(per_example_grad(batch, wrt=["w0", "b1"]))({"x": x})
    mapped = vmap(grad(one, wrt=["w0", "b1"]), {"x": 0})
    got = session(mapped)({"x": x})
    for name in signature(mapped).gradients.values():
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12)
    assert "Scan" not in operators(mapped)
    f = Function(one).grad(wrt="w0")
    np.testing.assert_allclose(f.vmap({"x": 0})(x), want["w0_grad"], rtol=1e-12)
    assert f.vmap({"x": 0}) is f.vmap({"x": 0})


def test_an_ensemble_of_weights_and_rows_there_are_none_of():
    source = net([3, 4, 2], batch=None)
    w, before = normal((5, 3, 4)), source.SerializeToString()
    mapped = vmap(source, {"w0": 0}, axis_size="members")
    assert source.SerializeToString() == before
    got = session(mapped)({"x": np.ones(3), "w0": w})["y"]
    assert got.shape == (5, 2)
    assert np.ptp(got, axis=0).min() > 0
    for text, in_axes in ((LINEAR, {"x": 0}), (IF % "Exp", {"x": 0}), (SCAN, {"x": 0}), (LOOP % "Exp", {"x": 0})):
        source = parsed(text)
        shapes = {"w": (3, 2), "v": 3, "xs": (5, 3)}
        got = session(vmap(source, in_axes))(
            {"x": np.zeros((0, 3)), "n": np.array(2), **{n: normal(s) for n, s in shapes.items()}}
        )
        for v in source.graph.output:
            assert got[v.name].shape == (0, *[d.dim_value for d in v.type.tensor_type.shape.dim])


def test_axes_of_outputs():
    source = parsed("g (double[3] x, double[2] u) => (double[3] y, double[2] z, double[3] x2) "
                    "{ y = Sin(x) z = Sin(u) x2 = Identity(x) }")  # fmt: skip
    x, u = normal((4, 3)), normal(2)
    got = session(vmap(source, {"x": 0}, {"y": 1, "z": None}))({"x": x, "u": u})
    np.testing.assert_allclose(got["y"], np.sin(x).T, rtol=1e-14)
    np.testing.assert_allclose(got["z"], np.sin(u), rtol=1e-14)
    np.testing.assert_array_equal(got["x2"], x)
    got = session(vmap(source, {"x": 0}, -1, axis_size=4))({"x": x, "u": u})
    np.testing.assert_allclose(got["z"], np.repeat(np.sin(u)[:, None], 4, 1), rtol=1e-14)


def test_an_input_that_is_handed_through():
    source = parsed("g (double[3] x, double[2] u) => (double[3] x, double[2] u, double[3] y) { y = Sin(x) }")
    x, u = normal((4, 3)), normal(2)
    got = Function(source).vmap({"x": 0})(x, u)
    np.testing.assert_array_equal(got["x"], x)
    np.testing.assert_array_equal(got["u"], np.stack([u] * 4))
    got = Function(source).vmap({"x": 0}, {"x": 1, "u": None})(x, u)
    np.testing.assert_array_equal(got["x"], x.T)
    np.testing.assert_array_equal(got["u"], u)


def test_a_loop_that_is_longer_for_some_rows_of_some_rows():
    source = parsed(LOOP % "Sin")
    x, n = normal((2, 3)), np.array([[1, 2], [3, 0], [5, 5]])
    got = session(vmap(vmap(source, {"x": 0, "n": 0}), {"n": 0}))({"x": x, "n": n})["y"]
    one = session(source)
    for i, k in np.ndindex(n.shape):
        np.testing.assert_allclose(got[i, k], one({"x": x[k], "n": n[i, k]})["y"], rtol=1e-12)


SEQUENCE = """g (double[3] x, seq(double[3]) q) => (double[3] y, seq(double[3]) r) {
    i = Constant <value = int64 {0}> () h = SequenceAt(q, i) y = Add(x, h) r = SequenceInsert(q, x) }"""
NONZERO = "g (double[3] x) => (int64[1, K] y) { y = NonZero(x) }"


@pytest.mark.parametrize(
    ("text", "arguments", "error", "says"),
    [
        (LINEAR, ({"q": 0},), UnknownName, "'q'"),
        (LINEAR, ({"x": 0}, {"q": 0}), UnknownName, "'q'"),
        (LINEAR, ({"x": 2},), BadInput, "'x' has 2 axes with the batch axis, which cannot be axis 2"),
        (LINEAR, ({"x": "0"},), BadInput, "batch axis of 'x'"),
        (LINEAR, ({"x": None},), BadInput, "no input is mapped"),
        (LINEAR, ({"x": 0}, None), BadInput, "output 'y' differs between rows"),
        (SEQUENCE, ({"q": 0},), BadInput, "input 'q' is a sequence"),
        (SEQUENCE, ({"x": 0},), BadInput, "output 'r' is a sequence"),
        (NONZERO, ({"x": 0},), BadInput, "the size of output 'y' may differ between rows.*NonZero"),
        (LINEAR, ({"x": 0}, 0, 0), BadInput, "axis_size"),
    ],
)
def test_what_cannot_be(text, arguments, error, says):
    *axes, size = arguments if len(arguments) == 3 else (*arguments, "batch")
    with pytest.raises(error, match=says):
        vmap(parsed(text), *axes, axis_size=size)


def test_sequences_inside_a_row_run_row_by_row():
    source = parsed("""g (double[3] x) => (double[6] y) { a = Sin(x) s = SequenceConstruct(x, a)
        y = ConcatFromSequence <axis = 0> (s) }""")
    check(source, {"x": 0}, {"x": normal((4, 3))})


def test_random_operators_draw_for_every_row_that_they_read():
    source = parsed("""g (float[50] x) => (float[50] y, float[50] z) {
        y = RandomNormalLike(x) z = RandomNormal <shape = [50]> () }""")
    got = session(vmap(source, {"x": 0}))({"x": np.zeros((2, 50), np.float32)})
    assert (got["y"][0] != got["y"][1]).all()
    assert (got["z"][0] == got["z"][1]).all()

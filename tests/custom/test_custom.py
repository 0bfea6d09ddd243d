"""Rules of a user's own: for operators, local functions and sub-graphs; in Python and as ONNX graphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad import (
    BadInput,
    NotDifferentiable,
    UnknownName,
    custom_jvp,
    custom_rules,
    custom_vjp,
    grad,
    hessian,
    jvp,
    load_rule,
    vjp,
)
from onnxgrad.custom import iterate
from onnxgrad.errors import RuleError
from onnxgrad.model_io import local_functions
from tests.commands import command
from tests.model_io.function_models import parsed
from tests.model_io.test_local_functions import run
from tests.models import assert_sound

X = np.array([-1.5, 0.0, 2.0], np.float32)
CUBE = """m (float[N] x, float[N] w) => (float[] l)
    { a = Tanh (x)  s = Mul (a, a)  c = Mul (s, a)  y = Mul (c, w)  l = ReduceSum <keepdims = 0> (y) }"""
FUNCTION = """m (float[N] x) => (float[] l)
    { a = my.F <k = 3.0> (x)  b = my.F (a)  l = ReduceSum <keepdims = 0> (b) }
    <domain: "my", opset_import: ["" : 21]> F <k: float = 0.5> (v) => (u)
    { c = Constant <value_float: float = @k> ()  p = Mul (v, c)  u = Sin (p) }"""


@custom_vjp(inputs=["a"], outputs=["c"])
def cube(op, g, a):
    return g * (3 * a * a)


def gradient(model, rules, **feeds):
    derived = grad(model, wrt="x", rules=rules)
    assert_sound(derived)
    return run(derived, feeds)["x_grad"]


def test_a_sub_graph():
    w = np.array([1, 2, 3], np.float32)
    true = gradient(parsed(CUBE), [], x=X, w=w)
    np.testing.assert_allclose(gradient(parsed(CUBE), [cube], x=X, w=w), true, rtol=1e-6)
    false = custom_vjp(rule=lambda op, g, a: g * 7, inputs=["a"], outputs=["c"])
    np.testing.assert_allclose(gradient(parsed(CUBE), [false], x=X, w=w), 7 * w * (1 - np.tanh(X) ** 2), rtol=1e-6)
    pushed = run(jvp(parsed(CUBE), wrt="x", rules=[false]), {"x": X, "w": w, "x_tangent": np.ones(3, np.float32)})
    np.testing.assert_allclose(pushed["l_tangent"], (7 * w * (1 - np.tanh(X) ** 2)).sum(), rtol=1e-6)


def test_a_sub_graph_whose_inside_is_read_outside():
    """The rule holds for the path through the sub-graph; beside it, all is as before."""
    source = parsed(CUBE.replace("y = Mul (c, w)", "q = Add (c, s)  y = Mul (q, w)"))
    false = custom_vjp(rule=lambda op, g, a: g * 7, inputs=["a"], outputs=["c"])
    t, w = np.tanh(X), np.ones(3, np.float32)
    np.testing.assert_allclose(gradient(source, [false], x=X, w=w), (7 + 2 * t) * (1 - t * t), rtol=1e-5)


def test_a_derivative_of_a_derivative_takes_the_rule_again():
    w = np.ones(3, np.float32)
    with custom_rules(cube):
        second = grad(grad(parsed(CUBE), wrt="x"), wrt="x")
        whole = hessian(parsed(CUBE), wrt="x")
    got, full = run(second, {"x": X, "w": w}), run(whole, {"x": X, "w": w})
    t = np.tanh(X)
    want = 6 * t * (1 - t**2) ** 2 - 6 * t**3 * (1 - t**2)
    np.testing.assert_allclose(next(v for k, v in got.items() if k.startswith("x_grad")), want, rtol=1e-5)
    np.testing.assert_allclose(np.diag(next(v for v in full.values() if v.ndim == 2)), want, rtol=1e-5)


def test_what_a_sub_graph_also_reads_must_not_be_differentiated():
    rule = custom_vjp(rule=lambda op, g, c: g, inputs=["c"], outputs=["y"])
    gradient(parsed(CUBE), [rule], x=X, w=X)
    for derive in (vjp, jvp):
        with pytest.raises(NotDifferentiable, match=r"also reads 'w'.*\n.*inputs"):
            derive(parsed(CUBE), wrt=["x", "w"], rules=[rule])


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "says"),
    [
        (["b"], ["c"], UnknownName, "no value named 'b'"),
        (["a"], ["z"], UnknownName, "no value named 'z'"),
        (["c"], ["a"], BadInput, "'a' is not computed from its inputs"),
        (["a"], ["a"], BadInput, "'a' is not computed from its inputs"),
        (["a", "w"], ["c"], BadInput, "does not read 'w'"),
        (["x", "y"], ["a", "l"], BadInput, "no sub-graph: its inputs depend on its outputs"),
    ],
)
def test_what_is_no_sub_graph(inputs, outputs, error, says):
    rule = custom_vjp(rule=lambda op, g, *xs: None, inputs=inputs, outputs=outputs)
    with pytest.raises(error, match=says):
        grad(parsed(CUBE), wrt="x", rules=[rule])


def test_what_a_rule_is_for_is_said_once():
    for given in ({}, {"operator": "a::B", "inputs": ["x"]}, {"inputs": ["x"]}, {"outputs": ["x"]}):
        with pytest.raises(BadInput, match="one operator or function, or for one sub-graph"):
            custom_vjp(rule=lambda op, g: g, **given)
    with pytest.raises(BadInput, match="lists of names"):
        custom_vjp(inputs="x", outputs="y")
    with pytest.raises(BadInput, match="not a int"):
        custom_vjp("a::B", 3)
    with pytest.raises(BadInput, match="not a function"):
        grad(parsed(CUBE), wrt="x", rules=[lambda op, g: g])


def test_a_local_function_keeps_its_call_and_its_attributes():
    seen = []

    @custom_vjp("my::F")
    def scaled(op, g, v, u):
        seen.append(op.attr("k"))
        return g * op.attr("k")

    derived = grad(parsed(FUNCTION), wrt="x", rules=[scaled])
    assert_sound(derived)
    assert seen == [0.5, 3.0]
    np.testing.assert_allclose(run(derived, {"x": X})["x_grad"], np.full(3, 1.5), rtol=1e-6)
    both = vjp(parsed(FUNCTION), wrt="x", rules=[scaled])
    assert [f.name for f in both.functions] == ["F"]
    np.testing.assert_allclose(
        run(both, {"x": X, "l_cotangent": np.array(1, np.float32)})["l"], np.sin(0.5 * np.sin(3 * X)).sum(), rtol=1e-6
    )
    assert not grad(parsed(FUNCTION), wrt="x").functions, "the rule holds for its call alone"


def test_a_standard_operator():
    rule = custom_jvp("Tanh", lambda op, tangents, x, y: tangents[0] * 5)
    w = np.ones(3, np.float32)
    np.testing.assert_allclose(gradient(parsed(CUBE), [rule], x=X, w=w), 15 * np.tanh(X) ** 2, rtol=1e-5)
    pushed = run(jvp(parsed(CUBE), wrt="x", rules=[rule]), {"x": X, "w": w, "x_tangent": w})
    np.testing.assert_allclose(pushed["l_tangent"], (15 * np.tanh(X) ** 2).sum(), rtol=1e-5)


def test_inside_loops_and_branches():
    source = parsed("""m (float[3] x) => (float[] l)
        { n = Constant <value = int64 {3}> ()  c = Constant <value = bool {1}> ()
          z = Loop (n, c, x) <body = step (int64 i, bool go, float[3] s) => (bool on, float[3] t)
            { on = Identity (go)  k = ReduceMax <keepdims = 0> (s)  o = Constant <value_float = -9.0> ()
              p = Greater (k, o)
              t = If (p) <then_branch = g () => (u) { u = my.F (s) }, else_branch = h () => (v) { v = Neg (s) }> }>
          l = ReduceSum <keepdims = 0> (z) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u) { u = Sin (v) }""")
    rule = custom_vjp("my::F", lambda op, g, v: g * 2)
    np.testing.assert_allclose(gradient(source, [rule], x=X), np.full(3, 8.0))
    pushed = run(jvp(source, wrt="x", rules=[rule]), {"x": X, "x_tangent": np.ones(3, np.float32)})
    np.testing.assert_allclose(pushed["l_tangent"], 24.0)


TWO = """m (float[N] x, float[N] w) => (float[] l, float[] k) <float[N] a, float[N] b>
    { a, b = acme.Two (x, w)  l = ReduceSum <keepdims = 0> (a)  k = ReduceSum <keepdims = 0> (b) }"""


class Two(OpRun):
    op_domain = "acme"

    def _run(self, x, w):
        return x * w, x + w


def test_an_operator_of_a_domain_of_its_own():
    """Several results: a cotangent of each, None for one that nothing depends on."""
    source = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21, "acme" : 2]>' + TWO)

    @custom_vjp("acme::Two")
    def two(op, g, x, w, a, b):
        assert isinstance(g, tuple)
        g_a, g_b = (op.zeros_like(x) if u is None else u for u in g)
        return g_a * w + g_b, g_a * x + g_b

    with pytest.raises(NotDifferentiable, match=r"Two.*acme"):
        grad(source, wrt="x")
    w = np.array([1, 2, 3], np.float32)
    for of, want in ((None, w + 1), ("l", w), ("k", np.ones(3))):
        derived = grad(source, wrt="x", of=of, rules=[two])
        got = ReferenceEvaluator(derived, new_ops=[Two]).run(None, {"x": X, "w": w})
        np.testing.assert_allclose(got[0], want)
    pushed = jvp(source, wrt="w", of="l", rules=[two])
    got = ReferenceEvaluator(pushed, new_ops=[Two]).run(["l_tangent"], {"x": X, "w": w, "w_tangent": w})
    np.testing.assert_allclose(got[0], (X * w).sum())
    untyped = onnx.ModelProto.FromString(source.SerializeToString())
    del untyped.graph.value_info[:]
    with pytest.raises(NotDifferentiable, match=r"the type of 'a' is not known; declare it"):
        jvp(untyped, wrt="w", of="l", rules=[two])


def test_rules_that_break_their_contract_are_told_with_the_node():
    w = np.ones(3, np.float32)
    few = custom_vjp("Mul", lambda op, g, a, b: [g])
    with pytest.raises(RuleError, match="a rule returns a value for each input"):
        gradient(parsed(CUBE), [few], x=X, w=w)
    with pytest.raises(RuleError, match=r"returns values that `op` wrote.*not 0\.0"):
        gradient(parsed(CUBE), [custom_vjp("Tanh", lambda op, g, x: 0.0)], x=X, w=w)
    wrong = custom_vjp("Tanh", lambda op, g, x: op.Cast(g, to=T.DOUBLE))
    with pytest.raises(RuleError, match="the rule of Tanh node 'a'"):
        gradient(parsed(CUBE), [wrong], x=X, w=w)


# --- rules that are ONNX graphs ---------------------------------------------------------------------

SEVEN = """m (float[N] g, float[N] v) => (float[N] d)
    { c = Constant <value_float = 7.0> ()  p = Mul (g, c)  d = Mul (p, v) }"""


def as_function() -> onnx.FunctionProto:
    made = parsed(SEVEN).graph
    return helper.make_function("rules", "Seven", ["g", "v"], ["d"], made.node, [helper.make_opsetid("", 21)])


@pytest.mark.parametrize("graph", [parsed(SEVEN), as_function()], ids=["model", "function"])
def test_a_rule_that_is_a_graph_goes_through_a_file(graph, tmp_path):
    t, w = np.tanh(X), np.ones(3, np.float32)
    want = 7 * t * (1 - t * t)
    rule = custom_vjp(rule=graph, inputs=["a"], outputs=["c"])
    np.testing.assert_allclose(gradient(parsed(CUBE), [rule], x=X, w=w), want, rtol=1e-5)
    rule.save(tmp_path / "rule.onnx")
    assert load_rule(tmp_path / "rule.onnx") == rule
    np.testing.assert_allclose(gradient(parsed(CUBE), [tmp_path / "rule.onnx"], x=X, w=w), want, rtol=1e-5)
    pushed = run(jvp(parsed(CUBE), wrt="x", rules=[rule]), {"x": X, "w": w, "x_tangent": w})
    np.testing.assert_allclose(pushed["l_tangent"], want.sum(), rtol=1e-5)


def test_a_pushforward_that_is_a_graph(tmp_path):
    rule = custom_jvp("my::F", parsed(SEVEN))
    rule.save(tmp_path / "rule.onnx")
    loaded = load_rule(tmp_path / "rule.onnx")
    assert (loaded.mode, loaded.operator) == ("jvp", ("my", "F"))
    np.testing.assert_allclose(gradient(parsed(FUNCTION), [loaded], x=X), 49 * X * np.sin(3 * X), rtol=1e-5)


def test_files_that_are_no_rules(tmp_path):
    onnx.save(parsed(CUBE), tmp_path / "model.onnx")
    with pytest.raises(BadInput, match="no rule that onnxgrad wrote"):
        load_rule(tmp_path / "model.onnx")
    with pytest.raises(BadInput, match="Python function cannot be kept in a file"):
        cube.save(tmp_path / "rule.onnx")


def test_a_rule_on_the_command_line(tmp_path):
    onnx.save(parsed(CUBE), tmp_path / "model.onnx")
    custom_vjp(rule=parsed(SEVEN), inputs=["a"], outputs=["c"]).save(tmp_path / "rule.onnx")
    args = ["grad", tmp_path / "model.onnx", "--wrt", "x", "--rule", tmp_path / "rule.onnx", "-o", tmp_path / "d.onnx"]
    done = command(*args)
    assert done.returncode == 0, done.stderr
    t = np.tanh(X)
    got = run(onnx.load(tmp_path / "d.onnx"), {"x": X, "w": np.ones(3, np.float32)})["x_grad"]
    np.testing.assert_allclose(got, 7 * t * (1 - t * t), rtol=1e-5)


def test_a_graph_gives_what_is_due():
    few = custom_vjp("Mul", parsed("m (float[N] g, float[N] a, float[N] b) => (float[N] d) { d = Mul (g, b) }"))
    with pytest.raises(NotDifferentiable, match=r"Mul node.*gives 1 results, but 2 are due"):
        gradient(parsed(CUBE), [few], x=X, w=X)
    many = custom_vjp(
        "Tanh", parsed("m (float[N] a, float[N] b, float[N] c, float[N] d) => (float[N] e) { e = Mul (a, b) }")
    )
    with pytest.raises(NotDifferentiable, match="takes 4 operands, but there are 3"):
        gradient(parsed(CUBE), [many], x=X, w=X)
    first = custom_vjp("Mul", few.graph, wrt=[0])  # said to be all
    t = np.tanh(X)
    np.testing.assert_allclose(gradient(parsed(CUBE), [first], x=X, w=X), X * t * t * (1 - t * t), rtol=1e-5, atol=1e-7)


def test_a_rule_inside_functions_that_stay_functions(monkeypatch):
    monkeypatch.setattr(local_functions, "SMALLEST", 0)
    monkeypatch.setattr(local_functions, "SAVES", -(10**9))
    source = parsed("""m (float[N] x) => (float[] l)
        { a = my.G (x)  b = my.G (a)  l = ReduceSum <keepdims = 0> (b) }
        <domain: "my", opset_import: ["" : 21, "my" : 1]> G (v) => (u) { p = my.F <k = 2.0> (v)  u = Neg (p) }
        <domain: "my", opset_import: ["" : 21]> F <k: float = 0.5> (v) => (u)
        { c = Constant <value_float: float = @k> ()  u = Mul (v, c) }""")
    rule = custom_vjp("my::F", lambda op, g, v: g * (3 * op.attr("k")))
    derived = grad(source, wrt="x", rules=[rule])
    assert [f.name for f in derived.functions if "backward" in f.name] == ["G_backward"]
    np.testing.assert_allclose(run(derived, {"x": X})["x_grad"], np.full(3, 36.0))
    pushed = run(jvp(source, wrt="x", rules=[rule]), {"x": X, "x_tangent": np.ones(3, np.float32)})
    np.testing.assert_allclose(pushed["l_tangent"], 108.0)


def test_a_rule_holds_in_a_training_step():
    from onnxgrad.training import attach, compile_step

    seen = []

    @custom_vjp("my::F")
    def rule(op, g, v):
        seen.append(op.attr("k"))
        return g

    source = parsed(
        FUNCTION.replace("(float[N] x) => (float[] l)", "(float[N, 2] x) => (float[N, 1] b) <float[2, 1] w = {1, 2}>")
        .replace("a = my.F <k = 3.0> (x)  b = my.F (a)", "a = MatMul (x, w)  b = my.F (a)")
        .replace("  l = ReduceSum <keepdims = 0> (b)", "")
    )
    with custom_rules(rule):
        compile_step(attach(source, loss="mse", optimizer="sgd", learning_rate=0.1))
    assert seen == [0.5]


def test_iterate_stops_by_what_moves_beside_what_there_is():
    """A cotangent may be of any scale: the mean over a batch makes it tiny."""
    source = parsed("""m (double[N] x) => (double[] l)
        { z = my.Half (x)  s = Constant <value = double {1e-12}> ()  t = Mul (z, s)  l = ReduceSum <keepdims = 0> (t) }
        <domain: "my", opset_import: ["" : 21]> Half (x) => (z) { z = Add (x, x) }""")

    @custom_vjp("my::Half")
    def rule(op, g, x, z):
        return iterate(op, lambda b, u: b.Add(g, u * 0.5), g, tolerance=1e-9)  # z = x + z/2

    got = run(grad(source, wrt="x", rules=[rule]), {"x": X.astype(float)})["x_grad"]
    np.testing.assert_allclose(got, 2e-12, rtol=1e-8)
    pushed = run(jvp(source, wrt="x", rules=[rule]), {"x": X.astype(float), "x_tangent": np.ones(3)})["l_tangent"]
    np.testing.assert_allclose(pushed, 6e-12, rtol=1e-8)

"""Local functions that stay functions: the same numbers as inlined, in every mode and order, in smaller models."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest

from onnxgrad import (
    BadInput,
    NoRule,
    custom_vjp,
    gauss_newton_vp,
    grad,
    hvp,
    jvp,
    linearize,
    signature,
    split_vjp,
    straight_through,
    value_and_grad,
    vjp,
)
from onnxgrad.engine import reverse
from onnxgrad.errors import RuleError
from onnxgrad.model_io import local_functions
from onnxgrad.transforms import derivation
from tests.model_io.function_models import Random, parsed, transformer
from tests.models import assert_sound, nodes_of

#: What the names of sizes stand for; 3 where nothing is said.
SIZES = {"M": 5}
WEIGHTS = ("wq0", "w21", "g1", "x")


@pytest.fixture
def all_kept(monkeypatch):
    """Every function stays one, however small."""
    monkeypatch.setattr(local_functions, "SMALLEST", 0)
    monkeypatch.setattr(local_functions, "SAVES", -(10**9))


def inlined(derive, *args, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_functions, "SAVES", 10**9)
        made = derive(*args, **kwargs)
    assert not made.functions
    return made


def run(proto: onnx.ModelProto, feeds) -> dict[str, np.ndarray]:
    """On ONNX Runtime, which must be able to."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in proto.graph.output], session.run(None, feeds)))


def agree(a: onnx.ModelProto, b: onnx.ModelProto, feeds=None, tolerance: float = 1e-6) -> None:
    """Both models are sound, and give the same."""
    feeds = dict(feeds or {})
    rng = np.random.default_rng(5)
    for i in a.graph.input:
        dims = [d.dim_value or SIZES.get(d.dim_param, 3) for d in i.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        feeds.setdefault(i.name, rng.standard_normal(dims).astype(dtype))
    assert_sound(a)
    got, want = run(a, feeds), run(b, feeds)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("derive", [grad, value_and_grad, vjp, jvp])
def test_a_transformer_of_one_function(derive):
    source = transformer(8)
    kept = derive(source, wrt=WEIGHTS)
    assert kept.functions
    agree(kept, inlined(derive, source, wrt=WEIGHTS), tolerance=1e-5)


@pytest.mark.parametrize("layers", [24, pytest.param(48, marks=pytest.mark.complete)])
def test_many_layers_are_not_many_copies(layers):
    source = transformer(layers)
    wrt = [t.name for t in source.graph.initializer]
    kept = grad(source, wrt=wrt)
    flat = inlined(grad, source, wrt=wrt)
    assert len(kept.functions) <= 4  # two of them: the first layer need not hand on
    count = sum(1 for _ in nodes_of(kept.graph)) + sum(len(f.node) for f in kept.functions)
    assert count < 400
    assert count < len(flat.graph.node) / (layers / 4.8)
    added = [len(m.SerializeToString()) - len(source.SerializeToString()) for m in (kept, flat)]
    assert added[0] < added[1] / 3
    agree(kept, flat, {"x": np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)}, tolerance=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("outer", [grad, jvp])
@pytest.mark.parametrize("inner", [grad, jvp])
def test_second_order(inner, outer):
    source = transformer(5, shape=(1, 2))

    def both():
        first = inner(source, wrt=["wq0", "x"])
        of = [*signature(first).gradients.values(), *signature(first).output_tangents.values()]
        return outer(first, wrt=["w21", "x"], of=of)

    kept = both()
    assert any("forward" in f.name for f in kept.functions)
    agree(kept, inlined(both), tolerance=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(14))
def test_random_programs(seed, all_kept):
    source = Random(seed).model()
    for derive in (vjp, jvp):
        kept = derive(source, wrt=["x", "w"])
        assert kept.functions
        agree(kept, inlined(derive, source, wrt=["x", "w"]), tolerance=2e-5)
    if seed % 4 == 0:
        first = vjp(source, wrt="x")
        of = signature(first).gradients["x"]
        for derive in (vjp, jvp):
            agree(
                derive(first, wrt="x", of=of),
                inlined(derive, inlined(vjp, source, wrt="x"), wrt="x", of=of),
                tolerance=1e-4,
            )


# --- what differs from call to call -----------------------------------------------------------------

CASES = {
    "sizes": """
        m (float[N, 3] x, float[2, 3] w) => (float[] y)
        { a = my.F (x)  b = my.F (w)  c = my.F (a)  d = my.F (b)  s = ReduceSum <keepdims = 0> (c)
          t = ReduceSum <keepdims = 0> (d)  y = Add (s, t) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u)
        { m = ReduceMean <keepdims = 1> (v)  d = Sub (v, m)  t = Tanh (d)  u = Mul (t, v) }""",
    "sizes that only a run tells are others in each call": """
        m (float[N] x, float[N] w) => (float[] y)
        { a = my.Positive (x)  b = my.Positive (w)  o = Constant <value_ints = [1]> ()
          r = Constant <value_ints = [1, -1]> ()  f = Constant <value_ints = [0]> ()
          first = Slice (b, f, o)  c = Mul (a, first)  d = my.Positive (c)  e = Mul (d, b)
          y = ReduceSum <keepdims = 0> (e) }
        <domain: "my", opset_import: ["" : 21]> Positive (v) => (u)
        { z = Constant <value_float = 0.0> ()  k = Greater (v, z)  p = Compress (v, k)  u = Exp (p) }""",
    "axes and shapes as operands": """
        m (float[2, 3] x, float[6] w) => (float[] y)
        { s = Constant <value_ints = [3, 2]> ()  r = Constant <value_ints = [6]> ()  k = Constant <value_ints = [0]> ()
          a = my.F (x, s, k)  b = my.F (w, s, k)  c = my.F (a, r, k)  d = my.F (b, r, k)
          e = Mul (c, d)  y = ReduceSum <keepdims = 0> (e) }
        <domain: "my", opset_import: ["" : 21]> F (v, s, k) => (u)
        { q = Reshape (v, s)  m = ReduceMax (q, k)  d = Sub (q, m)  u = Exp (d) }""",
    "operands that are left out": """
        m (float[N, 3] x, float[3] w) => (float[] y)
        { a = my.F (x, w)  b = my.F (a)  c = my.F (b, w)  y = ReduceSum <keepdims = 0> (c) }
        <domain: "my", opset_import: ["" : 21]> F (v, b) => (u)
        { h = Constant <value_float = 0.9> ()  l = Constant <value_float = -0.9> ()  t = Tanh (v)
          u = Clip (t, l, h)  }""",
    "results that are operands or the same twice": """
        m (float[N] x, float[N] w) => (float[] y)
        { a, b, c = my.F (x, w)  d, e, f = my.F (c, b)  g = Mul (d, e)  h = Add (g, f)
          y = ReduceSum <keepdims = 0> (h) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (v, t, s)
        { t = Sin (v)  s = Add (w, t) }""",
    "the same operand twice": """
        m (float[N] x, float[N] w) => (float[] y)
        { a = my.F (x, x)  b = my.F (a, w)  y = ReduceSum <keepdims = 0> (b) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (s)
        { t = Sin (v)  s = Mul (w, t) }""",
    "calls in a loop, and a loop in the function": """
        m (float[3] x, float[3] w) => (float[] y)
        { n = Constant <value = int64 {3}> ()  c = Constant <value = bool {1}> ()
          z = Loop (n, c, x) <body = step (int64 i, bool go, float[3] s) => (bool on, float[3] t)
            { on = Identity (go)  a = my.F (s, w)  t = my.F (a, x) }>
          q = my.F (z, w)  y = ReduceSum <keepdims = 0> (q) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (u)
        { n = Constant <value = int64 {2}> ()  c = Constant <value = bool {1}> ()
          u = Loop (n, c, v) <body = inner (int64 i, bool go, s) => (bool on, t)
            { on = Identity (go)  p = Mul (s, w)  t = Tanh (p) }>
        }""",
    "a branch in the function": """
        m (float[3] x, float[3] w) => (float[] y)
        { a = my.F (x, w)  b = my.F (a, w)  q = my.F (b, x)  y = ReduceSum <keepdims = 0> (q) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (u)
        { z = Constant <value_float = 0.0> ()  s = ReduceSum <keepdims = 0> (v)  k = Greater (s, z)
          u = If (k) <then_branch = g () => (p) { p = Mul (v, w) }, else_branch = h () => (q) { q = Sin (v) }> }""",
    "one body for calls of other sizes": """
        m (float[N] x, float[M] w) => (float[] y)
        { a = my.F (x)  b = my.F (w)  s = ReduceSum <keepdims = 0> (a)  t = ReduceSum <keepdims = 0> (b)
          y = Mul (s, t) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u)
        { z = Constant <value_float = 0.5> ()  s = ReduceMax <keepdims = 0> (v)  k = Greater (s, z)
          n = Constant <value = int64 {3}> ()  c = Constant <value = bool {1}> ()
          p = Loop (n, c, v) <body = step (int64 i, bool go, r) => (bool on, t)
            { on = Identity (go)  q = Mul (r, v)  t = Tanh (q) }>
          u = If (k) <then_branch = g () => (e) { e = Mul (v, p) }, else_branch = h () => (f) { f = Sin (v) }> }""",
    "sequences": """
        m (float[3] x, float[3] w) => (float[] y)
        { s = SequenceConstruct (x, w)  a = my.F (s)  b = my.F (a)  e = ConcatFromSequence <axis = 0> (b)
          y = ReduceSum <keepdims = 0> (e) }
        <domain: "my", opset_import: ["" : 21]> F (s) => (r)
        { o = Constant <value = int64 {1}> ()  n = Constant <value = int64 {0}> ()  v = SequenceAt (s, n)
          w = SequenceAt (s, o)  t = Mul (v, w)  u = Sin (v)  r = SequenceConstruct (t, u) }""",
    "operators that are lowered": """
        m (float[2, 3] x, float[2, 3] w) => (float[] y)
        { a = my.F (x)  b = my.F (a)  p = Mul (b, w)  y = ReduceSum <keepdims = 0> (p) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u)
        { m = MeanVarianceNormalization <axes = [1]> (v)  u = Sin (m) }""",
    "statistics of the primal": """
        m (float[2, 3] x, float[3] w) => (float[] y)
        { a = my.F (x, w)  b = my.F (a, w)  s = Sin (b)  y = ReduceSum <keepdims = 0> (s) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (u) { u = LayerNormalization <axis = -1> (v, w) }""",
    "a scan in the function": """
        m (float[4, 3] x, float[3] w) => (float[] y)
        { a = my.F (x, w)  b = my.F (a, w)  y = ReduceSum <keepdims = 0> (b) }
        <domain: "my", opset_import: ["" : 21]> F (v, w) => (u)
        { z, u = Scan <num_scan_inputs = 1, body = step (s, e) => (t, o)
            { p = Mul (s, e)  q = Add (p, w)  t = Tanh (q)  o = Identity (t) }> (w, v) }""",
    "a shape that is computed outside": """
        m (float[N, 3] x, float[3] w) => (float[] y)
        { s = Shape (x)  f = Constant <value_ints = [-1]> ()  g = Reshape (x, f)  a = my.F (g, s)  b = Mul (a, w)
          c = my.F (b, f)  d = my.F (c, s)  y = ReduceSum <keepdims = 0> (d) }
        <domain: "my", opset_import: ["" : 21]> F (v, s) => (u) { r = Reshape (v, s)  t = Tanh (r)  u = Mul (t, r) }""",
    "integers beside floats": """
        m (float[4] x, float[4] w) => (float[] y)
        { k = Constant <value_ints = [2]> ()  v, i = TopK (x, k)  a, j = my.F (x, i)  b, l = my.F (w, j)
          p = Mul (a, b)  y = ReduceSum <keepdims = 0> (p) }
        <domain: "my", opset_import: ["" : 21]> F (v, i) => (u, j)
        { g = Gather (v, i)  u = Exp (g)  j = Identity (i) }""",
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("derive", [vjp, jvp])
def test_calls(name, derive, all_kept):
    source = parsed(CASES[name])
    feeds = {"x": np.linspace(-0.5, 1.5, 6).astype(np.float32), "w": np.linspace(1, -0.7, 6).astype(np.float32)}
    for value in source.graph.input:
        dims = [d.dim_value or SIZES.get(d.dim_param, 3) for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.resize(feeds[value.name], dims)
    kept = derive(source, wrt=["x", "w"])
    assert kept.functions
    if name.startswith("results"):  # which the onnx package's inliner gets wrong
        agree(kept, inlined(derive, source, wrt=["x", "w"]), feeds)
    else:
        agree(kept, derive(onnx.inliner.inline_local_functions(source), wrt=["x", "w"]), feeds)
    again = vjp(kept, wrt="x", of=[o.name for o in kept.graph.output if o.name.endswith(("_grad", "_tangent"))])
    flat = inlined(derive, source, wrt=["x", "w"])
    agree(again, inlined(vjp, flat, wrt="x", of=[o.name for o in flat.graph.output if o.name != "y"]), feeds)


@pytest.mark.parametrize("derive", [hvp, gauss_newton_vp])
def test_products(derive):
    source = transformer(5, shape=(1, 2))
    kept = derive(source, wrt=["wq0", "x"])
    assert kept.functions
    agree(kept, inlined(derive, source, wrt=["wq0", "x"]), tolerance=1e-4)


@pytest.mark.parametrize("derive", [linearize, split_vjp])
def test_halves(derive):
    source = transformer(5, shape=(1, 2))
    x = np.random.default_rng(0).standard_normal((1, 2, 8)).astype(np.float32)
    halves = derive(source, wrt=["wq0", "x"])
    whole = (jvp if derive is linearize else vjp)(source, wrt=["wq0", "x"])
    assert halves.forward.functions
    assert halves.linear.functions
    rng = np.random.default_rng(1)
    seeds = [i.name for i in whole.graph.input if i.name != "x"]
    sizes = {"wq0_tangent": (8, 8), "x_tangent": (1, 2, 8), "y_cotangent": ()}
    given = {n: np.asarray(rng.standard_normal(sizes[n]), np.float32) for n in seeds}
    first = run(halves.forward, {"x": x})
    reads = {i.name for i in halves.linear.graph.input}
    second = run(halves.linear, {k: v for k, v in {**first, "x": x, **given}.items() if k in reads})
    want = run(whole, {"x": x, **given})
    for name, array in second.items():
        np.testing.assert_allclose(array, want[name], rtol=1e-4, atol=1e-5)


# --- where a function cannot stay one ---------------------------------------------------------------


def test_names_inside_a_function_inline_it():
    derived = vjp(transformer(8), wrt="scores", of="y")
    assert not derived.functions
    assert "scores_grad" in {o.name for o in derived.graph.output}


@pytest.fixture
def derivations(monkeypatch):
    """The derivations that are begun, one entry for each."""
    begun = []
    monkeypatch.setattr(derivation, "reverse", lambda *args: begun.append(args) or reverse(*args))
    return begun


def test_what_no_function_is_to_blame_for_is_derived_once(all_kept, derivations):
    source = parsed("""m (float[3] x) => (float[3] y, float[3] z, int64[1] k) {
        y = my.F (x)  m = odd.Op (x)  z = Mul (m, x)  k = Shape (x) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u) { u = Sin (v) }""")
    source.opset_import.add(domain="odd", version=1)
    with pytest.raises(NoRule, match="Op node"):
        vjp(source, wrt="x", of="z")
    assert len(derivations) == 1
    for wrong in ({"wrt": "nowhere", "of": "y"}, {"wrt": "x", "of": "k"}, {"wrt": []}):
        with pytest.raises(BadInput):
            vjp(source, **wrong)
    assert len(derivations) == 1


def test_what_stands_in_the_way_inside_a_function_is_told_with_its_path(all_kept):
    unknown = parsed("""m (float[3] x) => (float[3] y) { a = my.F (x)  y = my.F (a) }
        <domain: "my", opset_import: ["" : 21, "odd" : 1]> F (v) => (u) { b = odd.Op (v)  u = Mul (b, v) }""")
    unknown.opset_import.add(domain="odd", version=1)
    with pytest.raises(NoRule, match=r"Op node 'b'.*\n.*x → \[Op\] → Mul → Mul → y\n.*Op node 'b_2'"):
        vjp(unknown, wrt="x")


def test_a_bug_in_a_rule_inside_a_function_surfaces_at_once(all_kept):
    called = []

    def broken(op, g, x):
        called.append(op.node.name)
        raise ValueError("a bug")

    model = parsed("""m (float[3] x) => (float[3] y) { y = my.F (x) }
        <domain: "my", opset_import: ["" : 21]> F (v) => (u) { u = Tanh (v) }""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(RuleError, match="a bug"):
        vjp(model, wrt="x", rules=[custom_vjp("Tanh", broken)])
    assert len(called) == 1


def test_a_path_beside_what_has_no_derivative(all_kept):
    """Only one result of the function can be differentiated, and only that one is asked for."""
    source = parsed("""m (float[3] x) => (float[3] y, float[3] z) { y, z = my.F (x) }
        <domain: "my", opset_import: ["" : 21, "odd" : 1]> F (v) => (u, w)
        { u = Sin (v)  m = odd.Op (v)  w = Add (m, v) }""")
    source.opset_import.add(domain="odd", version=1)
    derived = vjp(source, wrt="x", of="y")
    assert derived.functions
    assert all("odd" not in n.domain for f in derived.functions if "backward" in f.name for n in f.node)


def test_many_directions_at_once_inline():
    """The body of a function has a form for a stack of directions; a call has none."""
    derived = vjp(transformer(8, shape=(1, 2)), wrt="wq0", directions=3)
    assert not derived.functions


@pytest.mark.parametrize("opset", [17, 18, 21])
def test_functions_below_the_lowest_opset(opset):
    source = transformer(8, shape=(1, 2))
    for node in source.functions[0].node:
        node.op_type = "Tanh" if node.op_type == "Gelu" else node.op_type
    source.opset_import[0].version = source.functions[0].opset_import[0].version = opset
    derived = grad(source, wrt=WEIGHTS)
    assert derived.functions
    versions = {i.version for f in derived.functions for i in f.opset_import if not i.domain}
    assert versions == {max(opset, 18)} == {i.version for i in derived.opset_import if not i.domain}
    agree(derived, inlined(grad, source, wrt=WEIGHTS), tolerance=1e-5)


def test_tiny_functions_are_inlined():
    """Exporters write them by the hundred; a call would be no smaller."""
    calls = "  ".join(f"v{i + 1} = my.F (v{i})" for i in range(60))
    source = parsed(f"""m (float[3] v0) => (float[3] v60) {{ {calls} }}
        <domain: "my", opset_import: ["" : 21]> F (v) => (u) {{ t = Tanh (v)  u = Mul (t, v) }}""")
    assert not grad(source, wrt="v0").functions


def test_the_model_that_was_passed_stays_as_it_was():
    source = transformer(8)
    before = source.SerializeToString()
    vjp(source, wrt=WEIGHTS)
    assert source.SerializeToString() == before


def test_against_central_differences():
    source = transformer(8, shape=(1, 2))
    for tensor in source.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for node in source.functions[0].node:
        node.op_type = "Tanh" if node.op_type == "Gelu" else node.op_type
        if node.output[0] == "scale":
            node.attribute[0].CopyFrom(
                onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.float64(0.5)))
            )
    derived = grad(source, wrt="x")
    assert derived.functions
    x, v = np.random.default_rng(2).standard_normal((2, 1, 2, 8))
    up, down = (run(source, {"x": x + e * v})["y"] for e in (1e-6, -1e-6))
    np.testing.assert_allclose((run(derived, {"x": x})["x_grad"] * v).sum(), (up - down) / 2e-6, rtol=1e-7)


def test_straight_through_sees_into_functions(all_kept):
    """Quantized numbers that one function gives and another reads carry the estimate on."""
    source = parsed("""m (float[4] x) => (float[] l)
        { s = Constant <value = float {0.1}> ()  q = my.Q (x, s)  d = my.D (q, s)  e = Mul (d, d)
          l = ReduceSum <keepdims = 0> (e) }
        <domain: "my", opset_import: ["" : 21]> Q (v, s) => (q)
        { z = Constant <value = int8 {0}> ()  q = QuantizeLinear (v, s, z) }
        <domain: "my", opset_import: ["" : 21]> D (q, s) => (u) { u = DequantizeLinear (q, s) }""")
    x = np.array([0.51, -0.98, 2.04, 30], np.float32)
    with straight_through("QuantizeLinear"):
        derived = grad(source, wrt="x")
    np.testing.assert_allclose(run(derived, {"x": x})["x_grad"], [1.0, -2.0, 4.0, 0], rtol=1e-5)
    assert not run(grad(source, wrt="x"), {"x": x})["x_grad"].any()

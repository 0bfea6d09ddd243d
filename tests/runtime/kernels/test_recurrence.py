"""Recurrences in C: recurrent layers and other Scans against the operators, float64 and PyTorch."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import onnxgrad
from onnxgrad.ir.graph import scopes
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.control_flow.compare import normal
from tests.control_flow.test_recurrent import CASES, GATES, layer
from tests.runtime.kernels.test_forged import called, refused
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import recurrent

pytestmark = needs_kernels

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def kinds(model):
    """The number of remaining Scans, and of calls that replace others."""
    model = recurrent(model if isinstance(model, ir.Model) else ir.from_proto(model))
    nodes = [(n.domain, n.op_type) for graph in scopes(model.graph) for n in graph]
    return nodes.count(("", "Scan")), nodes.count((DOMAIN, "Recurrence"))


def agree(model, feeds, scans, threads=(1, 2, 3), bits=(), **close):
    """Both targets give the same, and kernels the same `bits` on any number of threads; then what they give."""
    assert kinds(model) == (0, scans)
    want = Session(model, Options(threads=1, target="portable")).run(feeds)
    found = [Session(model, Options(threads=t, target="native")).run(feeds) for t in threads]
    for other in found:
        for name, value in want.items():
            np.testing.assert_allclose(other[name], value, err_msg=name, **(close or CLOSE))
        for name in bits:
            np.testing.assert_array_equal(other[name], found[0][name], err_msg=name)
    return found[0]


def pulled(op, options, sizes):
    """The pullback of a layer, and its feeds."""
    model, feeds, wrt = layer(op, sizes=sizes, any_batch=True, **options)
    derived = onnxgrad.vjp(model, wrt=wrt)
    of = [v for v in derived.graph.input if v.name not in feeds]
    scale = sizes[2] ** -0.5
    feeds = {k: v if k == "sequence_lens" else np.float32(scale * v) for k, v in feeds.items()}
    t, n, h = sizes
    ways = options.get("directions", 1)
    shapes = {"Y": (t, ways, n, h), "Y_h": (ways, n, h), "Y_c": (ways, n, h)}
    seeds = {v.name: normal(*shapes[v.name.removesuffix("_cotangent")]).astype(np.float32) for v in of}
    return derived, feeds | seeds


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", [c for c in CASES.values() if "elu" not in c[1].get("activations", ())], ids=str)
def test_layers(case):
    op, options = case
    derived, feeds = pulled(op, options, (6, 5, 9))
    ways = options.get("directions", 1)
    agree(derived, feeds, 2 * ways)


SIZES = [(1, 1, 1), (4, 1, 33), (3, 2, 64), (3, 3, 40), (2, 4, 16), (5, 7, 21), (9, 16, 32), (3, 19, 65), (2, 70, 17)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", GATES)
def test_sizes(op, sizes):
    derived, feeds = pulled(op, {"lens": sizes[0] > 2}, sizes)
    agree(derived, feeds, 2)


@pytest.mark.parametrize("rows", [3, 40])
def test_matrices_too_large_for_the_caches(rows):
    """Few rows: their products are divided among the threads; many: more of them go together."""
    derived, feeds = pulled("RNN", {}, (3, rows, 700))
    agree(derived, feeds, 2, bits=("Y", "Y_h"))


@pytest.mark.parametrize("op", GATES)
def test_float64(op):
    """The cotangents in float32 by kernels are those of the equations in float64, rounded."""
    single, feeds = pulled(op, {"directions": 2, "lens": True}, (5, 9, 13))
    model, _, wrt = layer(op, directions=2, lens=True, sizes=(5, 9, 13), dtype=TensorProto.DOUBLE)
    want = Session(onnxgrad.vjp(model, wrt=wrt)).run(
        {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}, [f"{n}_grad" for n in wrt]
    )
    found = Session(single, Options(threads=2, target="native")).run(feeds)
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("op", GATES)
def test_what_is_not_finite(op):
    """A row keeps it to itself."""
    derived, feeds = pulled(op, {}, (4, 6, 8))
    feeds["X"][1, 2, 3], feeds["X"][0, 4, 0], feeds["Y_cotangent"][2, 0, 5, 1] = np.nan, np.inf, np.nan
    found = agree(derived, feeds, 2)
    clean = np.isfinite(found["X_grad"]).all((0, 2))
    assert clean[[0, 1, 3]].all()
    assert not clean[[2, 5]].any()


@pytest.mark.parametrize("op", GATES)
def test_second_derivatives(op):
    model, feeds, _ = layer(op, sizes=(4, 5, 6), any_batch=True)
    derived = onnxgrad.jvp(onnxgrad.grad(model, wrt=["X", "R"], of="Y"), wrt=["X", "R"])
    feeds = feeds | {f"{n}_tangent": normal(*feeds[n].shape) for n in ("X", "R")}
    left, taken = kinds(derived)
    assert (left, taken > 1) == (0, True)
    agree(derived, feeds, taken, rtol=2e-4, atol=2e-4)


@pytest.mark.torch
@pytest.mark.parametrize("op", ["GRU", "LSTM"])
def test_of_torch(op):
    """Both directions, and rows of any length."""
    torch = pytest.importorskip("torch")
    t, n, h = 6, 5, 9
    options = {"directions": 2, "lens": True} | ({"linear_before_reset": 1} if op == "GRU" else {})
    derived, feeds = pulled(op, options, (t, n, h))
    feeds["sequence_lens"] = np.array([6, 3, 1, 4, 6], np.int32)
    found = Session(derived, Options(threads=2, target="native")).run(feeds)
    theirs = getattr(torch.nn, op)(h, h, bidirectional=True, dtype=torch.float64)
    order = [2, 0, 3, 1] if op == "LSTM" else [1, 0, 2]  # of theirs in ours: (i, f, g, o) and (r, z, n)
    back = np.argsort(order)

    def turned(array, to):
        gates = array.reshape(len(order), h, *array.shape[1:])
        return gates[to].reshape(array.shape)

    gates = back if op == "GRU" else [0, 2, 3, 1]
    names = {}
    for d, end in enumerate(("", "_reverse")):
        bias = feeds["B"][d].reshape(2, -1)
        for name, array in (("weight_ih", feeds["W"][d]), ("weight_hh", feeds["R"][d]), ("bias_ih", bias[0]),
                            ("bias_hh", bias[1])):  # fmt: skip
            names[f"{name}_l0{end}"] = torch.from_numpy(turned(array, gates).astype(np.float64))
    theirs.load_state_dict(names)
    x = torch.from_numpy(feeds["X"].astype(np.float64)).requires_grad_()
    states = [torch.from_numpy(feeds[k].astype(np.float64)).requires_grad_() for k in ("h0", "c0") if k in feeds]
    lengths = torch.from_numpy(feeds["sequence_lens"].astype(np.int64))
    rows = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    packed, ends = theirs(rows, tuple(states) if op == "LSTM" else states[0])
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, total_length=t)
    ends = ends if op == "LSTM" else (ends,)
    seeds = [feeds[f"{k}_cotangent"].astype(np.float64) for k in ("Y_h", "Y_c") if f"{k}_cotangent" in feeds]
    loss = (y * torch.from_numpy(feeds["Y_cotangent"].transpose(0, 2, 1, 3).reshape(t, n, 2 * h).astype(float))).sum()
    loss = loss + sum((e * torch.from_numpy(s)).sum() for e, s in zip(ends, seeds))
    loss.backward()
    np.testing.assert_allclose(found["X_grad"], x.grad.numpy(), **CLOSE)
    np.testing.assert_allclose(found["h0_grad"], states[0].grad.numpy(), **CLOSE)
    for d, end in enumerate(("", "_reverse")):
        mine = np.argsort(gates)
        for name, k in (("weight_ih", "W_grad"), ("weight_hh", "R_grad")):
            want = turned(getattr(theirs, f"{name}_l0{end}").grad.numpy(), mine)
            np.testing.assert_allclose(found[k][d], want, **CLOSE)


# --- other bodies ----------------------------------------------------------------------------------


def scan(text, k=4):
    """A model of one Scan over any number of rows of four numbers, and of `k` in y."""
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N,4] a0, float[N,4] b0, float[T,N,4] x, float[T,N,1] m,'
        " float[4,4] w, float[4] v, float[1,4] r, float[N,4] f, float s)"
        f" => (float[N,4] a, float[N,4] b, float[T,N,{k}] y) {{ a, b, y = Scan <num_scan_inputs = 2, body = step"
        f" (float[N,4] a, float[N,4] b, float[N,4] x, float[N,1] m) => (float[N,4] p, float[N,4] q, float[N,{k}] y)"
        f" {{ {text} }}> (a0, b0, x, m) }}"
    )


def feeds_of(times, rows):
    mask = np.random.default_rng(1).integers(0, 2, (times, rows, 1)).astype(np.float32)
    return {
        "a0": normal(rows, 4), "b0": normal(rows, 4), "x": normal(times, rows, 4), "m": mask, "w": normal(4, 4) / 2,
        "v": normal(4), "r": normal(1, 4), "f": normal(rows, 4), "s": normal(),
    }  # fmt: skip


BODIES = {
    "states change places": "p = Identity (b)  q = Identity (a)  y = Add (a, x)",
    "in a ring with a sum": "p = Identity (b)  q = Add (a, b)  y = Identity (b)",
    "columns of a state for another": """c = Concat <axis = 1> (a, b)  h = Constant <value = int64[2] {4, 4}> ()
        y1, y2 = Split <axis = 1> (c, h)  p = Identity (y2)  q = Identity (y1)  y = Identity (c)""",
    "a row, an operand of all steps, a number": """z = Mul (v, a)  t = Add (z, r)  u = Mul (t, f)  p0 = Mul (u, s)
        p = Tanh (p0)  q = Sub (p, b)  y = Identity (p0)""",
    "where a mask says so": """t = Constant <value = float {0.5}> ()  l = Less (t, m)  n = MatMul (a, w)  o = Tanh (n)
        p = Where (l, o, a)  q = Mul (m, b)  y = Concat <axis = -1> (m, o, m, o)""",
    "one value twice": "t = Tanh (a)  y = Concat <axis = 1> (t, t, x)  p = Mul (t, t)  q = Identity (t)",
    "two products, one sum": """m1 = MatMul (a, w)  m2 = Gemm <transB = 1> (b, w)  s1 = Add (m1, m2)  p = Tanh (s1)
        q = Gemm (x, w, v)  y = Relu (q)""",
    "a product plus itself": "n = MatMul (a, w)  y = Add (n, n)  p = Sigmoid (y)  q = Identity (b)",
    "a slice": """i = Constant <value = int64[1] {1}> ()  j = Constant <value = int64[1] {3}> ()  t = Tanh (x)
        y = Slice (t, i, j, i)  c = Concat <axis = 1> (y, y)  p = Add (c, a)  q = Neg (b)""",
    "what is read alone": "p = Identity (x)  q = Identity (f)  y = Identity (m)",
    "numbers": """t = Constant <value = float {2.0}> ()  z = Constant <value = float[1] {0.25}> ()  p1 = Mul (a, t)
        p = Sin1 (p1)  q = Clip (b)  y = Max (p, z)""".replace("Sin1", "Tanh"),
}

#: How many numbers y has, if not four.
WIDTHS = {"columns of a state for another": 8, "where a mask says so": 10, "one value twice": 12, "a slice": 2,
          "what is read alone": 1}  # fmt: skip


def body(name):
    """One of these."""
    return scan(BODIES[name], WIDTHS.get(name, 4))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name):
    for times, rows in ((5, 3), (1, 1), (2, 21), (3, 300)):
        model = body(name)
        agree(model, feeds_of(times, rows), 1, bits=("a", "b", "y"), rtol=1e-6, atol=1e-6)


def test_no_rows():
    assert agree(body("a slice"), feeds_of(3, 0), 1)["y"].shape == (3, 0, 2)


def test_directions():
    text = onnx.printer.to_text(body("two products, one sum"))
    for k in range(4):
        ways = f"scan_input_directions: ints = [{k % 2}, {k // 2}], scan_output_directions: ints = [{int(k in (1, 2))}]"
        model = onnx.parser.parse_model(text.replace("num_scan_inputs: int = 2", f"num_scan_inputs: int = 2, {ways}"))
        agree(model, feeds_of(4, 5), 1, rtol=1e-6, atol=1e-6)


def test_what_comes_before_is_taken_along():
    """Elementwise operators that nobody else reads: no tensor of all steps is written for them."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N,4] a0, float[T,N,4] x, float[T,N,4] z, float[4] v) => (float[N,4] a, float[T,N,4] y, float[T,N,4] e)
        {
            one = Constant <value = float {1.0}> ()  u = Mul (x, z)  d = Sub (one, u)  w = Mul (d, u)  k = Add (w, v)
            e = Exp (z)  l = Mul (e, x)
            a, y = Scan <num_scan_inputs = 2, body = b (float[N,4] a, float[N,4] k, float[N,4] l) =>
                (float[N,4] p, float[N,4] o) { p = Add (a, k)  o = Mul (p, l) }> (a0, k, l)
        }""")
    left = [n.op_type for n in recurrent(ir.from_proto(model)).graph]
    assert sorted(left) == ["Exp", "Recurrence"]
    feeds = {"a0": normal(3, 4), "x": normal(5, 3, 4), "z": normal(5, 3, 4), "v": normal(4)}
    agree(model, feeds, 1, rtol=1e-6, atol=1e-6)


OTHERS = {
    "rows read each other": """i = Constant <value = int64[1] {0}> ()  t = ReduceSum (x, i)  p = Add (a, t)
        q = Identity (b)  y = Tanh (p)""",
    "a product of two states": """t = Transpose <perm = [1, 0]> (b)  u = MatMul (t, a)  p = MatMul (a, u)  q = Tanh (b)
        y = Tanh (a)""",
    "an operator that there is no step for": "p = Sin (a)  q = Identity (b)  y = Tanh (p)",
    "a product with a slice": "t = MatMul (w, w)  u = MatMul (x, t)  p = Add (a, u)  q = Tanh (b)  y = Softmax (p)",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_stays_a_scan(text):
    assert kinds(scan(text)) == (1, 0)
    feeds = {name: array / 4 for name, array in feeds_of(3, 5).items()}  # products of products would grow to thousands
    want, found = (Session(scan(text), Options(threads=1, target=t)).run(feeds) for t in ("portable", "native"))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6)


def test_an_activation_that_there_is_no_step_for():
    """Elu has one, its cotangent has none."""
    derived, _ = pulled("RNN", {"activations": ["Elu"]}, (3, 4, 5))
    assert kinds(derived) == (1, 1)


def test_other_types_and_the_switch():
    double = onnx.parser.parse_model(onnx.printer.to_text(body("a slice")).replace("float[", "double["))
    assert kinds(double) == (1, 0)
    with pytest.raises(onnxgrad.OnnxGradError, match="there is no pass 'recurrences'"):
        Session(body("a slice"), Options(target="native", without=("recurrences",)))
    feeds = feeds_of(3, 5)
    plain = Session(body("a slice"), Options(target="native", without=("recurrence",))).run(feeds)
    np.testing.assert_allclose(
        plain["y"], Session(body("a slice"), Options(target="native")).run(feeds)["y"], rtol=1e-6
    )


FORGED = [-1, 0, 1, 2, 5, 7, 63, 300, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 33, (1 << 63) - 1, -(1 << 63)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("key", ["values", "steps"])
@pytest.mark.parametrize("name", ["two products, one sum", "where a mask says so"])
def test_forged_programs(name, key):
    """Any number in the place of any other: an error, or numbers (``sanitized.py`` sees what is read and written)."""
    call = next(n for n in recurrent(ir.from_proto(body(name))).graph if n.op_type == "Recurrence")
    feeds = feeds_of(2, 5)
    arrays = [None if v is None else feeds[v.name] for v in call.inputs]
    sound = {n: list(a.value) for n, a in call.attributes.items()}
    called("Recurrence", arrays, sound, outputs=len(call.outputs))
    outcomes = set()
    for at in range(len(sound[key])):
        for number in (FORGED[(7 * at + k) % len(FORGED)] for k in range(3)):
            forged = [*sound[key][:at], number, *sound[key][at + 1 :]]
            try:
                called("Recurrence", arrays, {**sound, key: forged}, outputs=len(call.outputs))
                outcomes.add("numbers")
            except Exception as error:
                outcomes.add(type(error).__module__.partition(".")[0])
    assert outcomes <= {"onnxruntime", "numbers"}
    for cut in (sound[key][:-1], sound[key] * 200):
        refused("Recurrence", arrays, {**sound, key: cut}, outputs=len(call.outputs))


def test_operands_of_other_sizes():
    call = next(n for n in recurrent(ir.from_proto(body("two products, one sum"))).graph if n.op_type[0] == "R")
    feeds = feeds_of(2, 5)
    arrays = [None if v is None else feeds[v.name] for v in call.inputs]
    attributes = {name: list(a.value) for name, a in call.attributes.items()}
    for at, array in [(at, array) for at, array in enumerate(arrays) if array is not None]:
        fewer = [array[:, :-1]] if array.ndim == 3 else [array[:-1], array[:0]]  # there may be fewer steps
        for other in (*fewer, array[..., :-1], array[None], None):
            if array.ndim == 1 and other is not None and other.size == array.size:
                continue  # a row may have an axis before it
            given = [*arrays[:at], other, *arrays[at + 1 :]]
            refused("Recurrence", given, attributes, outputs=len(call.outputs), match="Recurrence|missing")


def test_a_scan_in_a_branch():
    inner = body("two products, one sum")
    graph = helper.make_graph(list(inner.graph.node), "then", [], list(inner.graph.output))
    other = helper.make_graph(
        [helper.make_node("Identity", [a], [b]) for a, b in (("a0", "a_"), ("b0", "b_"), ("x", "y_"))], "else", [],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("a_", "b_", "y_")],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["a1", "b1", "y1"], then_branch=graph, else_branch=other)
    inputs = [*inner.graph.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("a1", "b1", "y1")]
    graph = helper.make_graph([node], "g", inputs, ends)
    model = helper.make_model(graph, opset_imports=inner.opset_import, ir_version=9)
    for taken in (True, False):
        agree(model, feeds_of(3, 5) | {"c": np.array(taken)}, 1, rtol=1e-6, atol=1e-6)

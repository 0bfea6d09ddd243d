"""Attention by blocks of queries and keys, against the same with all scores at once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import Trainer
from onnxgrad.engine import reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.model_io import open_model
from onnxgrad.runtime import Options, Session, StepRunner, measured_peak
from onnxgrad.training.build.attach import attach
from onnxgrad.training.graph import attention_blocks
from onnxgrad.training.graph.attention_blocks import MANY, attend_by_blocks
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.step.compile import compile_step
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels
from tests.training.nets import model_of

HEADS, WIDTH = 2, 3
node = helper.make_node

#: Between the scores `s` [rows, heads, queries, keys] and the probabilities `p`.
BETWEEN = {
    "plain": [node("Softmax", ["s"], ["p"], axis=-1)],
    "mask": [node("Add", ["s", "mask"], ["m"]), node("Softmax", ["m"], ["p"])],
    "row_mask": [node("Add", ["keys_mask", "s"], ["m"]), node("Softmax", ["m"], ["p"], axis=3)],
    "causal": [  # as exporters write it
        node("Shape", ["x"], ["dims"]), node("Gather", ["dims", "one"], ["length"]),
        node("Range", ["zero", "length", "one"], ["places"]), node("Unsqueeze", ["places", "ones"], ["column"]),
        node("LessOrEqual", ["places", "column"], ["seen"]), node("Where", ["seen", "s", "inf"], ["m"]),
        node("Softmax", ["m"], ["q_"], axis=-1), node("IsNaN", ["q_"], ["lost"]),
        node("Where", ["lost", "nil", "q_"], ["p"]),
    ],
    "hidden": [  # some queries see nothing
        node("Add", ["s", "window"], ["m"]), node("Softmax", ["m"], ["q_"], axis=-1), node("IsNaN", ["q_"], ["lost"]),
        node("Where", ["lost", "nil", "q_"], ["p"]),
    ],
    "added": [node("Add", ["s", "lowest_mask"], ["m"]), node("Softmax", ["m"], ["p"])],  # scores are lost in it
    "lowest": [node("Where", ["window_seen", "s", "lowest"], ["m"]), node("Softmax", ["m"], ["p"], axis=-1)],
    "far": [node("Where", ["far", "faraway", "s"], ["m"]), node("Softmax", ["m"], ["p"], axis=-1)],
    "faint": [node("Add", ["s", "faint"], ["m"]), node("Softmax", ["m"], ["p"])],  # which hides nothing
    "biases": [  # all of which train
        node("Add", ["s", "pairs"], ["s1"]), node("Mul", ["slopes", "of_keys"], ["s2"]),
        node("Add", ["s1", "s2"], ["s3"]), node("Add", ["of_queries", "s3"], ["s4"]),
        node("Sub", ["s4", "slopes"], ["s5"]),
        node("Softmax", ["s5"], ["p"], axis=-1),
    ],
    "half": [
        node("Cast", ["s", ], ["whole"], to=1), node("Softmax", ["whole"], ["wide"], axis=-1),
        node("Cast", ["wide"], ["p"], to=10),
    ],
    "capped": [
        node("Div", ["s", "cap"], ["d"]), node("Tanh", ["d"], ["t"]), node("Mul", ["t", "cap"], ["capped"]),
        node("Softmax", ["capped"], ["p"], axis=-1),
    ],
    "read": [node("Softmax", ["s"], ["p"], axis=-1), node("ReduceMax", ["p"], ["most"], keepdims=0)],
    "dropped": [node("Softmax", ["s"], ["p_"], axis=-1), node("Dropout", ["p_", "", "on"], ["p", ""])],
}  # fmt: skip


#: What masks have for keys that are hidden.
LOWEST = {t: max(np.finfo(t).min, np.finfo(np.float32).min) for t in (np.float16, np.float32, np.float64)}


def window(length):
    """1 for keys near a query, but for queries 5 to 7, which see nothing."""
    near = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) < 3
    near[5:8] = False
    return near.astype(np.float64)


def layer(kind, length, dtype=np.float64, **attributes):
    """x → y, with scores by products or, as kind "operator", by Attention."""
    rng = np.random.default_rng(0)
    size = HEADS * WIDTH
    weights = {f"w{c}": (rng.standard_normal((size, size)) * 0.7).astype(dtype) for c in "qkvo"}
    known = length if isinstance(length, int) else 0
    constants = {
        "heads": np.array([0, 0, HEADS, WIDTH]), "flat": np.array([0, 0, size]), "scale": np.array(0.5, dtype),
        "mask": np.where(np.tri(known), 0, -1e4).astype(dtype), "zero": np.array(0), "one": np.array(1),
        "ones": np.array([1]), "inf": np.array(-np.inf, dtype), "nil": np.array(0, dtype), "cap": np.array(2, dtype),
        "pairs": rng.standard_normal((HEADS, known, known)).astype(dtype),
        "window": np.where(window(known), 0, -np.inf).astype(dtype),
        "slopes": rng.standard_normal((HEADS, 1, 1)).astype(dtype), "window_seen": window(known) > 0,
        "of_keys": rng.standard_normal((HEADS, 1, known)).astype(dtype), "faraway": np.array(-1e4, dtype),
        "of_queries": rng.standard_normal((1, HEADS, known, 1)).astype(dtype), "far": window(known) == 0,
        "lowest": np.array(LOWEST[dtype], dtype),
        "lowest_mask": np.where(window(known), 0, LOWEST[dtype]).astype(dtype),
        "faint": (12 * (window(known) - 1)).astype(dtype),
        "on": np.array(True), "keys_mask": np.linspace(0, 1, known).astype(dtype).reshape(1, 1, 1, -1),
    }  # fmt: skip
    nodes = []
    for c in "qkv":
        perm = [0, 2, 3, 1] if c == "k" and kind != "operator" else [0, 2, 1, 3]
        nodes += [node("MatMul", ["x", f"w{c}"], [f"{c}0"]), node("Reshape", [f"{c}0", "heads"], [f"{c}1"])]
        nodes += [node("Transpose", [f"{c}1"], [c], perm=perm)]
    if kind == "operator":
        nodes += [node("Attention", ["q", "k", "v"], ["a"], **attributes)]
    else:
        nodes += [node("MatMul", ["q", "k"], ["products"]), node("Mul", ["products", "scale"], ["s"])]
        nodes += [*BETWEEN[kind], node("MatMul", ["p", "v"], ["a"])]
    nodes += [node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3]), node("Reshape", ["b", "flat"], ["c"])]
    nodes += [node("MatMul", ["c", "wo"], ["y"])]
    used = {i for n in nodes for i in n.input}
    kinds = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    dims = ["rows", length, size]
    outputs = [helper.make_tensor_value_info("y", kinds, dims)]
    if kind == "read":
        outputs.append(helper.make_tensor_value_info("most", kinds, []))
    graph = helper.make_graph(
        nodes, "layer", [helper.make_tensor_value_info("x", kinds, dims)], outputs,
        [numpy_helper.from_array(a, n) for n, a in (weights | constants).items() if n in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def compiled(model, rows, rate=1.0):
    training = attach(model, loss="mse", output="y", optimizer="sgd", learning_rate=rate)
    return compile_step(training, attention_rows=rows)


def scans(step):
    return [n for n in step.model.graph if n.op_type == "Scan"]


def stepped(step, dtype=np.float64, target="portable", length=13, drawn=None):
    """The loss, and by how much a step moves each weight."""
    rng = np.random.default_rng(1)
    shape = (2, length, HEADS * WIDTH)
    feeds = {n: rng.standard_normal(shape).astype(drawn or dtype).astype(dtype) for n in ("x", "labels")}
    runner = StepRunner(step, options=Options(threads=1, target=target))
    before = runner.state()
    return {"loss": runner.step(feeds)["loss"]} | {n: before[n] - a for n, a in runner.state().items()}


#: Kind, length, queries and keys of a block.
CASES = [
    ("plain", 13, 4, 5), ("plain", "time", 4, 5), ("mask", 13, 4, 13), ("mask", 13, 13, 4), ("row_mask", 13, 5, 3),
    ("causal", 13, 4, 4), ("causal", 13, 2, 2), ("causal", "time", 4, 3), ("capped", 13, 4, 6), ("operator", 13, 4, 5),
    ("operator", "time", 3, 20), ("hidden", 13, 3, 2), ("hidden", 13, 4, 20), ("lowest", 13, 3, 2), ("far", 13, 3, 2),
    ("faint", 13, 3, 2),
    ("biases", 13, 4, 5), ("biases", 13, 13, 13),
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "length", "rows", "keys"), CASES)
def test_gradients_are_those_of_all_scores_at_once(kind, length, rows, keys, monkeypatch):
    monkeypatch.setattr(attention_blocks, "KEYS", keys)
    model = layer(kind, length, **({"is_causal": 1} if kind == "operator" else {}))
    whole, blocks = (compiled(model, n) for n in (0, rows))
    assert not scans(whole)
    assert len(scans(blocks)) == 2
    found = stepped(blocks)
    for name, array in stepped(whole).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-13, err_msg=name)


#: So large a rate that of a weight in float32, which a step moves by rate times gradient, no digit is seen in that.
FAR = 2.0**30


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", ["portable", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("kind", ["mask", "causal", "lowest", "added"])
def test_gradients_in_float32_are_near_to_float64(kind, target, monkeypatch):
    """Also where large finite masks hide keys, or all keys from some queries; and where softmaxes are sharp."""
    monkeypatch.setattr(attention_blocks, "KEYS", 40)
    found = {}
    for name, rows, dtype in (("true", 0, np.float64), ("whole", 0, np.float32), ("blocks", 32, np.float32)):
        model = layer(kind, 96, dtype)
        for t in model.graph.initializer:
            if t.name == "scale":
                t.CopyFrom(numpy_helper.from_array(np.array(3, dtype), t.name))
        step = compiled(model, rows, FAR)
        target_of = "portable" if dtype == np.float64 else target
        found[name] = stepped(step, dtype, target_of, length=96, drawn=np.float32)
    for name, true in found["true"].items():
        whole, blocks = (np.abs(found[how][name] - true).max() / np.abs(true).max() for how in ("whole", "blocks"))
        assert max(whole, blocks) < 5e-6, (name, whole, blocks)


def test_products_in_16_bits_stay_in_16_bits(monkeypatch):
    monkeypatch.setattr(attention_blocks, "KEYS", 5)
    model = layer("half", 13, np.float16)
    whole, blocks = (compiled(model, n) for n in (0, 4))
    inside = [n for g in blocks.model.graphs() for n in g if g is not blocks.model.graph and n.op_type == "MatMul"]
    assert len(inside) == 7
    assert {n.inputs[0].dtype.name for n in inside} == {"FLOAT16"}
    found = stepped(blocks, np.float16)
    for name, array in stepped(whole, np.float16).items():
        np.testing.assert_allclose(found[name], array, rtol=0.05, atol=2e-3, err_msg=name)


def test_a_step_in_16_bits_has_its_blocks_in_16_bits():
    training = attach(layer("causal", 13, np.float32), loss="mse", output="y", optimizer="sgd", learning_rate=1.0)
    narrow = Precision(ir.DataType.FLOAT16, lambda node: True, 2.0**8, 3)
    step = compile_step(training, attention_rows=4, precision=narrow)
    inside = [n for g in step.model.graphs() for n in g if g is not step.model.graph and n.op_type == "MatMul"]
    assert len(inside) == 7
    assert {n.inputs[0].dtype.name for n in inside} == {"FLOAT16"}
    found = stepped(step, np.float32)
    for name, array in stepped(compiled(layer("causal", 13, np.float32), 0), np.float32).items():
        np.testing.assert_allclose(found[name], array, rtol=0.02, atol=2e-3, err_msg=name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "attributes", [{"kv_num_heads": 1}, {"kv_num_heads": 1, "is_causal": 1, "softcap": 1.5}, {"is_causal": 1}]
)
def test_heads_that_share_keys(attributes, monkeypatch):
    """Four heads of queries, of 3, on one or two of keys."""
    monkeypatch.setattr(attention_blocks, "KEYS", 5)
    rng, few = np.random.default_rng(0), attributes.get("kv_num_heads", 2)
    weights = {f"w{c}": rng.standard_normal((12, 12 if c == "q" else 3 * few)) for c in "qkv"}
    nodes = [node("MatMul", ["x", w], [w[1]]) for w in weights]
    nodes += [node("Attention", ["q", "k", "v", "bias"], ["y"], q_num_heads=4, **{"kv_num_heads": few, **attributes})]
    weights["bias"] = rng.standard_normal((4, 13, 13))
    model = model_of(nodes, weights, {"x": ["N", 13, 12]}, {"y": ["N", 13, 12]}, 24, TensorProto.DOUBLE)
    results = []
    for rows in (0, 4):
        step = compiled(model, rows)
        assert bool(scans(step)) == bool(rows)
        rng = np.random.default_rng(1)
        runner = StepRunner(step, options=Options(threads=1, target="portable"))
        runner.step({n: rng.standard_normal((2, 13, 12)) for n in ("x", "labels")})
        results.append(runner.state())
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-9, atol=1e-13, err_msg=name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "more", [{}, {"local_window_size": 4}, {"softcap": 1.5}, {"do_rotary": 1}, {"smooth_softmax": 1}], ids=str
)
def test_group_query_attention(more, monkeypatch):
    """Four heads of queries on two of keys, of sequences of 13 and 9 tokens; with a sink, it stays as it is."""
    monkeypatch.setattr(attention_blocks, "KEYS", 5)
    rng = np.random.default_rng(0)
    weights = {f"w{c}": rng.standard_normal((12, 32 if c == "q" else 16)) for c in "qkv"}
    weights = {n: a.astype(np.float32) for n, a in weights.items()} | {
        "ends": np.array([12, 8], np.int32), "total": np.array(13, np.int32),
    }  # fmt: skip
    angles = np.outer(np.arange(16), 0.5 ** np.arange(4)).astype(np.float32)
    turned = {"cos": np.cos(angles), "sin": np.sin(angles)} if "do_rotary" in more else {}
    names = ["q", "k", "v", "", "", "ends", "total", *turned]
    nodes = [node("MatMul", ["x", f"w{c}"], [c]) for c in "qkv"]
    nodes += [node("GroupQueryAttention", names, ["y"], domain="com.microsoft", num_heads=4, kv_num_heads=2, **more)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 13, d]) for n, d in (("x", 12), ("y", 32))]
    held = [numpy_helper.from_array(a, n) for n, a in (weights | turned).items()]
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "fused", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    results = []
    for rows in (0, 4):
        training = attach(model, loss="mse", trainable=["wq", "wk", "wv"], optimizer="sgd", learning_rate=1.0)
        step = compile_step(training, attention_rows=rows)
        assert len(scans(step)) == (2 if rows and "smooth_softmax" not in more else 0)
        rng = np.random.default_rng(1)
        runner = StepRunner(step, options=Options(threads=1, target="portable"))
        feeds = {n: rng.standard_normal((2, 13, d)).astype(np.float32) for n, d in (("x", 12), ("labels", 32))}
        before = runner.state()
        runner.step(feeds)
        results.append({n: before[n] - a for n, a in runner.state().items()})
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("operator", ["Attention", "MultiHeadAttention"])
def test_operators_of_onnx_runtime(operator, unidirectional, monkeypatch):
    monkeypatch.setattr(attention_blocks, "KEYS", 5)
    rng = np.random.default_rng(0)
    wide = {"w": rng.standard_normal((12, 36)), "b": rng.standard_normal(36)}
    weights = wide if operator == "Attention" else {f"w{c}": rng.standard_normal((12, 12)) for c in "qkv"}
    nodes = [] if operator == "Attention" else [node("MatMul", ["x", w], [w[1]]) for w in weights]
    names = ["x", "w", "b"] if operator == "Attention" else ["q", "k", "v"]
    attributes = {"num_heads": 4, "unidirectional": unidirectional}
    nodes += [node(operator, names, ["y"], domain="com.microsoft", **attributes)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 13, 12]) for n in "xy"]
    held = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "fused", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    results = []
    for rows in (0, 4):
        step = compiled(model, rows)
        assert len(scans(step)) == (2 if rows else 0)
        rng = np.random.default_rng(1)
        runner = StepRunner(step, options=Options(threads=1, target="portable"))
        runner.step({n: rng.standard_normal((2, 13, 12)).astype(np.float32) for n in ("x", "labels")})
        results.append(runner.state())
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_blocks_that_a_mask_hides_are_not_computed(monkeypatch):
    """A NaN among values that only the last queries see does not reach the others."""
    monkeypatch.setattr(attention_blocks, "KEYS", 4)
    model = layer("causal", 12, np.float32)
    spoil = np.zeros((12, 1), np.float32)
    spoil[8:] = np.nan
    model.graph.initializer.append(numpy_helper.from_array(spoil, "spoil"))
    last = next(i for i, n in enumerate(model.graph.node) if n.output[0] == "a")
    model.graph.node[last].input[1] = "spoilt"
    model.graph.node.insert(last, node("Add", ["v", "spoil"], ["spoilt"]))
    opened = open_model(model).model
    assert attend_by_blocks(opened.graph, 4) == 1
    x = np.random.default_rng(0).standard_normal((1, 12, HEADS * WIDTH)).astype(np.float32)
    (y,) = Session(opened, Options(threads=1, target="portable")).run({"x": x}).values()
    assert np.isfinite(y[:, :8]).all()
    assert np.isnan(y[:, 8:]).all()


def test_a_derivative_of_the_derivative(monkeypatch):
    """Of |∂Σy²/∂x|², through what is kept of the forward pass as well."""
    monkeypatch.setattr(attention_blocks, "KEYS", 3)
    found = []
    for rows in (0, 2):
        model = open_model(layer("causal", 7)).model
        graph = model.graph
        assert attend_by_blocks(graph, rows) == bool(rows)
        (x, *_), (y, *_) = graph.inputs, graph.outputs
        b = Builder(graph)
        for _ in range(2):
            (slope,) = reverse(b, list(graph), {y: 2 * b.var(y)}, [x]).values()
            y = b.ReduceSum(slope * slope, keepdims=0).value if y.shape else slope.value
        graph.outputs[0] = y
        data = np.random.default_rng(0).standard_normal((2, 7, HEADS * WIDTH))
        found.append(next(iter(Session(model, Options(threads=1, target="portable")).run({"x": data}).values())))
    assert np.abs(found[0]).max() > 1
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9, atol=1e-11)


@needs_kernels
def test_kernels_take_the_place_of_a_block():
    model = layer("mask", 13, np.float32)
    found = stepped(compiled(model, 4), np.float32, "native")
    for name, array in stepped(compiled(model, 0), np.float32).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_product_of_a_constant_node_is_no_attention():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 1, 2] x) => (float[N, 2, 2] y) <float[1, 2] W = {1, 2}> {
            c = Constant <value = float[1, 2, 1] {1, 2}> ()
            h = Mul (x, W)
            p = MatMul (c, h)
            y = Softmax (p)
        }""")
    assert not scans(compiled(model, 4))


@pytest.mark.parametrize("kind", ["read", "dropped"])
def test_scores_that_something_else_reads_stay(kind):
    training = attach(layer(kind, 13), loss="mse", output="y", train_mode=kind == "dropped")
    assert not scans(compile_step(training, outputs=["most"] if kind == "read" else [], attention_rows=4))


def test_many_keys_are_taken_by_blocks_and_few_are_not():
    assert not scans(compiled(layer("plain", MANY - 1), None))
    assert scans(compiled(layer("plain", MANY), None))
    assert not scans(compiled(layer("plain", "time"), None))  # nobody knows how many


@needs_kernels
def test_attention_is_left_to_a_kernel_where_there_is_one(monkeypatch):
    """Up to so many keys, by a trainer; other compiled steps have blocks, and either continues the other."""
    monkeypatch.setattr(attention_blocks, "MANY", 8)
    monkeypatch.setattr(attention_blocks, "MANY_FOR_KERNEL", 20)

    def trainer(kind="plain", length=13, dtype=np.float32, target="native", **more):
        options = Options(threads=1, target=target)
        return Trainer(layer(kind, length, dtype), loss="mse", output="y", optimizer="sgd", options=options, **more)

    left, blocks = trainer(), trainer(target="portable")
    assert not scans(left.step)
    assert scans(blocks.step)
    assert "AttentionGrad" in {n.op_type for n in with_kernels(left.step.model).graph}
    assert left.fingerprint == blocks.fingerprint != trainer(attention_rows=4).fingerprint
    rng = np.random.default_rng(3)
    feeds = {n: rng.standard_normal((4, 13, HEADS * WIDTH)).astype(np.float32) for n in ("x", "labels")}
    for machine in (left.machine, blocks.machine):
        machine.step(feeds)
    for name, array in blocks.state().items():
        np.testing.assert_allclose(left.state()[name], array, rtol=1e-4, atol=1e-6)
    assert not scans(trainer(accumulate=2).step)
    assert scans(compiled(layer("plain", 13, np.float32), None))
    assert not scans(compiled(layer("plain", 13, np.float32), "kernel"))
    for other in ({"kind": "capped"}, {"length": 20}, {"dtype": np.float64}, {"attention_rows": 4}):
        assert scans(trainer(**other).step), other


def test_what_a_step_takes_is_linear_in_the_length():
    peaks = {}
    for rows in (0, 16):
        for length in (256, 512):
            step = compiled(layer("operator", length, np.float32, is_causal=1), rows)
            feeds = {n: np.zeros((1, length, HEADS * WIDTH), np.float32) for n in step.batch}
            peaks[rows, length] = measured_peak(step, feeds, Options(target="portable"))
    assert peaks[0, 512] > 3.5 * peaks[0, 256]
    assert peaks[16, 512] < 2.2 * peaks[16, 256]
    assert peaks[16, 512] * 8 < peaks[0, 512]


def test_a_trainer_passes_it_on_and_parts_of_a_batch_have_it_too():
    model = layer("causal", "time")
    feeds = {n: np.random.default_rng(3).standard_normal((4, 7, HEADS * WIDTH)) for n in ("x", "labels")}
    losses = []
    for rows, parts in ((0, 1), (3, 1), (3, 2)):
        trainer = Trainer(model, loss="mse", optimizer="sgd", learning_rate=1.0, accumulate=parts, attention_rows=rows)
        assert bool(scans(trainer.step)) == bool(rows)
        losses.append((trainer.machine.step(feeds)[trainer.step.loss], trainer.state()["wq"]))
    for loss, weights in losses[1:]:
        np.testing.assert_allclose(loss, losses[0][0], rtol=1e-12)
        np.testing.assert_allclose(weights, losses[0][1], rtol=1e-10)


@pytest.mark.parametrize("rows", [-1, 1.5, True, "8"])
def test_what_is_no_number_of_queries_is_refused(rows):
    with pytest.raises(BadInput, match="attention_rows is a number of queries"):
        compiled(layer("plain", 13), rows)


def test_what_a_kernel_does_not_compute_is_not_left_to_it(monkeypatch):
    monkeypatch.setattr(attention_blocks, "MANY", 8)
    for lead, count in (("1,2", 0), ("1,2,2", 1)):  # a kernel has one axis of heads beside that of rows
        axes = len(lead.split(",")) + 2
        perm = [*range(axes - 2), axes - 1, axes - 2]
        text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{lead},9,3] q, float[{lead},9,3] k) =>
            (float[{lead},9,3] y) {{
                kt = Transpose<perm={perm}>(k) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, k) }}"""
        graph = open_model(onnx.parser.parse_model(text)).model.graph
        assert attend_by_blocks(graph, "kernel") == count, lead

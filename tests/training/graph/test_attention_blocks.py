"""Attention by blocks of queries, against the same with all scores at once."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxgrad import Trainer
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner, measured_peak
from onnxgrad.training.build.attach import attach
from onnxgrad.training.graph.attention_blocks import MANY
from onnxgrad.training.step.compile import compile_step
from tests.runtime.kernels.twins import needs_compiler

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
    "capped": [
        node("Div", ["s", "cap"], ["d"]), node("Tanh", ["d"], ["t"]), node("Mul", ["t", "cap"], ["capped"]),
        node("Softmax", ["capped"], ["p"], axis=-1),
    ],
    "read": [node("Softmax", ["s"], ["p"], axis=-1), node("ReduceMax", ["p"], ["most"], keepdims=0)],
    "dropped": [node("Softmax", ["s"], ["p_"], axis=-1), node("Dropout", ["p_", "", "on"], ["p", ""])],
}  # fmt: skip


def layer(kind, length, dtype=np.float64, **attributes):
    """x → y, with scores by products or, as kind "operator", by Attention."""
    rng = np.random.default_rng(0)
    size = HEADS * WIDTH
    weights = {f"w{c}": (rng.standard_normal((size, size)) * 0.7).astype(dtype) for c in "qkvo"}
    known = length if isinstance(length, int) else 0
    constants = {
        "heads": np.array([0, 0, HEADS, WIDTH]), "flat": np.array([0, 0, size]), "scale": np.array(0.5, dtype),
        "mask": np.where(np.tri(known), 0, -1e9).astype(dtype), "zero": np.array(0), "one": np.array(1),
        "ones": np.array([1]), "inf": np.array(-np.inf, dtype), "nil": np.array(0, dtype), "cap": np.array(2, dtype),
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


def compiled(model, rows):
    training = attach(model, loss="mse", output="y", optimizer="sgd", learning_rate=1.0)
    return compile_step(training, attention_rows=rows)


def scans(step):
    return [n for n in step.model.graph if n.op_type == "Scan"]


def stepped(step, dtype=np.float64, target="portable", length=13):
    """The loss, and by how much a step moves each weight."""
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, length, HEADS * WIDTH)).astype(dtype) for n in ("x", "labels")}
    runner = StepRunner(step, options=Options(threads=1, target=target))
    before = runner.state()
    return {"loss": runner.step(feeds)["loss"]} | {n: before[n] - a for n, a in runner.state().items()}


CASES = [
    ("plain", 13), ("plain", "time"), ("mask", 13), ("row_mask", 13), ("causal", 13), ("causal", "time"),
    ("capped", 13), ("operator", 13), ("operator", "time"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "length", "rows"), [*((*case, 4) for case in CASES), ("mask", 13, 13)])
def test_gradients_are_those_of_all_scores_at_once(kind, length, rows):
    model = layer(kind, length, **({"is_causal": 1} if kind == "operator" else {}))
    whole, blocks = (compiled(model, n) for n in (0, rows))
    assert not scans(whole)
    assert len(scans(blocks)) == 2
    found = stepped(blocks)
    for name, array in stepped(whole).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-13, err_msg=name)


@needs_compiler
def test_kernels_take_the_place_of_a_block():
    model = layer("mask", 13, np.float32)
    found = stepped(compiled(model, 4), np.float32, "native")
    for name, array in stepped(compiled(model, 0), np.float32).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["read", "dropped"])
def test_scores_that_something_else_reads_stay(kind):
    training = attach(layer(kind, 13), loss="mse", output="y", train_mode=kind == "dropped")
    assert not scans(compile_step(training, outputs=["most"] if kind == "read" else [], attention_rows=4))


def test_many_keys_are_taken_by_blocks_and_few_are_not():
    assert not scans(compiled(layer("plain", MANY - 1), None))
    assert scans(compiled(layer("plain", MANY), None))
    assert not scans(compiled(layer("plain", "time"), None))  # nobody knows how many


def test_what_a_step_takes_is_linear_in_the_length():
    peaks = {}
    for rows in (0, 16):
        for length in (256, 512):
            step = compiled(layer("operator", length, np.float32, is_causal=1), rows)
            feeds = {n: np.zeros((1, length, HEADS * WIDTH), np.float32) for n in step.batch}
            peaks[rows, length] = measured_peak(step, feeds)
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

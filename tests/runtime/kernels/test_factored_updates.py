"""Updates of weights by the factors of their gradients: the numbers of the whole gradient, which is never there."""

import os

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels import factored_updates, running_sums
from onnxgrad.runtime.passes import Memory
from onnxgrad.runtime.peak_memory import measured_peak
from onnxgrad.runtime.session import passes_of
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.sanitized import SANITIZED
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

WORDS, WIDE = 517, 64  # no multiple of a vector
PASSES = ("factored_updates", "last_blocks")


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(factored_updates, "_LARGE", 1 << 10)
    monkeypatch.setattr(running_sums, "_FEWEST", 1 << 10)


def step_of(optimizer, loss, turned=False):
    """Of a layer and a head, whose weight is [WORDS, WIDE] if `turned`."""
    head = "t = Transpose (head)\n" if turned else ""
    found = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, {WIDE}] x) => (float[N, {WORDS}] y) {{
        a = MatMul (x, w)\nh = Tanh (a)\n{head} y = MatMul (h, {"t" if turned else "head"}) }}"""
    )
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((WIDE, WIDE)) / 6, "head": rng.standard_normal((WIDE, WORDS)) / 6}
    arrays = {n: np.ascontiguousarray(a.T if turned else a, np.float32) for n, a in arrays.items()}
    found.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return compile_step(attach(found, loss=loss, optimizer=optimizer, trainable=list(arrays), labels="labels"))


def batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, WIDE)).astype(np.float32), "labels": rng.integers(0, WORDS, rows)}


def options(threads=2):
    return [Options(threads=threads, target="native", without=without) for without in ((), PASSES)]


def same_steps(step, counts, threads=2):
    parts, whole = (StepRunner(step, options=o) for o in options(threads))
    for seed, rows in enumerate(counts):
        found, expected = (float(machine.step(batch(rows, seed))[step.loss]) for machine in (parts, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    start = step.state
    for name, array in whole.state().items():
        moved = np.abs(array - start[name].initial.numpy()).max()
        np.testing.assert_allclose(parts.state()[name], array, rtol=1e-5, atol=1e-4 * moved, err_msg=name)


def applied(step):
    state = {t.input: t.output for t in step.state.values()}
    passed = passes_of(step.model, Options(target="native"), Memory(state, overwrites=True, shares=True))
    return [name for name in PASSES if name in passed.applied]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "optimizer", ["sgd", "momentum", "adam", "adamw", "nadam", "adagrad", "rmsprop", "rmsprop:momentum=0.9", "lion"]
)
def test_every_optimizer(optimizer):
    step = step_of(optimizer, "cross_entropy")
    assert applied(step) == ["factored_updates"]
    same_steps(step, (5, 300, 1), threads=1 if optimizer == "adam" else 2)


@pytest.mark.parametrize("turned", [False, True])
def test_last_blocks(turned):
    """One block of few rows (as many as the head is wide, or fewer), and several; a sum of none is empty."""
    step = step_of("adam", "cross_entropy:block_rows=16", turned)
    assert "last_blocks" in applied(step)
    same_steps(step, (64, 65, 7, 150, 1, 16))


@pytest.mark.parametrize("lookups", [1, 2])
def test_a_table_that_is_the_head_as_well(lookups):
    """Its gradient has the terms of lookups besides the factors; few rows have no sum of blocks."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (int64[N] ids) => (float[N, {WORDS}] y) {{
        e = Gather (table, ids)\nt = Transpose (table)\na = MatMul (e, w)\nh = Tanh (a)
        {"s = Add (h, r)" if lookups == 2 else "s = Identity (h)"}\n y = MatMul (s, t) }}"""
    )
    if lookups == 2:
        model.graph.node.insert(0, onnx.helper.make_node("Gather", ["table", "turned"], ["r"]))
        model.graph.node.insert(0, onnx.helper.make_node("Neg", ["ids"], ["turned"]))
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((WIDE, WIDE)) / 6, "table": rng.standard_normal((WORDS, WIDE)) / 6}
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    loss = "cross_entropy:block_rows=16"
    step = compile_step(attach(model, loss=loss, optimizer="adam", trainable=list(arrays), labels="labels"))
    assert "last_blocks" in applied(step)
    parts, whole = (StepRunner(step, options=o) for o in options())
    for rows in (64, 65, 7, 150, 1, 16):
        fed = {"ids": rng.integers(0, WORDS, rows), "labels": rng.integers(0, WORDS, rows)}
        found, expected = (float(machine.step(fed)[step.loss]) for machine in (parts, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, array in whole.state().items():
        moved = np.abs(array - step.state[name].initial.numpy()).max()
        np.testing.assert_allclose(parts.state()[name], array, rtol=1e-5, atol=1e-4 * moved, err_msg=name)


@pytest.mark.skipif(bool(os.environ.get(SANITIZED)), reason="without an arena, nothing is measured")
def test_the_memory_of_a_gradient_and_of_its_sum():
    head = 4 * WORDS * WIDE
    for loss, rows, spared in (("cross_entropy", 8, 0.9), ("cross_entropy:block_rows=16", 20, 0.6)):
        step = step_of("adam", loss)
        fewer, more = (measured_peak(step, batch(rows), o) for o in options(1))
        assert fewer < more - spared * head, loss


def test_a_gradient_that_something_else_reads_is_whole():
    """Its norm, of all gradients."""
    step = compile_step(
        attach(
            onnx.parser.parse_model(
                f'<ir_version: 10, opset_import: ["": 21]> g (float[N, {WIDE}] x) => (float[N, {WIDE}] y) '
                f"<float[{WIDE}, {WIDE}] w = {{{', '.join(['0.1'] * WIDE * WIDE)}}}> {{ y = MatMul (x, w) }}"
            ),
            loss="mse", optimizer="adam", labels="labels", clip_norm=1.0,
        )
    )  # fmt: skip
    assert applied(step) == []

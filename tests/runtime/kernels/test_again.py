"""Cheap results that the backward pass computes again: the same bits in less memory, and only where that is so."""

import os

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.ir.execution_order import execution_order
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.passes import Memory
from onnxgrad.runtime.peak_memory import measured_peak
from onnxgrad.runtime.session import passes_of
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.sanitized import SANITIZED
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

WIDE, BLOCKS, ROWS, KEYS = 48, 5, 40, 8
LAYER = "{a} = LayerNormalization <axis = -1> ({x}, scale, shift)\n"
RMS = """{a}_2 = Mul ({x}, {x})\n{a}_m = ReduceMean ({a}_2, last)\n{a}_e = Add ({a}_m, small)
    {a}_s = Sqrt ({a}_e)\n{a}_d = Div ({x}, {a}_s)\n{a} = Mul ({a}_d, scale)\n"""
ATTENTION = """{a} = MatMul ({x}, w)\n{u} = Reshape ({a}, heads)\n{v} = Transpose <perm = [0, 2, 1, 3]> ({u})
    {h} = MatMul ({x}, w2)\n{h}_4 = Reshape ({h}, heads)\n{s} = Transpose <perm = [0, 2, 3, 1]> ({h}_4)
    {h}_v = Transpose <perm = [0, 2, 1, 3]> ({h}_4)\n{u}_s = MatMul ({v}, {s})\n{u}_m = Add ({u}_s, mask)
    {i} = Softmax <axis = -1> ({u}_m)\n{g} = MatMul ({i}, {h}_v)\n{g}_t = Transpose <perm = [0, 2, 1, 3]> ({g})
    {g}_2 = Reshape ({g}_t, rows)\n{g}_w = MatMul ({g}_2, w)\n{y} = Add ({x}, {g}_w)\n"""
#: What a block makes of x, and an upper bound of the memory that a second computation leaves.
KINDS = {
    "gelu": (LAYER + "{u} = MatMul ({a}, w)\n{g} = Gelu ({u})\n{v} = MatMul ({g}, w)\n{y} = Add ({x}, {v})\n", 0.9),
    "gated": (
        RMS + "{u} = MatMul ({a}, w)\n{h} = MatMul ({a}, w2)\n{s} = Sigmoid ({u})\n{i} = Mul ({u}, {s})\n"
        "{g} = Mul ({i}, {h})\n{v} = MatMul ({g}, w)\n{y} = Add ({x}, {v})\n", 0.9,
    ),
    "relu": ("{u} = MatMul ({x}, w)\n{v} = Relu ({u})\n{y} = MatMul ({v}, w)\n", 0.9),
    "attention": (ATTENTION, 0.9),
    "learned bias": (ATTENTION.replace("mask", "bias"), 0.95),  # of which no kernel has the cotangent
    "tanh": ("{u} = MatMul ({x}, w)\n{v} = Tanh ({u})\n{y} = MatMul ({v}, w)\n", 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr("onnxgrad.runtime.passes.LARGE_STATE", 0)


def step_of(kind):
    text, x = "", "x"
    for i in range(BLOCKS):
        names = {n: f"{n}{i}" for n in "auvghsi"} | {"x": x, "y": "y" if i == BLOCKS - 1 else f"y{i}"}
        text += kind.format(**names)
        x = names["y"]
    found = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, {WIDE}] x) => (float[N, {WIDE}] y) {{ {text} }}'
    )
    rng = np.random.default_rng(0)
    arrays = {n: np.float32(rng.standard_normal((WIDE, WIDE)) / 7) for n in ("w", "w2")}
    arrays |= {"scale": np.ones(WIDE, np.float32), "shift": np.zeros(WIDE, np.float32), "small": np.float32(1e-6)}
    arrays["two"] = np.float32(2)
    arrays |= {"last": np.array([-1]), "heads": np.array([-1, KEYS, 4, WIDE // 4]), "rows": np.array([-1, WIDE])}
    arrays["bias"] = np.float32(rng.standard_normal((4, KEYS, KEYS)))
    arrays["mask"] = np.triu(np.full((KEYS, KEYS), -np.inf, np.float32), 1)
    found.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items() if n in text)
    weights = [n for n in ("w", "w2", "scale", "shift", "bias") if n in text]
    return compile_step(attach(found, loss="mse", optimizer="adam", trainable=weights, labels="labels"))


def batch(seed):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal((ROWS, WIDE)).astype(np.float32) for n in ("x", "labels")}


def optimized(step):
    state = {t.input: t.output for t in step.state.values()}
    return passes_of(step.model, Options(target="native"), Memory(state, overwrites=True, shares=True)).model.graph


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_less_memory(kind):
    text, share = KINDS[kind]
    step = step_of(text)
    assert any(node.op_type == "After" for node in optimized(step)) is (share < 1)
    options = [Options(threads=1, target="native", without=without) for without in ((), ("again",))]
    if not os.environ.get(SANITIZED):  # without an arena, nothing is measured
        fewer, more = (measured_peak(step, batch(0), o) for o in options)
        assert fewer < share * more if share < 1 else fewer == more
    again, kept = (StepRunner(step, options=o) for o in options)
    for seed in range(3):
        found, expected = (machine.step(batch(seed))[step.loss].copy() for machine in (again, kept))
        np.testing.assert_array_equal(found, expected)
    for name, array in kept.state().items():
        np.testing.assert_array_equal(again.state()[name], array, err_msg=name)


@pytest.mark.skipif(bool(os.environ.get(SANITIZED)), reason="without an arena, nothing is measured")
def test_a_square_is_kept_as_its_base():
    """The backward pass of x² reads x; 2·x is not kept beside it."""
    text, options = KINDS["gated"][0], Options(threads=1, target="native")
    powers, products = step_of(text.replace("Mul ({x}, {x})", "Pow ({x}, two)")), step_of(text)
    more = measured_peak(powers, batch(0), options) - measured_peak(products, batch(0), options)
    assert more <= ROWS * WIDE * 4  # one tensor, not one of each block


def test_copies_wait_for_the_backward_pass():
    """All of them run after the last product of the forward pass, each right before its reader."""
    step = step_of(KINDS["gated"][0])
    types = [node.op_type for node in execution_order(optimized(step))]
    assert types.index("After") > max(i for i, t in enumerate(types) if t == "MatMul" and i < types.index("Adam"))


def test_small_state_is_left_alone(monkeypatch):
    monkeypatch.setattr("onnxgrad.runtime.passes.LARGE_STATE", 1 << 26)
    assert all(node.op_type != "After" for node in optimized(step_of(KINDS["gelu"][0])))

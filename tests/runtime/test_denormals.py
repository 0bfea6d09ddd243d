"""Denormal numbers are zeros in a training step, on all threads that compute it, and nowhere else."""

import subprocess
import sys
import threading

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.denormals import flushing
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.twins import needs_kernels

pytestmark = pytest.mark.skipif(flushing() is None, reason="denormal numbers are kept: this is not x86-64 under Linux")

ROWS = 3000  # as many numbers as are worth several threads


def kept():
    """True if this thread computes with denormal numbers."""
    return bool(np.all(np.full(16, 1e-39, np.float32) * np.float32(0.5)))


@pytest.fixture(scope="module")
def step():
    """An embedding, of which a batch touches few rows."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        lookup (int64[N] ids) => (float[N, 8] y) { y = Gather (table, ids) }""")
    table = np.random.default_rng(0).standard_normal((ROWS, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return compile_step(attach(model, loss="mse", optimizer="adam", learning_rate=0.01))


def moments(step, options, start, count=3):
    """The moments of rows without gradient after some steps, if all numbers of them were `start`."""
    machine = StepRunner(step, options=options)
    state = machine.state()
    names = [n for n, a in state.items() if a.shape == (ROWS, 8) and n != "table"]
    assert len(names) == 2
    machine.load_state(state | {n: np.full((ROWS, 8), start, np.float32) for n in names})
    label = next(n for n in step.batch if n != "ids")
    batch = {"ids": np.array([0, 1], np.int64), label: np.ones((2, 8), np.float32)}
    for _ in range(count):
        assert np.isfinite(machine.step(batch)[step.loss])
    state = machine.state()
    return state["table"], {n: state[n][2:] for n in names}


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("target", ["portable", pytest.param("native", marks=needs_kernels)])
def test_moments_end_at_zero(step, threads, target):
    _, found = moments(step, Options(threads=threads, target=target), 1.1756e-38)  # a little above the denormal ones
    for moment in found.values():
        assert not np.any(moment)
    assert kept()


def test_they_stay_denormal_on_request(step):
    """Rounding keeps them for ever: 0.9 times five of the smallest number is five of them."""
    _, found = moments(step, Options(threads=2, denormals=True), 7e-45, count=40)
    for moment in found.values():
        assert np.all(moment)


@needs_kernels
def test_both_targets_flush_alike(step):
    expected = moments(step, Options(threads=1, target="portable"), 1.3e-38, count=2)
    for threads in (1, 3):
        found = moments(step, Options(threads=threads, target="native"), 1.3e-38, count=2)
        np.testing.assert_array_equal(found[0], expected[0])
        for name, moment in expected[1].items():
            np.testing.assert_array_equal(found[1][name], moment)


def test_a_step_in_another_thread(step):
    found, machine = [], StepRunner(step, options=Options(threads=1))

    def work():
        machine.load_state({n: a if n == "table" else np.full_like(a, 1e-39) for n, a in machine.state().items()})
        label = next(n for n in step.batch if n != "ids")
        machine.step({"ids": np.zeros(1, np.int64), label: np.ones((1, 8), np.float32)})
        found.append(kept())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
    moments_ = [a for a in machine.state().values() if a.shape == (ROWS, 8) and np.abs(a).max() < 1]
    for array in moments_:
        assert not np.any(array[1:])


def test_the_caller_keeps_his_also_after_the_first_session_of_a_process():
    """To ONNX Runtime, the first one decides for the thread that makes it."""
    script = """
import numpy as np, onnx
from onnxgrad.runtime import StepRunner
from onnxgrad.training import attach, compile_step
model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y) '
    '<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }')
machine = StepRunner(compile_step(attach(model, loss="mse")))
print(bool(np.all(np.full(16, 1e-39, np.float32) * np.float32(0.5))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr

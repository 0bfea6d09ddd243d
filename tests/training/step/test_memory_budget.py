"""Steps within a budget of memory: the same numbers, the peak that was predicted, and nothing less will do."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.ir.execution_order import orders
from onnxgrad.remat import amount, emit, megabytes, sizes
from onnxgrad.remat.schedule import Schedules, reorder
from onnxgrad.runtime import Options, StepRunner, measured_peak
from onnxgrad.training import Trainer, attach, compile_step, split_step, within_memory
from tests.large_models import gpt
from tests.training.nets import model_of

node = helper.make_node
ONE = Options(threads=1)


# --- models ------------------------------------------------------------------------------------------


def deep(layers: int = 16, width: int = 32, batch: int | str = "N", last: str = "Tanh") -> onnx.ModelProto:
    """Layers of a product, a bias and an activation."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], {}, "x"
    for i in range(layers):
        weights[f"w{i}"] = (rng.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32)
        weights[f"b{i}"] = (rng.standard_normal(width) * 0.1).astype(np.float32)
        end = "y" if i == layers - 1 else f"a{i}"
        nodes += [
            node("MatMul", [x, f"w{i}"], [f"m{i}"], name=f"mul{i}"),
            node("Add", [f"m{i}", f"b{i}"], [f"h{i}"], name=f"add{i}"),
            node(last, [f"h{i}"], [end], name=f"act{i}"),
        ]
        x = end
    return model_of(nodes, weights, {"x": [batch, width]}, {"y": [batch, width]})


def convolutions(blocks: int = 4, norm: bool = True, skip: bool = True) -> onnx.ModelProto:
    """x + Relu(BatchNormalization(Conv(x))), some times, then the mean over each channel."""
    rng = np.random.default_rng(0)
    weights = {"first": (rng.standard_normal((16, 3, 3, 3)) * 0.2).astype(np.float32)}
    nodes = [node("Conv", ["x", "first"], ["c"], pads=[1, 1, 1, 1], name="first")]
    x = "c"
    for i in range(blocks):
        weights[f"k{i}"] = (rng.standard_normal((16, 16, 3, 3)) * 0.08).astype(np.float32)
        nodes.append(node("Conv", [x, f"k{i}"], [f"c{i}"], pads=[1, 1, 1, 1], name=f"conv{i}"))
        y = f"c{i}"
        if norm:
            for what, value in (("scale", 1.0), ("bias", 0.1), ("mean", 0.0), ("var", 1.0)):
                weights[f"{what}{i}"] = np.full(16, value, np.float32)
            operands = [y, *(f"{what}{i}" for what in ("scale", "bias", "mean", "var"))]
            nodes.append(node("BatchNormalization", operands, [f"n{i}"], name=f"norm{i}"))
            y = f"n{i}"
        nodes.append(node("Relu", [y], [f"r{i}"], name=f"relu{i}"))
        y = f"r{i}"
        if skip:
            nodes.append(node("Add", [x, y], [f"s{i}"], name=f"sum{i}"))
            y = f"s{i}"
        x = y
    nodes += [
        node("GlobalAveragePool", [x], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("MatMul", ["f", "head"], ["y"]),
    ]
    weights["head"] = rng.standard_normal((16, 10)).astype(np.float32)
    return model_of(nodes, weights, {"x": ["N", 3, 12, 12]}, {"y": ["N", 10]})


def dropping() -> onnx.ModelProto:
    """A deep network that drops behind every activation."""
    proto = deep(6)
    for i in range(5):
        proto.graph.node.append(node("Dropout", [f"a{i}", "share", "yes"], [f"d{i}"], name=f"drop{i}"))
        reader = next(n for n in proto.graph.node if n.name == f"mul{i + 1}")
        reader.input[0] = f"d{i}"
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0.3), "share"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    ordered = ir.from_proto(proto)
    ordered.graph.sort()
    return ir.to_proto(ordered)


#: name: model, loss, rows of a batch, share of the peak that a plan comes down to at least
MODELS = {
    "mlp": (deep, "mse", 512, 0.5),
    "mlp of static rows": (lambda: deep(batch=256, last="Relu"), "mse", 256, 0.6),
    "cnn": (lambda: convolutions(6, norm=False, skip=False), "cross_entropy", 16, 0.8),
    "residual cnn": (lambda: convolutions(6), "cross_entropy", 16, 0.7),
    "transformer": (lambda: gpt(3, 32, 4, 50, 16), "cross_entropy", 16, 0.7),
    "dropout": (dropping, "mse", 256, 0.7),
}


def step_of(name: str, **how):
    model, loss, rows, _ = MODELS[name]
    proto = model()
    return compile_step(attach(proto, loss=loss, optimizer="adam", **how)), rows


def batch_of(step, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = {v.name: v for v in step.model.graph.inputs}
    batch = {}
    for name in step.batch:
        shape = [d if isinstance(d, int) else rows for d in inputs[name].shape]
        whole = inputs[name].dtype == ir.DataType.INT64
        batch[name] = rng.integers(0, 10, shape) if whole else rng.standard_normal(shape).astype(np.float32)
    return batch


def dims_of(step, rows: int) -> dict[str, int]:
    inputs = {v.name: v for v in step.model.graph.inputs}
    return {str(d): rows for n in step.batch for d in inputs[n].shape[:1] if not isinstance(d, int)}


@functools.cache
def planned_of(name: str):
    """A step, the same within the least memory, and its rows."""
    step, rows = step_of(name)
    return step, within_memory(step, least_of(step, rows), rows), rows


def least_of(step, rows: int) -> int:
    """The smallest budget that can be met, as the message of the refusal tells."""
    with pytest.raises(BadInput, match="use at least") as refused:
        within_memory(step, 64, rows)
    return amount(str(refused.value).split("at least ")[1].split(" at a time")[0])


# --- the same numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n if n in ("mlp", "residual cnn") else pytest.param(n, marks=pytest.mark.complete) for n in MODELS]
)
def test_the_same_training_in_less_memory(name):
    """Five steps of both; the peak that ONNX Runtime tells is the one that was predicted.

    Both run standard operators, as plans do: Adam magnifies the rounding of kernels, 1e-8 in a step, to 7e-5 in five.
    """
    step, planned, rows = planned_of(name)
    plan = planned.plan
    assert plan.nodes
    assert plan.predicted <= plan.budget
    assert plan.predicted <= plan.plain * MODELS[name][3]
    assert plan.recomputed
    onnx.checker.check_model(ir.to_proto(planned.model))
    batches = [batch_of(step, rows, seed) for seed in range(5)]
    standard = Options(threads=1, target="portable")
    one, other = StepRunner(step, options=standard), StepRunner(planned, options=ONE)
    for batch in batches:
        want, got = one.step(batch), other.step(batch)
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    wanted, states = one.state(), other.state()
    for key, value in wanted.items():
        found = states[key]
        squares = [np.abs(state[f"{key}_square"]).max() for state in (wanted, states) if f"{key}_square" in state]
        if 0 < max(squares, default=0) < 1e-16:  # no gradient but rounding (the bias of keys), which Adam magnifies
            continue
        np.testing.assert_allclose(found, value, rtol=2e-3, atol=2e-5, err_msg=key)
    plain = Options(threads=1, layout="plain", level="none"), Options(threads=1, layout="plain")
    for options, margin in ((ONE, 1.25), *((options, 1.05) for options in plain)):  # copies in blocks of channels
        measured = measured_peak(planned, batches[0], options)
        assert measured <= plan.predicted * margin, options
        assert measured >= plan.predicted * 0.75, options
        assert measured < measured_peak(step, batches[0], options) * (MODELS[name][3] + 0.12), options


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["mlp", "residual cnn", "dropout"])
def test_to_the_bit_where_the_same_kernels_run(name):
    step, planned, rows = planned_of(name)
    plain = Options(threads=1, layout="plain", level="none", target="portable")
    one, other = StepRunner(step, options=plain), StepRunner(planned, options=plain)
    for seed in range(3):
        batch = batch_of(step, rows, seed)
        assert one.step(batch)["loss"] == other.step(batch)["loss"]
    for key, value in one.state().items():
        np.testing.assert_array_equal(other.state()[key], value, err_msg=key)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("level", ["none", "basic", "extended", "all"])
def test_no_optimization_of_the_runtime_undoes_it(level):
    step, planned, rows = planned_of("mlp")
    peak = measured_peak(planned, batch_of(step, rows), Options(threads=1, level=level))
    assert peak <= planned.plan.predicted * 1.05


def test_without_gates_nothing_is_saved(monkeypatch):
    """The runtime finds equal nodes, and what could be computed early: it is the gates that save memory."""
    step, planned, rows = planned_of("mlp")
    batch = batch_of(step, rows)
    real = emit.settle
    monkeypatch.setattr(emit.Rewriter, "_delay", lambda *_: None)
    monkeypatch.setattr(emit, "settle", lambda graph, size: real(graph, size) and 1)  # and believe it
    without = within_memory(step, planned.plan.budget, rows)
    assert without.plan.nodes
    assert measured_peak(without, batch, ONE) > 0.9 * planned.plan.plain > 1.5 * measured_peak(planned, batch, ONE)


def test_a_budget_in_between_isused():
    """Values are saved as far as they fit: a budget half way down costs less work than the smallest."""
    step, planned, rows = planned_of("mlp")
    hard = planned.plan
    easy = within_memory(step, (hard.plain + hard.budget) // 2, rows).plan
    assert 0 < easy.extra < hard.extra
    assert hard.predicted < easy.predicted <= easy.budget
    assert sum(easy.kept.values()) > sum(hard.kept.values())


def test_enough_memory_changes_nothing():
    step, rows = step_of("mlp")
    planned = within_memory(step, "1GB", rows)
    assert not planned.plan.nodes
    assert not planned.plan.recomputed
    assert [n.op_type for n in planned.model.graph] == [n.op_type for n in step.model.graph]
    assert "; 0% more work" in str(planned.plan)


# --- what must not happen twice ----------------------------------------------------------------------


def test_running_statistics_move_once():
    """A BatchNormalization that runs twice has statistics of its own to write into, and the state moves by one."""
    _, planned, _ = planned_of("residual cnn")
    norms = [n for n in planned.model.graph if n.op_type == "BatchNormalization"]
    assert len(norms) > 6
    written = [v for n in norms for v in n.inputs[3:5]]
    assert len(set(written)) == len(written)
    assert all(v.producer() is not None and len(list(v.uses())) == 1 for v in written)


def test_masks_are_the_same_twice():
    """A Dropout whose mask is computed anew drops the same: in five steps, the same weights to the bit."""
    _, planned, _ = planned_of("dropout")
    again = {n.op_type for n in planned.model.graph if (n.name or "").startswith("again_")}
    assert again & {"Where", "GreaterOrEqual", "Slice"}


def test_a_random_operator_never_runs_twice():
    proto = deep(8)
    first = next(n for n in proto.graph.node if n.name == "act4")
    first.output[0] = "quiet"
    at = list(proto.graph.node).index(first)
    noise = [node("RandomNormalLike", ["quiet"], ["noise"], scale=0.1), node("Add", ["quiet", "noise"], ["a4"])]
    for k, made in enumerate(noise):
        proto.graph.node.insert(at + 1 + k, made)
    step = compile_step(attach(proto, loss="mse"))
    planned = within_memory(step, least_of(step, 512), 512)
    assert sum(n.op_type == "RandomNormalLike" for n in planned.model.graph) == 1
    assert planned.plan.nodes


# --- how it is asked for -----------------------------------------------------------------------------


def test_the_same_graph_in_every_process():
    """A run that goes on from a checkpoint takes the same steps, so its plan must be the same."""
    program = "from tests.training.step.test_memory_budget import digest; print(digest())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.stdout.strip() == digest()


def digest() -> str:
    """The digest of a step within a budget."""
    step = compile_step(attach(deep(8, 16), loss="mse"), memory="150KB", batch_size=256)
    assert step.plan.nodes
    return hashlib.sha1(ir.to_proto(step.model).SerializeToString(deterministic=True)).hexdigest()


def test_the_smallest_budget_is_told_and_can_be_met():
    step, planned, rows = planned_of("residual cnn")
    assert planned.plan.predicted <= planned.plan.budget
    with pytest.raises(BadInput, match="accumulate"):
        within_memory(step, planned.plan.budget * 9 // 10, rows)


def test_rows_decide():
    """Twice the rows need twice the memory; how many must be said where the model leaves it open."""
    step, rows = step_of("mlp")
    few, many = (within_memory(step, "1GB", n).plan.plain for n in (rows, 2 * rows))
    assert many == pytest.approx(2 * few, rel=0.01)
    with pytest.raises(BadInput, match="batch_size=32"):
        within_memory(step, "1MB")


def test_other_dimensions_are_named():
    step = compile_step(attach(gpt(1), loss="cross_entropy"))
    names = {d.value for n in step.model.graph.inputs for d in n.shape or () if isinstance(d, ir.SymbolicDim)}
    open_ = names - set(dims_of(step, 4))
    if open_:
        with pytest.raises(BadInput, match="dims="):
            within_memory(step, "1GB", 4)
    assert within_memory(step, "1GB", 4, dict.fromkeys(names, 8)).plan.plain


@pytest.mark.parametrize(("text", "count"), [
    ("200MB", 200_000_000), ("1.5 GiB", 1.5 * 2**30), ("7kb", 7000), ("512", 512), (512, 512), (".5MiB", 2**19),
])  # fmt: skip
def test_amounts(text, count):
    assert amount(text) == count


@pytest.mark.parametrize("text", ["", "much", "-3MB", "3 parsecs", 0, -1, 1.5, None, True, "0MB"])
def test_what_is_no_amount(text):
    with pytest.raises(BadInput, match="200MB"):
        amount(text)


@pytest.mark.parametrize("count", [1, 999, 1234, 99_950, 123_456, 10**6, 26_843_545, 10**9 + 1])
def test_said_amounts_are_enough(count):
    assert count <= amount(megabytes(count)) <= count * 1.1 + 1


def test_by_compile_step_and_trainer():
    proto = deep(6, 8)
    step = compile_step(attach(proto, loss="mse"))
    least = least_of(step, 64)
    planned = compile_step(attach(proto, loss="mse"), memory=least, batch_size=64)
    assert planned.plan.nodes
    trainer = Trainer(proto, loss="mse", memory=least, batch_size=64)
    assert trainer.plan.predicted == planned.plan.predicted
    data = {"x": np.ones((128, 8), np.float32), "labels": np.zeros((128, 8), np.float32)}
    losses = trainer.fit(data, epochs=2, batch_size=64).epochs
    assert losses[-1]["loss"] < losses[0]["loss"]
    with pytest.raises(BadInput, match="at most 64 rows, not 65"):
        trainer.fit(data, batch_size=65)


def test_another_budget_goes_on_from_the_same_checkpoint(tmp_path):
    """Who runs out of memory resumes with less."""
    proto = deep(6, 8)
    data = {"x": np.ones((128, 8), np.float32), "labels": np.zeros((128, 8), np.float32)}
    first = Trainer(proto, loss="mse")
    first.fit(data, epochs=1, batch_size=64, checkpoint=tmp_path)
    least = least_of(first.step, 64)
    then = Trainer(proto, loss="mse", memory=least, batch_size=64)
    assert then.plan.nodes
    then.fit(data, epochs=2, batch_size=64, checkpoint=tmp_path, resume=True)
    assert then.step_count == 4


@pytest.mark.complete
def test_parts_of_a_batch():
    """The gradient of a part has the budget; training is as without it."""
    proto = deep(10, 8)
    data = {"x": np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)}
    data["labels"] = np.tanh(data["x"])
    least = least_of(split_step(attach(proto, loss="mse", accumulate=True)).gradient, 100)
    ends = []
    for how in ({}, {"memory": least, "batch_size": 300}):
        trainer = Trainer(proto, loss="mse", accumulate=3, options=ONE, **how)
        trainer.fit(data, epochs=1, batch_size=300)
        ends.append(trainer.state())
    assert trainer.plan.nodes
    for key, value in ends[0].items():
        np.testing.assert_allclose(ends[1][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


# --- what a process takes ----------------------------------------------------------------------------

_PROCESS = """
import json, sys
from pathlib import Path
from onnxgrad.runtime import Options, StepRunner
from tests.training.step.test_memory_budget import batch_of, deep
from onnxgrad.training import attach, compile_step, within_memory
rows, budget = int(sys.argv[1]), int(sys.argv[2])
step = compile_step(attach(deep(16, 64), loss="mse", optimizer="sgd"))
if budget:
    step = within_memory(step, budget, rows)
runner = StepRunner(step, options=Options(threads=1))
batch = batch_of(step, rows)
runner.step({k: v[:2] for k, v in batch.items()})
def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
runner.step(batch)
print(json.dumps(resident("VmHWM") - before))
"""


@pytest.mark.complete
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_grows_by_less():
    """Resident memory, of processes of their own: less than half of it, for the deep network."""
    rows = 8192
    step = compile_step(attach(deep(16, 64), loss="mse", optimizer="sgd"))
    least = least_of(step, rows)
    grown = []
    for budget in (0, least):
        command = [sys.executable, "-c", _PROCESS, str(rows), str(budget)]
        grown.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert grown[1] < 0.5 * grown[0]
    assert grown[1] < least * 1.3


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [{}, {"clip_norm": 1.0}])
def test_the_order_alone_gives_back_sooner(how):
    """Gradients are computed when their cotangents are there, also where the norm of all of them is taken."""
    step, rows = step_of("residual cnn", **how)
    size = sizes(step.model, dims_of(step, rows))
    given = list(step.model.graph)
    schedules = Schedules(step.model.graph, size)
    found = max(schedules.used(given).values())
    for order in orders(step.model.graph):
        reorder(step.model.graph, order)
        assert found <= max(schedules.used(order).values()) * 1.05
    reorder(step.model.graph, given)
    assert measured_peak(step, batch_of(step, rows), ONE) <= found * 1.25

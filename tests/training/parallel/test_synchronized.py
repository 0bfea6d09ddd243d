"""BatchNormalization with the statistics of all ranks: what ranks get is what one process gets of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import BadInput, PassWarning
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels import KERNELS
from onnxgrad.training import Loss, Trainer, attach, compile_step
from onnxgrad.training.parallel import stages as stage_module
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.stages import stages
from onnxgrad.training.step.accumulate import Accumulating, split_step
from tests.distributed.simulated import World
from tests.runtime.kernels.twins import needs_kernels
from tests.training.nets import mlp, model_of
from tests.training.parallel.test_machine import check_replicas, part_of

ONE = Options(threads=1)


def convolutional():
    """Two convolutions with BatchNormalization behind them."""
    rng, node = np.random.default_rng(0), helper.make_node
    held, nodes, before = {}, [], "x"
    for k, (inner, outer) in enumerate([(3, 5), (5, 4)]):
        held[f"w{k}"] = rng.standard_normal((outer, inner, 3, 3)).astype(np.float32) / 3
        held |= {f"{name}{k}": np.full(outer, value, np.float32) for name, value in zip("sbmv", (1, 0, 0, 1))}
        nodes.append(node("Conv", [before, f"w{k}"], [f"c{k}"], pads=[1] * 4))
        nodes.append(node("BatchNormalization", [f"c{k}", *(f"{n}{k}" for n in "sbmv")], [f"n{k}"], momentum=0.8))
        nodes.append(node("Relu", [f"n{k}"], [before := f"r{k}"]))
    held["w"] = rng.standard_normal((4, 3)).astype(np.float32)
    nodes += [node("GlobalAveragePool", [before], ["p"]), node("Flatten", ["p"], ["f"])]
    nodes.append(node("MatMul", ["f", "w"], ["y"]))
    return model_of(nodes, held, {"x": ["N", 3, 6, 6]}, {"y": ["N", 3]})


def batches(rows, count=4):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = (2 * rng.standard_normal((rows, 3, 6, 6)) + 5).astype(np.float32)
        yield {"x": x, "labels": np.sort(rng.integers(0, 3, rows))}


def stepped(split, size, data, parts=1):
    def work(collective):
        machine = DataParallel(split, parts, collective, options=ONE)
        results = [{k: v.copy() for k, v in machine.step(part_of(batch, collective)).items()} for batch in data]
        return machine.state(), results

    return World(size).run(work)


def check_as(machine, data, found):
    """`machine`, of one process, has had the losses and has the state that ranks have `found`."""
    check_replicas(found)
    state, results = found[0]
    for batch, one in zip(data, results):
        np.testing.assert_allclose(one["loss"], machine.step(batch)["loss"], rtol=1e-5)
    for name, array in machine.state().items():
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


LOSSES = ["cross_entropy", "cross_entropy:ignore_index=0", Loss("cross_entropy", weight=[0.2, 1, 5]),
          Loss("cross_entropy", reduction="sum")]  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("loss", "size", "rows"), [*zip(LOSSES, (2, 5, 3, 2), (8, 11, 7, 9)), (LOSSES[0], 6, 5)])
def test_ranks_do_what_one_process_does(loss, size, rows):
    """With shards of different sizes, or empty ones, and a rank of whose rows none counts (labels are sorted)."""
    model = attach(convolutional(), loss=loss, optimizer="momentum", learning_rate=0.02, accumulate=True)
    data = list(batches(rows))
    found = stepped(split_step(model, synchronized=True), size, data)
    check_as(StepRunner(compile_step(model), options=ONE), data, found)
    if size == 2:  # and it makes a difference
        apart = stepped(split_step(model), size, data)
        assert abs(apart[0][1][-1]["loss"] / found[0][1][-1]["loss"] - 1) > 1e-4


def test_parts_are_those_of_all_ranks():
    """Of two ranks with two parts each: the first parts together are the first part of one process."""
    model = attach(convolutional(), loss="cross_entropy", optimizer="sgd", learning_rate=0.05, accumulate=True)
    data = list(batches(8))
    found = stepped(split_step(model, synchronized=True), 2, data, parts=2)
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    shuffled = [{name: array[order] for name, array in batch.items()} for batch in data]
    check_as(Accumulating(split_step(model), 2, options=ONE), shuffled, found)
    uneven = stepped(split_step(model, synchronized=True), 3, list(batches(4)), parts=2)  # of 1 row there is one part
    check_replicas(uneven)


def test_a_mean_far_from_zero_costs_no_digits():
    """Of a vector, whose running variance becomes that of the batch: as numpy finds it in float64."""
    names = ["x", "s", "b", "m", "v"]
    held = dict(zip(names[1:], np.float32([[1, 1], [0, 0], [0, 0], [1, 1]])))
    nodes = [helper.make_node("BatchNormalization", names, ["y"], momentum=0.0)]
    model = attach(model_of(nodes, held, {"x": ["N", 2]}, {"y": ["N", 2]}), loss="mse", accumulate=True)
    x = np.random.default_rng(3).standard_normal((9, 2)).astype(np.float32) * np.float32([1e-2, 1]) + np.float32(
        [1e2, 0]
    )
    data = [{"x": x, "labels": np.zeros((9, 2), np.float32)}]
    state = stepped(split_step(model, synchronized=True), 4, data)[0][0]
    np.testing.assert_allclose(state["m"], x.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(state["v"], x.astype(np.float64).var(0), rtol=1e-4)


@needs_kernels
@pytest.mark.target("native")
def test_kernels_that_the_runtime_refuses_are_left_out(monkeypatch):
    """Stages have them before they are cut, so that no session of a stage can do without."""
    split = split_step(attach(convolutional(), loss="cross_entropy", accumulate=True), synchronized=True)
    data = list(batches(8, 2))
    want = stepped(split, 2, data)

    def apply(model, setting):
        places = KERNELS.apply(model, setting)
        next(n for n in model.graph if n.domain == "onnxgrad.native").op_type = "NoSuchKernel"
        return places

    monkeypatch.setattr(stage_module, "KERNELS", replace(KERNELS, apply=apply))
    with pytest.warns(PassWarning, match="(?s)'kernels' failed .*NoSuchKernel") as told:
        found = stepped(split, 2, data)
    assert len(told) == 2  # one of each rank
    for name, array in found[0][0].items():
        np.testing.assert_allclose(array, want[0][0][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_step_has_a_stage_for_each_sum_in_a_row():
    """Two norms forward, two backward; what each is sent are numbers per channel."""
    model = attach(convolutional(), loss="cross_entropy", accumulate=True)
    found = stages(split_step(model, synchronized=True).gradient.model)
    assert [len(stage.summed) for stage in found] == [1, 1, 1, 1, 0]
    assert "SoftmaxCrossEntropyLoss" not in {n.op_type for stage in found[:2] for n in stage.model.graph}


def test_a_model_without_such_statistics_is_refused():
    with pytest.raises(BadInput, match="no BatchNormalization in training mode"):
        split_step(attach(mlp(), loss="mse", accumulate=True), synchronized=True)


# --- whole runs ---------------------------------------------------------------------------------

HOW = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.01}


def fitted(size, folder=None, resume=False, **own):
    """The trainers of `size` ranks after two epochs, whose last batch has rows for some ranks only."""
    [data] = batches(11, 1)

    def work(collective):
        trainer = Trainer(convolutional(), options=ONE, distributed=collective, **HOW, **own)
        trainer.fit(data, epochs=2, batch_size=5, seed=1, checkpoint=folder, resume=resume, progress=False)
        return trainer

    return World(size).run(work)


@pytest.mark.parametrize("own", [{}, pytest.param({"shard_optimizer": True}, marks=pytest.mark.complete)])
def test_a_run_of_ranks_is_that_of_one_process(own, tmp_path):
    (alone,) = fitted(1, sync_batch_norm=True)  # which is of no matter to one rank
    for trainer in fitted(2, tmp_path, sync_batch_norm=True, **own):
        for one, other in zip(trainer.history.epochs, alone.history.epochs):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for name in ("w0", "s1", "m0", "v1"):
            found, wanted = (t.machine.state()[name] for t in (trainer, alone))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    with pytest.raises(BadInput, match="statistics of batches of all ranks, not of each rank"):
        fitted(2, tmp_path, resume=True, **own)


@pytest.mark.parametrize("own", [{"sync_every": 4}, {"memory": "1GB", "batch_size": 10}])
def test_what_does_not_go_with_it_is_refused(own):
    with pytest.raises(BadInput, match=f"sync_batch_norm does not go with {next(iter(own))}"):
        World(2).run(lambda c: Trainer(convolutional(), distributed=c, sync_batch_norm=True, **HOW, **own))

"""The machine of a rank: what ranks get from parts of a batch is what one process gets from all of it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from onnx import helper

from onnxgrad.distributed import Alone, blocks
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import attach, compile_step
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.step.accumulate import split_step
from tests.distributed.simulated import World
from tests.training.graph.test_training_mode import norm_net
from tests.training.models import blobs, classifier
from tests.training.nets import mlp, model_of
from tests.training.step.test_accumulate import CASES, batches

ONE = Options(threads=1)


def part_of(batch, collective):
    """The rows of a rank."""
    bounds = blocks(len(next(iter(batch.values()))), collective.size)
    return {name: array[slice(*bounds[collective.rank :][:2])] for name, array in batch.items()}


def stepped(model, size, data, parts=1, outputs=()):
    """The state and losses of each of `size` ranks after steps on `data`."""

    def work(collective):
        machine = DataParallel(split_step(model, outputs=outputs), parts, collective, options=ONE)
        results = [{k: v.copy() for k, v in machine.step(part_of(batch, collective)).items()} for batch in data]
        return machine.state(), results

    return World(size).run(work)


def check_replicas(found):
    for state, results in found[1:]:
        for name, array in found[0][0].items():
            np.testing.assert_array_equal(state[name], array, err_msg=name)
        for one, other in zip(results, found[0][1]):
            assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in other.items()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("case", "size", "parts"), [(c, 3 + i % 3, 1 + i % 2) for i, c in enumerate(CASES)])
def test_ranks_do_what_one_process_does(case, size, parts):
    """Same losses, same weights, same state; replicas are equal bit by bit. Twelve rows on five ranks are uneven."""
    kind, options = CASES[case]
    options = {"optimizer": "adam", "learning_rate": 0.05, **options}
    extra = options.get("metrics", [])
    model = attach(mlp(), accumulate=True, **options)
    data = list(batches(kind))
    whole = StepRunner(compile_step(model, outputs=extra), options=ONE)
    wanted = [{k: v.copy() for k, v in whole.step(batch).items()} for batch in data]
    found = stepped(model, size, data, parts, extra)
    check_replicas(found)
    for one, other in zip(found[0][1], wanted):
        for name in ("loss", *extra):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)
    for name, array in whole.state().items():
        np.testing.assert_allclose(found[0][0][name], array, rtol=2e-3, atol=1e-5, err_msg=name)


def integers(rows=8, count=4):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.integers(-2, 3, (rows, 4)).astype(np.float32)
        yield {"x": x, "labels": rng.integers(-3, 4, (rows, 2)).astype(np.float32)}


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_that_are_small_integers_add_up_exactly(size):
    """Powers of two everywhere, so no sum is rounded in whatever order it is taken."""
    weight = np.arange(8, dtype=np.float32).reshape(4, 2) - 4
    net = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, {"x": ["N", 4]}, {"y": ["N", 2]})
    model = attach(net, loss="mse", optimizer="sgd", learning_rate=2**-10, accumulate=True)
    data = list(integers())
    whole = StepRunner(compile_step(model), options=ONE)
    wanted = [float(whole.step(batch)["loss"]) for batch in data[:1]]
    found = stepped(model, size, data[:1])
    assert [float(r["loss"]) for r in found[0][1]] == wanted
    np.testing.assert_array_equal(found[0][0]["w"], whole.state()["w"])


def test_ranks_without_rows_take_part():
    model = attach(mlp(), loss="mse", optimizer="adam", accumulate=True)
    data = list(batches("real", rows=2))
    whole = StepRunner(compile_step(model), options=ONE)
    wanted = [float(whole.step(batch)["loss"]) for batch in data]
    found = stepped(model, 5, data)
    check_replicas(found)
    np.testing.assert_allclose([float(r["loss"]) for r in found[0][1]], wanted, rtol=1e-5)


def test_ranks_whose_labels_are_all_ignored_weigh_nothing():
    model = attach(mlp(), loss="cross_entropy:ignore_index=1", optimizer="adam", accumulate=True)
    data = list(batches("classes"))
    for batch in data:
        batch["labels"][:6] = 1
    whole = StepRunner(compile_step(model), options=ONE)
    wanted = [float(whole.step(batch)["loss"]) for batch in data]
    found = stepped(model, 4, data)
    check_replicas(found)
    np.testing.assert_allclose([float(r["loss"]) for r in found[0][1]], wanted, rtol=1e-5)


def test_running_statistics_are_means_over_ranks_by_rows():
    """By their definition, of two steps on five rows: two for the first rank, three for the second."""
    model = attach(norm_net(), loss="mse", optimizer="sgd", learning_rate=0.0, accumulate=True)
    step = compile_step(model)
    (x,) = (name for name in step.batch if name != "labels")
    shape = next(v.shape for v in step.model.graph.inputs if v.name == x)
    rng = np.random.default_rng(0)
    sizes = [5, *(d if isinstance(d, int) else 3 for d in shape[1:])]
    out = next(v.shape for v in step.model.graph.inputs if v.name == "labels")
    goal = [5, *(d if isinstance(d, int) else 3 for d in out[1:])]
    data = [{x: rng.standard_normal(sizes).astype("f4"), "labels": rng.standard_normal(goal).astype("f4")}]
    found = stepped(model, 2, data)
    check_replicas(found)
    alone = [
        stepped(model, 1, [{k: v[rows] for k, v in b.items()} for b in data])[0][0] for rows in (slice(2), slice(2, 5))
    ]
    statistics = [n for n, t in step.state.items() if t.kind == "statistic"]
    assert len(statistics) == 2
    for name in statistics:
        mean = (2 * alone[0][name].astype("f8") + 3 * alone[1][name].astype("f8")) / 5
        np.testing.assert_allclose(found[0][0][name], mean, rtol=1e-6)


def test_masks_of_dropout_differ_between_ranks_and_are_counted_alike():
    nodes = [helper.make_node("Mul", ["x", "w"], ["s"]), helper.make_node("Dropout", ["s"], ["y"])]
    net = model_of(nodes, {"w": np.ones(64, np.float32)}, {"x": ["N", 64]}, {"y": ["N", 64]})
    model = attach(net, loss="mse", optimizer="sgd", learning_rate=1.0, dropout={"Mul": 0.5}, accumulate=True)
    found = stepped(model, 2, [{"x": np.ones((2, 64), np.float32), "labels": np.zeros((2, 64), np.float32)}] * 3)
    check_replicas(found)
    state = found[0][0]
    assert int(state["dropout_step"]) == 3
    one = stepped(model, 1, [{"x": np.ones((1, 64), np.float32), "labels": np.zeros((1, 64), np.float32)}] * 3)[0][0]
    assert (state["w"] != one["w"]).any()  # the second rank has masks of its own


def test_results_that_are_no_scalars_are_refused():
    model = attach(mlp(), loss="mse", accumulate=True)
    with pytest.raises(BadInput, match="scalars; 'y' is none"):
        stepped(model, 2, [], outputs=["y"])


def test_a_bucket_is_handed_over_where_it_lies():
    """The runtime writes gradients into the array that is summed, and reads them there; no step allocates another."""
    model = attach(classifier(hidden=20_000), loss="cross_entropy", optimizer="momentum", accumulate=True)
    summed = []

    class Spy(Alone):
        def all_reduce(self, array):
            summed.append((array.ctypes.data, array.nbytes))

    machine = DataParallel(split_step(model), 1, Spy(), options=ONE)
    array, first = machine.bucket.array, machine.state()
    written = {value.data_ptr() for value in machine.gradient._bindings[0].get_outputs()}
    assert {piece.ctypes.data for piece in machine.bucket.pieces.values()} <= written
    machine.gradients(blobs(32))
    array[...] = 0
    machine.updated(1.0)
    for name, value in machine.state().items():
        np.testing.assert_array_equal(value, first[name] + (name == "steps"))
    data = blobs(32)
    machine.step(data)
    tracemalloc.start()
    machine.step(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [s for s in summed if s[1] == array.nbytes] == [(array.ctypes.data, array.nbytes)] * 2
    assert peak < array.nbytes / 4

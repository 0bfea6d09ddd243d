"""Ranks that exchange seldom, or little: the numbers of plain programs, replicas, bytes, and going on exactly."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.distributed import Lost, blocks
from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.local_steps import VELOCITY, LocalSteps
from onnxgrad.training.parallel.machine import LOST, DataParallel
from onnxgrad.training.parallel.ranks import OnAll, OnRank
from onnxgrad.training.step.accumulate import Accumulating, split_step
from tests.distributed.simulated import World
from tests.training.models import blobs, classifier

ONE = Options(threads=1, target="portable")
HOW = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.02}


def batches(count, rows=24):
    data = blobs(count * rows)
    return [{n: a[k * rows : (k + 1) * rows] for n, a in data.items()} for k in range(count)]


def part_of(batch, rank, size):
    bounds = blocks(len(batch["x"]), size)
    return {name: array[bounds[rank] : bounds[rank + 1]] for name, array in batch.items()}


@pytest.fixture(scope="module")
def splits():
    """Steps in two halves by optimizer."""
    attached = {o: attach(classifier(), loss="cross_entropy", optimizer=o, learning_rate=0.05, accumulate=True)
                for o in ("sgd", "adam")}  # fmt: skip
    return {name: split_step(model) for name, model in attached.items()}


def by_hand(split, data, size, every, rate, momentum):
    """DiLoCo in one process: as many machines as ranks, and numpy between them. The weights after each outer step."""
    workers = [Accumulating(split, 1, options=ONE) for _ in range(size)]
    names = [n for n, t in split.update.state.items() if t.kind == "parameter"]
    start = {n: workers[0].state()[n] for n in names}
    velocity = {n: np.zeros_like(a) for n, a in start.items()}
    found = []
    for k, batch in enumerate(data, 1):
        for rank, worker in enumerate(workers):
            worker.step(part_of(batch, rank, size))
        if k % every == 0 or k == len(data):
            states = [worker.state() for worker in workers]
            for n in names:
                slope = np.sum([start[n] - state[n] for state in states], axis=0) / size
                velocity[n] = momentum * velocity[n] + slope
                start[n] = start[n] - rate * (slope + momentum * velocity[n])
            for worker, state in zip(workers, states):
                worker.load_state(state | start)
            found.append(dict(start))
    means = {n: np.mean([w.state()[n] for w in workers], axis=0) for n in workers[0].state()}
    return found, means


@pytest.mark.sweep(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("size", "every", "outer"), [(2, 3, (None, None)), (3, 4, (0.5, 0.0)), (4, 1, (None, 0.3)), (1, 5, (1.2, None))]
)
def test_outer_steps_are_those_of_a_plain_program(splits, optimizer, size, every, outer):
    """By default with a rate of 0.7 and a momentum of 0.9."""
    data, split = batches(10), splits[optimizer]
    rate, momentum = (default if given is None else given for given, default in zip(outer, (0.7, 0.9)))

    def work(collective):
        machine = LocalSteps(split, 1, collective, Exchanges(every, *outer), options=ONE)
        losses = [float(machine.step(part_of(b, collective.rank, size))[split.gradient.loss]) for b in data]
        own = machine.state()
        machine.settle()
        return losses, own, machine.state(), machine.extras()

    found = World(size).run(work)
    expected, means = by_hand(split, data, size, every, rate, momentum)
    for _, _, state, extras in found:
        for name, array in state.items():
            np.testing.assert_array_equal(array, found[0][2][name])
            wanted = expected[-1].get(name, means[name])
            np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(extras[VELOCITY], found[0][3][VELOCITY])
    if size > 1 and optimizer == "adam":  # until then, what belongs to the optimizer is a rank's own
        moments = next(n for n, t in split.update.state.items() if t.kind == "optimizer" and t.initial.size > 10)
        assert not np.array_equal(found[0][1][moments], found[1][1][moments])


def test_a_mean_of_weights_after_each_step_of_gradient_descent_is_a_step_from_the_mean_gradient(splits):
    data, split = batches(5), splits["sgd"]

    def work(collective):
        plain = DataParallel(split, 1, collective, options=ONE)
        means = LocalSteps(split, 1, collective, Exchanges(1, 1.0, 0.0), options=ONE)
        for batch in data:
            part = part_of(batch, collective.rank, 4)
            plain.step(part)
            means.step(part)
        return plain.state(), means.state()

    for plain, means in World(4).run(work):
        for name, array in plain.items():
            np.testing.assert_allclose(means[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("every", "compress", "share"), [(5, None, 1 / 5), (1, "fp16", 1 / 2), (5, "fp16", 1 / 10)])
def test_bytes_on_the_wire(every, compress, share):
    """Of a model large enough that what is not a weight or gradient does not count."""
    model = attach(classifier(hidden=2000), loss="cross_entropy", optimizer="sgd", learning_rate=0.01, accumulate=True)
    split, size, data = split_step(model), 4, batches(10)

    def sent(make):
        world = World(size)

        def work(collective):
            machine = make(collective)
            for batch in data:
                machine.step(part_of(batch, collective.rank, size))

        world.run(work)
        return world.sent

    plain = sent(lambda c: DataParallel(split, 1, c, options=ONE))
    if every == 1:
        less = sent(lambda c: DataParallel(split, 1, c, compress=compress, options=ONE))
    else:
        less = sent(lambda c: LocalSteps(split, 1, c, Exchanges(every, compress=compress), options=ONE))
    np.testing.assert_allclose(less, plain * share, rtol=0.01)
    bucket = 4 * sum(t.initial.size for t in split.update.state.values() if t.kind == "parameter")
    np.testing.assert_allclose(plain, len(data) * 2 * (size - 1) / size * bucket, rtol=0.01)


def test_compressed_gradients_train_as_others_do(splits):
    data = batches(30)

    def work(collective, compress):
        machine = DataParallel(splits["adam"], 1, collective, compress=compress, options=ONE)
        return [float(machine.step(part_of(b, collective.rank, 3))["loss"]) for b in data], machine.state()

    plain, packed = (World(3).run(lambda c, how=how: work(c, how)) for how in (None, "fp16"))
    np.testing.assert_allclose(packed[0][0], plain[0][0], rtol=0.02)
    assert packed[0][0] != plain[0][0]
    for losses, state in packed:
        assert losses == packed[0][0]
        for name, array in state.items():
            np.testing.assert_array_equal(array, packed[0][1][name])


# --- whole runs ---------------------------------------------------------------------------------


class Dies(Callback):
    """Ends a rank in the middle of an epoch, as a signal would that cannot be caught."""

    def __init__(self, rank, step):
        self.rank, self.at = rank, step

    def step(self, run, loss):
        if run.step_count == self.at and run.ranks is not None and run.ranks.rank == self.rank:
            raise SystemExit


def fitted(size, folder=None, dies=None, data=None, **options):
    own = HOW | {k: options.pop(k) for k in ("sync_every", "outer_rate", "compress", "loss") if k in options}
    options = {"epochs": 4, "batch_size": 16, "seed": 3, "progress": False, **options}

    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, **own)
        trainer.fit(data or blobs(90), checkpoint=folder, callbacks=[Dies(*dies)] if dies else [], **options)
        return trainer

    return World(size).run(work)


LOW = [{"sync_every": 4}, {"compress": "fp16"}, {"sync_every": 4, "compress": "fp16"}]


def numbers(trainer):
    return [{k: v for k, v in r.items() if "second" not in k} for r in trainer.history.epochs]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("low", "dies"), [*((low, (1, 9)) for low in LOW), (LOW[-1], (0, 14))], ids=str)
def test_a_run_that_is_killed_goes_on_exactly(low, dies, tmp_path):
    """An epoch has six steps, so no exchange falls on its end; the last of its batches has rows for some ranks only."""
    whole = fitted(3, tmp_path / "whole", **low)
    with pytest.raises((SystemExit, Lost)):
        fitted(3, tmp_path / "killed", dies, **low)
    kept = Checkpoint.load(tmp_path / "killed" / FILE)
    assert kept.run["epoch"] == dies[1] // 6
    assert set(kept.extras) == {name for key, name in (("sync_every", VELOCITY), ("compress", LOST)) if key in low}
    assert all(np.abs(array).max() > 0 for array in kept.extras.values())
    resumed = fitted(3, tmp_path / "killed", resume=True, **low)
    for one, other in zip(resumed, whole):
        assert numbers(one) == numbers(other) == numbers(whole[0])
        for name, array in whole[0].state().items():
            np.testing.assert_array_equal(one.state()[name], array)
            np.testing.assert_array_equal(other.state()[name], array)


def test_another_number_of_ranks_goes_on(tmp_path):
    """Four, two, then one rank alone, which has nothing to exchange, and three again."""
    for epochs, size in enumerate((4, 2, 1, 3), 1):
        trainers = fitted(size, tmp_path, epochs=epochs, resume=epochs > 1, validation=blobs(60, 1), **LOW[-1])
    records = numbers(trainers[0])
    assert [r["epoch"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["validation_loss"] < 0.5 * records[0]["validation_loss"]


def test_what_decides_the_numbers_must_be_told_again(tmp_path):
    fitted(2, tmp_path, sync_every=4, epochs=1)
    with pytest.raises(BadInput, match="steps between exchanges 4, not 8"):
        fitted(2, tmp_path, sync_every=8, resume=True)
    with pytest.raises(BadInput, match=r"outer rate 0.7, not 0.5"):
        fitted(2, tmp_path, sync_every=4, outer_rate=0.5, resume=True)
    with pytest.raises(BadInput, match="compression none, not fp16"):
        fitted(2, tmp_path, sync_every=4, compress="fp16", resume=True)


def test_measuring_between_steps_settles(tmp_path):
    """All ranks measure the same weights."""
    trainers = fitted(2, sync_every=4, evaluate_every=3, validation=blobs(60, 1))
    for trainer in trainers:
        assert trainer.history.evaluations == trainers[0].history.evaluations
        for name, array in trainers[0].state().items():
            np.testing.assert_array_equal(trainer.state()[name], array)
    assert [e["step"] for e in trainers[0].history.evaluations] == [3, 6, 9, 12, 15, 18, 21, 24]


def test_a_loss_that_is_no_number_on_one_rank_is_told_to_all():
    """In the second batch, the rows of the second rank."""
    data = {"x": blobs(64)["x"], "labels": np.zeros((64, 3), np.float32)}
    data["labels"][24:32] = 1e30
    with pytest.raises(OnRank, match="rank 1: the loss is inf on its own rows") as caught:
        fitted(2, data=data, shuffle=False, sync_every=8, loss="mse")
    assert isinstance(caught.value, TrainingError)


def test_what_makes_no_sense_is_refused():
    for options, said in (
        ({"sync_every": 0}, "at least 1"),
        ({"compress": "fp8"}, "fp16"),
        ({"sync_every": 4, "outer_rate": 0.0}, "outer_rate must be positive, not 0"),
        ({"sync_every": 4, "outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), not 1"),
        ({"outer_momentum": 0.5}, "together every sync_every steps"),
        ({"outer_rate": "fast", "sync_every": 2}, "outer_rate is a number, not 'fast'"),
    ):
        with pytest.raises(BadInput, match=said):
            Trainer(classifier(), **HOW, **options)
    with pytest.raises((BadInput, OnAll), match="leave sync_every out"):
        World(2).run(lambda c: Trainer(classifier(), distributed=c, sync_every=2, **HOW).find_rate(blobs(90)))

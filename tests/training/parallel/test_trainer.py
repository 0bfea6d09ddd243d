"""A whole run on several ranks in one process: it measures, stops, keeps, resumes and refuses as one process does."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.distributed import Launch
from onnxgrad.errors import TrainingError
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer, attach, split_step
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.parallel.ranks import OnAll, OnRank
from tests.distributed.simulated import World
from tests.training.models import blobs, classifier
from tests.training.step.test_memory_budget import deep, least_of

ONE = Options(threads=1, target="portable")
HOW = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.02}


def fitted(size, model=None, folder=None, watch=(), **options):
    """The trainers of `size` ranks after a run; of one, without ranks."""
    options = {"epochs": 3, "batch_size": 16, "seed": 3, "progress": False, **options}

    def work(collective):
        own = {k: v[collective.rank] if isinstance(v, _Each) else v for k, v in options.items()}
        trainer = Trainer(model or classifier(), options=ONE, distributed=collective, **HOW)
        data = own.pop("data", None) or blobs(90)
        trainer.fit(data, checkpoint=folder, callbacks=[w() for w in watch], **own)
        return trainer

    return World(size).run(work)


class _Each(list):
    """A setting that differs between ranks."""


def numbers(trainer):
    """The measurements, without times."""
    return [{k: v for k, v in r.items() if "second" not in k} for r in trainer.history.epochs]


def check_alike(trainers):
    for trainer in trainers[1:]:
        assert numbers(trainer) == numbers(trainers[0])
        for name, array in trainers[0].state().items():
            np.testing.assert_array_equal(trainer.state()[name], array)


METRICS = ("accuracy", "f1", "auc", "log_loss")


@pytest.fixture(scope="module")
def alone():
    (trainer,) = fitted(1, validation=blobs(300, 1), metrics=METRICS)
    return trainer


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_run_is_that_of_one_process(alone, size):
    trainers = fitted(size, validation=blobs(300, 1), metrics=METRICS)
    check_alike(trainers)
    assert trainers[0].ranks.size == size
    assert alone.ranks is None
    for one, other in zip(numbers(trainers[0]), numbers(alone), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-5), name
    curve = [t.history.curve.means for t in (trainers[0], alone)]
    np.testing.assert_allclose(*curve, rtol=1e-5)


def test_metrics_of_numbers_and_whole_arrays_are_joined():
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((700, 6)).astype("f4"), "labels": rng.standard_normal((700, 3)).astype("f4")}

    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, loss="mse")
        return trainer.evaluate(data, batch_size=64)

    (wanted,) = World(1).run(work)
    assert {"loss", "mae", "r2"} <= wanted.keys()
    for found in World(3).run(work):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_ranks_see_every_row_once_and_the_same_batches_whatever_their_number():
    def rows(size):
        def work(collective):
            trainer = Trainer(classifier(), options=ONE, distributed=collective, **HOW)
            data = trainer.data(blobs(90))
            order = data.order([3, 1], 16)
            return [b["x"].copy() for b in data.batches(16, order, 32, part=(collective.rank, collective.size))]

        return [np.concatenate(parts) for parts in zip(*World(size).run(work))]

    wanted = rows(1)
    assert sum(map(len, wanted)) == 90 - 32
    for size in (2, 3, 20):
        for one, other in zip(rows(size), wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_rows_that_are_read_on_demand_are_read_by_their_rank_alone():
    asked = []

    class Rows:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            asked.append(int(i))
            return {"x": np.full(6, i, np.float32), "labels": np.int64(i % 3)}

    trainer = Trainer(classifier(), options=ONE, **HOW)
    data = trainer.data(Rows())
    asked.clear()
    found = [len(b.get("x", ())) for b in data.batches(4, np.arange(10), part=(2, 3))]
    assert found == [2, 2, 1]
    assert sorted(set(asked)) == [2, 3, 6, 7, 9]


def test_early_stopping_and_the_best_weights_are_those_of_all_ranks():
    options = {"validation": blobs(60, 1), "epochs": 12, "patience": 2, "keep_best": True, "schedule": "plateau"}
    trainers = fitted(3, **options)
    check_alike(trainers)
    (one,) = fitted(1, **options)
    assert len(numbers(one)) == len(numbers(trainers[0]))
    assert trainers[0].history.about.get("stopped") == one.history.about.get("stopped")


class StopAfter(Callback):
    """Asks to be interrupted, as Ctrl-C on one of the ranks does."""

    def step(self, run, loss):
        if run.step_count == 8 and run.ranks.rank == 1:
            run.machine.asked = True


def test_an_interrupt_of_one_rank_stops_all_and_other_numbers_of_ranks_go_on(tmp_path, alone):
    """Four ranks, then two, then three, then one: rows that were not yet seen, each once."""
    where = tmp_path / "run"
    with pytest.raises(Interrupted, match="after step 9"):
        fitted(4, folder=where, watch=[StopAfter])
    state = Checkpoint.load(where / FILE).run
    assert (state["step"], state["epoch"], state["row"]) == (9, 1, 48)
    for size, epochs in ((2, 2), (3, 3)):
        trainers = fitted(size, folder=where, resume=True, epochs=epochs)
        check_alike(trainers)
    plain = {k: v for k, v in numbers(alone)[-1].items() if not k.startswith("validation")}
    assert numbers(trainers[0])[-1] == pytest.approx(plain, rel=1e-5)
    (one,) = fitted(1, folder=where, resume=True, epochs=4)
    assert len(numbers(one)) == 4


@pytest.mark.sweep(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_trainer_that_was_interrupted_fits_again(shard):
    """The requests that ended a run before are forgotten: by the ranks that were asked, and by the others."""

    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, shard_optimizer=shard, **HOW)
        how = {"epochs": 2, "batch_size": 16, "progress": False}
        with pytest.raises(Interrupted):
            trainer.fit(blobs(90), callbacks=[StopAfter()], **how)
        return len(trainer.fit(blobs(90), **how).epochs)

    assert World(2).run(work) == [2, 2]


def test_a_resumed_run_of_the_same_ranks_is_equal_bit_by_bit(tmp_path):
    whole = fitted(3)
    with pytest.raises(Interrupted):
        fitted(3, folder=tmp_path / "run", watch=[StopAfter])
    resumed = fitted(3, folder=tmp_path / "run", resume=True)
    check_alike([whole[0], *resumed])


def other_model():
    model = classifier()
    model.graph.initializer[0].raw_data = (np.frombuffer(model.graph.initializer[0].raw_data, "f4") * 2).tobytes()
    return model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": _Each([3, 3, 4])}, "rank 2: seed 4, not 3"),
        ({"batch_size": _Each([16, 8, 16])}, "rank 1: batch size 8, not 16"),
        ({"epochs": _Each([2, 2, 5])}, "rank 2: epochs 5, not 2"),
        ({"data": _Each([blobs(90), blobs(90, 1), blobs(90)])}, "rank 1: other training data"),
        ({"schedule": _Each(["cosine", "cosine", "linear"])}, "rank 2: schedule linear"),
        ({"patience": _Each([1, 1, 2]), "validation": blobs(30)}, "rank 2: other callbacks"),
    ],
)
def test_ranks_that_differ_are_refused(options, said):
    """On all of them, with one message that says what and where."""
    with pytest.raises(OnAll, match="not about to do the same") as caught:
        fitted(3, **options)
    assert said in str(caught.value)


def test_ranks_with_other_weights_are_refused():
    world = World(2)

    def work(collective):
        model = classifier() if collective.rank == 0 else other_model()
        Trainer(model, options=ONE, distributed=collective, **HOW).fit(blobs(90), progress=False)

    with pytest.raises(OnAll, match="rank 1: other weights"):
        world.run(work)
    assert {type(e) for e in world.errors.values()} == {OnAll}


def test_what_goes_wrong_on_one_rank_before_the_start_is_raised_on_all():
    world = World(3)

    def work(collective):
        data = blobs(90) if collective.rank != 1 else {"x": np.zeros((5, 6), "f4")}
        Trainer(classifier(), options=ONE, distributed=collective, **HOW).fit(data, progress=False)

    with pytest.raises(OnAll, match=r"^rank 1: .*labels"):
        world.run(work)
    assert {type(e) for e in world.errors.values()} == {OnAll}


def test_what_goes_wrong_on_one_rank_later_is_told_to_the_others():
    class Rows:
        def __init__(self, rank):
            self.rank, self.begun = rank, False
            self._fingerprint = "the same"

        def __len__(self):
            return 64

        def __getitem__(self, i):
            if self.rank == 1 and i > 40:
                return {"x": np.zeros(5, np.float32), "labels": np.int64(0)}
            return {"x": np.full(6, i % 7, np.float32), "labels": np.int64(i % 3)}

    world = World(2)

    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, **HOW)
        trainer.fit(Rows(collective.rank), shuffle=False, batch_size=8, progress=False)

    with pytest.raises(OnRank, match=r"^rank 1: array 'x' of the training data is"):
        world.run(work)


def test_a_loss_that_is_no_number_is_said_alike_on_all():
    world = World(2)

    def work(collective):
        how = {**HOW, "optimizer": "sgd", "learning_rate": 3e38}
        Trainer(classifier(), options=ONE, distributed=collective, **how).fit(blobs(90), progress=False, epochs=5)

    with pytest.raises(TrainingError):
        world.run(work)
    assert len({str(e) for e in world.errors.values()}) == 1


def test_a_learning_rate_is_found_together():
    def work(collective):
        return Trainer(classifier(), options=ONE, distributed=collective, **HOW).find_rate(blobs(90), steps=30)

    (wanted,) = World(1).run(work)
    found = World(3).run(work)
    assert {f.suggestion for f in found} == {found[0].suggestion}
    np.testing.assert_allclose(found[0].losses[:10], wanted.losses[:10], rtol=1e-4)


def test_only_the_first_rank_writes(tmp_path):
    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, **HOW)
        own = tmp_path / str(collective.rank)
        trainer.fit(blobs(30), progress=False, checkpoint=own, history=own / "h.json", log=own / "log.jsonl")
        trainer.save(own / "m.onnx")

    World(2).run(work)
    assert sorted(p.name for p in (tmp_path / "0").iterdir())[:2] == [
        "checkpoint.previous.safetensors",
        "checkpoint.safetensors",
    ]
    assert not (tmp_path / "1").exists()


def test_a_model_with_a_fixed_batch_has_it_on_every_rank():
    trainers = fitted(3, model=classifier(batch=8), data=blobs(60), epochs=2)
    check_alike(trainers)
    assert trainers[0].step_count == 2 * 2  # batches of 24, and 12 rows are left out


def test_a_job_whose_ranks_come_and_go_is_resumed_until_its_end(tmp_path, monkeypatch):
    """The launcher starts all of them anew and tells nothing but the name of its job; another job begins anew."""
    monkeypatch.setattr("onnxgrad.training.loop.resume.launched", lambda: Launch(job="a job"))
    with pytest.raises(Interrupted):
        fitted(4, folder=tmp_path / "run", watch=[StopAfter])
    resumed = fitted(2, folder=tmp_path / "run")
    assert resumed[0].history.about["finished"]
    assert [r["step"] for r in numbers(resumed[0])] == [6, 12, 18]
    assert Checkpoint.load(tmp_path / "run" / FILE).run["step"] == 18
    begun = fitted(2, folder=tmp_path / "run", seed=5)  # the run was at its end
    assert numbers(begun[0]) != numbers(resumed[0])


@pytest.mark.complete
def test_memory_is_that_of_the_rows_of_a_rank():
    """Each rank computes anew what does not fit of its part of a batch; the numbers are those of plenty."""
    proto, size = deep(6, 8), 2
    least = least_of(split_step(attach(proto, loss="mse", accumulate=True)).gradient, 50)
    x = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)

    def work(collective, memory):
        trainer = Trainer(proto, loss="mse", options=ONE, distributed=collective, memory=memory, batch_size=100)
        trainer.fit({"x": x, "labels": np.tanh(x)}, batch_size=100, progress=False)
        return trainer.plan, trainer.state()

    wanted = World(size).run(lambda c: work(c, None))[0][1]
    for plan, state in World(size).run(lambda c: work(c, least)):
        assert plan.nodes
        for name, array in wanted.items():
            np.testing.assert_allclose(state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    with pytest.raises(OnAll, match="at most 100 rows, not 101"):
        World(size).run(lambda c: Trainer(proto, loss="mse", distributed=c, memory=least, batch_size=100).fit(
            {"x": x, "labels": x}, batch_size=101, progress=False))  # fmt: skip

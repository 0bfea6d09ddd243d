"""Whole runs of ranks that share out the state of the optimizer: measured, killed, resumed by others, consolidated."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest

from onnxgrad.distributed import Lost
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, consolidate
from onnxgrad.training.loop.checkpoint import FILE, PARTS, Checkpoint, named_parts, previous
from onnxgrad.training.parallel.ranks import OnAll
from tests.distributed.simulated import World
from tests.training.models import blobs, classifier
from tests.training.parallel.test_low_bandwidth import Dies, numbers

ONE = Options(threads=1, target="portable")
HOW = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.02}


def fitted(size, folder=None, dies=None, deaths=None, shard=True, after=lambda trainer: trainer, **options):
    """The results of `after` on the trainers of `size` ranks after a run."""
    own = HOW | {k: options.pop(k) for k in ("optimizer", "ema", "clip_norm") if k in options}
    options = {"epochs": 3, "batch_size": 16, "seed": 3, "progress": False, **options}

    def work(collective):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, shard_optimizer=shard, **own)
        trainer.fit(blobs(60), checkpoint=folder, callbacks=[Dies(*dies)] if dies else [], **options)
        return after(trainer)

    return World(size, deaths).run(work)


def states(size, *args, **options):
    """The histories and the states, whole, of all ranks."""
    return fitted(size, *args, after=lambda t: (numbers(t), t.state()), **options)


def check_same(found, wanted, atol=0.0):
    for one, other in zip(found[0], wanted[0], strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5 if atol else 0)
    for name, array in wanted[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def replicated():
    return {size: states(size, shard=False, validation=blobs(60, 1)) for size in (2, 3)}


@pytest.mark.parametrize("size", [2, 3])
def test_a_run_is_that_of_replicated_ranks(replicated, size):
    found = states(size, validation=blobs(60, 1))
    for one in found:
        check_same(one, replicated[size][0])


def test_best_weights_and_averages_are_measured_put_back_and_saved(tmp_path):
    """All ranks measure the averages, which none of them keeps whole; the first one saves them."""
    how = {
        "optimizer": "lamb",
        "ema": 0.8,
        "keep_best": True,
        "monitor": "loss",
        "validation": blobs(60, 1),
        "epochs": 4,
    }

    def after(trainer, name):
        trainer.save(tmp_path / name)
        trainer.save_training_model(tmp_path / f"training.{name}")
        return numbers(trainer), trainer.evaluate(blobs(60, 1)), trainer.state()

    wanted = fitted(2, shard=False, after=lambda t: after(t, "whole.onnx"), **how)
    found = fitted(2, after=lambda t: after(t, "parts.onnx"), **how)
    for one in found:
        assert one[:2] == wanted[0][:2]
        for name, array in wanted[0][2].items():
            np.testing.assert_array_equal(one[2][name], array, err_msg=name)
    for prefix in ("", "training."):
        first, second = (onnx.load(tmp_path / f"{prefix}{name}.onnx") for name in ("whole", "parts"))
        assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_a_rate_is_found_and_a_second_run_goes_on():
    def work(collective, shard):
        trainer = Trainer(classifier(), options=ONE, distributed=collective, shard_optimizer=shard, **HOW)
        rate = trainer.find_rate(blobs(90), steps=12).suggestion
        for _ in range(2):
            trainer.fit(blobs(60), progress=False)
        return rate, trainer.state()

    wanted, found = (World(2).run(lambda c, how=how: work(c, how)) for how in (False, True))
    for rate, state in found:
        assert rate == wanted[0][0]
        for name, array in wanted[0][1].items():
            np.testing.assert_array_equal(state[name], array)


# --- checkpoints --------------------------------------------------------------------------------


def parts_in(folder):
    return sorted(p.name for p in folder.glob("part-*"))


def test_parts_of_a_checkpoint_are_files_of_their_ranks(tmp_path):
    """Replicated state is written once; the index and the previous one name all files, and no others exist."""
    fitted(3, tmp_path)
    index = Checkpoint.load_file(tmp_path / FILE)
    assert set(index.state) == {"w1", "b1", "w2", "steps"}
    files = [named_parts(path) for path in (tmp_path / FILE, previous(tmp_path / FILE))]
    assert [len(names) for names in files] == [3, 3]
    assert parts_in(tmp_path) == sorted({*files[0], *files[1]})
    whole = Checkpoint.load(tmp_path / FILE)
    moments = 2 * sum(index.state[n].nbytes for n in ("w1", "b1", "w2"))
    sizes = [sum(a.nbytes for a in Checkpoint.load_file(tmp_path / name).state.values()) for name in files[0]]
    assert sum(sizes) == moments == whole.state["w1_mean"].nbytes * 2 * 80 // 48
    assert max(sizes) - min(sizes) <= 8


@pytest.mark.parametrize("shape", [[-1], [10**17], ["n"], [10**30]])
def test_an_index_with_impossible_parts_is_refused(tmp_path, shape):
    index = Checkpoint({"w": np.ones(2, np.float32)}, {PARTS: {"files": [], "tensors": {"m": ["float32", shape]}}})
    index.save(tmp_path / FILE)
    assert set(Checkpoint.load_file(tmp_path / FILE).state) == {"w"}
    with pytest.raises(BadInput, match="does not say which parts"):
        Checkpoint.load(tmp_path / FILE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("optimizer", "last"), [("adam", [(2, False), (1, True), (2, True)]), ("lamb", [])])
def test_four_two_three_ranks_go_on(tmp_path, optimizer, last):
    """And ranks that share nothing out, and one alone, and again; all in the course of one run."""
    course = [(4, True), (2, True), (3, True), *last]
    for epochs, (size, shard) in enumerate(course, 1):
        found = states(size, tmp_path, shard=shard, epochs=epochs, resume=epochs > 1, optimizer=optimizer)
        assert bool(named_parts(tmp_path / FILE)) == (shard and size > 1)
    (wanted,) = states(1, epochs=len(course), optimizer=optimizer)
    check_same(found[0], wanted, atol=1e-5)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    return states(2, tmp_path_factory.mktemp("unharmed"), checkpoint_seconds=0, epochs=2)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("at", range(30, 90, 3))
def test_the_same_ranks_go_on_with_the_same_bits_wherever_one_is_killed(tmp_path, unharmed, at):
    """Rank 1 dies before one of its exchanges, within the writing of a checkpoint, too."""
    with pytest.raises(Lost):
        fitted(2, tmp_path, deaths={1: at}, checkpoint_seconds=0, epochs=2)
    Checkpoint.load(tmp_path / FILE)
    check_same(states(2, tmp_path, resume=True, checkpoint_seconds=0, epochs=2)[1], unharmed[0])


def test_a_kill_between_any_two_files_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """The files of a save are put into place one after the other; after each of them, all is as before or as after."""
    states_of, saves = [], []
    original = Checkpoint.save

    def save(self, path, **how):
        original(self, path, **how)
        saves.append(path.name)
        if (tmp_path / "run" / FILE).exists():
            found = Checkpoint.load(tmp_path / "run" / FILE)
            states_of.append((found.run["step"], np.abs(found.state["w1_mean"]).max()))

    monkeypatch.setattr(Checkpoint, "save", save)
    fitted(2, tmp_path / "run", checkpoint_seconds=0, epochs=1)
    assert saves[-1] == FILE
    assert len(saves) == 3 * (1 + 4 + 1)
    steps = [step for step, _ in states_of]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3, 4}
    assert all((moment > 0) == (step > 0) for step, moment in states_of)


def test_consolidated_it_is_that_of_replicated_ranks(tmp_path):
    fitted(2, tmp_path / "whole", shard=False)
    fitted(2, tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "own")
    assert consolidate(tmp_path / "parts", tmp_path / "one.safetensors") == tmp_path / "one.safetensors"
    assert consolidate(tmp_path / "own") == tmp_path / "own" / FILE
    before = {p.name: p.read_bytes() for p in (tmp_path / "parts").iterdir()}
    wanted = Checkpoint.load(tmp_path / "whole" / FILE)
    for path in (tmp_path / "one.safetensors", tmp_path / "own" / FILE):
        found = Checkpoint.load(path)
        for name, array in wanted.state.items():
            np.testing.assert_array_equal(found.state[name], array, err_msg=name)
        assert found.run.keys() == wanted.run.keys()
    assert set(parts_in(tmp_path / "own")) == set(named_parts(previous(tmp_path / "own" / FILE)))
    assert {p.name: p.read_bytes() for p in (tmp_path / "parts").iterdir()} == before
    (found,) = states(1, tmp_path / "own", resume=True, epochs=4)
    check_same(found, states(2, tmp_path / "parts", resume=True, epochs=4)[0], atol=1e-5)
    trainer = Trainer(classifier(), options=ONE, **HOW)
    trainer.restore(tmp_path / "parts" / FILE)
    with pytest.raises(BadInput, match="is an ordinary one"):
        consolidate(tmp_path / "whole")


def _one_less(folder, name):
    index = Checkpoint.load_file(folder / FILE)
    del index.run["parts"]["files"][1]
    index.save(folder / FILE)


def _missing(folder, name):
    (folder / name).unlink()


def _mangled(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 1
    (folder / name).write_bytes(data)


def _cut_short(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:100])


def _of_the_step_before(folder, name):
    shutil.copy(folder / named_parts(previous(folder / FILE))[0], folder / name)


def _of_another_run(folder, name):
    found = Checkpoint.load_file(folder / name)
    found.state = {n: a + 1 for n, a in found.state.items()}
    found.save(folder / name)


def _elsewhere(folder, name):
    found = Checkpoint.load_file(folder / FILE)
    found.run["parts"]["files"][0][0] = "../x.safetensors"
    found.save(folder / FILE)


def _overlapping(folder, name):
    index = Checkpoint.load_file(folder / FILE)
    name = named_parts(folder / FILE)[1]
    found = Checkpoint.load_file(folder / name)
    found.run["places"] = {n: [0, high - low] for n, (low, high) in found.run["places"].items()}
    found.save(folder / name)
    index.run["parts"]["files"][1][1] = Checkpoint.load_file(folder / name).digest
    index.save(folder / FILE)


DAMAGE = {
    "missing": (_missing, "is missing"),
    "mangled": (_mangled, "is damaged"),
    "short": (_cut_short, "is damaged"),
    "mixed steps": (
        _of_the_step_before,
        "is of step 8 and rank 0; the checkpoint .*, of step 12, needs that of rank 0",
    ),
    "another run": (_of_another_run, "is not the one that the checkpoint"),
    "one less": (_one_less, "its parts do not make all of"),
    "overlapping": (_overlapping, "its parts do not make all of"),
    "elsewhere": (_elsewhere, "does not say which parts"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    fitted(2, folder)
    return folder


@pytest.mark.sweep(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_and_nothing_is_touched(tmp_path, kept, damage):
    do, said = DAMAGE[damage]
    folder = tmp_path / "run"
    shutil.copytree(kept, folder)
    do(folder, named_parts(folder / FILE)[0])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(BadInput, match=said):
        consolidate(folder)
    with pytest.raises(BadInput, match=said):
        fitted(2, folder, resume=True, epochs=4)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_ranks_that_differ_in_it_are_refused():
    def work(collective):
        how = {**HOW, "shard_optimizer": collective.rank == 1}
        Trainer(classifier(), options=ONE, distributed=collective, **how).fit(blobs(60), progress=False)

    with pytest.raises(OnAll, match="state of the optimizer shared out, not on every rank"):
        World(2).run(work)


def test_a_folder_that_cannot_be_written_is_told_by_all(tmp_path):
    (tmp_path / "file").write_text(json.dumps({}))
    world = World(2)
    with pytest.raises((BadInput, OnAll)):
        world.run(lambda c: Trainer(classifier(), options=ONE, distributed=c, shard_optimizer=True, **HOW).fit(
            blobs(60), progress=False, checkpoint=tmp_path / "file" / "run"))  # fmt: skip
    assert all(isinstance(e, (BadInput, Lost)) for e in world.errors.values())

"""``onnxgrad train``, killed at any moment, again and again: what it leaves is whole, and the end is the same.

With ``--complete``, a hundred times.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from onnxgrad.training.loop.callbacks import Log
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint, previous
from tests.commands import command
from tests.training.models import blobs, classifier

RECIPE = [
    *("train", "m.onnx", "--data", "train.npz", "--validation", "test.npz", "--loss", "cross_entropy"),
    *("--optimizer", "adam", "--lr", "0.02", "--batch-size", "8", "--threads", "1", "--seed", "7"),
    *("--keep-best", "--ema", "0.9", "--accumulate", "2", "--schedule", "plateau:patience=1,factor=0.7"),
    *("--checkpoint-seconds", "0"),
]


def _run(folder: str, args: list[str]) -> None:
    """The command, in a process that has its imports behind it."""
    from onnxgrad.cli import main

    os.chdir(folder)
    with open("said.txt", "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["onnxgrad", *args]
    main()


class Forked:
    """A process forked from one that has imported the command."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, place: Path, args: list[str]) -> None:
        self.context.set_forkserver_preload(["onnxgrad.cli.app", "onnxgrad.cli.train", "safetensors.numpy"])
        self.process = self.context.Process(target=_run, args=(str(place), args))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def kill(self):
        self.process.kill()

    def wait(self):
        self.process.join()
        return self.process.exitcode


def arguments(name: str, epochs: int) -> list[str]:
    return [
        *RECIPE,
        *("--epochs", str(epochs), "-o", f"{name}.onnx", "--log", f"{name}.jsonl", "--history", f"{name}.json"),
    ]


def log_of(path: Path) -> list[dict]:
    """The whole lines of a log; only the last may have been cut."""
    lines = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def whole(place: Path, name: str) -> int:
    """Check that every file is whole; the step of the checkpoint."""
    folder = place / f"{name}.checkpoint"
    path = folder / FILE
    for file in (path, previous(path), folder / "best.safetensors"):
        if file.exists():
            Checkpoint.load(file)
    if (place / f"{name}.onnx").exists():
        onnx.checker.check_model(onnx.load(place / f"{name}.onnx"), full_check=True)
    if (place / f"{name}.json").exists():
        json.loads((place / f"{name}.json").read_text())
    held = Checkpoint.load(path).run["step"] if path.exists() else 0
    logged = max((line["step"] for line in log_of(place / f"{name}.jsonl")), default=0)
    assert held >= logged - 1, "every step but the last was kept"
    return held


def litter(place: Path) -> list[Path]:
    return [p for p in place.rglob(".*") if p.name.endswith(".partial")]


def timeless(value):
    """Without what was measured by a clock, and without the command, which says what is resumed and written where."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if "second" not in k and k != "command"}
    return [timeless(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(64))
    np.savez(tmp_path / "test.npz", **blobs(40, seed=1))
    return tmp_path


def test_killed_again_and_again(place, request):
    complete = request.config.getoption("--complete")
    kills, epochs = (100, 150) if complete else (5, 10)
    survive(place, kills, epochs)


def survive(place: Path, kills: int, epochs: int) -> int:
    rng = random.Random(0)
    assert Forked(place, arguments("straight", epochs)).wait() == 0, (place / "said.txt").read_text()
    args, step, killed = arguments("out", epochs), 0, 0
    log = place / "out.jsonl"
    while killed < kills:
        before = log.stat().st_mtime_ns if log.exists() else 0
        more = ["--resume"] if (place / "out.checkpoint" / FILE).exists() else []
        process = Forked(place, args + more)
        while process.poll() is None and (not log.exists() or log.stat().st_mtime_ns == before):
            time.sleep(0.002)  # it has begun when it writes its log
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        ended = process.wait()
        if ended == 0:
            break
        assert ended == -9, (place / "said.txt").read_text()
        killed += 1
        now = whole(place, "out")
        assert now >= step, "no step was lost that had been kept"
        step = now
        assert len(litter(place)) <= 3, "what one process leaves, the next one removes"
    more = ["--resume"] if (place / "out.checkpoint" / FILE).exists() else []
    assert Forked(place, args + more).wait() == 0, (place / "said.txt").read_text()
    assert not litter(place)
    assert (place / "out.onnx").read_bytes() == (place / "straight.onnx").read_bytes()
    for file in (FILE, "best.safetensors"):
        ours, theirs = (Checkpoint.load(place / f"{n}.checkpoint" / file) for n in ("out", "straight"))
        assert {k: v.tobytes() for k, v in ours.state.items()} == {k: v.tobytes() for k, v in theirs.state.items()}
        assert timeless(ours.run) == timeless(theirs.run)
    assert timeless(log_of(log)) == timeless(log_of(place / "straight.jsonl")), "each line once"
    mine, other = (json.loads((place / f"{n}.json").read_text()) for n in ("out", "straight"))
    assert timeless(mine) == timeless(other)
    return killed


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_holds_is_not(tmp_path):
    from onnxgrad.files import replacing

    path = tmp_path / "file"
    left, other = tmp_path / ".file.abcdefgh.partial", tmp_path / ".file.previous"
    left.write_text("")
    other.write_text("")
    with replacing(path) as mine:
        mine.write_text("mine")
        with replacing(path) as another:
            another.write_text("another")
            assert mine.exists()
    assert path.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"file", ".file.previous"}


def test_two_runs_in_one_folder(place):
    np.savez(place / "train.npz", **blobs(2000))
    first = Forked(place, arguments("out", 100000))
    try:
        while not (place / "out.jsonl").exists() and first.poll() is None:
            time.sleep(0.01)
        os.kill(first.process.pid, signal.SIGSTOP)  # which leaves the cores to the others
        for more in ((), ("--resume",), ("--restart",)):
            second = command(*arguments("out", 3), *more, cwd=place)
            assert second.returncode == 2
            assert re.fullmatch(r"error: another run is at work in 'out.checkpoint'\n  hint: .*\n", second.stderr)
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    again = Forked(place, [*arguments("out", 1), "--restart"])
    assert again.wait() == 0, "who is dead locks nothing"


def test_a_log_forgets_the_end_of_an_epoch_that_no_checkpoint_knows_of(tmp_path):
    """Killed between the line of an epoch and its checkpoint: the last one knows the step, and not the epoch."""
    path = tmp_path / "log.jsonl"
    lines = [{"step": 4, "epoch": 1, "loss": 0.5}, {"epoch": 1, "step": 4, "loss": 0.5, "seconds": 0.1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "ep')
    log = Log(path)
    log.start(SimpleNamespace(step_count=4, epoch=0))
    log.stop()
    assert log_of(path) == lines[:1]
    log.start(SimpleNamespace(step_count=4, epoch=1))
    log.stop()
    assert log_of(path) == lines[:1]

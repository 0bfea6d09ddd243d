"""``onnxgrad train`` under torchrun and mpiexec, from the files to the trained model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.cli import main
from onnxgrad.training.loop.checkpoint import FILE, named_parts
from tests.cli.said import ran
from tests.distributed.launching import environment, mpiexec, torchrun
from tests.training.parallel.test_synchronized import batches, convolutional

KILLED = str(Path(__file__).with_name("killed_worker.py"))
HOW = ["--loss", "cross_entropy", "--optimizer", "adam", "--lr", "0.02", "--epochs", "3", "--batch-size", "16"]
HOW += ["--target", "portable"]


def command(place, name, *more):
    files = [str(place / "m.onnx"), "--data", str(place / "d.npz"), "--validation", str(place / "v.npz")]
    out = ["-o", str(place / f"{name}.onnx"), "--history", str(place / f"{name}.json")]
    return ["train", *files, *HOW, *out, *more]


def history(place, name):
    epochs = json.loads((place / f"{name}.json").read_text())["epochs"]
    return [{k: v for k, v in e.items() if "second" not in k} for e in epochs]


@pytest.fixture(scope="module")
def alone(place):
    """The measurements of a single process."""
    ran(place, " ".join(command(place, "alone", "-q")))
    return history(place, "alone")


def check_as_alone(found, alone):
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_torchrun_trains_and_goes_on_after_a_kill_with_the_same_bits(place, alone):
    """The whole run, one that shares out the optimizer's state, and one that is killed are commands of one launch."""
    three = [*command(place, "whole"), "--then", *command(place, "parts", "--shard-optimizer")]
    three += ["--then", *command(place, "again", "--checkpoint-seconds", "0")]
    done = torchrun(2, KILLED, *three, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained model") == done.stderr.count("epoch 3/3") == 3
    assert "320 bytes of 640 bytes of the optimizer's state" in done.stderr
    assert "2 ranks, each CPU, " in done.stderr
    assert done.stderr.count("error: rank 1 is gone or does not answer; the others cannot go on") == 1
    assert "Traceback" not in done.stderr
    check_as_alone(history(place, "whole"), alone)
    for name in ("parts", "again"):  # a sum of two is the same in either order
        assert history(place, name) == history(place, "whole")
        assert (place / f"{name}.onnx").read_bytes() == (place / "whole.onnx").read_bytes()
    assert len(named_parts(place / "parts.checkpoint" / FILE)) == 2


@pytest.mark.complete
def test_three_ranks_go_on_after_a_kill_with_the_same_bits(place, alone):
    whole = torchrun(3, "-m", "onnxgrad", *command(place, "three"))
    assert whole.returncode == 0, whole.stderr
    check_as_alone(history(place, "three"), alone)
    again = torchrun(3, KILLED, *command(place, "three2", "--checkpoint-seconds", "0"), options=("--max-restarts", "1"))
    assert again.returncode == 0, again.stderr
    assert history(place, "three2") == history(place, "three")
    assert (place / "three2.onnx").read_bytes() == (place / "three.onnx").read_bytes()


@pytest.mark.complete
@pytest.mark.parametrize("order", [("--stream",), ("--shuffle-buffer", "20")], ids=" ".join)
def test_a_streamed_table_goes_on_after_a_kill_with_the_same_bits(tmp_path, order):
    """A table with gaps and categories, fitted in one pass, whose second pass is cut off in the middle."""
    random = np.random.default_rng(0)
    rows = [f"{'' if i % 7 == 3 else i},{['red', 'green', ''][i % 3]},{random.standard_normal()}" for i in range(90)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,colour,goal", *rows]) + "\n")
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 5] x) => (float[N, 1] y) <float[5, 1] w = {0.1, 0.2, 0.3, 0.4, 0.5}> { y = MatMul (x, w) }""")
    onnx.save(model, tmp_path / "m.onnx")

    def line(name):
        files = [str(tmp_path / "m.onnx"), "--data", str(tmp_path / "rows.csv"), "-o", str(tmp_path / f"{name}.onnx")]
        table = ["--input", "x=age,colour", "--missing", "indicator", "--standardize", "--labels", "goal"]
        how = ["--loss", "mse", *HOW[2:], "--history", str(tmp_path / f"{name}.json"), "--checkpoint-seconds", "0"]
        return ["train", *files, *table, *how, *order]

    done = torchrun(2, KILLED, *line("whole"), "--then", *line("again"), options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: rank 1 is gone or does not answer; the others cannot go on") == 1
    assert history(tmp_path, "again") == history(tmp_path, "whole")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


@pytest.mark.complete
def test_torchrun_shares_the_statistics_of_batches(tmp_path):
    onnx.save(convolutional(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **next(batches(22)))
    found = []
    for name in ("one", "two"):
        files = [str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "-o", str(tmp_path / f"{name}.onnx")]
        line = ["train", *files, *HOW, "--history", str(tmp_path / f"{name}.json"), "--sync-batch-norm", "-q"]
        if name == "one":
            ran(tmp_path, " ".join(line))
        else:
            done = torchrun(2, "-m", "onnxgrad", *line)
            assert done.returncode == 0, done.stderr
        found.append([epoch["loss"] for epoch in history(tmp_path, name)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.complete
def test_ranks_that_exchange_seldom_and_little_go_on_after_a_kill_with_the_same_bits(place):
    low = ("--sync-every", "4", "--compress", "fp16")
    whole = torchrun(2, "-m", "onnxgrad", *command(place, "low", *low))
    assert whole.returncode == 0, whole.stderr
    again = torchrun(2, KILLED, *command(place, "low2", *low), options=("--max-restarts", "1"))
    assert again.returncode == 0, again.stderr
    assert history(place, "low2") == history(place, "low")
    assert (place / "low2.onnx").read_bytes() == (place / "low.onnx").read_bytes()


@pytest.mark.complete
def test_without_restarts_a_kill_ends_the_others_with_one_line(place):
    done = torchrun(2, KILLED, *command(place, "dead", "-q"))
    assert done.returncode
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert said == ["error: rank 1 is gone or does not answer; the others cannot go on"]
    assert not (place / "dead.onnx").exists()


def test_ctrl_c_stops_all_ranks_and_keeps_the_checkpoint(place):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    how = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "onnxgrad"]
    run = command(place, "stopped", "-q", "--epochs", "100000")
    launcher = subprocess.Popen(
        [sys.executable, *how, *run], env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    file = place / "stopped.checkpoint" / "checkpoint.safetensors"
    for _ in range(600):
        if file.exists() or launcher.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: everybody hears of it, and the launcher says it again
    _, said = launcher.communicate(timeout=120)
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, said
    assert lines[0].startswith("error: interrupted after step ")
    assert launcher.returncode
    assert file.exists()


def test_mpiexec_trains_and_refuses_with_one_message(place, alone):
    """Two commands of the same processes; the second one is wrong."""
    wrong = command(place, "wrong", "--labels", "nothing")
    done = mpiexec(2, KILLED, *command(place, "mpi"), "--then", *wrong)
    assert done.stdout.count("trained model") == 1
    check_as_alone(history(place, "mpi"), alone)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "nothing" in done.stderr


@pytest.mark.complete
def test_a_rank_that_has_other_files_is_named_by_one_message(place, tmp_path):
    (tmp_path / "train.sh").write_text(
        'test "$RANK" = 1 && set -- "${@/d.npz/gone.npz}"; exec "$PYTHON" -m onnxgrad "$@"\n'
    )
    done = torchrun(
        2, "bash", str(tmp_path / "train.sh"), *command(place, "x"), options=("--no-python",), PYTHON=sys.executable
    )
    assert done.returncode
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert said[0].startswith("error: rank 1: there is no file ")


def test_an_engine_that_is_none_is_refused_by_name(place, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["onnxgrad", *command(place, "y", "--distributed", "nccl")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no engine of ranks named 'nccl'" in capsys.readouterr().err

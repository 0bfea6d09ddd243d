"""``onnxgrad train`` when things go wrong around it: one clear message, the exit code, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from tests.commands import command
from tests.training.models import blobs, classifier

#: The beginnings of what a run says of itself before its first step.
TOLD = ("trains ", "data ", "classes ", "rates ", "run ", "on ")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(hidden=64), "m.onnx")
    np.savez("train.npz", **blobs())
    return tmp_path


def arguments(*more, model="m.onnx", data="train.npz", loss="cross_entropy", output="out.onnx"):
    args = ("train", model, "--data", data, "--loss", loss, "--optimizer", "adam", "--epochs", "2", "-o", output)
    return [*args, *map(str, more)]


def train(*more, **changed):
    found = CliRunner().invoke(build(), arguments(*more, **changed))
    assert found.exit_code in (0, 2), found.output
    assert len(found.output) < 600
    return found


def whole(place):
    """Nothing temporary is left, and what was written can be read."""
    assert not [p for p in place.rglob("*") if "partial" in p.name]
    if (place / "out.onnx").exists():
        onnx.checker.check_model(onnx.load(place / "out.onnx"))


def changed(array, at, to):
    array = array.copy()
    array[at] = to
    return array


RNG = np.random.default_rng(0)
DATA, TARGETS = blobs(), RNG.random((90, 3))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("arrays", "loss", "words"),
    [
        ({"x": changed(DATA["x"], (3, 2), np.inf)}, "cross_entropy", "'x' of train.npz is not finite: inf in row 3"),
        ({"x": changed(DATA["x"], (3, 2), np.nan)}, "cross_entropy", "'x' of train.npz is not finite: nan in row 3"),
        ({"x": DATA["x"].astype(float) * 1e300}, "cross_entropy", "as float32, is not finite: inf in row 0"),
        ({"labels": changed(TARGETS, (5, 1), np.nan)}, "mse", "'labels' of train.npz is not finite: nan in row 5"),
        ({"labels": changed(TARGETS, (5, 1), -np.inf)}, "mse", "'labels' of train.npz is not finite: -inf in row 5"),
        ({"labels": TARGETS * 1e38}, "mse", "the loss is inf at step 1 (epoch 1); nothing was trained yet"),
        ({"labels": DATA["labels"] - 1}, "cross_entropy", "has the label -1 in row"),
        ({"labels": DATA["labels"] + 1}, "cross_entropy", "has the label 3 in row"),
        ({f"c{i}": DATA["labels"] for i in range(10_000)} | {"x": None}, "cross_entropy", "no array named 'x'"),
    ],
    ids=["inf", "nan", "too wide", "nan label", "inf label", "overflow", "below", "beyond", "ten thousand columns"],
)
def test_data(place, arrays, loss, words):
    np.savez("train.npz", **{k: v for k, v in (DATA | arrays).items() if v is not None})
    found = train(loss=loss)
    assert found.exit_code == 2
    assert next(x for x in found.output.splitlines() if not x.startswith(TOLD)).startswith("error: ")
    assert words in found.output
    assert not (place / "out.onnx").exists()
    whole(place)


def test_a_weight_that_is_no_number(place):
    model = classifier()
    held = onnx.numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(changed(held, (0, 0), np.nan), "w1"))
    onnx.save(model, "m.onnx")
    found = train()
    assert found.exit_code == 2
    assert "the weight 'w1' of the model holds nan" in found.output
    assert not (place / "out.onnx").exists()


def test_one_row_and_ten_thousand_columns_that_nobody_wants(place):
    columns = {f"c{i}": np.zeros(1) for i in range(10_000)}
    np.savez("train.npz", **{k: v[:1] for k, v in DATA.items()}, **columns)
    assert train().exit_code == 0
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": list(DATA["x"][:1]), "labels": DATA["labels"][:1]} | columns)
    parquet.write_table(table, "wide.parquet")
    assert train("--restart", data="wide.parquet").exit_code == 0
    whole(place)


def test_names_in_every_alphabet(place):
    model = classifier()
    names = {"x": "entrée·入力", "y": "вывод", "w1": "βάρος 🏋"}
    for node in model.graph.node:
        for held in (node.input, node.output):
            held[:] = [names.get(n, n) for n in held]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    onnx.save(model, "モデル.onnx")
    np.savez("données ü.npz", **{"entrée·入力": DATA["x"], "étiquettes": DATA["labels"]})
    found = train(
        *("--labels", "étiquettes", "--prediction", "вывод", "--log", "журнал.jsonl", "--report", "報告.html"),
        *("--train", "βάρος*", "--history", "métriques.json"),
        model="モデル.onnx",
        data="données ü.npz",
        output="обученная.onnx",
    )
    assert found.exit_code == 0, found.output
    held = {t.name for t in onnx.load("обученная.onnx").graph.initializer}
    assert "βάρος 🏋" in held
    assert (place / "обученная.checkpoint").is_dir()
    found = train("--resume", "--labels", "étiquettes", "--train", "βάρος*", "--epochs", "3", model="モデル.onnx",
                  data="données ü.npz", output="обученная.onnx")  # fmt: skip
    assert found.exit_code == 0, found.output


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device")
def test_a_device_is_not_replaced(place):
    for flags in (("--log", "/dev/null"), ("--history", "/dev/null"), ("--report", "/dev/null")):
        found = train(*flags)
        assert (found.exit_code, found.output) == (2, "error: cannot write '/dev/null': it is no ordinary file\n")
    assert train(output="/dev/null").exit_code == 2
    assert not os.path.isfile("/dev/null")


def real(args, limit=None, **more):
    def bound():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-B", "-m", "onnxgrad", *args]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=bound if limit else None, **more)


@pytest.mark.parametrize(
    ("limit", "flags", "file"),
    [
        pytest.param(5000, (), "out.checkpoint/checkpoint.safetensors", marks=pytest.mark.complete),
        (20_000, ("--plot", "p.png"), "p.png"),
    ],
    ids=["at the start", "at the end"],
)
def test_a_disk_that_is_full(place, limit, flags, file):
    """A full disk for one file: a resource limit of the process stands for it."""
    found = real(arguments(*flags), limit)
    assert found.returncode == 2, found.stderr
    lines = [x for x in found.stderr.splitlines() if not x.startswith(("epoch", *TOLD))]
    assert lines == [f"error: cannot write '{file}': File too large"]
    left = {p.name for p in place.iterdir()}
    assert left == {"m.onnx", "train.npz"} | ({"out.checkpoint"} if flags else set())
    whole(place)
    assert train(*flags, *(["--resume"] if flags else [])).exit_code == 0, "where there is room again, it goes on"


@pytest.mark.complete
def test_a_log_that_the_disk_has_no_room_for(place):
    onnx.save(classifier(), "m.onnx")  # whose checkpoint is smaller than the log gets
    found = real(arguments("--log", "l.jsonl", "--epochs", "4", "--batch-size", "1"), 12_000)
    assert found.returncode == 2, found.stderr
    lines = [x for x in found.stderr.splitlines() if not x.startswith(("epoch", *TOLD))]
    assert lines == ["error: cannot write 'l.jsonl': File too large"]
    assert not (place / "out.onnx").exists()
    whole(place)


def test_ctrl_c_while_it_is_being_imported(place):
    """At any moment between the start of Python and the first steps: one error, 130, nothing half-written."""
    for wait in (0.15, 0.7):
        process = subprocess.Popen(
            [sys.executable, "-B", "-m", "onnxgrad", *arguments("--epochs", "100000")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # before this module is read Python itself would answer
        while process.poll() is None and "onnxgrad" not in maps(process.pid):
            time.sleep(0.002)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert out == ""
        lines = [line for line in said.splitlines() if not line.startswith(("epoch", *TOLD))]
        assert lines[0].startswith("error: interrupted")
        assert all(line.startswith("  ") for line in lines[1:])
        assert "Traceback" not in said
    whole(place)


def maps(pid: int) -> str:
    """The mapped files of a process: compiled modules of this package and of imported ones show in its memory."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            return "onnxgrad" if "numpy" in file.read() else ""
    except OSError:
        return "onnxgrad"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_a_checkpoint_that_goes_on(place, name):
    command = [*arguments("--epochs", "100000", "--log", "log.jsonl"), "--batch-size", "8"]
    process = subprocess.Popen([sys.executable, "-m", "onnxgrad", *command], stderr=subprocess.PIPE, text=True)
    try:
        begun = time.monotonic()
        while not os.path.exists("log.jsonl") and process.poll() is None and time.monotonic() < begun + 120:
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "error: interrupted after step" in said
    assert "Traceback" not in said
    np.savez("other.npz", **blobs(seed=5))
    found = train("--resume", "--batch-size", "8", data="other.npz")
    assert found.exit_code == 2
    assert "was written with other training data" in found.output
    assert train("--resume", "--batch-size", "8", "--accept-changes", data="other.npz").exit_code == 0
    whole(place)


def test_names_that_are_not_utf8(tmp_path):
    """Folders, files and classes have names of other encodings: the model is written, and its classes are read."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    folder = tmp_path / os.fsdecode(b"d\xff\x7f")
    rng = np.random.default_rng(0)
    for name in (b"caf\xe9", b"b$x$"):
        place = folder / os.fsdecode(b"pi\xfe") / os.fsdecode(name)
        place.mkdir(parents=True)
        for k in range(4):
            file = place / os.fsdecode(b"%d\xe9.png" % k)
            image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(file)
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 8, 8] x) => (float[N, 2] y) '
        "{ f = Flatten (x) y = MatMul (f, w) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((192, 2), np.float32), "w"))
    onnx.save(proto, folder / os.fsdecode(b"m\xe9.onnx"))
    model, out, data = (folder / os.fsdecode(n) for n in (b"m\xe9.onnx", b"o\xe9.onnx", b"pi\xfe"))
    how = ("--loss", "cross_entropy", "--optimizer", "sgd", "--epochs", "1", "--validation-split", "0.5")
    written = [f"--{n}={folder / n}" for n in ("plot", "report", "history", "log", "tensorboard")]
    for line in (
        ("train", model, "--data", data, *how, *written, "-o", out),
        (
            "train",
            model,
            "--config",
            out.with_suffix(".checkpoint") / "run.toml",
            "--data",
            data,
            "--restart",
            "-o",
            out,
        ),
        ("evaluate", out, "--data", data, "--picture", folder / "p.png"),
        ("evaluate", out, "--data", data, "--json"),
        ("predict", out, "--data", data, "-o", folder / "p.csv"),
        ("info", out, "--json"),
    ):
        done = command(*line)
        assert done.returncode == 0, done.stderr
    (classes,) = [p.value for p in onnx.load(out).metadata_props if p.key == "onnxgrad.classes"]
    assert json.loads(classes) == ["b$x$", "caf\udce9"]
    (folder / "p.csv").read_text(encoding="utf-8")


def test_a_run_in_a_folder_with_a_control_character_is_repeated(place, tmp_path):
    out = tmp_path / "\x7f\x1b" / "out.onnx"
    out.parent.mkdir()
    args = arguments(model=place / "m.onnx", data=place / "train.npz", output=out)
    assert command(*args).returncode == 0
    config = out.with_suffix(".checkpoint") / "run.toml"
    done = command("train", place / "m.onnx", "--config", config, "--restart", "--force")
    assert done.returncode == 0, done.stderr

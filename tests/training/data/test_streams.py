"""Streams: rows and batches as they come, shuffled, cut for ranks, resumed, and larger than memory."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Callback, Interrupted, Trainer, evaluate, predict
from onnxgrad.training.data.streams import Stream
from tests.training.nets import mlp

RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((50, 4)).astype(np.float32), RNG.standard_normal((50, 3)).astype(np.float32)


class StopAt(Callback):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, step):
        self.at = step

    def step(self, run, loss):
        if run.step_count == self.at:
            os.kill(os.getpid(), signal.SIGINT)


class Tensor:
    """As much of a tensor of PyTorch as a stream reads."""

    def __init__(self, array):
        self.array, self.dtype = array, str(array.dtype)

    def detach(self):
        return self

    def cpu(self):
        return self

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


class Loader:
    """As much of a ``DataLoader`` as matters: a length in batches, and an iterator for each epoch."""

    def __init__(self, form, size=16):
        self.form, self.size, self.opened = form, size, 0

    def __len__(self):
        return -(-len(X) // self.size)

    def __iter__(self):
        self.opened += 1
        for low in range(0, len(X), self.size):
            yield self.form(Tensor(X[low : low + self.size]), Tensor(T[low : low + self.size]))


def rows_of(form):
    return [form(x, t) for x, t in zip(X, T)]


def weights_of(data, epochs=1, **settings):
    trainer = Trainer(mlp(), loss="mse", optimizer="sgd", learning_rate=0.1)
    history = trainer.fit(data, epochs=epochs, **{"batch_size": 16, "shuffle": False, **settings})
    return trainer.state(), history


def check_equal(found, wanted):
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


FORMS = {
    "tuple": lambda x, t: (x, t),
    "list": lambda x, t: [x, t],
    "dict": lambda x, t: {"x": x, "labels": t},
    "other names": lambda x, t: {"inputs": x, "y": t},
    "nested": lambda x, t: {"features": {"x": x}, "labels": t, "meta": {"id": 3 if np.ndim(x) == 1 else [3] * len(x)}},
    "mapping and labels": lambda x, t: ({"x": x}, t),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_batches_are_taken_as_they_come(form):
    """Each batch of a loader is a step, and every form of a batch is the same data."""
    loader = Loader(lambda x, t: form(np.asarray(x), np.asarray(t)) if form is FORMS["nested"] else form(x, t))
    found, history = weights_of(loader, 2, batch_size=3)  # which is of rows alone
    wanted, _ = weights_of({"x": X, "labels": T}, 2)
    check_equal(found, wanted)
    assert [r["step"] for r in history.epochs] == [4, 8]
    assert loader.opened == 2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_rows_are_put_together(form):
    found, history = weights_of(lambda: iter(rows_of(form)), 2)
    wanted, same = weights_of({"x": X, "labels": T}, 2)
    check_equal(found, wanted)
    assert [r["loss"] for r in history.epochs] == [r["loss"] for r in same.epochs]


def test_a_map_style_dataset_of_tuples_has_rows():
    check_equal(weights_of(rows_of(FORMS["tuple"]))[0], weights_of({"x": X, "labels": T})[0])
    nested = [{"a": {"x": x}, "b": {"labels": t}} for x, t in zip(X, T)]
    check_equal(weights_of(nested)[0], weights_of({"x": X, "labels": T})[0])
    check_equal(weights_of({"a": {"x": X}, "b": {"labels": T}})[0], weights_of({"x": X, "labels": T})[0])


def test_one_array_for_one_input_and_arrays_by_position():
    trainer = Trainer(mlp(), loss="mean(y**2)", optimizer="sgd")
    trainer.fit(iter([X[:16], X[16:32]]))
    assert trainer.step_count == 2
    check_equal(weights_of(X, y=T)[0], weights_of((X, T))[0])


# --- tables and tars ------------------------------------------------------------------------------


def _table():
    return pa.table({"x": list(X), "labels": list(T)})


def _write(path: Path):
    table = _table()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=20)
    elif path.suffix == ".arrow":
        pyarrow.feather.write_feather(table, path, chunksize=20)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"x": x.tolist(), "labels": t.tolist()}) + "\n" for x, t in zip(X, T)))
    else:
        wide = {f"x{i}": X[:, i] for i in range(4)} | {f"t{i}": T[:, i] for i in range(3)}
        pyarrow.csv.write_csv(pa.table(wide), path)
    return path


@pytest.mark.sweep(3)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl", ".csv"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_files_are_read_in_parts(suffix, folder, tmp_path):
    inputs = {"x": "x0..x3", "labels": "t0..t2"} if suffix == ".csv" else None
    path = _write(tmp_path / f"rows{suffix}")
    wanted, _ = weights_of(path, 2, inputs=inputs)
    if folder:
        (tmp_path / "shards").mkdir()
        for k, part in enumerate(np.array_split(np.arange(50), 3)):
            global X, T
            whole = X, T
            try:
                X, T = X[part], T[part]
                _write(tmp_path / "shards" / f"{k}{suffix}")
            finally:
                X, T = whole
        path = tmp_path / "shards"
    found, _ = weights_of(path, 2, inputs=inputs, stream=True)
    check_equal(found, wanted)


def test_tables_of_arrow_in_batches():
    batches = _table().to_batches(max_chunksize=7)
    wanted, _ = weights_of({"x": X, "labels": T})
    check_equal(weights_of(iter(batches))[0], wanted)
    check_equal(weights_of(pa.RecordBatchReader.from_batches(batches[0].schema, batches))[0], wanted)

    class Lazy:  # as a LazyFrame of polars
        def collect_batches(self):
            return iter(batches)

    check_equal(weights_of(Lazy(), 2)[0], weights_of({"x": X, "labels": T}, 2)[0])


def _tar(path, entries):
    with tarfile.open(path, "w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def _npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_tars_of_samples(tmp_path):
    entries = [(f"part/{i:03}.{k}.npy", _npy(a[i])) for i in range(50) for k, a in (("x", X), ("labels", T))]
    path = _tar(tmp_path / "rows.tar", entries)
    check_equal(weights_of(path, 2)[0], weights_of({"x": X, "labels": T}, 2)[0])
    assert len(predict(mlp(), path)["y"]) == 50


def test_tars_of_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = onnxgrad_pictures()
    pixels = RNG.integers(0, 255, (12, 8, 8), np.uint8)
    entries = []
    for i, picture in enumerate(pixels):
        out = io.BytesIO()
        image.fromarray(picture).save(out, "PNG")
        entries += [(f"{i}.png", out.getvalue()), (f"{i}.cls", b"%d" % (i % 2))]
    path = _tar(tmp_path / "pictures.tar", entries)
    trainer = onnxgrad.train(model, path, loss="cross_entropy", image_mean=0.5, image_std=0.5, batch_size=4)
    assert trainer.step_count == 3
    same = predict(trainer.inference_model(), {"image": ((pixels / 255 - 0.5) / 0.5).astype(np.float32)[:, None]})
    np.testing.assert_allclose(predict(trainer.inference_model(), path)["scores"], same["scores"], atol=1e-5)


def onnxgrad_pictures():
    import onnx

    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 1, 8, 8] image) => (float[N, 2] scores) { f = Flatten (image) scores = MatMul (f, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 2), np.float32) / 64, "w"))
    return model


def test_nothing_in_a_tar_is_unpickled(tmp_path):
    path = _tar(tmp_path / "rows.tar", [("a.x.npy", _npy(X[0])), ("a.labels.pyd", b"cos\nsystem\n")])
    with pytest.raises(BadInput, match="nothing is unpickled"):
        weights_of(path)
    path = _tar(tmp_path / "objects.tar", [("a.x.npy", _npy(np.array([print], object)))])
    with pytest.raises(BadInput, match=r"cannot read 'a\.x\.npy"):
        weights_of(path)


# --- order, epochs, ranks, resuming -------------------------------------------------------------------


def _seen(stream, epoch=0, seed=0, **how):
    return [int(b["x"][k, 0]) for b, _ in stream.batches(8, seed, epoch, (0, 0), **how) for k in range(len(b["x"]))]


def _numbered(n=100, **how):
    fields = Trainer(mlp(), loss="mse").fields
    rows = [{"x": np.full(4, i, np.float32), "labels": T[0]} for i in range(n)]
    return Stream(lambda: iter(rows), fields, **how)


def test_a_shuffle_buffer_draws_every_row_once():
    stream = _numbered(shuffle_buffer=20)
    first, again, second, other = _seen(stream), _seen(stream), _seen(stream, 1), _seen(stream, seed=1)
    for order in (first, second, other):
        assert sorted(order) == list(range(100))
        assert order != list(range(100))
    assert first == again
    assert first not in (second, other)
    # at the k-th row, at most 20 + a batch and a part of rows were read
    assert all(row <= k + 20 + 8 + 64 for k, row in enumerate(first))
    assert _seen(_numbered()) == list(range(100))


@pytest.mark.parametrize("buffer", [0, 20])
def test_ranks_have_blocks_of_every_batch(buffer):
    parts = [_seen(_numbered(shuffle_buffer=buffer), part=(k, 3)) for k in range(3)]
    assert sorted(row for part in parts for row in part) == list(range(100))
    assert all(parts)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("source", ["rows", "batches", "parquet"])
@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer": 20}, {"steps_per_epoch": 3}], ids=str)
def test_a_resumed_run_is_the_same_run(source, settings, tmp_path):
    streams = {
        "rows": lambda: lambda: iter(rows_of(FORMS["dict"])),
        "batches": lambda: Loader(FORMS["tuple"]),
        "parquet": lambda: _write(tmp_path / "rows.parquet"),
    }
    settings = settings | ({"stream": True} if source == "parquet" else {})
    wanted, history = weights_of(streams[source](), 3, **settings)
    kept = {"checkpoint": tmp_path / "kept", "checkpoint_seconds": 0}
    with pytest.raises(Interrupted):
        weights_of(streams[source](), 3, callbacks=[StopAt(6)], **kept, **settings)
    found, same = weights_of(streams[source](), 3, resume=True, **kept, **settings)
    check_equal(found, wanted)
    assert [r["loss"] for r in same.epochs] == [r["loss"] for r in history.epochs]


def test_a_resumed_run_reads_no_row_group_that_it_has_seen(tmp_path, monkeypatch):
    read = []
    real = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, size, row_groups: read.extend(row_groups) or real(self, size, row_groups=row_groups),
    )
    stream = Stream(_write(tmp_path / "rows.parquet"), Trainer(mlp(), loss="mse").fields)
    stream.close()
    read.clear()
    left = [b["x"] for b, _ in stream.batches(10, 0, 1, (40, 4))]
    np.testing.assert_array_equal(np.concatenate(left), X[40:])
    assert read == [2]


def test_steps_per_epoch_of_a_stream_without_an_end():
    def forever():
        while True:
            yield from rows_of(FORMS["tuple"])

    trainer = Trainer(mlp(), loss="mse", optimizer="sgd")
    history = trainer.fit(forever(), epochs=3, batch_size=16, steps_per_epoch=5, schedule="cosine")
    assert [r["step"] for r in history.epochs] == [5, 10, 15]


def test_passes_follow_each_other_in_epochs_of_some_steps():
    found, history = weights_of(Loader(FORMS["tuple"]), 4, steps_per_epoch=2)  # two passes of four batches
    check_equal(found, weights_of(Loader(FORMS["tuple"]), 2)[0])
    assert [r["step"] for r in history.epochs] == [2, 4, 6, 8]


def test_an_iterator_that_ends_ends_the_run():
    trainer = Trainer(mlp(), loss="mse", optimizer="sgd")
    history = trainer.fit(iter(rows_of(FORMS["tuple"])), epochs=9, batch_size=10, steps_per_epoch=4)
    assert [r["step"] for r in history.epochs] == [4, 5]
    assert history.about["stopped"] == "the stream ended"


def test_a_stream_is_read_to_its_end_where_it_is_measured():
    loader, rows = Loader(FORMS["tuple"]), {"x": X, "labels": T}
    trainer = Trainer(mlp(), loss="mse", optimizer="sgd")
    assert trainer.evaluate(loader) == trainer.evaluate(rows)
    assert evaluate(mlp(), Loader(FORMS["dict"])).metrics == evaluate(mlp(), rows).metrics
    np.testing.assert_array_equal(predict(mlp(), (x for x in X))["y"], predict(mlp(), X)["y"])
    history = trainer.fit(loader, validation=Loader(FORMS["tuple"]))
    assert history.epochs[0]["validation_loss"] == trainer.evaluate(rows)["loss"]


def test_text_classes_of_a_stream_are_named():
    names = ["no", "yes", "maybe"]
    rows = [{"x": x, "labels": names[i % 3]} for i, x in enumerate(X)]
    with pytest.raises(BadInput, match="does not show all classes"):
        Trainer(mlp(), loss="cross_entropy").fit(lambda: iter(rows))
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer="sgd")
    trainer.fit(lambda: iter(rows), classes=names, batch_size=16)
    other = Trainer(mlp(), loss="cross_entropy", optimizer="sgd")
    other.fit({"x": X, "labels": np.arange(50) % 3}, shuffle=False, batch_size=16)
    check_equal(trainer.state(), other.state())
    assert trainer.classes == tuple(names)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (lambda: iter(rows_of(FORMS["tuple"])), {"epochs": 2}, "can be read once, and there are 2 epochs"),
        (lambda: iter([]), {}, "is an empty stream"),
        (lambda: iter([object()]), {}, "neither a dict of arrays, a tuple of arrays nor a table"),
        (lambda: iter([(X[:4], T[:4], T[:4])]), {}, "3 arrays without names, and there are 2 inputs"),
        (lambda: iter([(X[:4, :3], T[:4])]), {}, r"expected float32\[N, 4\]"),
        (lambda: iter(rows_of(FORMS["tuple"])), {"validation_split": 0.2}, "validation_split needs all rows"),
        (lambda: iter(rows_of(FORMS["tuple"])), {"sample": "balanced"}, "balanced samples need"),
        (lambda: {"x": X, "labels": T}, {"steps_per_epoch": 3}, "steps_per_epoch is of a stream"),
        (lambda: {"x": X, "labels": T}, {"shuffle_buffer": 3}, "these data lie in memory"),
        (lambda: lambda: 3, {}, "a function of data returns an iterable"),
        (
            lambda: iter(rows_of(FORMS["tuple"])),
            {"schedule": lambda share: 1.0},
            "the length of the stream is not known",
        ),
        (lambda: iter(rows_of(FORMS["tuple"])), {"schedule": "cosine"}, "total"),
    ],
)
def test_streams_that_are_refused(data, settings, message):
    with pytest.raises(BadInput, match=message):
        Trainer(mlp(), loss="mse").fit(data(), **settings)


def test_an_iterator_is_not_resumed(tmp_path):
    kept = {"checkpoint": tmp_path / "kept", "checkpoint_seconds": 0}
    with pytest.raises(Interrupted):
        weights_of(iter(rows_of(FORMS["dict"])), callbacks=[StopAt(2)], **kept)
    with pytest.raises(BadInput, match="is an iterator, which cannot go back to row 32 of epoch 1"):
        weights_of(iter(rows_of(FORMS["dict"])), resume=True, **kept)


def test_a_batch_in_the_middle_that_does_not_fit_is_named():
    batches = [(X[:16], T[:16]), (X[16:32], T[16:32] * np.nan)]
    with pytest.raises(BadInput, match="array 'labels' of part 1 of the training data is not finite"):
        Trainer(mlp(), loss="mse").fit(iter(batches))


_LARGE = """
import resource, sys
import numpy as np, onnx
from onnxgrad.training import Trainer
model = onnx.load(sys.argv[1])
def rows():
    for k in range(int(sys.argv[2])):
        x = np.random.default_rng(k).standard_normal((1 << 14, 64), np.float32)  # 4 MiB
        yield {"x": x, "labels": x[:, :1] * 2}
trainer = Trainer(model, loss="mse", optimizer="sgd", threads=1, target="portable")
buffer = 1 << 14 if sys.argv[3] == "shuffled" else None
trainer.fit(rows(), shuffle_buffer=buffer, batch_size=1 << 13)
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), used + (64 << 20)))
trainer.fit(rows(), shuffle_buffer=buffer, batch_size=1 << 13)
print("steps", trainer.step_count)
try:
    np.zeros(100 << 20, np.uint8)
except MemoryError:
    print("limited")
"""


@pytest.mark.sweep(2)
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("order", ["as it comes", "shuffled"])
def test_a_stream_larger_than_memory(order, tmp_path):
    """256 MiB of rows in a process that may allocate 64 MiB more than it has after a first run."""
    import onnx

    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 64] x) => (float[N, 1] y) { y = MatMul (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 1), np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    done = subprocess.run(
        [sys.executable, "-c", _LARGE, str(tmp_path / "model.onnx"), "64", order], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = 64 if order == "as it comes" else 128
    assert done.stdout.split() == ["steps", str(steps), "limited"]

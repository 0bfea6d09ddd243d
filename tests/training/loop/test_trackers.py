"""Reports and trackers: what they leave is whole, needs nothing else, and says what was measured."""

import json
import re
import sys
import time
import types
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer
from onnxgrad.training.loop.callbacks import AtEnd
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.html_report import Picture, write_report
from onnxgrad.training.loop.trackers import MLflow, TensorBoard, Tracker, WandB
from tests.training.models import blobs, trainable

ONE = Options(threads=1)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def fit(*callbacks, **options):
    trainer = Trainer(trainable(), options=ONE)
    trainer.fit(blobs(), epochs=2, validation=blobs(seed=1), callbacks=callbacks, **options)
    return trainer.history


class Tags(HTMLParser):
    """Checks that tags are closed in order; collects what the page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page(tmp_path):
    history = fit()
    history.about["before"] = {"loss": 1.5, "accuracy": 0.25}
    write_report(history, tmp_path / "r.html", "A <b> run", [Picture("before & after", PNG)])
    page = (tmp_path / "r.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.loads) == ([], [])
    assert "A &lt;b&gt; run" in page
    assert "before &amp; after" in page
    ET.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    rows = re.findall(r"<tr>(?:<td>[^<]*</td>)+</tr>", page)
    assert sum("1.5000" in r and "0.2500" in r for r in rows) == 1
    assert sum(f"{history.epochs[1]['validation_loss']:.4f}" in r for r in rows) == 1


def test_a_report_at_the_end_of_a_run(tmp_path):
    fit(AtEnd(write_report, tmp_path / "r.html"))
    assert "</html>" in (tmp_path / "r.html").read_text()


def test_a_report_of_nothing(tmp_path):
    write_report(History(), tmp_path / "r.html")
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    history = fit(TensorBoard(tmp_path, every=2))
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + size]
        assert int.from_bytes(data[12 + size : 16 + size], "little") == masked_crc32c(body)
        event = Event.FromString(body)
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
        data = data[16 + size :]
    assert list(found["step/loss"]) == [2, 4, 6]
    for record in history.epochs:
        assert found["epoch/validation_loss"][record["step"]] == pytest.approx(record["validation_loss"])


def test_mlflow_is_told(monkeypatch):
    said = []
    fake = types.ModuleType("mlflow")
    fake.active_run = lambda: None
    for name in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(fake, name, lambda *a, name=name, **k: said.append((name, a, k)))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    history = fit(MLflow("mine"))
    assert [s[0] for s in said] == [*("set_experiment", "start_run", "log_params"), *["log_metrics"] * 2, "end_run"]
    assert said[3][1][0]["validation_loss"] == history.epochs[0]["validation_loss"]
    assert said[4][2] == {"step": 6}


def test_mlflow_reads_back_what_was_logged(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="no mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    history = fit(MLflow("mine"))
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("mine").experiment_id])
    assert run.data.params["batch_size"] == "32"
    assert run.data.metrics["validation_loss"] == pytest.approx(history.epochs[-1]["validation_loss"])
    assert mlflow.active_run() is None


def log_records(data):
    """The records of a file in the log format of LevelDB, behind a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_weights_and_biases_without_a_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="no wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    history = fit(WandB("mine", every=2, mode="offline", dir=str(tmp_path)))
    assert wandb.run is None
    (file,) = tmp_path.rglob("*.wandb")
    found, end = {}, time.monotonic() + 30
    while ("epoch/validation_loss", 6) not in found and time.monotonic() < end:  # another process writes it
        for data in log_records(file.read_bytes()):
            items = wandb_internal_pb2.Record.FromString(data).history.item
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            found.update({(k, values["_step"]): v for k, v in values.items()})
    for record in history.epochs:
        assert found["epoch/validation_loss", record["step"]] == pytest.approx(record["validation_loss"])
    assert ("step/loss", 2) in found


def test_a_tracker_of_your_own():
    class Lines(Tracker):
        every = 3

        def __init__(self):
            self.lines = []

        def open(self, step, about):
            self.lines.append(("open", step, about["settings"]["batch_size"]))

        def log(self, kind, values, step):
            self.lines.append((kind, step, sorted(values)[:2]))

        def close(self):
            self.lines.append(("close",))

    tracker = Lines()
    fit(tracker)
    assert tracker.lines[0] == ("open", 0, "32")
    assert [line[:2] for line in tracker.lines[1:-1]] == [("step", 3), ("epoch", 3), ("step", 6), ("epoch", 6)]
    assert tracker.lines[1][2] == ["learning_rate", "loss"]
    assert tracker.lines[-1] == ("close",)


@pytest.mark.parametrize(
    ("make", "package"), [(MLflow, "mlflow"), (lambda: TensorBoard("x"), "tensorboardX"), (WandB, "wandb")]
)
def test_a_package_that_is_missing(monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=f"need.* {package}: pip install"):
        make()

"""Any metric by name while training: as `evaluate` measures it, watched, kept, looked up before the first step."""

import json

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer, attach, evaluate
from onnxgrad.training.loop.checkpoint import Checkpoint
from tests.training.loop.test_callbacks import At, bits, interrupt
from tests.training.models import blobs, classifier

ONE = Options(threads=1)
NAMES = ["accuracy", "balanced_accuracy", "precision", "recall", "f1", "auc", "average_precision", "log_loss"]


def trainer(**settings):
    return Trainer(attach(classifier(), optimizer="sgd", learning_rate=0.3, **settings), options=ONE)


def fitted(epochs=3, **options):
    found = trainer()
    found.fit(blobs(), epochs=epochs, validation=blobs(seed=1), **options)
    return found


def test_metrics_are_those_of_the_saved_model(tmp_path):
    found = fitted(metrics=",".join(NAMES), history=tmp_path / "h.json")
    found.save(tmp_path / "m.onnx")
    last = found.history.epochs[-1]
    outside = evaluate(tmp_path / "m.onnx", blobs(seed=1), metrics=NAMES).metrics
    assert {n: last[f"validation_{n}"] for n in NAMES} == pytest.approx(outside, rel=1e-5)
    assert [k for k in last if k.startswith("validation_")] == ["validation_loss", *(f"validation_{n}" for n in NAMES)]
    assert json.loads((tmp_path / "h.json").read_text())["epochs"][-1]["validation_auc"] == last["validation_auc"]
    assert found.evaluate(blobs(seed=1), metrics="auc")["auc"] == pytest.approx(outside["auc"], rel=1e-5)


def test_a_watched_metric_is_measured_and_its_best_weights_come_back():
    found = fitted(epochs=6, monitor="validation_auc", keep_best=True)
    values = [e["validation_auc"] for e in found.history.epochs]
    assert found.history.about["best"]["validation_auc"] == max(values)
    assert found.evaluate(blobs(seed=1), metrics="auc")["auc"] == pytest.approx(max(values))
    assert "validation_accuracy" in found.history.epochs[0], "beside what is usual"
    loss = fitted(epochs=2, monitor="validation_log_loss", keep_best=True)
    assert loss.history.about["best"]["epoch"] == 2, "less is better"


def test_the_best_states_are_kept(tmp_path):
    found = fitted(epochs=6, keep=3, checkpoint=tmp_path, evaluate_every=2)
    measured = dict(found.history.measured("validation_loss"))
    assert list(measured) == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    best = sorted(measured, key=measured.get)[:3]
    kept = found.history.about["kept"]
    assert [e["step"] for e in kept] == best
    assert {p.name for p in tmp_path.glob("best-*")} == {f"best-{step}.safetensors" for step in best}
    other = trainer()
    other.restore(tmp_path / kept[1]["file"])
    assert other.evaluate(blobs(seed=1))["loss"] == pytest.approx(measured[best[1]])
    assert bits(Checkpoint.load(tmp_path / "best.safetensors").state) == bits(found.state())
    fitted(epochs=1, keep=2, checkpoint=tmp_path)
    assert [p.name for p in tmp_path.glob("best-*")] == ["best-3.safetensors"], "those of another run are gone"
    with pytest.raises(BadInput, match="to keep 2 states, say in which folder"):
        fitted(keep=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", [5, 6, 7, 11])
def test_measuring_between_epochs_survives_an_interruption(tmp_path, at):
    options = {"epochs": 5, "evaluate_every": 2, "keep": 2, "metrics": ["auc"], "monitor": "validation_auc"}
    whole = fitted(checkpoint=tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        fitted(checkpoint=tmp_path / "cut", callbacks=[At(at, interrupt)], **options)
    again = fitted(checkpoint=tmp_path / "cut", resume=True, **options)
    assert again.history.evaluations == whole.history.evaluations
    assert again.history.about["kept"] == whole.history.about["kept"]
    assert bits(again.state()) == bits(whole.state())


def test_it_stops_between_epochs():
    found = trainer()
    found.fit(blobs(), epochs=9, validation=blobs(seed=1), schedule=lambda _: 0.0, evaluate_every=2, patience=3)
    assert found.step_count == 8, "of three steps per epoch"
    assert found.history.about["stopped"] == "validation_loss has not become better for 3 measurements"
    assert found.history.epochs[-1]["epoch"] == 3
    assert np.isfinite(found.history.epochs[-1]["loss"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": "acuracy"}, "no metric named 'acuracy'; did you mean 'accuracy'"),
        ({"metrics": ["mae"]}, "mae is no metric for a task of classes; those are accuracy"),
        ({"metrics": "run/metrics.json"}, "is no metric: metrics are names"),
        ({"metrics": []}, "no metric is named"),
        ({"monitor": "validation_acuracy", "patience": 1}, "did you mean 'validation_accuracy'"),
        ({"monitor": "auc", "keep_best": True}, "no entry of an epoch named 'auc'; did you mean 'validation_auc'"),
        ({"monitor": "val_auc", "keep_best": True}, "did you mean 'validation_auc'"),
        ({"monitor": "val_loss", "keep_best": True}, "did you mean 'validation_loss'"),
        ({"monitor": "validation_wer", "patience": 1}, "wer is no metric for a task of classes"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
    ],
)
def test_names_are_looked_up_before_the_first_step(options, words, tmp_path):
    found = trainer()
    with pytest.raises(BadInput, match=words):
        found.fit(blobs(), epochs=1, validation=blobs(seed=1), checkpoint=tmp_path / "c", **options)
    assert found.step_count == 0
    assert not (tmp_path / "c").exists(), "nothing is left behind"


def test_without_validation_data_nothing_is_watched():
    for options in ({"patience": 1}, {"keep_best": True}, {"keep": 1}):
        with pytest.raises(BadInput, match="validation_loss is watched, and there are no validation data"):
            trainer().fit(blobs(), **options)
    with pytest.raises(BadInput, match="evaluate_every measures validation data, and there are none"):
        trainer().fit(blobs(), evaluate_every=1)
    trainer().fit(blobs(), patience=1, monitor="loss")


def test_a_loss_that_is_a_graph_does_not_tell_what_to_compare():
    loss = onnx.parser.parse_function("""
        <opset_import: ["": 21], domain: "own"> sum (y) => (s) { s = ReduceMean <keepdims = 0> (y) }""")
    model = attach(classifier(), loss=loss, optimizer="sgd")
    with pytest.raises(BadInput, match="does not show which values it compares"):
        Trainer(model).fit({"x": blobs()["x"]}, validation={"x": blobs()["x"]}, metrics="accuracy")


def test_words_of_ctc_are_watched():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 6, 4] x) => (float[N, 6, 4] y) { y = MatMul (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    path = np.array([[1, 0, 3, 2, 2, 0], [1, 1, 3, 1, 0, 0]])  # 3 stands between words
    data = {"x": np.eye(4, dtype=np.float32)[path], "labels": np.array([[1, 3, 2], [2, 3, 1]])}
    found = Trainer(model, loss="ctc", optimizer="sgd", learning_rate=1e-6, options=ONE)
    found.fit(data, validation=data, monitor="validation_wer:space=3", keep_best=True)
    last = found.history.epochs[-1]
    assert (last["validation_exact"], last["validation_cer"]) == (0.5, 1 / 6)
    assert last["validation_wer:space=3"] == 1 / 4
    with pytest.raises(BadInput, match="the symbol between words is not known"):
        found.fit(data, validation=data, metrics="wer")


def test_a_plateau_by_name_follows_what_is_measured():
    found = trainer()
    found.fit(blobs(), epochs=4, validation=blobs(seed=1), schedule="plateau:patience=1,monitor=validation_auc")
    assert {"rate_factor", "validation_auc"} <= found.history.epochs[0].keys()

"""The loop: it learns, measures what is saved, goes on exactly where it stopped, and stops cleanly."""

import json
import os
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from rich.console import Console

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, open_model, save_model, training_info
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach, compile_step
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.history import Curve, History
from onnxgrad.training.loop.progress import Lines
from onnxgrad.training.loop.progress_bar import Bar
from tests.training.models import blobs, classifier, trainable

ONE = Options(threads=1)


def bits(state):
    return {name: array.tobytes() for name, array in state.items()}


class Recorder(Callback):
    """Keeps the losses; may do something after a step."""

    def __init__(self, then=None, at=None):
        self.losses, self.then, self.at = [], then, at

    def step(self, run, loss):
        self.losses.append(loss)
        if run.step_count == self.at:
            self.then()


def test_it_learns_and_the_numbers_are_those_of_the_inference_model():
    trainer = Trainer(trainable(), options=ONE)
    test = blobs(seed=1)
    before = trainer.evaluate(test)
    history = trainer.fit(blobs(), epochs=12, batch_size=16, validation=test)
    assert [e["epoch"] for e in history.epochs] == list(range(1, 13))
    assert [e["step"] for e in history.epochs] == [6 * k for k in range(1, 13)]
    last = history.epochs[-1]
    assert last["validation_loss"] < 0.3 * before["loss"]
    assert last["validation_accuracy"] > 0.95 > before["accuracy"]
    # independently: plain ONNX Runtime, and numpy for the loss
    session = onnxruntime.InferenceSession(trainer.inference_model().SerializeToString())
    (y,) = session.run(None, {"x": test["x"]})
    y = y - y.max(1, keepdims=True)
    logp = y - np.log(np.exp(y).sum(1, keepdims=True))
    assert last["validation_loss"] == pytest.approx(-logp[np.arange(90), test["labels"]].mean(), rel=1e-5)
    assert last["validation_accuracy"] == (y.argmax(1) == test["labels"]).mean()


def test_the_training_loss_of_an_epoch_is_the_mean_over_its_rows():
    recorder = Recorder()
    trainer = Trainer(trainable(), options=ONE)
    history = trainer.fit(blobs(50), epochs=1, batch_size=20, callbacks=[recorder])
    a, b, c = recorder.losses
    assert history.epochs[0]["loss"] == pytest.approx((20 * a + 20 * b + 10 * c) / 50)


def test_the_seed_decides_everything():
    states = []
    for seed in (3, 3, 4):
        trainer = Trainer(trainable(), options=ONE)
        trainer.fit(blobs(), epochs=2, seed=seed)
        states.append(bits(trainer.state()))
    assert states[0] == states[1] != states[2]


def test_without_shuffling_the_rows_come_in_order():
    trainer = Trainer(trainable(), options=ONE)
    trainer.fit(blobs(), epochs=1, batch_size=30, shuffle=False)
    data, by_hand = blobs(), Trainer(trainable(), options=ONE)
    for k in range(3):
        by_hand.machine.step({n: a[30 * k : 30 * k + 30] for n, a in data.items()})
    assert bits(trainer.state()) == bits(by_hand.state())


def test_a_schedule_scales_the_rate():
    rates = []

    def schedule(progress):
        rates.append(progress)
        return 0.0

    trainer = Trainer(trainable("sgd"), options=ONE)
    before = bits(trainer.state())
    trainer.fit(blobs(), epochs=2, batch_size=45, schedule=schedule)
    assert rates == [0, 0.25, 0.5, 0.75]
    assert bits(trainer.state()) == before


@pytest.mark.parametrize("schedule", ["linear:warmup=2", lambda progress: 1 - progress])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_with_a_schedule_takes_no_second_one(schedule, accumulate):
    model = trainable("sgd", schedule="cosine:total=8,warmup=1", accumulate=accumulate > 1)
    trainer = Trainer(model, options=ONE, accumulate=accumulate)
    with pytest.raises(
        BadInput, match=r"of its own \(cosine:total=8,end=0,warmup=1\)(.|\n)*hint: leave `schedule` out"
    ):
        trainer.fit(blobs(), epochs=1, batch_size=45, schedule=schedule)
    assert trainer.step_count == 0
    trainer.fit(blobs(), epochs=1, batch_size=45)
    trainer.fit(blobs(), epochs=2, batch_size=45, schedule="constant")
    assert trainer.step_count == 4


def test_a_fixed_batch_size():
    model = attach(classifier(batch=16), optimizer="adam", learning_rate=0.02)
    trainer = Trainer(model, options=ONE)
    history = trainer.fit(blobs(50), epochs=2, validation=blobs(40))
    assert [e["step"] for e in history.epochs] == [3, 6]
    assert history.epochs[-1]["validation_loss"] == pytest.approx(trainer.evaluate(blobs(40))["loss"], rel=1e-6)
    with pytest.raises(BadInput, match="exactly 16 rows; the data have 15"):
        trainer.fit(blobs(15))


@pytest.mark.parametrize("loss", ["cross_entropy:ignore_index=1", "cross_entropy:block_rows=4", "mean(scores**2)"])
def test_all_rows_are_measured_in_batches_of_a_fixed_size(loss):
    """The last batch is filled up; what fills it counts neither in the loss nor in metrics."""
    fixed, free = (Trainer(attach(classifier(batch=n), loss=loss), options=ONE) for n in (16, "N"))
    for rows in (40, 15, 32):
        assert fixed.evaluate(blobs(rows)) == pytest.approx(free.evaluate(blobs(rows)), rel=1e-6)


def test_the_saved_file_is_measured_even_where_the_loss_is_taken_of_an_inner_value(tmp_path):
    model = classifier(softmax=True)
    trainer = Trainer(attach(model, optimizer="adam", learning_rate=0.02), options=ONE)
    assert trainer.evaluation.boundary == ["z"], "the loss takes the logits"
    trainer.fit(blobs(), epochs=5)
    save_model(trainer.inference_model(), tmp_path / "m.onnx")
    test = trainer.data(blobs(seed=1))
    found = trainer.evaluation.file(tmp_path / "m.onnx", test)
    assert found == pytest.approx(trainer.evaluate(test), rel=1e-6)
    saved = onnx.load(tmp_path / "m.onnx")
    assert [v.name for v in saved.graph.output] == ["y"]
    (y,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": test.arrays["x"]})
    assert found["accuracy"] == (y.argmax(1) == test.arrays["labels"]).mean()
    assert found["loss"] == pytest.approx(-np.log(y[np.arange(90), test.arrays["labels"]]).mean(), rel=1e-4)


NORMED = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[N, 6] x) => (float[N, 3] y)
    <float[6, 3] w = {1,0,0, 0,1,0, 0,0,1, 1,1,0, 0,1,1, 1,0,1}, float[6] scale = {1,1,1,1,1,1},
     float[6] bias = {0,0,0,0,0,0}, float[6] mean = {0,0,0,0,0,0}, float[6] var = {1,1,1,1,1,1},
     float ratio = {0.5}>
    {
        n = BatchNormalization (x, scale, bias, mean, var)
        d = Dropout (n, ratio)
        y = MatMul (d, w)
    }"""


def test_evaluation_is_in_inference_mode_though_training_is_not(tmp_path):
    model = onnx.parser.parse_model(NORMED)
    step = compile_step(attach(model, optimizer="sgd", learning_rate=0.1))
    assert {t.name for t in step.state.values() if t.kind == "statistic"} >= {"mean", "var"}
    trainer = Trainer(step, options=ONE)
    assert trainer.evaluation.boundary == ["y"], "copies in training mode are the originals again"
    trainer.fit(blobs(), epochs=3)
    test = trainer.data(blobs(seed=1))
    once, twice = trainer.evaluate(test), trainer.evaluate(test, batch_size=7)
    assert once == pytest.approx(twice, rel=1e-5), "neither dropout nor the statistics of a batch"
    save_model(trainer.inference_model(), tmp_path / "m.onnx")
    saved = onnx.load(tmp_path / "m.onnx")
    kept = {t.name: onnx.numpy_helper.to_array(t) for t in saved.graph.initializer}
    assert np.abs(kept["mean"]).max() > 0.1, "the running statistics moved"
    n = (test.arrays["x"] - kept["mean"]) / np.sqrt(kept["var"] + 1e-5) * kept["scale"] + kept["bias"]
    y = (n @ kept["w"]).astype(np.float64)
    loss = np.log(np.exp(y).sum(1)) - y[np.arange(90), test.arrays["labels"]]
    assert trainer.evaluation.file(tmp_path / "m.onnx", test)["loss"] == pytest.approx(loss.mean(), rel=1e-4)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "bce_with_logits"])
def test_losses_of_tensors(loss):
    data = blobs()
    data["labels"] = np.eye(3, dtype=np.float32)[data["labels"]]
    trainer = Trainer(attach(classifier(), loss=loss, optimizer="adam", learning_rate=0.02), options=ONE)
    before = trainer.evaluate(data)
    history = trainer.fit(data, epochs=10, validation=data)
    assert history.epochs[-1]["validation_loss"] < 0.8 * before["loss"]
    assert ("accuracy" in before) == (loss == "bce_with_logits")
    if loss == "bce_with_logits":
        (y,) = onnxruntime.InferenceSession(trainer.inference_model().SerializeToString()).run(None, {"x": data["x"]})
        assert history.epochs[-1]["validation_accuracy"] == ((y > 0) == (data["labels"] > 0.5)).mean()


def test_ignored_labels_do_not_count(tmp_path):
    data = blobs()
    data["labels"][::2] = -1
    model = attach(classifier(), loss="cross_entropy:ignore_index=-1", optimizer="adam", learning_rate=0.02)
    trainer = Trainer(model, options=ONE)
    found = trainer.fit(data, epochs=5, validation=data).epochs[-1]
    (y,) = onnxruntime.InferenceSession(trainer.inference_model().SerializeToString()).run(None, {"x": data["x"]})
    counts = data["labels"] >= 0
    assert found["validation_accuracy"] == (y.argmax(1) == data["labels"])[counts].mean()


def test_metrics_and_plot(tmp_path):
    trainer = Trainer(trainable(), options=ONE)
    trainer.fit(blobs(), epochs=2, validation=blobs(seed=1), history=tmp_path / "m.json", plot=tmp_path / "p.png")
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["finished"]
    assert [e["epoch"] for e in found["epochs"]] == [1, 2]
    assert found["training_loss"]["step"] == [1, 2, 3, 4, 5, 6]
    assert found["settings"]["seed"] == 0
    picture = (tmp_path / "p.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture.endswith(b"IEND\xaeB`\x82")
    assert sorted(os.listdir(tmp_path)) == ["m.json", "p.png"]


def test_a_curve_stays_short_and_loses_nothing():
    curve = Curve(limit=8)
    values = np.random.default_rng(0).standard_normal(1000)
    for v in values:
        curve.add(v)
    assert len(curve.means) < 8
    assert curve.width == 128
    np.testing.assert_allclose(curve.means, values[: 128 * len(curve.means)].reshape(-1, 128).mean(1))
    assert curve.total == pytest.approx(values[128 * len(curve.means) :].sum())
    again = History.of_json(json.loads(json.dumps(History(curve=curve, about={"a": 1}).to_json())))
    assert (again.curve, again.about) == (curve, {"a": 1})


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_shown(terminal):
    console = Console(file=open(os.devnull, "w"), force_terminal=terminal, record=True, width=120)  # noqa: SIM115
    shown = (Bar if terminal else Lines)(console)
    shown.PERIOD = 0.0
    Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, validation=blobs(seed=1), callbacks=[shown])
    text = console.export_text()
    for word in ("epoch 1/2", "epoch 2/2", "loss", "accuracy", "steps/s"):
        assert word in text
    if not terminal:
        assert "step 3/6" in text
        assert "s left" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"resume": True}, "say in which folder the checkpoint is"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(BadInput, match=words):
        Trainer(trainable(), options=ONE).fit(blobs(), **options)


def test_a_validation_loss_that_overflows_is_reported_and_kept(tmp_path):
    worse = blobs()
    worse["labels"] = np.full((90, 3), 1e38, np.float32)
    data = blobs() | {"labels": np.zeros((90, 3), np.float32)}
    model = attach(classifier(), loss="mse", optimizer="adam")
    options = {"checkpoint": tmp_path, "validation": worse}
    history = Trainer(model, options=ONE).fit(data, epochs=1, history=tmp_path / "m.json", **options)
    assert history.epochs[0]["validation_loss"] == np.inf
    assert json.loads((tmp_path / "m.json").read_text())["epochs"][0]["validation_loss"] is None
    assert len(Trainer(model, options=ONE).fit(data, epochs=2, resume=True, **options).epochs) == 2


def by_hand(loss_inside: bool) -> onnx.ModelProto:
    """A model with training information written by hand; the loss is in the model or behind it."""
    loss = """
            d = Sub (y, t)
            dd = Mul (d, d)
            loss = ReduceMean <keepdims = 0> (dd)"""
    inputs = "float[N, 6] x, float[N, 3] t" if loss_inside else "float[N, 6] x"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        net ({inputs}) => (float[N, 3] y{", float loss" if loss_inside else ""}) {{
            y = MatMul (x, w) {loss if loss_inside else ""}
        }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((6, 3), 0.1, np.float32), "w"))
    head = "() => (" if loss_inside else "(float[N, 3] t) => (float loss, "
    algorithm = onnx.parser.parse_graph(f"""
        train {head} float[6, 3] wn) {{
            {"" if loss_inside else loss}
            g = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "t"], y = "loss"> (w, x, t)
            rate = Constant <value = float {{0.05}}> ()
            s = Mul (rate, g)
            wn = Sub (w, s)
        }}""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    info.update_binding.add(key="w", value="wn")
    return model


@pytest.mark.parametrize("inside", [False, True])
def test_training_information_written_by_hand(tmp_path, inside):
    data = {"x": blobs()["x"], "t": np.eye(3, dtype=np.float32)[blobs()["labels"]]}
    trainer = Trainer(by_hand(inside), options=ONE)
    rows = trainer.data(data)
    before = trainer.evaluate(rows)
    found = trainer.fit(rows, epochs=8, validation=rows).epochs[-1]
    assert found["validation_loss"] < 0.5 * before["loss"]
    w = trainer.state()["w"]
    assert found["validation_loss"] == pytest.approx(((data["x"] @ w - data["t"]) ** 2).mean(), rel=1e-5)
    save_model(trainer.inference_model(), tmp_path / "m.onnx")
    assert trainer.evaluation.file(tmp_path / "m.onnx", rows)["loss"] == pytest.approx(found["validation_loss"])
    with pytest.raises(BadInput, match="no learning rate that could follow"):
        trainer.fit(rows, schedule="cosine")


def test_a_step_without_its_source_trains_and_says_why_it_cannot_be_evaluated():
    step = compile_step(trainable())
    step.source = None
    trainer = Trainer(step, options=ONE)
    history = trainer.fit(blobs(), epochs=5)
    assert history.epochs[-1]["loss"] < 0.7 * history.epochs[0]["loss"]
    for ask in (lambda: trainer.evaluate(blobs()), lambda: trainer.fit(blobs(), validation=blobs())):
        with pytest.raises(BadInput, match="without the model that it was compiled from"):
            ask()


def test_a_loss_and_an_optimizer_are_attached_to_a_bare_model(tmp_path):
    settings = {"loss": "cross_entropy", "optimizer": "momentum", "learning_rate": 0.1, "freeze": ["b1"]}
    attached = Trainer(attach(classifier(), **settings), options=ONE)
    attached.fit(blobs(), epochs=2)
    path = tmp_path / "bare.onnx"
    onnx.save(classifier(), path)
    loaded = load_model(path)
    for bare in (classifier(), path, loaded):
        short = Trainer(bare, **settings, options=ONE)
        short.fit(blobs(), epochs=2)
        assert short.fingerprint == attached.fingerprint
        assert bits(short.state()) == bits(attached.state())
    assert not training_info(loaded)


def test_a_bare_model_can_be_trained_in_parts():
    whole, parts = (Trainer(classifier(), loss="cross_entropy", accumulate=n, options=ONE) for n in (1, 3))
    losses = [t.fit(blobs(), epochs=2, batch_size=30).epochs[-1]["loss"] for t in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (classifier, {}, "carries no training information; say which loss"),
        (classifier, {"optimizer": "sgd"}, "say which loss"),
        (trainable, {"loss": "mse"}, "carries training information, which is used as it is; drop loss"),
        (trainable, {"optimizer": "sgd", "learning_rate": 0.1}, "drop optimizer, learning_rate"),
        (lambda: load_model_of(trainable()), {"loss": "mse"}, "drop loss"),
        (lambda: compile_step(trainable()), {"freeze": ["b1"]}, "a compiled step .* drop freeze"),
        (classifier, {"loss": "mean"}, "there is no loss 'mean'"),
        (classifier, {"loss": "mse", "accumulate": 0}, "accumulate must be at least 1, not 0"),
        (lambda: 3, {"loss": "mse"}, "a model is a path, .* not a int"),
    ],
)
def test_what_is_attached_twice_or_not_at_all_is_refused(model, settings, message):
    with pytest.raises(BadInput, match=message):
        Trainer(model(), **settings, options=ONE)


def load_model_of(proto):
    return open_model(proto).model


def test_options_that_do_not_exist_are_named():
    with pytest.raises(BadInput, match="learning_rat"):
        Trainer(classifier(), loss="mse", learning_rat=0.1)


def by_position(rows):
    return rows["x"], rows["labels"]


def test_arrays_by_position_are_those_with_names(tmp_path):
    data, test = blobs(64), blobs(32, seed=1)
    named, placed = (Trainer(classifier(), loss="cross_entropy") for _ in range(2))
    named.fit(data, validation=test, batch_size=16)
    placed.fit(*by_position(data), validation=by_position(test), batch_size=16)
    assert all((named.state()[n] == a).all() for n, a in placed.state().items())
    assert (
        named.evaluate(test)
        == placed.evaluate(*by_position(test))
        == placed.evaluate(({"x": test["x"]}, test["labels"]))
    )
    np.testing.assert_array_equal(placed.predict(test["x"])["y"], named.predict(test)["y"])
    trained = onnxgrad.train(classifier(), *by_position(data), loss="cross_entropy:weight=balanced", batch_size=16)
    assert trained.step_count == 4


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((np.zeros((4, 2)),), "1 array without a name, and there are 2 inputs to feed: x (float32"),
        ((np.zeros((4, 2)), (np.zeros(4), np.zeros(4))), "3 arrays without names"),
        (
            (np.zeros((4, 2)), 64),
            "the second argument are labels, not 64\n  hint: give settings by name: batch_size=64",
        ),
    ],
)
def test_too_many_or_too_few_arrays_by_position(arrays, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        Trainer(classifier(), loss="cross_entropy").fit(*arrays)


def test_onnx_saves_the_inference_model(tmp_path):
    trainer = Trainer(classifier(), loss="cross_entropy")
    onnx.save(trainer.inference_model(), tmp_path / "a.onnx")
    trainer.save(tmp_path / "b.onnx")
    a, b = onnx.load(tmp_path / "a.onnx"), onnx.load(tmp_path / "b.onnx")
    assert a == b  # the order of their fields may differ

"""Callbacks of a run: early stopping, best weights, rate reduction, and their saved state."""

import json
import signal

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer, attach
from onnxgrad.training.loop.callbacks import Callback, EarlyStopping, KeepBest, Log, Monitor, Plateau
from tests.training.models import blobs, classifier, trainable

ONE = Options(threads=1)


def bits(state):
    return {name: array.tobytes() for name, array in state.items()}


class At(Callback):
    """Does something after one step."""

    def __init__(self, step, then):
        self.at, self.then = step, then

    def step(self, run, loss):
        if run.step_count == self.at:
            self.then()


class Values(Callback):
    """Makes up what was measured."""

    def __init__(self, *values):
        self.values = values

    def epoch(self, run, record):
        record["made_up"] = self.values[record["epoch"] - 1]


class Rates(Callback):
    """Keeps the rates that steps had."""

    def __init__(self):
        self.seen = []

    def step(self, run, loss):
        self.seen.append(float(next(iter(run.machine.held.values()))))


def interrupt():
    signal.raise_signal(signal.SIGINT)


def fit(*callbacks, epochs=6, **options):
    trainer = Trainer(trainable(), options=ONE)
    trainer.fit(blobs(), epochs=epochs, callbacks=callbacks, **options)
    return trainer


def test_a_monitor_counts_what_is_not_better():
    monitor = Monitor("loss", least=0.1)
    seen = [monitor({"loss": v}) for v in (1.0, 0.95, 0.85, float("nan"), 0.8, 0.7)]
    assert seen == [True, False, True, False, False, True]
    assert monitor.value == 0.7
    assert [Monitor("validation_accuracy")({"validation_accuracy": v}) for v in (0.5,)] == [True]
    up = Monitor("validation_f1")
    assert [up({"validation_f1": v}) for v in (0.5, 0.4, 0.6)] == [True, False, True]
    with pytest.raises(BadInput, match="no 'validation_loss'; is there validation data"):
        Monitor("validation_loss")({"epoch": 1, "loss": 1.0})


def test_it_stops_early():
    trainer = fit(Values(3.0, 2.0, 2.5, 2.0, 1.0, 0.0), EarlyStopping("made_up", patience=2))
    assert len(trainer.history.epochs) == 4
    assert trainer.history.about["stopped"] == "made_up has not become better for 2 epochs"


def test_the_best_weights_come_back(tmp_path):
    expected = fit(epochs=2)
    for folder in (None, tmp_path):
        values = Values(3.0, 1.0, 2.0, 2.0, 2.0, 2.0)
        trainer = fit(values, KeepBest("made_up"), checkpoint=folder)
        assert bits(trainer.state()) == bits(expected.state())
        assert trainer.history.about["best"] == {"epoch": 2, "step": expected.step_count, "made_up": 1.0}


def test_a_plateau_lowers_the_rate():
    rates = Rates()
    fit(Values(3.0, 2.0, 2.5, 2.0, 1.0, 0.0), Plateau("made_up", factor=0.5, patience=2), rates)
    first = rates.seen[0]
    assert rates.seen == [first] * 12 + [first / 2] * 6


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", [4, 8, 9, 13])
def test_what_a_callback_remembers_survives_an_interruption(tmp_path, at):
    def callbacks():
        made_up = Values(3.0, 1.0, 2.0, 2.5, 0.5, 0.7)
        return [made_up, KeepBest("made_up"), Plateau("made_up", 0.5, 1), EarlyStopping("made_up", 3)]

    whole, rates = Rates(), Rates()
    expected = fit(*callbacks(), whole)
    with pytest.raises(Interrupted):
        fit(*callbacks(), rates, At(at, interrupt), checkpoint=tmp_path)
    again = fit(*callbacks(), rates, checkpoint=tmp_path, resume=True)
    assert rates.seen == whole.seen
    assert bits(again.state()) == bits(expected.state())
    assert again.history.about["best"]["epoch"] == 5
    with pytest.raises(BadInput, match=r"other callbacks \(KeepBest, Plateau, EarlyStopping\)"):
        fit(checkpoint=tmp_path, resume=True)


def test_a_run_that_stopped_early_has_nothing_left_to_do(tmp_path):
    def stopping():
        return [Values(*range(6)), EarlyStopping("made_up", 1)]

    first = fit(*stopping(), checkpoint=tmp_path)
    again = fit(*stopping(), checkpoint=tmp_path, resume=True)
    assert again.step_count == first.step_count == 6


def test_a_log_has_every_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    fit(Log(path))
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["step"] for e in whole if "seconds" not in e] == list(range(1, 19))
    with pytest.raises(Interrupted):
        fit(Log(path), At(8, interrupt), checkpoint=tmp_path / "c")
    with path.open("a") as file:
        file.write('{"step": 9, "lo')  # as if it had been killed while writing
    fit(Log(path), checkpoint=tmp_path / "c", resume=True)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    for one, other in zip(whole, again, strict=True):
        assert {k: v for k, v in one.items() if "second" not in k} == {
            k: v for k, v in other.items() if "second" not in k
        }
    fit(Log(path, every=0))
    assert len(path.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EarlyStopping(patience=0), "patience must be at least 1"),
        (lambda: Plateau(factor=1.0), "factor must lie between 0 and 1"),
        (lambda: KeepBest(least=-1), "at least 0"),
    ],
)
def test_options_that_cannot_be(make, words):
    with pytest.raises(BadInput, match=words):
        make()


def test_a_plateau_needs_a_rate():
    model = attach(classifier(), optimizer="sgd", learning_rate=0.1)
    trainer = Trainer(model, options=ONE)
    trainer.fit(blobs(), epochs=2, callbacks=[Values(1.0, 2.0), Plateau("made_up", 0.5, 1)])
    assert np.isfinite(trainer.history.epochs[-1]["loss"])


def test_a_method_as_other_libraries_call_it_is_not_silent():
    with pytest.warns(UserWarning, match="Mine.on_epoch_end is not called; a callback has start, step"):

        class Mine(Callback):
            def on_epoch_end(self, epoch, logs=None):
                """Never called."""


def test_the_former_name_of_a_hook_is_called_with_a_warning():
    with pytest.warns(DeprecationWarning, match="the hook Mine.evaluated is deprecated; it is called evaluation now"):

        class Mine(Callback):
            def evaluated(self, run, record):
                record["seen"] = True

    record = {}
    Mine().evaluation(None, record)
    assert record == {"seen": True}

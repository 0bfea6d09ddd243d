"""A run that resumes, is interrupted, or meets numbers that are none."""

import math
import signal
import threading

import numpy as np
import pytest

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.training import Interrupted, Trainer, attach
from onnxgrad.training.loop.callbacks import KeepBest, Plateau
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from tests.training.loop.test_trainer import ONE, Recorder, bits
from tests.training.models import blobs, classifier, trainable


@pytest.mark.sweep(3)
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize("at", [1, 6, 9, 12])
def test_a_run_that_resumes_takes_the_same_steps(tmp_path, optimizer, at):
    data, test = blobs(), blobs(seed=1)
    options = {"epochs": 3, "batch_size": 16, "validation": test, "seed": 5, "schedule": "cosine"}
    whole = Trainer(trainable(optimizer), options=ONE)
    recorder = Recorder()
    expected = whole.fit(data, callbacks=[recorder], **options)

    first = Trainer(trainable(optimizer), options=ONE)
    interrupt = Recorder(lambda: signal.raise_signal(signal.SIGINT), at)
    with pytest.raises(Interrupted) as caught:
        first.fit(data, checkpoint=tmp_path, callbacks=[interrupt], **options)
    assert caught.value.step == at
    assert str(tmp_path / FILE) in str(caught.value)
    second = Trainer(trainable(optimizer), options=ONE)
    rest = Recorder()
    history = second.fit(data, checkpoint=tmp_path, resume=True, callbacks=[rest], **options)
    assert interrupt.losses + rest.losses == recorder.losses
    assert bits(second.state()) == bits(whole.state())
    assert history.curve == expected.curve
    for one, other in zip(history.epochs, expected.epochs, strict=True):
        assert {key for key, value in one.items() if value != other[key]} <= {"seconds", "steps_per_second"}


def test_a_finished_run_may_be_made_longer(tmp_path):
    whole, parts = Trainer(trainable(), options=ONE), Trainer(trainable(), options=ONE)
    whole.fit(blobs(), epochs=3)
    parts.fit(blobs(), epochs=1, checkpoint=tmp_path)
    again = Trainer(trainable(), options=ONE)
    again.fit(blobs(), epochs=3, checkpoint=tmp_path, resume=True)
    assert bits(again.state()) == bits(whole.state())


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "written with seed 0, not 1"),
        ({"batch_size": 31}, "written with batch size 32, not 31"),
        ({"data": blobs(80)}, "written with rows 90, not 80"),
        ({"data": blobs() | {"labels": np.roll(blobs()["labels"], 1)}}, "written with other training data;"),
        (
            {
                "data": {
                    "x": blobs()["x"] + np.float32(1e-3) * (np.arange(540) == 539).reshape(90, 6),
                    "labels": blobs()["labels"],
                }
            },
            "written with other training data;",
        ),
        ({"validation": blobs(seed=2)}, "written with other validation data;"),
        ({"shuffle": False}, "written with shuffle True, not False"),
        ({"schedule": "exponential:gamma=0.9"}, "written with schedule constant, not exponential:gamma=0.9"),
        ({"schedule": lambda share: 1.0}, "written with schedule constant, not a function"),
        ({"model": trainable(learning_rate=0.03)}, "written with learning rate 0.02, not 0.03"),
        ({"model": trainable(clip_norm=1.0)}, "belongs to another training step"),
        ({"model": trainable(learning_rate=0.02, optimizer="adamw")}, "belongs to another training step"),
        ({"model": trainable(optimizer="sgd")}, "belongs to another model or optimizer"),
        ({"model": attach(classifier(9), optimizer="adam", learning_rate=0.02)}, "'w1' is float32"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, words):
    Trainer(trainable(), options=ONE).fit(blobs(), validation=blobs(seed=1), checkpoint=tmp_path)
    model, data = change.pop("model", trainable()), change.pop("data", blobs())
    kept = (tmp_path / FILE).read_bytes()
    with pytest.raises(BadInput, match=words):
        Trainer(model, options=ONE).fit(data, epochs=2, checkpoint=tmp_path, resume=True, **change)
    assert (tmp_path / FILE).read_bytes() == kept
    if "another model" in words or "w1" in words:
        return
    trainer = Trainer(model, options=ONE)
    trainer.fit(data, epochs=2, checkpoint=tmp_path, resume=True, accept_changes=True, **change)
    assert trainer.step_count == 3 + -(-len(data["labels"]) // change.get("batch_size", 32))


def test_a_run_of_the_operator_adam_goes_on_as_it_was(tmp_path):
    """It began when the operator was the default: the default of today is refused with a hint, the operator goes on."""
    old = trainable(convention="onnx")
    whole = Trainer(old, options=ONE)
    whole.fit(blobs(), epochs=2)
    Trainer(old, options=ONE).fit(blobs(), epochs=1, checkpoint=tmp_path)
    with pytest.raises(BadInput, match='convention="onnx"'):
        Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)
    again = Trainer(old, options=ONE)
    again.fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)
    assert bits(again.state()) == bits(whole.state())


def test_another_cut_of_the_batches_is_refused(tmp_path):
    model = attach(classifier(), loss="cross_entropy", optimizer="adam", accumulate=True)
    Trainer(model, options=ONE, accumulate=2).fit(blobs(), checkpoint=tmp_path)
    with pytest.raises(BadInput, match="written with accumulated parts 2, not 3"):
        Trainer(model, options=ONE, accumulate=3).fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)


def test_an_epoch_with_other_rows_begins_anew(tmp_path):
    stop = Recorder(lambda: signal.raise_signal(signal.SIGINT), 5)
    with pytest.raises(Interrupted):
        Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path, callbacks=[stop])
    trainer, rest = Trainer(trainable(), options=ONE), Recorder()
    more = trainer.fit(
        blobs(200), epochs=2, checkpoint=tmp_path, resume=True, accept_changes=True, shuffle=False, callbacks=[rest]
    )
    assert len(rest.losses) == 7
    mean = np.average(rest.losses, weights=[32] * 6 + [8])
    np.testing.assert_allclose(more.epochs[-1]["loss"], mean)


def test_a_checkpoint_without_settings_goes_on(tmp_path):
    """One of before they were kept."""
    whole, parts = Trainer(trainable(), options=ONE), Trainer(trainable(), options=ONE)
    whole.fit(blobs(), epochs=3)
    parts.fit(blobs(), epochs=1, checkpoint=tmp_path)
    found = Checkpoint.load(tmp_path / FILE)
    del found.run["settings"]
    found.save(tmp_path / FILE)
    again = Trainer(trainable(), options=ONE)
    again.fit(blobs(), epochs=3, checkpoint=tmp_path, resume=True)
    assert bits(again.state()) == bits(whole.state())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("key", ["callbacks", "history"])
@pytest.mark.parametrize("value", [["x"], [[1]], {"curve": 1}, {"epochs": [1], "curve": {}}, "x"])
def test_a_document_of_wrong_types_inside_is_one_message(tmp_path, key, value):
    Trainer(trainable(), options=ONE).fit(blobs(), checkpoint=tmp_path)
    found = Checkpoint.load(tmp_path / FILE)
    found.run[key] = value
    found.save(tmp_path / FILE)
    with pytest.raises(BadInput, match=r"does not say where its run stood|is not a checkpoint|other callbacks"):
        Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)


def test_a_state_that_is_not_finite_is_not_called_good(tmp_path):
    Trainer(trainable(), options=ONE).fit(blobs(), checkpoint=tmp_path)
    found = Checkpoint.load(tmp_path / FILE)
    tensors = found.state | {"w1": found.state["w1"] * np.float32(np.nan)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxgrad.training.loop.checkpoint._finite", lambda array: True)
        Checkpoint(tensors, found.run, found.step_graph).save(tmp_path / FILE)
    with pytest.raises(BadInput, match="is no good: its 'w1' is not finite"):
        Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, name):
    number = getattr(signal, name, None) or pytest.skip(f"the system has no {name}")
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="after step 2; the checkpoint is"):
        Trainer(trainable(), options=ONE).fit(
            blobs(), checkpoint=tmp_path, callbacks=[Recorder(lambda: signal.raise_signal(number), 2)]
        )
    assert Checkpoint.load(tmp_path / FILE).run["step"] == 2
    assert signal.getsignal(number) is before


def test_who_was_told_to_ignore_a_hangup_does():
    number = getattr(signal, "SIGHUP", None) or pytest.skip("the system has no SIGHUP")
    before = signal.signal(number, signal.SIG_IGN)
    try:
        trainer = Trainer(trainable(), options=ONE)
        trainer.fit(blobs(), callbacks=[Recorder(lambda: signal.raise_signal(number), 2)])
        assert trainer.step_count == 3
    finally:
        signal.signal(number, before)


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    trainer = Trainer(trainable("sgd", 0.1), options=ONE)
    trainer.fit(blobs(), epochs=1, checkpoint=tmp_path)
    good = (tmp_path / FILE).read_bytes()
    state = trainer.state()
    state["w1"][:, 0] = np.nan
    trainer.machine.load_state(state)
    with pytest.raises(TrainingError, match=r"the loss is nan at step 1 \(epoch 1\)"):
        trainer.fit(blobs(), epochs=2)
    trainer = Trainer(trainable("sgd", 1e38), options=ONE)
    with pytest.raises(TrainingError, match=r"at step \d+ .*the last good checkpoint is") as caught:
        trainer.fit(blobs(), epochs=5, batch_size=10, checkpoint=tmp_path / "b")
    kept = Checkpoint.load(tmp_path / "b" / FILE)
    assert all(np.isfinite(a).all() for a in kept.state.values())
    assert kept.run["step"] < trainer.step_count
    assert "\n" not in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == good


def test_weights_that_overflow_in_the_last_step_are_noticed(tmp_path):
    model = trainable("sgd", 1e38, loss="cross_entropy:reduction=sum")
    trainer = Trainer(model, options=ONE)
    with pytest.raises(TrainingError, match=r"'w[12]' is not finite after step 1"):
        trainer.fit({n: a * (30 if n == "x" else 1) for n, a in blobs().items()}, epochs=1, batch_size=90)


def test_a_second_interrupt_stops_at_once():
    trainer = Trainer(trainable(), options=ONE)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit(blobs(), callbacks=[Recorder(twice, 2)])
    assert not isinstance(caught.value, Interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_runs_outside_the_main_thread():
    trainer = Trainer(trainable(), options=ONE)
    thread = threading.Thread(target=lambda: trainer.fit(blobs(), epochs=2))
    thread.start()
    thread.join()
    assert trainer.step_count == 6


def _recorded(**entries):
    """A history of one epoch, with these entries."""
    curve = {"limit": 512, "width": 1, "means": [1.0], "total": 0.0, "count": 0}
    return {"history": {"epochs": [{"epoch": 1, "step": 3, "loss": 1.0} | entries], "curve": curve}}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row": 10**9}, "stands at row 1000000000 of an epoch of 90 rows"),
        ({"row": 10**30}, "its row is 1000000"),
        ({"step": 2**60}, "its step is"),
        ({"settings": {}}, "does not say which training data it had"),
        ({"drawing": {}}, "does not say which seed it had"),
        ({"history": {}}, "does not say where its run stood"),
        ({"history": {"epochs": [], "curve": {"width": 0}}}, "does not say where its run stood"),
        ({"callbacks": [[]]}, "does not say where its run stood"),
        (_recorded(validation_loss=[1, "a"]), "does not say where its run stood"),
        (_recorded(validation_accuracy={}), "does not say where its run stood"),
        (_recorded(step="x"), "does not say where its run stood"),
        (_recorded(loss=None), "does not say where its run stood"),
        (_recorded(loss=10**400), "does not say where its run stood"),
        ({"history": _recorded()["history"] | {"best": [1]}}, "does not say where its run stood"),
    ],
)
def test_a_document_that_somebody_made_up_is_refused(tmp_path, change, says):
    """The digests of the file are right."""
    Trainer(trainable(), options=ONE).fit(blobs(), epochs=1, checkpoint=tmp_path)
    found = Checkpoint.load(tmp_path / FILE)
    found.run |= {"row": 32, "epoch": 0} | change
    found.save(tmp_path / FILE)
    again = Trainer(trainable(), options=ONE)
    start = bits(again.state())
    with pytest.raises(BadInput, match=says):
        again.fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)
    assert bits(again.state()) == start


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "entry",
    [
        {"file": "../mine.safetensors"},
        {"file": "mine.safetensors"},
        {"step": "/../../mine", "file": "best-/../../mine.safetensors"},
        {"loss": 10**400},
        {"loss": "x"},
        {"loss": math.nan},
    ],
)
def test_a_checkpoint_has_no_file_elsewhere_deleted(tmp_path, entry):
    """Files of states that are no longer kept get deleted; their names are in the checkpoint."""
    places = [tmp_path / "mine.safetensors", tmp_path / "run" / "mine.safetensors"]
    (tmp_path / "run").mkdir()
    for place in places:
        place.write_text("the user's own")
    keep = KeepBest("loss", keep=2)
    Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path / "run", callbacks=[keep])
    found = Checkpoint.load(tmp_path / "run" / FILE)
    ranked = found.run["callbacks"][0][1]["ranked"]
    ranked[-1] |= {"loss": 1e9} | entry
    found.save(tmp_path / "run" / FILE)
    with pytest.raises(BadInput, match="does not say where its run stood"):
        Trainer(trainable(), options=ONE).fit(
            blobs(), epochs=4, checkpoint=tmp_path / "run", resume=True, callbacks=[KeepBest("loss", keep=2)]
        )
    assert all(place.exists() for place in places)


@pytest.mark.parametrize("state", [{"share": math.nan}, {"share": -1.0}, {"share": 10**400}, {"best": math.nan}])
def test_a_callback_whose_state_somebody_made_up(tmp_path, state):
    Trainer(trainable(), options=ONE).fit(blobs(), epochs=1, checkpoint=tmp_path, callbacks=[Plateau("loss")])
    found = Checkpoint.load(tmp_path / FILE)
    found.run["callbacks"][0][1] |= state
    found.save(tmp_path / FILE)
    with pytest.raises(BadInput, match="does not say where its run stood"):
        Trainer(trainable(), options=ONE).fit(
            blobs(), epochs=2, checkpoint=tmp_path, resume=True, callbacks=[Plateau("loss")]
        )


def test_a_message_does_not_repeat_all_that_somebody_made_up(tmp_path):
    Trainer(trainable(), options=ONE).fit(blobs(), epochs=1, checkpoint=tmp_path)
    found = Checkpoint.load(tmp_path / FILE)
    found.run["drawing"]["seed"] = "9" * 5000
    found.save(tmp_path / FILE)
    with pytest.raises(BadInput, match="was written with") as raised:
        Trainer(trainable(), options=ONE).fit(blobs(), epochs=2, checkpoint=tmp_path, resume=True)
    assert len(str(raised.value)) < 1000 + len(str(tmp_path))

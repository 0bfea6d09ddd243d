"""Pruning during training: schedules, masks that the optimizer keeps, and the narrower model that is saved."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.loop.prune import prune
from onnxgrad.training.loop.run import Callback
from onnxgrad.training.pruning.plan import PrunePlan
from onnxgrad.training.pruning.record import record_in
from tests.training import nets
from tests.training.models import blobs, classifier


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("optimizer", ["momentum:weight_decay=0.01", "adamw", "lion"])
def test_masked_weights_stay_zero(optimizer):
    model = prune(classifier(hidden=16), weights=0.5)
    zeros = {n: a == 0 for n, a in weights_of(model).items() if n.startswith("w")}
    trainer = Trainer(model, loss="cross_entropy", optimizer=optimizer, learning_rate=0.01, ema=0.9)
    trainer.fit(blobs(), epochs=3)
    for trained in (
        trainer.inference_model(),
        Trainer(trainer.inference_model(), loss="cross_entropy").inference_model(),
    ):
        after = weights_of(trained)
        for name, zero in zeros.items():
            assert (after[name][zero] == 0).all()
            assert (after[name] != 0).sum() == (~zero).sum()


class Counts(Callback):
    """The share of zeros after every step."""

    def __init__(self) -> None:
        self.zeros: list[float] = []

    def step(self, run, loss):
        weights = [a for n, a in run.state().items() if n in ("w1", "w2")]
        self.zeros.append(1 - sum(int((a != 0).sum()) for a in weights) / sum(a.size for a in weights))


@pytest.mark.parametrize("score", ["magnitude", "gradient", "movement"])
def test_a_schedule_grows_to_its_share(score):
    counts = Counts()
    trainer = onnxgrad.train(
        classifier(hidden=16), blobs(96), loss="cross_entropy", optimizer="adam",
        learning_rate=0.02, epochs=20, batch_size=16,
        prune=[f"weights=0.75:schedule=cubic,score={score},end=0.5,times=10"], callbacks=[counts],
    )  # fmt: skip
    assert np.diff(counts.zeros).min() > -1e-9
    assert counts.zeros[10] < 0.75 - 0.05
    assert counts.zeros[60] == pytest.approx(0.75, abs=0.02)
    assert counts.zeros[-1] == counts.zeros[60]
    assert trainer.evaluate(blobs())["accuracy"] > 0.85


def test_a_pattern_of_two_in_four():
    trainer = onnxgrad.train(classifier(hidden=16), blobs(), loss="cross_entropy", epochs=2, prune="weights=2:4")
    w2 = weights_of(trainer.inference_model())["w2"]
    assert ((w2.reshape(4, 4, 3) != 0).sum(1) == 2).all()


@pytest.mark.parametrize("score", ["magnitude", "movement"])
def test_channels_go_from_the_saved_model(score, tmp_path):
    trainer = onnxgrad.train(
        classifier(hidden=16), blobs(), loss="cross_entropy", optimizer="adam", learning_rate=0.03, epochs=8,
        prune=[f"channels=0.5:score={score}"], output=tmp_path / "small.onnx",
    )  # fmt: skip
    made = onnx.load(tmp_path / "small.onnx")
    onnx.checker.check_model(made, full_check=True)
    shapes = {n: a.shape for n, a in weights_of(made).items()}
    assert shapes == {"w1": (6, 8), "b1": (8,), "w2": (8, 3)}
    rows = blobs()
    wide = nets.run(trainer.step.inference_model(trainer.state()), {"x": rows["x"]})
    np.testing.assert_allclose(nets.run(made, {"x": rows["x"]})["y"], wide["y"], atol=1e-5)
    assert trainer.evaluate(rows)["accuracy"] > 0.9
    again = onnxgrad.train(tmp_path / "small.onnx", rows, loss="cross_entropy", epochs=1)
    assert again.step.state["w1"].initial.shape == (6, 8)


def test_a_resumed_run_prunes_the_same(tmp_path):
    settings = {"loss": "cross_entropy", "prune": ["channels=0.5"]}
    whole = Trainer(classifier(hidden=16), **settings)
    whole.fit(blobs(), epochs=4)

    class Stops(Callback):
        def epoch(self, run, record):
            if record["epoch"] == 2:
                raise KeyboardInterrupt

    first = Trainer(classifier(hidden=16), **settings)
    with pytest.raises(BaseException):  # noqa: B017
        first.fit(blobs(), epochs=4, checkpoint=tmp_path / "c", callbacks=[Stops()])
    second = Trainer(classifier(hidden=16), **settings)
    second.fit(blobs(), epochs=4, checkpoint=tmp_path / "c", resume=True)
    for name, array in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], array)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("channels", "is spelled"),
        ("layers=0.5", "cannot be pruned"),
        ("channels=1.5", "between 0 and 1"),
        ("weights=4:2", "N of M"),
        ("weights=0.5:schedule=square", "no schedule of pruning"),
        ("weights=0.5:score=wanda", "no score in training"),
        ("weights=0.5:begin=0.9,end=0.1", "begin ≤ end"),
        ("weights=0.5:speed=1", "no option 'speed'"),
    ],
)
def test_bad_spellings(text, message):
    with pytest.raises(BadInput, match=message):
        PrunePlan.of(text)


def test_what_cannot_be_pruned():
    with pytest.raises(BadInput, match="no heads"):
        Trainer(classifier(), loss="cross_entropy", prune=["heads=0.5"])
    with pytest.raises(BadInput, match="adapters"):
        Trainer(classifier(), loss="cross_entropy", prune=["weights=0.5"], lora=2, lora_targets="all")


@pytest.mark.parametrize("text", ['{"version": 2, "weights": [], "plan": []}', '{"weights": [], "plan": []}', "[1]"])
def test_a_record_of_another_form_is_refused(text):
    model = classifier()
    model.metadata_props.add(key="onnxgrad.pruned", value=text)
    with pytest.raises(BadInput, match=r"metadata 'onnxgrad.pruned' are damaged"):
        record_in(onnx_ir.from_proto(model))

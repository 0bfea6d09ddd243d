"""A training model that is saved on its way goes on with the same bits."""

import onnx
import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, attach, validate
from tests.training.loop.test_trainer import ONE, bits
from tests.training.models import blobs, classifier
from tests.training.spec.test_proposal import FEEDS, today

SETTINGS = [
    {"optimizer": "adam"},
    {"optimizer": "momentum", "clip_norm": 1.0, "freeze": ["b1"]},
    {"optimizer": "adagrad"},
    {"optimizer": "nadam", "schedule": "cosine:total=9,warmup=2"},
    {"optimizer": "adafactor", "groups": ["w2:rate=0.1"]},
    {"optimizer": "adam", "ema": 0.9, "dropout": {"Tanh": 0.3}},
    {"optimizer": "muon", "dropout": {"Tanh": 0.3}, "accumulate": True},
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_it_goes_on_with_the_same_bits(tmp_path, settings):
    parts = 2 if "accumulate" in settings else 1
    model = attach(classifier(), loss="cross_entropy", learning_rate=0.02, **settings)

    def trainer(of):
        return Trainer(of, options=ONE, accumulate=parts)

    whole, first = trainer(model), trainer(model)
    run = {"batch_size": 30, "shuffle": False, "seed": 3}
    whole.fit(blobs(), epochs=4, **run)
    first.fit(blobs(), epochs=2, **run)
    first.save_training_model(tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    assert validate(tmp_path / "m.onnx") == []
    again = trainer(tmp_path / "m.onnx")
    assert bits(again.state()) == bits(first.state())
    assert again.fingerprint == first.fingerprint
    again.fit(blobs(), epochs=2, **run)
    assert bits(again.state()) == bits(whole.state())
    assert "onnxgrad.dropout_step" not in again.inference_ir().metadata_props


def test_by_steps(tmp_path):
    """Counters of an algorithm that somebody else has written, and without `fit`."""
    whole = Trainer(today(), options=ONE)
    for _ in range(2):
        whole.machine.step(FEEDS)
    whole.save_training_model(tmp_path / "m.onnx")
    again = Trainer(tmp_path / "m.onnx", options=ONE)
    for trainer in (whole, again):
        trainer.machine.step(FEEDS)
    assert bits(again.state()) == bits(whole.state())
    assert again.state()["T"] == 4


def test_initializations_are_not_done_again(tmp_path):
    model = onnx.ModelProto()
    model.CopyFrom(attach(classifier(), loss="cross_entropy", optimizer="adam"))
    info = model.training_info[0]
    info.initialization.CopyFrom(
        onnx.parser.parse_graph("""
        draw () => (float[6, 8] drawn) { drawn = RandomNormal <shape = [6, 8], dtype = 1> () }""")
    )
    info.initialization_binding.add(key="w1", value="drawn")
    trainer = Trainer(model, options=ONE)
    trainer.fit(blobs())
    trainer.save_training_model(tmp_path / "m.onnx")
    assert bits(Trainer(tmp_path / "m.onnx", options=ONE).state()) == bits(trainer.state())


def test_a_count_that_is_none_is_refused(tmp_path):
    trainer = Trainer(classifier(), loss="cross_entropy", dropout={"Tanh": 0.3}, options=ONE)
    trainer.save_training_model(tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    for prop in model.metadata_props:
        prop.value = "-1e3"
    with pytest.raises(BadInput, match=r"'onnxgrad\.dropout_step' is '-1e3', not a count"):
        Trainer(model, options=ONE)


def test_the_command(tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "m.onnx")
    np.savez("train.npz", **blobs())

    def train(model, *more):
        common = ("--data", "train.npz", "-o", "out.onnx", "--threads", "1", "--restart")
        found = CliRunner().invoke(build(), ["train", model, *common, *more])
        assert found.exit_code in (0, 2), found.output
        return found

    recipe = ("--loss", "cross_entropy", "--optimizer", "adam", "--dropout", "Tanh=0.3")
    found = train("m.onnx", *recipe, "--epochs", "2", "--save-training", "going.onnx")
    assert "training model going.onnx" in found.output
    assert train("going.onnx", "--epochs", "1", "--save-training", "later.onnx").exit_code == 0
    first = Trainer(classifier(), loss="cross_entropy", optimizer="adam", dropout={"Tanh": 0.3}, options=ONE)
    first.fit("train.npz", epochs=2)
    again = Trainer(first.training_model(), options=ONE)
    again.fit("train.npz", epochs=1)
    assert bits(Trainer("later.onnx").state()) == bits(again.state())
    found = train("m.onnx", *recipe, "--save-training", "train.npz")
    assert found.exit_code == 2
    assert "--save-training train.npz would write over --data train.npz" in found.output
    assert train("m.onnx", *recipe, "--save-training", "no/such/place.onnx").exit_code == 2

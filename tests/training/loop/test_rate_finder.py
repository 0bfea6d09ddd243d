"""The range test, balanced weights, and names that are looked up before the first step."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data.class_weights import balanced_weights
from onnxgrad.training.data.split import split_rows
from onnxgrad.training.loop.callbacks import KeepBest
from onnxgrad.training.loop.recipe import DataRecipe, LossRecipe, Recipe
from onnxgrad.training.loop.train import trainer_for

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 3)).astype(np.float32)
DATA = {"x": X, "labels": X.argmax(1)}


def linear():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 3), np.float32), "w"))
    return proto


def test_the_suggested_rate_is_one_at_which_the_loss_falls(tmp_path):
    pytest.importorskip("matplotlib")
    trainer = Trainer(linear(), loss="cross_entropy", optimizer="sgd", learning_rate=0.123)
    before = trainer.state()
    found = trainer.find_rate(DATA, highest=1e4, batch_size=50)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, before[name])
    assert float(next(iter(trainer.machine.held.values()))) == pytest.approx(0.123)
    assert found.rates == sorted(found.rates)
    assert 1e-3 < found.suggestion < 1e3
    found.plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 1000
    rates = (found.suggestion, found.suggestion * 1e-4)
    settings = {"loss": "cross_entropy", "optimizer": "sgd"}
    losses = [onnxgrad.train(linear(), DATA, learning_rate=r, **settings).history.epochs[-1]["loss"] for r in rates]
    assert losses[0] < 0.9 * losses[1]


def test_a_range_that_is_none_is_refused():
    trainer = Trainer(linear(), loss="cross_entropy", optimizer="sgd")
    for settings in ({"lowest": 0.0}, {"lowest": 1.0, "highest": 0.1}, {"steps": 3}):
        with pytest.raises(BadInput, match="10 steps or more"):
            trainer.find_rate(DATA, **settings)


def test_balanced_weights_are_those_of_scikit_learn():
    labels = np.array([0, 0, 0, 2, 2, 3])
    weights = balanced_weights(labels, 5)
    assert weights == pytest.approx([6 / (3 * 3), 0, 6 / (3 * 2), 6 / (3 * 1), 0], abs=1e-6)
    sk = pytest.importorskip("sklearn.utils.class_weight")
    assert [weights[c] for c in (0, 2, 3)] == pytest.approx(
        sk.compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels), abs=1e-6
    )
    assert balanced_weights(np.array([0, 1, -100]), 2, ignore_index=-100) == [1, 1]
    with pytest.raises(BadInput, match="from 0 to 1"):
        balanced_weights(labels, 2)


def test_a_loss_with_balanced_weights_counts_each_class_alike():
    rare = {"x": np.zeros((40, 3), np.float32), "labels": np.array([0] * 36 + [1] * 4)}
    balanced, plain = (
        onnxgrad.train(
            biased(), rare, loss=loss, optimizer="sgd", learning_rate=0.5, epochs=300, batch_size=40
        ).predict(rare)["y"][0]
        for loss in ("cross_entropy:weight=balanced", "cross_entropy")
    )  # fmt: skip
    assert balanced[0] == pytest.approx(balanced[1], abs=0.05)
    assert plain[0] - plain[1] == pytest.approx(np.log(9), abs=0.3)


def biased():
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 3] y) { y = Add(x, b) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "b"))
    return proto


def test_rows_that_are_held_out_do_not_count():
    data = DATA | {"labels": np.where(np.arange(200) % 20 < 2, 2, np.arange(200) % 2)}
    recipe = Recipe(LossRecipe("cross_entropy:weight=balanced"), data=DataRecipe(validation_split=0.87))
    trainer = trainer_for(linear(), data, recipe)
    kept, _ = split_rows(trainer.data(data), 0.87, recipe.loop.seed)
    weights = [round(w, 6) for w in len(kept) / (3 * np.bincount(data["labels"][kept]))]
    (found,) = [v.const_value.numpy() for v in trainer.step.model.graph.initializers.values() if v.shape == (3,)]
    assert found.tolist() == pytest.approx(weights)
    assert weights != balanced_weights(data["labels"], 3)


def test_balanced_weights_without_data_are_refused():
    with pytest.raises(BadInput, match="computed from the data"):
        Trainer(linear(), loss="cross_entropy:weight=balanced")


def test_what_is_watched_is_looked_up_before_the_first_step():
    trainer = Trainer(linear(), loss="cross_entropy")
    with pytest.raises(BadInput, match="did you mean 'validation_accuracy'"):
        trainer.fit(DATA, validation_split=0.2, callbacks=[KeepBest("validation_acuracy")])
    with pytest.raises(BadInput, match="hint: give validation data"):
        trainer.fit(DATA, callbacks=[KeepBest("validation_loss")])
    assert trainer.step_count == 0


def test_progress_is_shown_where_somebody_watches(capsys):
    trainer = Trainer(linear(), loss="cross_entropy")
    trainer.fit(DATA)
    assert not capsys.readouterr().err
    trainer.fit(DATA, progress=True)
    assert "epoch 1/1" in capsys.readouterr().err


def test_a_rate_is_found_in_the_data_of_fit(tmp_path):
    """Tables, held-out rows and balanced samples, as `fit` has them; nothing of the preparation stays."""
    rows = {n: np.where(RNG.random(200) < 0.1, np.nan, X[:, i]) for i, n in enumerate("abc")}
    settings = {"inputs": {"x": "a,b,c"}, "missing": "mean", "standardize": True, "validation_split": 0.25}
    trainer = Trainer(linear(), loss="cross_entropy", optimizer="sgd")
    found = trainer.find_rate({**rows, "labels": X.argmax(1)}, highest=1e4, batch_size=50, **settings)
    assert not trainer.preprocessing.inputs
    assert trainer.classes is None
    data = trainer.training_data({**rows, "labels": X.argmax(1)}, preparation=DataRecipe(**settings))
    kept, _ = split_rows(data, 0.25, 0)
    filled = np.stack([np.where(np.isnan(c), np.nanmean(c[kept]), c) for c in rows.values()], axis=1)
    filled = (filled - filled[kept].mean(0)) / filled[kept].std(0)
    plain = Trainer(linear(), loss="cross_entropy", optimizer="sgd")
    same = plain.find_rate(
        {"x": filled[kept].astype(np.float32), "labels": X.argmax(1)[kept]}, highest=1e4, batch_size=50
    )
    np.testing.assert_allclose(found.losses, same.losses, rtol=1e-5)
    balanced = plain.find_rate(DATA, highest=1e4, batch_size=50, sample="balanced")
    assert balanced.losses != plain.find_rate(DATA, highest=1e4, batch_size=50).losses
    with pytest.raises(BadInput, match="sample is 'each' or 'balanced'"):
        plain.find_rate(DATA, sample="all")


def test_balanced_weights_of_classes_and_weights_of_rows_go_together():
    rows = {"x": X, "labels": X.argmax(1), "importance": RNG.random(200).astype(np.float32)}
    loss = "cross_entropy:weight=balanced,row_weights=importance"
    found = onnxgrad.train(biased(), rows, loss=loss, batch_size=200).history.epochs[0]["loss"]
    scores = X - np.log(np.exp(X).sum(1, keepdims=True))
    weights = rows["importance"] * np.array(balanced_weights(rows["labels"], 3))[rows["labels"]]
    assert found == pytest.approx(-(weights * scores[np.arange(200), rows["labels"]]).sum() / weights.sum(), rel=1e-5)


def test_a_rate_is_found_over_a_stream():
    """A stream in the order of the rows, against the same rows one by one; it is read again where it ends."""

    def rows():
        return iter([{"x": x, "labels": x.argmax()} for x in X])

    trainer = Trainer(linear(), loss="cross_entropy", optimizer="sgd")
    found = trainer.find_rate(rows, highest=1e4, batch_size=50)
    batches = [{"x": X[i : i + 50], "labels": X[i : i + 50].argmax(1)} for i in range(0, 200, 50)]
    same = trainer.find_rate(lambda: iter(batches), highest=1e4)
    assert found.losses == same.losses
    assert len(found.losses) > 4
    assert 1e-3 < found.suggestion < 1e3
    with pytest.raises(BadInput, match="is an iterator, which can be read once only"):
        trainer.find_rate(rows())

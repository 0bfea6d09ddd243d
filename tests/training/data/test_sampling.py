"""Balanced samples: each class as often as the others, all of its rows before any comes again, by the seed alone."""

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer
from onnxgrad.training.data.sampling import balanced
from tests.training.loop.test_callbacks import At, bits, interrupt
from tests.training.models import blobs, trainable


def test_each_class_comes_as_often():
    labels = np.repeat([0, 2, 7], [80, 15, 6])
    for seed in range(5):
        order = balanced(labels, np.random.default_rng(seed))
        assert len(order) == 101
        assert sorted(np.bincount(labels[order])[[0, 2, 7]]) == [33, 34, 34]
        rare = np.bincount(order, minlength=101)
        assert rare[:80].max() == 1
        assert set(rare[80:95]) <= {2, 3}
        assert set(rare[95:]) <= {5, 6}
    first = [balanced(labels, np.random.default_rng([0, epoch])) for epoch in range(30)]
    assert set(np.concatenate(first)) == set(range(101)), "in other epochs other rows of a frequent class"


def uneven():
    data = blobs(90)
    kept = np.flatnonzero((data["labels"] != 1) | (np.arange(90) % 8 == 0))
    return {name: array[kept] for name, array in data.items()}


def fit(*callbacks, sample="balanced", data=None, **options):
    trainer = Trainer(trainable(), options=Options(threads=1))
    trainer.fit(data or uneven(), epochs=3, sample=sample, callbacks=callbacks, **options)
    return trainer


def test_training_takes_balanced_samples_and_goes_on_with_them(tmp_path):
    whole = fit()
    assert bits(whole.state()) != bits(fit(sample="each").state())
    with pytest.raises(Interrupted):
        fit(At(3, interrupt), checkpoint=tmp_path)
    assert bits(fit(checkpoint=tmp_path, resume=True).state()) == bits(whole.state())
    with pytest.raises(BadInput, match="was written with sample balanced, not each"):
        fit(sample="each", checkpoint=tmp_path, resume=True)


def test_arrays_in_files_are_balanced_as_those_in_memory(tmp_path):
    for name, array in uneven().items():
        np.save(tmp_path / f"{name}.npy", array)
    options = {"validation_split": 0.2}
    assert bits(fit(data=tmp_path, **options).state()) == bits(fit(**options).state())


def test_what_cannot_be_balanced_is_refused():
    with pytest.raises(BadInput, match="sample is 'each' or 'balanced', not 'weighted'"):
        fit(sample="weighted")
    with pytest.raises(BadInput, match="leave shuffle=False out"):
        fit(shuffle=False)
    rows = [{"x": x, "labels": t} for x, t in zip(*blobs().values())]
    with pytest.raises(BadInput, match="need one array with a class number for each row of the training data"):
        fit(data=rows)

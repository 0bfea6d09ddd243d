"""Masks: pairs of files, and their variants, which move with the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data import Augment, Data, Field, Images, open_data

SIZES = [(12, 10), (9, 14), (12, 10)]


def write(folder: Path, pictures: str = "images", masks: str = "masks", suffix: str = "") -> list[np.ndarray]:
    """Noise with masks of its brightest channel; the masks."""
    found = []
    for k, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(k).integers(0, 256, (height, width, 3), np.uint8)
        for name, image in (
            (pictures, Image.fromarray(pixels)),
            (masks, Image.fromarray(pixels.argmax(2).astype("u1"))),
        ):
            (folder / name).mkdir(parents=True, exist_ok=True)
            image.save(folder / name / f"{k}{suffix if name == masks else ''}.png")
        found.append(pixels.argmax(2))
    return found


def fields(shape=(3, None, None), own=None, **label):
    known = {
        "dtype": np.dtype(np.int64),
        "shape": own or tuple(shape[1:]),
        "classes": 3,
        "indices": True,
        "ignored": 255,
    }
    return [Field("x", np.dtype(np.float32), shape), Field("labels", **{**known, **label}, label=True)]


@pytest.mark.parametrize("is_turned", [True, False])
def test_pictures_are_turned_as_their_masks_are(tmp_path, is_turned):
    """A mask of the size that the picture has before its EXIF orientation was drawn on it without that."""
    masks = write(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.open(tmp_path / "images" / "0.png")
    shown = np.asarray(stored)
    if is_turned:
        stored = Image.fromarray(np.ascontiguousarray(np.rot90(shown)))
    stored.save(tmp_path / "images" / "0.png", exif=exif)
    (batch,) = Data(tmp_path, fields()).batches(3)
    np.testing.assert_array_equal(batch["labels"][0, :10, :12], masks[0])
    np.testing.assert_allclose(batch["x"][0, :, :10, :12].transpose(1, 2, 0) * 255, shown, atol=1e-4)
    some = open_data(tmp_path)["images"].select(np.array([1, 0]))
    assert some.sizes(fields()[0]).tolist() == [[14, 9], [10, 12]]


@pytest.mark.parametrize(
    "names", [("images", "masks"), ("images", "labels", "_mask"), ("JPEGImages", "SegmentationClass")]
)
def test_pairs(tmp_path, names):
    masks = write(tmp_path, *names)
    if names[0] == "JPEGImages":
        Image.new("RGB", (4, 4)).save(tmp_path / "JPEGImages" / "more.png")  # which has no mask
    data = Data(tmp_path, fields())
    assert data.files.tolist() == ["0.png", "1.png", "2.png"]
    (batch,) = data.batches(3)
    assert batch["x"].shape == (3, 3, 14, 12)
    for k, mask in enumerate(masks):
        h, w = mask.shape
        np.testing.assert_array_equal(batch["labels"][k, :h, :w], mask)
        assert (batch["labels"][k, h:] == 255).all()  # beside the picture, no label counts
        assert (batch["labels"][k, :, w:] == 255).all()


def test_masks_are_as_large_as_pictures(tmp_path):
    masks = write(tmp_path)
    (batch,) = Data(tmp_path, fields((3, 20, 24))).batches(3)
    assert batch["x"].shape == (3, 3, 20, 24)
    np.testing.assert_array_equal(batch["labels"][0], masks[0].repeat(2, 0).repeat(2, 1))  # the nearest pixel, no mean
    (batch,) = Data(tmp_path, fields(), images=Images(size=(5, 6))).batches(3)
    assert batch["labels"].shape == (3, 5, 6)


def test_zeros_and_ones(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    Image.fromarray(np.uint8([[0, 255]] * 2).repeat(2, 0).repeat(2, 1)).save(tmp_path / "masks" / "a.png")
    kind = {"dtype": np.dtype(np.float32), "own": (1, 4, 4), "classes": None, "indices": False, "ignored": None}
    (batch,) = Data(tmp_path, fields((3, 4, 4), **kind, binary=True)).batches(1)
    assert batch["labels"].tolist() == [[[[0, 0, 1, 1]] * 4]]
    Image.fromarray(np.full((4, 4), 3000, np.uint16)).save(tmp_path / "masks" / "a.png")
    (batch,) = Data(tmp_path, fields((3, 4, 4), **kind)).batches(1)
    assert (batch["labels"] == 3000).all()


def test_what_is_refused(tmp_path):
    write(tmp_path)
    rows = Data(tmp_path, fields(own=(4,)))
    with pytest.raises(BadInput, match=r"masks cannot be the labels 'labels', which are int64\[N, 4\]"):
        next(rows.batches(2))
    (tmp_path / "masks" / "1.png").unlink()
    with pytest.raises(BadInput, match=r"images/1\.png' has no file of that name in .*masks'"):
        open_data(tmp_path)
    Image.new("RGB", (9, 14), (1, 2, 3)).save(tmp_path / "masks" / "1.png")
    with pytest.raises(BadInput, match=r"masks/1\.png': it has colors"):
        list(Data(tmp_path, fields()).batches(3))
    Image.fromarray(np.full((14, 9), 7, np.uint8)).save(tmp_path / "masks" / "1.png")
    with pytest.raises(BadInput, match="has the label 7 in row 1; the model tells 3 classes apart"):
        list(Data(tmp_path, fields()).batches(3))
    (tmp_path / "masks" / "1.png").write_bytes(b"no picture")
    with pytest.raises(BadInput, match=r"cannot read the mask .*1\.png"):
        list(Data(tmp_path, fields()).batches(3))


@pytest.mark.parametrize("how", ["flip=1", "vflip=1", "crop=3", "flip,vflip,crop=2,jitter,erase"])
def test_masks_move_with_their_pictures(how):
    rng = np.random.default_rng(0)
    t = rng.integers(0, 3, (6, 8, 9))
    x = (10 * (t[:, None] == np.arange(3)[:, None, None]) + rng.random((6, 3, 8, 9))).astype(np.float32)
    data = Data({"x": x, "labels": t}, fields((3, 8, 9))).augmented(Augment.of(how))
    moved = 0
    for epoch in range(4):
        (batch,) = data.batches(6, np.arange(6), draw=(0, epoch))
        known = batch["labels"] != 255
        right = batch["x"].argmax(1) == batch["labels"]
        assert right[known].mean() > (0.6 if "erase" in how else 1 - 1e-9)
        if "erase" not in how and "crop" in how:
            assert (batch["x"].max(1)[~known] == 0).all()
        moved += (batch["labels"] != t).any((1, 2)).sum()
    assert moved > 12
    plain = next(data.batches(6))
    np.testing.assert_array_equal(plain["labels"], t)


def test_masks_that_nothing_marks_are_not_cropped():
    data = Data(
        {"x": np.zeros((2, 3, 8, 9), "f"), "labels": np.zeros((2, 8, 9), np.int64)}, fields((3, 8, 9), ignored=None)
    )
    data.augmented(Augment.of("flip"))
    with pytest.raises(BadInput, match="dice:ignore_index=255"):
        data.augmented(Augment.of("crop"))


def test_a_model_learns_masks(tmp_path):
    write(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, H, W] x) => (float[N, 3, H, W] y) { y = Conv (x, w) }""")
    w = np.random.default_rng(0).standard_normal((3, 3, 1, 1)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    trainer = Trainer(model, loss="dice:ignore_index=255", optimizer="adam", learning_rate=0.3)
    trainer.fit(tmp_path, epochs=40, batch_size=3, augment="flip,vflip,crop=2", validation=tmp_path)
    assert trainer.history.epochs[-1]["validation_miou"] > 0.9
    trainer.save(tmp_path / "trained.onnx")
    found = onnxgrad.evaluate(tmp_path / "trained.onnx", tmp_path, ignore_index=255)
    assert found.metrics["miou"] == pytest.approx(trainer.history.epochs[-1]["validation_miou"], abs=1e-6)


def test_masks_of_one_class_are_measured(tmp_path):
    """A mask of 0 and 255, for a model with one score, on pictures that it scales and a map that is half as large."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    inside = np.zeros((12, 12), bool)
    inside[:6, 4:] = True
    Image.fromarray(np.uint8(200 * inside)).save(tmp_path / "images" / "a.png")
    Image.fromarray(np.uint8(255 * inside)).save(tmp_path / "masks" / "a.png")
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 1, 12, 12] x) => (float[N, 1, 6, 6] y) {
            half = Constant <value = float {0.4}> ()
            d = Sub (x, half)
            y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d) }""")
    assert onnxgrad.evaluate(model, tmp_path, metrics="miou,accuracy").metrics == {"miou": 1, "accuracy": 1}


def test_masks_of_another_size_are_refused(tmp_path):
    """Where the model takes both as they are; where it has a size, both are scaled."""
    write(tmp_path)
    Image.new("L", (6, 5)).save(tmp_path / "masks" / "0.png")
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, H, W] x) => (float[N, 3, H, W] y) { y = Conv (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "w"))
    trainer = Trainer(model, loss="cross_entropy:ignore_index=255", optimizer="sgd")
    with pytest.raises(BadInput, match="have 5 pixels where the pictures 'x' have 10"):
        trainer.fit(tmp_path, epochs=1, batch_size=1)


def test_two_classes_of_0_and_255(tmp_path):
    """Nothing says that 255 is to be ignored: with one class left, everything would be right."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    Image.fromarray(np.uint8([[0, 255]] * 2).repeat(2, 0).repeat(2, 1)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(BadInput, match=r"label 255 in row 0(.|\n)*a model with one score .*write 1 in place of 255"):
        list(Data(tmp_path, fields(classes=2, ignored=None)).batches(1))


def test_unknown_depth_does_not_count(tmp_path):
    """A map of 16 bits for one score: 0 is not known, in every epoch and in `evaluate`."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    depth = np.uint16([[0, 3000, 3000, 1500]]).repeat(4, 0)
    Image.fromarray(np.uint8(depth // 20)).save(tmp_path / "images" / "a.png")
    Image.fromarray(depth).save(tmp_path / "masks" / "a.png")
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        depth (float[N, 1, H, W] x) => (float[N, 1, H, W] y) { s = Mul (x, w) y = Add (s, b) }""")
    for name, number in (("w", 5100.0), ("b", 150.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((1, 1, 1), number, np.float32), name))
    trainer = Trainer(model, loss="silog", optimizer="sgd", learning_rate=1e-9)
    trainer.fit(tmp_path, epochs=1, validation=tmp_path, metrics="mae,rmse,abs_rel")
    found = onnxgrad.evaluate(model, tmp_path, metrics="mae,rmse,abs_rel").metrics
    assert found == pytest.approx({"mae": 150, "rmse": 150, "abs_rel": (2 / 20 + 1 / 10) / 3}, rel=1e-4)
    assert {n: trainer.history.epochs[-1][f"validation_{n}"] for n in found} == pytest.approx(found, rel=1e-4)
    assert onnxgrad.evaluate(model, tmp_path).task == "numbers"
    rows = {"x": np.float32([[[[1, 2]]]]), "labels": np.float32([[[[-1, 10350]]]])}
    assert onnxgrad.evaluate(model, rows, ignore_index=-1).metrics["mae"] == pytest.approx(0, abs=1e-2)

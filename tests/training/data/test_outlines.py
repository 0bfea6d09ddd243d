"""Outlines of COCO drawn into masks: the pixels of pycocotools, and the numbers of classes."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from PIL import Image

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data import Data, Field, open_data
from onnxgrad.training.data.annotations.outlines import draw_outline
from tests.training.data.test_masks import fields


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_as_pycocotools():
    mask = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for k in range(200):
        w, h = map(int, rng.integers(1, 50, 2))
        polygons = []
        for _ in range(int(rng.integers(1, 3))):
            corners = rng.uniform(-8, 58, (int(rng.integers(3, 9)), 2))
            corners = np.rint(corners * 2) / 2 if k % 3 else corners
            if k % 5 == 0:
                corners[1] = corners[0]
            polygons.append(corners.ravel().tolist())
        code = mask.merge(mask.frPyObjects(polygons, h, w))
        expected = mask.decode(code).astype(bool)
        np.testing.assert_array_equal(draw_outline(polygons, (w, h), ""), expected)
        noise = rng.random((h, w)) < rng.random()
        for pixels in (expected, noise):
            code = mask.encode(np.asfortranarray(pixels, "u1"))
            text = {"size": [h, w], "counts": code["counts"].decode()}
            np.testing.assert_array_equal(draw_outline(text, (w, h), ""), pixels)
            changes = np.flatnonzero(np.diff(pixels.T.ravel(), prepend=False))
            runs = {"size": [h, w], "counts": np.diff(changes, prepend=0, append=w * h).tolist()}
            np.testing.assert_array_equal(draw_outline(runs, (w, h), ""), pixels)


def test_a_rectangle_and_a_code():
    """Pixels whose middle is inside; the code is that of pycocotools for the same pixels."""
    expected = np.zeros((6, 8), bool)
    expected[1:5, 2:7] = True
    np.testing.assert_array_equal(draw_outline([[2, 1, 7, 1, 7, 5, 2, 5]], (8, 6), ""), expected)
    np.testing.assert_array_equal(draw_outline({"size": [6, 8], "counts": "=4200000005"}, (8, 6), ""), expected)


@pytest.mark.parametrize(
    ("outline", "message"),
    [
        (None, "has no outline"),
        ([], "has no outline"),
        ([[1, 2, 3, 4]], "three or more corners"),
        ([[1, 2, 3, 4, 5]], "three or more corners"),
        ([[1, 2, 3, 4, 5, float("nan")]], "three or more corners"),
        ({"size": [5, 4], "counts": [20]}, r"of the size \[5, 4\]"),
        ({"size": [4, 5], "counts": [19]}, "does not fill 5 × 4 pixels"),
        ({"size": [4, 5], "counts": "\n"}, "is damaged"),
        ({"size": [4, 5], "counts": "d"}, "is cut off"),
        ({"size": [4, 5]}, "without counts"),
    ],
)
def test_refusals(outline, message):
    with pytest.raises(BadInput, match=message):
        draw_outline(outline, (5, 4), "annotation 3")


def square(x, y, size):
    return [[x, y, x + size, y, x + size, y + size, x, y + size]]


def write(folder, categories=((7, "dog"), (3, "cat")), orientation=1):
    """Two pictures: a large dog below a small cat, and a crowd of dogs; its masks by hand."""
    entries = [(0, 3, square(4, 2, 3), 0), (0, 7, square(2, 1, 8), 0), (1, 7, square(0, 0, 4), 1)]
    images = [{"id": k, "file_name": f"{k}.png", "width": 12, "height": 10} for k in range(2)]
    annotations = [
        {"id": k, "image_id": image, "category_id": c, "segmentation": outline, "iscrowd": crowd,
         "bbox": [*outline[0][:2], *np.subtract(outline[0][4:6], outline[0][:2]).tolist()],
         "area": float(np.prod(np.subtract(outline[0][4:6], outline[0][:2])))}
        for k, (image, c, outline, crowd) in enumerate(entries)
    ]  # fmt: skip
    known = [{"id": k, "name": name} for k, name in categories]
    (folder / "a.json").write_text(json.dumps({"images": images, "annotations": annotations, "categories": known}))
    masks = np.zeros((2, 10, 12), np.int64)
    masks[0, 1:9, 2:10], masks[0, 2:5, 4:7], masks[1, :4, :4] = 2, 1, 255
    for k, mask in enumerate(masks):
        pixels = np.uint8(60 * mask)[..., None].repeat(3, 2)
        exif = Image.Exif()
        exif[0x0112] = orientation
        shown = pixels if orientation == 1 else np.rot90(pixels, 1)
        Image.fromarray(np.ascontiguousarray(shown)).save(folder / f"{k}.png", exif=exif)
    return folder / "a.json", masks


@pytest.mark.parametrize("orientation", [1, 6])
def test_masks_of_objects(tmp_path, orientation):
    """Small objects lie over large ones, crowds are ignored; pictures are turned as their annotations are."""
    path, masks = write(tmp_path, orientation=orientation)
    assert open_data(path)["labels"].names == ("background", "cat", "dog")
    (batch,) = Data(path, fields()).batches(2)
    np.testing.assert_array_equal(batch["labels"], masks)
    np.testing.assert_allclose(batch["x"][0, 0] * 255, 60 * masks[0], atol=1e-4)
    (batch,) = Data(path, fields((3, 20, 24))).batches(2)
    np.testing.assert_array_equal(batch["labels"], masks.repeat(2, 1).repeat(2, 2))
    own = Field("labels", np.dtype(np.float32), (1, 10, 12), label=True, binary=True)
    (batch,) = Data(path, [fields()[0], own]).batches(2)  # one score tells objects from the background
    np.testing.assert_array_equal(batch["labels"][:, 0], masks > 0)


def test_polygons_of_yolo(tmp_path):
    """A folder of text files gives the masks of COCO's outlines; a box has none."""
    _, masks = write(tmp_path)
    for name in ("images", "labels"):
        (tmp_path / "yolo" / name).mkdir(parents=True)
    (tmp_path / "0.png").rename(tmp_path / "yolo" / "images" / "0.png")
    (tmp_path / "yolo" / "classes.txt").write_text("cat\ndog\n")
    size = np.array([12, 10])
    lines = [(0, square(4, 2, 3)), (1, square(2, 1, 8))]
    text = [f"{k} {' '.join(map(str, (np.reshape(c, (-1, 2)) / size).ravel()))}" for k, c in lines]
    (tmp_path / "yolo" / "labels" / "0.txt").write_text("\n".join(text))
    assert open_data(tmp_path / "yolo")["labels"].names == ("background", "cat", "dog")
    (batch,) = Data(tmp_path / "yolo", fields()).batches(1)
    np.testing.assert_array_equal(batch["labels"], masks[:1])
    (tmp_path / "yolo" / "labels" / "0.txt").write_text("0 0.5 0.5 0.2 0.2")
    with pytest.raises(BadInput, match=r"object 0 of the picture '0' .* has no outline"):
        list(Data(tmp_path / "yolo", fields()).batches(1))


def test_numbers_of_classes(tmp_path):
    path, masks = write(tmp_path, ((0, "Background"), (7, "cat"), (3, "dog")))
    assert open_data(path)["labels"].names == ("Background", "dog", "cat")
    (batch,) = Data(path, fields(), classes=["Background", "cat", "dog"]).batches(2)
    np.testing.assert_array_equal(batch["labels"][0], (masks[0] > 0) * (3 - masks[0]))
    with pytest.raises(BadInput, match="has the class 'dog', which is none of those"):
        Data(path, fields(), classes=["Background", "cat", "bird"])
    crowd = Data(path, fields(ignored=None))
    with pytest.raises(BadInput, match=r"object 0 of the picture 1 .* is a crowd"):
        list(crowd.batches(2))


def test_some_classes(tmp_path):
    """Objects of classes that are not chosen are background, in training, in validation and in a measurement."""
    path, masks = write(tmp_path)
    (batch,) = Data(path, fields(), classes=["dog"]).batches(2)
    np.testing.assert_array_equal(batch["labels"], np.where(masks == 255, 255, masks == 2))
    with pytest.raises(BadInput, match="has no class 'cow'; it has 'cat', 'dog'"):
        Data(path, fields(), classes=["cow"])
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, H, W] x) => (float[N, 2, H, W] y) { y = Conv (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w"))
    trained = tmp_path / "trained.onnx"
    onnxgrad.train(model, path, loss="cross_entropy:ignore_index=255", classes="dog", validation=path, output=trained,
                   epochs=1)  # fmt: skip
    found = onnxgrad.evaluate(trained, path, ignore_index=255, classes="dog")
    assert set(found.classes) == {"background", "dog"}
    with pytest.raises(BadInput, match="classes are chosen of boxes, and of outlines"):
        onnxgrad.evaluate(trained, {"x": np.zeros((1, 3, 4, 4), np.float32)}, classes="dog")


def test_a_model_learns_outlines(tmp_path):
    path, _ = write(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, H, W] x) => (float[N, 3, H, W] y) { a = Conv (x, w) r = Relu (a) y = Conv (r, v) }""")
    for name, shape in (("w", (16, 3, 1, 1)), ("v", (3, 16, 1, 1))):
        weights = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    trainer = Trainer(model, loss="cross_entropy:ignore_index=255", optimizer="adam", learning_rate=0.05)
    trainer.fit(path, epochs=60, batch_size=2, validation=path, augment="flip,crop=2")
    trainer.save(tmp_path / "trained.onnx")
    found = onnxgrad.evaluate(tmp_path / "trained.onnx", path, ignore_index=255)
    assert set(found.classes) == {"background", "cat", "dog"}
    assert found.rows == 2 * 120 - 16
    assert found.metrics["miou"] > 0.6


def test_one_class_is_measured(tmp_path):
    """Labels of 0 and 1 beside one score are those of a class, whatever metrics are asked for."""
    path, _ = write(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, 10, 12] x) => (float[N, 1, 10, 12] y) {
            z = ReduceMean <keepdims = 1> (x, axis)
            y = Sub (z, half) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.1), "half"))
    found = onnxgrad.evaluate(model, path)
    assert (found.task, found.metrics["accuracy"]) == ("binary", 1)

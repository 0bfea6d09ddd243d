"""Detectors measured on pictures with boxes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.detection.letterbox import Letterbox
from onnxgrad.training.detection.masks import InstanceMasks
from onnxgrad.training.detection.predict import Detector, choose_best, suppress
from onnxgrad.training.measure.detections import compare_boxes
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.training.metrics.boxes import Detections
from onnxgrad.training.metrics.registry import METRICS
from tests.training.detection.detectors import KINDS, detector
from tests.training.detection.pictures import SCENES, draw_picture, write_coco, write_yolo


class Oracle:
    """A detector that finds the labels of pictures in their order, but for what `spoil` changes."""

    def __init__(self, data, spoil=lambda k, found: found):
        self.data, self.spoil, self.next = data, spoil, 0

    def __call__(self, pictures):
        found = []
        for _ in pictures:
            row = self.data.rows[self.next]
            own = Detections(row.boxes, np.full(len(row.labels), 0.9), row.labels)
            found.append(self.spoil(self.next, own))
            self.next += 1
        return found


def test_labels_themselves_are_perfect(tmp_path):
    data = read_detection(write_coco(tmp_path))
    found = compare_boxes(Oracle(data), data, batch_size=2, worst=3, shown=2)
    assert found.metrics == {"map50_95": 1, "map50": 1, "map75": 1, "mar_100": 1}
    assert found.confusion.tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert found.names == ["cat", "dog", "background"]
    assert (found.rows, found.worst) == (3, [])
    assert [p.shape for _, p in found.pictures] == [(240, 320, 3), (320, 213, 3)]


def test_worst_pictures(tmp_path):
    data = read_detection(write_coco(tmp_path))

    def spoil(k, found):
        if k == 1:  # moved away: missed, and one too many
            return Detections(found.boxes[:1] / 4, found.scores[:1], found.labels[:1])
        return Detections(found.boxes, found.scores, 1 - found.labels) if k == 0 else found

    found = compare_boxes(Oracle(data, spoil), data, worst=2)
    assert found.confusion.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert [(m.row, m.loss, m.actual, m.predicted) for m in found.worst] == [
        (0, 2, "1 cat, 1 dog", "1 cat, 1 dog"),
        (1, 2, "1 dog", "1 dog"),
    ]
    green = (found.worst[0].image.transpose(1, 2, 0) * 255).round() == (40, 200, 40)
    assert green.all(2).sum() > 100  # labels are drawn
    with pytest.raises(BadInput, match="accuracy is no metric for a task of boxes"):
        compare_boxes(Oracle(data), data, ["accuracy"])


def test_running_metrics_of_boxes(tmp_path):
    data = read_detection(write_coco(tmp_path))
    found = Oracle(data)([s["image"] for s in data])
    whole, parts = METRICS["map50"].tasks["boxes"](), [METRICS["map50"].tasks["boxes"]() for _ in range(2)]
    whole.add(found, list(data))
    for k in range(3):
        parts[k % 2].add([found[k]], [data[k]])
    parts[1].join(parts[0].sums())
    assert whole.result() == parts[1].result() == 1


def test_suppression():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9], [20, 0, 30, 10], [0, 0, 10, 6]], float)
    assert suppress(boxes, np.array([0, 0, 1, 0, 0])).tolist() == [0, 2, 3, 4]
    assert suppress(boxes, np.array([0, 0, 1, 0, 0]), 0.55).tolist() == [0, 2, 3]


def test_best_boxes_of_a_picture():
    """30000 of all scores above 0.001 are compared; 300 that overlap no better one are kept (Ultralytics)."""
    corner = np.arange(320.0)[:, None] * 20
    boxes = np.tile([0, 0, 10, 10.0], (5000, 1))
    boxes[4000:4320] = corner + np.array([0, 0, 10, 10])
    shares = np.linspace(0.9, 0.1, 5000)[:, None] * [1, 0]
    shares[0, 1] = 0.001
    rows, labels, scores = choose_best(boxes, shares, one_to_one=False)
    assert rows.tolist() == [0, *range(4001, 4300)]  # behind 3999 on the same object
    assert (labels == 0).all()
    np.testing.assert_array_equal(scores, shares[rows, 0])
    rows, _, _ = choose_best(boxes, shares, one_to_one=True)
    assert rows.tolist() == list(range(300))


def test_masks_of_instances(tmp_path):
    """Metrics of masks are taken where the model draws them, and all objects have outlines."""
    data = json.loads(write_coco(tmp_path).read_text())
    model = detector("yolov8_seg", ["cat", "dog"])
    assert "mask_map50" not in onnxgrad.evaluate(model, tmp_path / "boxes.json", task="detection").metrics
    with pytest.raises(BadInput, match="has no outline"):
        onnxgrad.evaluate(model, tmp_path / "boxes.json", task="detection", metrics="mask_map50")
    for one in data["annotations"]:
        x, y, w, h = one["bbox"]
        one["segmentation"] = [[x, y, x + w, y, x + w, y + h]]
    (tmp_path / "boxes.json").write_text(json.dumps(data))
    found = onnxgrad.evaluate(model, tmp_path / "boxes.json", task="detection").metrics
    assert {"map50", "mask_map50", "mask_map50_95"} <= set(found)
    with pytest.raises(BadInput, match="a detector that draws them"):
        onnxgrad.evaluate(
            detector("yolov8", ["cat", "dog"]), tmp_path / "boxes.json", task="detection", metrics="mask_map50"
        )


def test_pixels_of_masks():
    """The weighted sum of maps, interpolated in the picture, above zero inside of the box."""
    letterbox = Letterbox(32, 32)
    placement = letterbox.place((40, 20))  # 32 by 16 pixels, 8 below the upper edge
    maps = np.stack([np.tile(np.arange(8.0) - 3.5, (8, 1)), np.tile(np.arange(8.0)[:, None] - 3.5, (1, 8))])
    weights = np.array([[1.0, 0], [0, 1.0], [-1.0, 0]])
    boxes = np.array([[0, 0, 40, 20], [3.5, 2.2, 17, 20], [30, 0, 40, 20]])
    masks = InstanceMasks(weights, maps, boxes, placement, (32, 32))
    whole = np.zeros((3, 20, 40), bool)
    for k, mask in enumerate(whole):
        y, x, pixels = masks(k)
        mask[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
    expected = np.zeros((3, 20, 40), bool)
    expected[0, :, 20:] = True  # the middle of the canvas is that of the picture
    expected[1, 10:, 4:17] = True
    np.testing.assert_array_equal(whole, expected)


def test_boxes_of_picture_files(tmp_path):
    """A detector with a note of its training gives a row for each box; pictures are turned by their EXIF."""
    write_coco(tmp_path)
    file = tmp_path / "images" / "0.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(file).save(tmp_path / "images" / "turned.jpg", exif=exif)
    model = detector("yolov8", ["cat", "dog"])
    model.metadata_props[DETECTOR] = json.dumps({"letterbox": Letterbox(64, 64).to_json()})
    found = onnxgrad.predict(model, tmp_path / "images")
    assert list(found) == ["file", "class", "score", "x1", "y1", "x2", "y2"]
    assert {Path(f).name for f in found["file"]} == {"0.png", "1.png", "2.png", "turned.jpg"}
    width, height = Image.open(file).size
    mine = found["file"] == str(tmp_path / "images" / "turned.jpg")
    assert found["x2"][mine].max() <= height < width
    (expected,) = Detector(model)([np.asarray(Image.open(file))])
    mine, sure = found["file"] == str(file), expected.scores >= 0.25
    assert sure.any()
    np.testing.assert_array_equal(found["score"][mine], expected.scores[sure])
    np.testing.assert_array_equal(np.stack([found[n][mine] for n in ("x1", "y1", "x2", "y2")], 1), expected.boxes[sure])
    assert [["cat", "dog"].index(n) for n in found["class"][mine]] == expected.labels[sure].tolist()
    of_file = onnxgrad.predict(model, tmp_path / "boxes.json")
    named = found["file"] != str(tmp_path / "images" / "turned.jpg")
    assert all(np.array_equal(of_file[name], column[named]) for name, column in found.items())


def test_names_of_classes(tmp_path):
    """Classes are compared by name; boxes of others are named; two sets of names are never taken by their order."""
    path = write_coco(tmp_path)
    with pytest.warns(UserWarning, match=r"1 boxes are of other classes than 'dog', 'owl', and do not count"):
        found = onnxgrad.evaluate(detector("yolov8", ["dog", "owl"]), path, task="detection")
    assert list(found.classes) == ["dog"]
    with pytest.raises(BadInput, match=r"has 2 classes, 'cat', 'dog'; the model has 2, 'Cat', 'Dog'"):
        onnxgrad.evaluate(detector("yolov8", ["Cat", "Dog"]), path, task="detection")
    by_number = onnxgrad.evaluate(detector("yolov8", ["0", "1"]), path, task="detection")
    assert list(by_number.classes) == ["cat", "dog"]


def test_pictures_without_objects(tmp_path):
    """Of a folder whose files of labels are empty, what is found is wrong; nothing can be learned."""
    draw_picture(tmp_path / "images" / "a.png", (70, 50), 1)
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("")
    model = detector("yolov8", ["cat", "dog"])
    found = onnxgrad.evaluate(model, tmp_path, task="detection")
    assert np.isnan(found.metrics["map50"])
    assert found.confusion[:2].sum() == 0 < found.confusion[2, :2].sum()
    with pytest.raises(BadInput, match=r"has no boxes to learn$"):
        onnxgrad.train(model, tmp_path, task="detection")


NUDENET = find_spec("nudenet")
packaged = pytest.mark.skipif(NUDENET is None, reason="no nudenet")


@pytest.fixture(scope="module")
def nudenet():
    """YOLOv8n with 18 classes, for pictures of 320 by 320."""
    return Path(NUDENET.origin).parent / "320n.onnx"


@packaged
def test_boxes_are_those_of_the_file(nudenet, tmp_path):
    """Raw values, decoded here, are what the file's own decoding gives; a rule of one picture at a time is lifted."""
    draw_picture(tmp_path / "a.png", (320, 320), 3)
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    detector = Detector(nudenet)
    (found,) = detector([pixels])
    session = onnxruntime.InferenceSession(str(nudenet))
    (rows,) = session.run(None, {session.get_inputs()[0].name: pixels.transpose(2, 0, 1)[None].astype("f") / 255})
    centre, size, scores = rows[0, :2].T, rows[0, 2:4].T, rows[0, 4:].T
    place = int(scores.max(1).argmax())
    best = np.concatenate([centre[place] - size[place] / 2, centre[place] + size[place] / 2])
    assert found.scores[0] == pytest.approx(scores.max(), rel=1e-4)
    assert found.labels[0] == scores[place].argmax()
    np.testing.assert_allclose(found.boxes[0], np.clip(best, 0, 320), atol=0.05)
    together = detector([pixels, pixels[:200]])
    np.testing.assert_allclose(together[0].scores, found.scores, atol=1e-5)


@packaged
def test_the_command(nudenet, tmp_path):
    names = ["FACE_MALE", "FEET_COVERED"]
    scenes = [(size, [(box, names[n == "dog"]) for box, n in boxes]) for size, boxes in SCENES]
    path = write_yolo(tmp_path, scenes, names, "val")
    done = CliRunner().invoke(build(), ["evaluate", str(nudenet), "--data", str(path), "--task", "detection", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["task"] == "boxes"
    assert set(found["metrics"]) == {"map50_95", "map50", "map75", "mar_100"}
    assert set(found["classes"]) == set(found["curves"]) == set(names)
    assert len(found["confusion"]) == len(found["names"]) == 19
    result = onnxgrad.evaluate(str(nudenet), str(path), task="detection", metrics="map50,map_small", worst=2)
    assert list(result.metrics) == ["map50", "map_small"]
    assert result.metrics["map50"] == found["metrics"]["map50"]
    assert len(result.worst) == 2
    picture = tmp_path / "worst.png"
    flags = ["--task", "detection", "--worst", "2", "--picture", str(picture)]
    done = CliRunner().invoke(build(), ["evaluate", str(nudenet), "--data", str(path), *flags])
    assert done.exit_code == 0, done.output
    assert "ap50_95" in done.output
    assert Image.open(picture).size[0] > 100


@packaged
def test_other_classes_are_refused(nudenet, tmp_path):
    with pytest.raises(BadInput, match=r"has 2 classes, 'cat', 'dog'; the model has 18"):
        onnxgrad.evaluate(str(nudenet), str(write_coco(tmp_path)), task="detection")


def test_no_detector(tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        plain (float[N, 3] x) => (float[N, 3] y) { y = Relu (x) }""")
    with pytest.raises(BadInput, match="a detector takes pictures"):
        onnxgrad.evaluate(model, str(write_coco(tmp_path)), task="detection")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_a_run_measures_as_the_command(kind, tmp_path):
    """The metrics of a run are those of the saved file; the report shows boxes, curves and the confusion matrix."""
    data = write_coco(tmp_path, SCENES * 2)
    report, output = tmp_path / "report.html", tmp_path / "mine.onnx"
    model = detector(kind, ["cat", "dog"])
    trainer = onnxgrad.train(
        model, data, task="detection", validation=data, epochs=2, batch_size=4, optimizer="adam", learning_rate=1e-2,
        metrics="map50,map50_95,mar_100", monitor="validation_mar_100", keep_best=True, report=report, output=output,
        augment="mosaic=0.5,zoom,flip", sample="balanced", checkpoint=tmp_path / "checkpoint",
    )  # fmt: skip
    found = onnxgrad.evaluate(output, data, metrics="map50,map50_95,mar_100")
    epochs = trainer.history.epochs
    best = max(epochs, key=lambda e: e["validation_mar_100"])
    assert found.metrics["mar_100"] > 0
    for name, value in found.metrics.items():
        assert best[f"validation_{name}"] == pytest.approx(value, abs=1e-4), name
    text = report.read_text()
    for title in ("Predictions (orange) beside labels (green)", "Precision over recall", "Confusion matrix"):
        assert title in text
    assert text.count("data:image/png;base64,") == 4

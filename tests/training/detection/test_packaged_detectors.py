"""Detectors that packages ship learn new classes, and run in plain ONNX Runtime afterwards."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from benchmarks.detection import DETECTORS, SHAPES, draw_shapes, packaged

import onnxgrad
from onnxgrad.model_io import open_model
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.detection.classes import with_classes
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.probe import stored_names

pytest.importorskip("sklearn")


def _file(name):
    found = packaged(name)
    if found is None:
        pytest.skip(f"{DETECTORS[name][0]} is not installed")
    return found[0]


@pytest.mark.parametrize(
    ("name", "bins", "strides", "classes"), [("YOLOv8n", 16, [8, 16, 32], 18), ("PicoDet", 8, [8, 16, 32, 64], 10)]
)
def test_heads(name, bins, strides, classes):
    model = open_model(_file(name)).model
    head = find_head(model, DETECTORS[name][2])
    assert (head.kind, head.bins, head.strides, head.classes) == ("dfl", bins, strides, classes)
    old = stored_names(model, classes)
    new, notes = with_classes(model, head, SHAPES, old)
    assert notes == [f"3 classes in the place of {classes}"]
    assert find_head(model, DETECTORS[name][2]).levels == new.levels


@pytest.mark.complete
def test_yolov8_learns_shapes(tmp_path):
    file = _file("YOLOv8n")
    training, test = (draw_shapes(tmp_path / str(k), n, 96, seed=k) for k, n in enumerate((48, 16)))
    output = tmp_path / "mine.onnx"
    onnxgrad.train(
        file, training, task="detection", validation=test, image_size=96, output=output, epochs=10, batch_size=8,
        optimizer="adamw", learning_rate=1e-3, schedule="cosine:warmup=6",
    )  # fmt: skip
    scores = onnxgrad.evaluate(output, test, task="detection").metrics
    assert scores["map50"] > 0.5
    # the model's own output, decoded by the graph, in plain ONNX Runtime
    session = onnxruntime.InferenceSession(output)
    data, found = read_detection(test), 0
    for k in range(len(data)):
        sample = data[k]
        (rows,) = session.run(None, {"images": sample["image"].transpose(2, 0, 1)[None].astype(np.float32) / 255})
        assert rows.shape[:2] == (1, 4 + len(SHAPES))
        boxes, probabilities = rows[0, :4].T, rows[0, 4:].T
        best = boxes[np.argmax(probabilities.max(1))]
        best = np.concatenate([best[:2] - best[2:] / 2, best[:2] + best[2:] / 2])
        own = sample["boxes"]
        low, high = np.maximum(own[:, :2], best[:2]), np.minimum(own[:, 2:], best[2:])
        shared = np.prod(np.maximum(high - low, 0), 1)
        union = np.prod(own[:, 2:] - own[:, :2], 1) + np.prod(best[2:] - best[:2]) - shared
        found += bool((shared / union).max() > 0.5)
    assert found > 0.7 * len(data)

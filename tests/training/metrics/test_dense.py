"""Key points against pycocotools, and anomaly maps against their definition, threshold by threshold."""

from __future__ import annotations

import contextlib
import io
import itertools

import numpy as np
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.measure.comparisons import Maps, Points
from onnxgrad.training.metrics.dense import FILLED, region_overlap
from onnxgrad.training.metrics.registry import METRICS, running
from tests.training.loss.test_losses import linear

AP = ("oks_map50_95", "oks_map50", "oks_map75")


def poses(seed, rows=40):
    """Labels with missing points, some without any, and predictions nearer or farther."""
    rng = np.random.default_rng(seed)
    t = np.concatenate([rng.uniform(0, 90, (rows, 17, 2)), rng.integers(0, 3, (rows, 17, 1))], 2)
    t[rng.random(rows) < 0.1, :, 2] = 0
    t[t[..., 2] == 0, :2] = 0  # as files have points that are not labelled
    far = rng.uniform(0, 12, (rows, 1, 1)) * (rng.random((rows, 1, 1)) < 0.8)
    y = np.concatenate([t[..., :2] + rng.normal(0, 1, (rows, 17, 2)) * far, rng.random((rows, 17, 1))], 2)
    return y, t


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_key_points_as_pycocotools(seed, scored):
    coco = pytest.importorskip("pycocotools.coco")
    evaluator = pytest.importorskip("pycocotools.cocoeval")
    y, t = poses(seed)
    content = {"images": [], "annotations": [], "info": {}, "categories": [{"id": 1, "name": "person"}]}
    results = []
    for k, (points, label) in enumerate(zip(y, t)):
        content["images"].append({"id": k})
        seen = label[label[:, 2] > 0, :2]
        low, high = (seen.min(0), seen.max(0)) if len(seen) else (np.zeros(2), np.zeros(2))
        entry = {"id": k + 1, "image_id": k, "category_id": 1, "iscrowd": 0, "keypoints": label.ravel().tolist()}
        box = {"bbox": [*low, *(high - low)], "area": FILLED * np.prod(high - low), "num_keypoints": len(seen)}
        if len(seen):
            content["annotations"].append(entry | box)
            score = points[:, 2].mean() if scored else 1.0
            results.append({"image_id": k, "category_id": 1, "keypoints": points.ravel().tolist(), "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = content
        truth.createIndex()
        evaluation = evaluator.COCOeval(truth, truth.loadRes(results), "keypoints")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    for name, expected in zip(AP, evaluation.stats):
        metric = running(name, "points")
        for part in (slice(0, 15), slice(15, None)):
            metric.add(y[part] if scored else y[part, :, :2], t[part])
        assert metric.result() == pytest.approx(expected, abs=1e-9), name
    assert 0.05 < evaluation.stats[0] < 0.95


def test_points_of_heat_maps_have_scores():
    maps = np.zeros((2, 17, 5, 6), np.float32)
    maps[0, :, 2, 3], maps[1, :, 1, 4] = 0.9, 0.2
    t = np.concatenate([np.random.default_rng(0).uniform(0, 5, (2, 17, 2)), np.full((2, 17, 1), 2)], 2)
    t[0, :4], t[0, 4:] = [3, 2, 1], [0, 0, 0]  # those that are labelled are found
    y, _ = Points()(maps, t)
    np.testing.assert_array_equal(y[0], np.tile(np.float32([3, 2, 0.9]), (17, 1)))
    t[0, 0, 0] += 1  # an extent, and so an area
    assert METRICS["oks_map50"].of("points", y, t) == pytest.approx(0.5, abs=0.01)


def by_thresholds(scores, masks, limit):
    """As Bergmann et al. 2021 define it: regions are found by a flood, thresholds are all scores."""
    regions = []
    for k, mask in enumerate(masks > 0):
        left = {tuple(p) for p in np.argwhere(mask)}
        while left:
            todo, region = [left.pop()], []
            while todo:
                i, j = todo.pop()
                region.append((k, i, j))
                near = {(i + a, j + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
                left -= near
                todo += near
            regions.append(tuple(np.array(region).T))
    normal = masks <= 0
    curve = [(0.0, 0.0)]
    for threshold in np.unique(scores)[::-1]:
        over = scores >= threshold
        curve.append((over[normal].mean(), np.mean([over[r].mean() for r in regions])))
    area = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 < limit and x1 > x0:
            end = min(x1, limit)
            area += (end - x0) * (y0 + (y0 + (y1 - y0) * (end - x0) / (x1 - x0))) / 2
    return area / limit


@pytest.mark.parametrize("levels", [7, 1000])
def test_overlap_of_regions(levels):
    pytest.importorskip("scipy")
    rng = np.random.default_rng(levels)
    masks = np.zeros((3, 12, 15))
    masks[0, 1:4, 1:9], masks[0, 4, 9], masks[0, 8:, 3:5] = 1, 1, 1  # a corner joins a region; a second one
    masks[1, 5, 5] = 1
    scores = np.rint((rng.random(masks.shape) + 0.4 * masks) * levels) / levels
    for limit in (0.3, 0.05, 1.0):
        expected = by_thresholds(scores, masks, limit)
        assert region_overlap(scores, masks, limit) == pytest.approx(expected, abs=1e-12)
    assert region_overlap(masks, masks) == pytest.approx(1)
    assert np.isnan(region_overlap(scores, np.zeros_like(masks)))
    found = {name: METRICS[name].of("maps", scores, masks) for name in ("auc", "image_auc")}
    pairs = scores[masks > 0][:, None] - scores[masks == 0]
    assert found["auc"] == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    most = scores.max((1, 2))
    assert found["image_auc"] == np.mean([(most[k] > most[2]) + 0.5 * (most[k] == most[2]) for k in (0, 1)])


def test_maps_of_a_model():
    """`evaluate` and each epoch measure regions; metrics of another task are refused beside them."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    t = np.zeros((4, 1, 5, 6), np.float32)
    t[:3, :, 1:3, 2:4] = 1
    x = (rng.random(t.shape) + 0.7 * t).astype(np.float32)
    model = linear(("N", 1, 5, 6))
    metrics = "au_pro,auc,image_auc"
    trainer = Trainer(model, loss="binary_dice", optimizer="sgd", learning_rate=1e-4)
    trainer.fit({"x": x, "labels": t}, epochs=1, validation={"x": x, "labels": t}, metrics=metrics)
    found = onnxgrad.evaluate(trainer.inference_model(), {"x": x, "labels": t}, metrics=metrics)
    assert found.task == "maps"
    (y,) = onnxgrad.predict(trainer.inference_model(), {"x": x}).values()
    assert found.metrics["au_pro"] == pytest.approx(region_overlap(y[:, 0], t[:, 0]))
    for name, value in found.metrics.items():
        assert trainer.history.epochs[-1][f"validation_{name}"] == pytest.approx(value, abs=1e-6), name
    with pytest.raises(BadInput, match="is no metric for a task of"):
        onnxgrad.evaluate(model, {"x": x, "labels": t}, metrics="au_pro,mae")
    with pytest.raises(BadInput, match="masks of their size"):
        Maps()(x, t[:, :, 1:])

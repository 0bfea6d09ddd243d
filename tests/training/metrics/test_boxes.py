"""Average precision against pycocotools, whose numbers are the definition, and by hand where it is missing."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from onnxgrad.distributed import Alone, gathered
from onnxgrad.training.metrics.boxes import AveragePrecision, Detections, mask_overlaps, overlaps

NAMES = ("cat", "dog", "bird", "never")
#: Names of the twelve statistics of pycocotools, in its order.
STATISTICS = (
    *("map50_95", "map50", "map75", "map_small", "map_medium", "map_large"),
    *("mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large"),
)


def random_pictures(seed: int, pictures: int = 12, integers: bool = False):  # type: ignore[no-untyped-def]
    """Labels of pictures with crowds and objects of all sizes, and predictions near them and elsewhere."""
    rng = np.random.default_rng(seed)
    for _ in range(pictures):
        n = int(rng.integers(0, 12))
        low, size = rng.uniform(0, 300, (n, 2)), rng.choice([8.0, 30, 60, 120], (n, 1)) * rng.uniform(0.5, 1.5, (n, 2))
        boxes = np.concatenate([low, low + size], axis=1)
        labels, crowd = rng.integers(0, 3, n), rng.random(n) < 0.2
        areas = np.prod(size, axis=1) * rng.uniform(0.4, 1, n)
        repeats = np.repeat(np.arange(n), rng.integers(0, 4, n))
        near = boxes[repeats] + rng.normal(0, 4, (len(repeats), 4))
        far = rng.uniform(0, 300, (int(rng.integers(0, 130)) if rng.random() < 0.3 else 4, 2))
        found = np.concatenate([near, np.concatenate([far, far + rng.uniform(5, 90, far.shape)], axis=1)])
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        classes = np.concatenate(
            [np.where(rng.random(len(repeats)) < 0.8, labels[repeats], 0), rng.integers(0, 4, len(far))]
        )
        if integers:  # equal overlaps and scores
            boxes, found, areas = np.rint(boxes / 8) * 8, np.rint(found / 8) * 8, np.rint(areas)
            found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 8)
        scores = np.rint(rng.random(len(found)) * 10) / 10 if integers else rng.random(len(found))
        sample = {"boxes": boxes, "labels": labels, "crowd": crowd, "areas": areas}
        yield sample, Detections(found, scores, classes)


def crowded(seed):  # type: ignore[no-untyped-def]
    """Pictures of up to 500 predictions of four scores, a class of which has more than the 100 that count."""
    rng = np.random.default_rng(seed)
    for sample, found in random_pictures(seed, pictures=6):
        many = rng.integers(0, len(found.scores), 500)
        boxes = found.boxes[many] + np.tile(rng.normal(0, 3, (500, 2)), 2)
        yield sample, Detections(boxes, rng.integers(1, 5, 500) / 4, found.labels[many])


def with_masks(seed):  # type: ignore[no-untyped-def]
    """Pictures of objects with masks, and masks near them and elsewhere, of a few scores; some have over 100."""
    rng = np.random.default_rng(seed)
    for picture in range(6):
        objects = np.zeros((int(rng.integers(0, 7)), 70, 90), bool)
        for mask in objects:
            y, x, h, w = (*rng.integers(0, 50, 2), *rng.integers(4, 40, 2))
            mask[y : y + h, x : x + w] = rng.random(mask[y : y + h, x : x + w].shape) < rng.choice([0.6, 1.0])
        labels, crowd = rng.integers(0, 3, len(objects)), rng.random(len(objects)) < 0.2
        windows, classes = [], []
        for k in rng.integers(0, len(objects) + 2, 130 if picture == 3 else 14):
            if k < len(objects) and rng.random() < 0.8:
                moved = np.roll(objects[k], rng.integers(-3, 4, 2), (0, 1))
                y, x = (int(np.flatnonzero(moved.any(a)).min(initial=0)) for a in (1, 0))
                windows.append((y, x, moved[y:, x:]))
                classes.append(labels[k])
            else:
                y, x, h, w = (*rng.integers(0, 50, 2).tolist(), *rng.integers(0, 20, 2))
                windows.append((y, x, rng.random((h, w)) < 0.7))
                classes.append(rng.integers(0, 4) if picture != 3 else 0)
        n = len(windows)
        sample = {"boxes": np.zeros((len(objects), 4)), "labels": labels, "crowd": crowd, "masks": objects}
        sample["areas"] = objects.sum((1, 2)).astype(float)
        yield sample, Detections(np.zeros((n, 4)), rng.integers(1, 6, n) / 5, np.array(classes), windows.__getitem__)


def by_pycocotools(pictures, kind="bbox"):  # type: ignore[no-untyped-def]
    """The object COCOeval of pycocotools for `pictures`; of `kind` segm, masks are compared."""
    coco = pytest.importorskip("pycocotools.coco")
    evaluator = pytest.importorskip("pycocotools.cocoeval")
    content: dict = {"images": [], "annotations": [], "info": {}}
    content["categories"] = [{"id": k, "name": n} for k, n in enumerate(NAMES)]
    results = []
    for k, (sample, found) in enumerate(pictures):
        content["images"].append({"id": k})
        for box, label, crowd, area in zip(*(sample[n] for n in ("boxes", "labels", "crowd", "areas"))):
            entry = {"id": len(content["annotations"]) + 1, "image_id": k, "category_id": int(label)}
            sides = [*box[:2], *(box[2:] - box[:2])]
            content["annotations"].append({**entry, "bbox": sides, "area": float(area), "iscrowd": int(crowd)})
        for i, (box, score, label) in enumerate(zip(found.boxes, found.scores, found.labels)):
            sides = [*map(float, box[:2]), *map(float, box[2:] - box[:2])]
            results.append({"image_id": k, "category_id": int(label), "bbox": sides, "score": float(score)})
            if kind == "segm":
                del results[-1]["bbox"]
                whole = np.zeros(sample["masks"].shape[1:], bool)
                y, x, pixels = found.masks(i)
                whole[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
                results[-1]["segmentation"] = _encoded(whole)
        if kind == "segm":
            content["images"][-1] |= dict(zip(("height", "width"), sample["masks"].shape[1:]))
            own = content["annotations"][len(content["annotations"]) - len(sample["masks"]) :]
            for entry, mask in zip(own, sample["masks"]):
                entry["segmentation"] = _encoded(mask)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = content
        truth.createIndex()
        evaluation = evaluator.COCOeval(truth, truth.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def _encoded(mask):  # type: ignore[no-untyped-def]
    return pytest.importorskip("pycocotools.mask").encode(np.asfortranarray(mask.astype(np.uint8)))


@pytest.mark.parametrize("seed", range(3))
def test_masks_as_pycocotools(seed):
    pictures = list(with_masks(seed))
    evaluation = by_pycocotools(pictures, "segm")
    running = AveragePrecision(NAMES, masks=True)
    for k, (sample, found) in enumerate(pictures):
        running.add(found, sample, sample["areas"], k)
    metrics = running.result().metrics
    assert 0.02 < metrics["map50_95"] < 0.95
    for name, expected in zip(STATISTICS, evaluation.stats):
        assert np.nan_to_num(metrics[name], nan=-1) == pytest.approx(expected, abs=1e-9), name


def test_overlaps_of_masks():
    objects = np.zeros((2, 4, 4), bool)
    objects[0, :2, :2] = objects[1, 2:] = True
    masks = [(1, 0, np.ones((2, 2), bool)), (3, 3, np.zeros((0, 1), bool))]
    found, areas = mask_overlaps(masks, objects, np.array([False, True]))
    np.testing.assert_allclose(found, [[2 / 6, 2 / 4], [0, 0]])
    assert areas.tolist() == [4, 0]


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_as_pycocotools(seed, integers):
    pictures = list(random_pictures(seed, integers=integers))
    evaluation = by_pycocotools(pictures)
    running = AveragePrecision(NAMES)
    for sample, found in pictures:
        running.add(found, sample, sample["areas"])
    result = running.result()
    for name, expected in zip(STATISTICS, evaluation.stats):
        assert np.nan_to_num(result.metrics[name], nan=-1) == pytest.approx(expected, abs=1e-9), name
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # [thresholds, recalls, classes]
    assert set(result.classes) == {n for k, n in enumerate(NAMES) if precision[0, 0, k] > -1}
    for k, name in enumerate(NAMES):
        if name in result.classes:
            assert result.classes[name]["ap50_95"] == pytest.approx(precision[:, :, k].mean(), abs=1e-9)
            np.testing.assert_allclose(result.curves[name], precision[0, :, k], atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_equal_scores_of_many_predictions(seed):
    """Predictions of equal scores count by the ids of their pictures, in whichever order these are added."""
    pictures = list(crowded(seed))
    assert max(np.bincount(found.labels).max() for _, found in pictures) > 100
    evaluation = by_pycocotools(pictures)
    parts = [AveragePrecision(NAMES) for _ in range(2)]
    for k in (4, 1, 5, 0, 3, 2):
        sample, found = pictures[k]
        parts[k % 2].add(found, sample, sample["areas"], k)
    parts[0].join(parts[1].sums())
    metrics = parts[0].result().metrics
    for name, expected in zip(STATISTICS, evaluation.stats):
        assert np.nan_to_num(metrics[name], nan=-1) == pytest.approx(expected, abs=1e-9), name


def test_parts_add_up():
    pictures = list(random_pictures(7))
    whole, *parts = (AveragePrecision(NAMES) for _ in range(3))
    for k, (sample, found) in enumerate(pictures):
        whole.add(found, sample)
        parts[k >= 5].add(found, sample)
    parts[0].join(gathered(Alone(), parts[1].sums())[0])  # as another rank sends them
    assert parts[0].result().metrics == whole.result().metrics
    np.testing.assert_array_equal(parts[0].confusion, whole.confusion)


def test_one_picture_by_hand():
    sample = {
        "boxes": np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [0, 50, 90, 90]], np.float64),
        "labels": np.array([0, 0, 1, 0]),
        "crowd": np.array([False, False, False, True]),
    }
    found = Detections(
        np.array([[0, 0, 10, 10], [60, 0, 70, 10], [20, 0, 30, 7], [40, 0, 50, 10], [5, 55, 20, 70]], np.float64),
        np.array([0.9, 0.8, 0.7, 0.6, 0.5]),
        np.array([0, 0, 0, 0, 0]),
    )
    running = AveragePrecision(("a", "b"))
    table = running.add(found, sample)
    # of class a: right, wrong, right (IoU 0.7), wrong (it is of class b), in the crowd; of class b nothing is found
    assert table.tolist() == [[2, 0, 0], [1, 0, 0], [1, 0, 0]]
    result = running.result()
    of_a = (51 * 1 + 50 * 2 / 3) / 101
    assert result.metrics["map50"] == pytest.approx(of_a / 2)
    assert result.classes["a"]["f1"] == pytest.approx(2 * 2 / (3 + 2))
    assert result.classes["a"]["score"] == 0.7
    assert result.classes["b"]["ap50"] == 0
    assert result.classes["b"]["boxes"] == 1


def test_overlaps():
    a, b = np.array([[0, 0, 4, 4.0]]), np.array([[2, 2, 6, 6.0], [4, 0, 8, 4], [1, 1, 1, 1]])
    np.testing.assert_allclose(overlaps(a, b), [[4 / 28, 0, 0]])
    np.testing.assert_allclose(overlaps(a, b, np.array([True, False, False])), [[4 / 16, 0, 0]])


def test_nothing_at_all():
    running = AveragePrecision(("a",))
    assert np.isnan(running.result().metrics["map50_95"])
    empty = {"boxes": np.zeros((0, 4)), "labels": np.zeros(0, np.int64), "crowd": np.zeros(0, bool)}
    running.add(Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)), empty)
    assert np.isnan(running.result().metrics["map50_95"])
    running.add(Detections(np.array([[0, 0, 5, 5.0]]), np.array([0.9]), np.array([0])), empty)
    assert running.confusion.tolist() == [[0, 0], [1, 0]]

"""Raw maps of heads, and labels, drawn by a frozen generator: the operands of losses that several tests compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.training.detection.head import Head, Level, MapPart

#: (height, width) of pictures, the number of classes, and the strides of the maps.
SIZE, CLASSES, STRIDES = (96, 128), 4, (8, 16, 32)
#: How many labels each of the pictures has, of so many rows.
COUNTS, ROWS = (4, 0, 2), 5
#: Kinds of queries.
QUERIES = ("detr", "deformable", "rtdetr", "dfine")


@dataclass
class Case:
    """A head with its raw values and labels.

    Attributes:
        head: of the kind that a loss is for.
        model: declares the raw values.
        maps: the raw values by name.
        labels: [N, M, 5].
    """

    head: Head
    model: ir.Model
    maps: dict[str, np.ndarray]
    labels: np.ndarray

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of a loss."""
        return {**self.maps, "labels": self.labels}


def case(kind: str) -> Case:
    """A case for a head of `kind`."""
    random = np.random.RandomState(7)
    draw = {
        "dfl": _distances,
        "plain": _distances,
        "yolox": _offsets,
        "yolo5": _anchor_sizes,
        **dict.fromkeys(QUERIES, _queries),
        "fcos": _squares,
    }.get(kind, _anchored)
    head, maps = draw(random, kind)
    values = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", *a.shape[1:]]))
        for n, a in maps.items()
    ]
    graph = ir.Graph(values, values, nodes=[], opset_imports={"": 21}, name="raw")
    return Case(head, ir.Model(graph, ir_version=10), maps, _labels(random))


def projections(gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The slopes of a loss along one random direction of each kind of map: of boxes, scores, objects."""
    found: dict[str, float] = {}
    for seed, (name, gradient) in enumerate(sorted(gradients.items())):
        direction = np.random.RandomState(seed).standard_normal(gradient.shape)
        kind = name.rstrip("0123456789")
        found[kind] = found.get(kind, 0.0) + float((gradient * direction).sum())
    return found


def _labels(random: np.random.RandomState) -> np.ndarray:
    found = np.zeros((len(COUNTS), ROWS, 5), np.float32)
    found[..., 0] = -1
    for picture, count in enumerate(COUNTS):
        for k in range(count):
            centre, size = random.uniform(20, 80, 2), random.uniform(5, 60, 2)
            low, high = np.maximum(centre - size / 2, 0), np.minimum(centre + size / 2, SIZE[::-1])
            found[picture, k] = [random.randint(CLASSES), *low, *high]
    return found


def _maps(random: np.random.RandomState, channels: dict[str, int], scale: dict[str, float]) -> dict[str, np.ndarray]:
    return {
        f"{name}{s}": (scale.get(name, 1.0) * random.standard_normal((len(COUNTS), c, SIZE[0] // s, SIZE[1] // s)))
        .astype(np.float32)
        for s in STRIDES
        for name, c in channels.items()
    }  # fmt: skip


def _shape(stride: int) -> tuple[int, int]:
    return SIZE[0] // stride, SIZE[1] // stride


def _distances(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    """Distributions of distances, or ``plain`` distances of a head with one prediction for each object (YOLO26)."""
    bins = 1 if kind == "plain" else 16
    maps = _maps(random, {"scores": CLASSES, "boxes": 4 * bins}, {"boxes": 2.0})
    if kind == "plain":
        maps = {n: np.abs(a) if n.startswith("boxes") else a for n, a in maps.items()}
    levels = [Level(_shape(s), MapPart(f"scores{s}", 0, CLASSES), MapPart(f"boxes{s}", 0, 4 * bins)) for s in STRIDES]
    return Head("dfl", CLASSES, tuple(levels), "images", SIZE, bins=bins, one_to_one=bins == 1), maps


def _offsets(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    maps = _maps(random, {"scores": CLASSES, "boxes": 4, "objects": 1}, {"boxes": 0.5})
    levels = [
        Level(_shape(s), MapPart(f"scores{s}", 0, CLASSES), MapPart(f"boxes{s}", 0, 4), MapPart(f"objects{s}", 0, 1))
        for s in STRIDES
    ]
    return Head("yolox", CLASSES, tuple(levels), "images", SIZE), maps


#: Widths and heights of YOLOv5's anchors, for pictures of this size.
ANCHORS = np.float32([[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 59]], [[58, 45], [78, 50], [60, 60]]])


def _anchor_sizes(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    maps = _maps(random, {"map": 3 * (5 + CLASSES)}, {})
    levels = [
        Level(_shape(s), MapPart(f"map{s}", 5, CLASSES), MapPart(f"map{s}", 0, 4), MapPart(f"map{s}", 4, 1), 3)
        for s in STRIDES
    ]
    return Head("yolo5", CLASSES, tuple(levels), "images", SIZE, anchors=ANCHORS), maps


#: Widths and heights of the anchors of a place, in strides.
SHAPES = ((2, 2), (3, 1.5), (1.5, 3))


def _anchored(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    count = CLASSES + (kind == "ssd")
    maps = _maps(random, {"scores": 3 * count, "boxes": 12}, {})
    levels, anchors = [], []
    for s in STRIDES:
        levels.append(Level(_shape(s), MapPart(f"scores{s}", 0, count), MapPart(f"boxes{s}", 0, 4), None, 3))
        y, x = np.meshgrid(*((np.arange(n) + 0.5) * s for n in _shape(s)), indexing="ij")
        centres = np.stack([x, y], -1).reshape(-1, 1, 2)
        half = np.array(SHAPES) * s / 2
        anchors.append(np.concatenate([centres - half, centres + half], -1).reshape(-1, 4))
    whole = np.concatenate(anchors).astype(np.float32)
    background = 0 if kind == "ssd" else None
    return Head(kind, CLASSES, tuple(levels), "images", SIZE, anchors=whole, background=background), maps


def _squares(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    maps = _maps(random, {"scores": CLASSES, "boxes": 4, "objects": 1}, {"boxes": 2.0})
    levels, anchors = [], []
    for s in STRIDES:
        parts = [MapPart(f"{name}{s}", 0, n) for name, n in (("scores", CLASSES), ("boxes", 4), ("objects", 1))]
        levels.append(Level(_shape(s), parts[0], parts[1], parts[2]))
        y, x = np.meshgrid(*(np.arange(n) * s for n in _shape(s)), indexing="ij")
        centres = np.stack([x, y], -1).reshape(-1, 2)
        anchors.append(np.concatenate([centres - s / 2, centres + s / 2], -1))
    return Head(
        "fcos", CLASSES, tuple(levels), "images", SIZE, anchors=np.concatenate(anchors).astype(np.float32)
    ), maps


def _queries(random: np.random.RandomState, kind: str) -> tuple[Head, dict[str, np.ndarray]]:
    """Queries, with a class of no object (DETR) or without; those of D-FINE have boxes out of the picture."""
    count = CLASSES + (kind == "detr")
    boxes = 1 / (1 + np.exp(-random.standard_normal((len(COUNTS), 12, 4))))
    boxes = 1.6 * boxes - 0.1 if kind == "dfine" else boxes
    maps = {
        "logits": random.standard_normal((len(COUNTS), 12, count)).astype(np.float32),
        "pred_boxes": boxes.astype(np.float32),
    }
    level = Level((0, 0), MapPart("logits", 0, count), MapPart("pred_boxes", 0, 4))
    background, varifocal = -1 if kind == "detr" else None, kind in ("rtdetr", "dfine")
    return Head(
        "detr", CLASSES, (level,), "images", SIZE, one_to_one=True, background=background, varifocal=varifocal
    ), maps

"""The parts of a detector's head: raw maps by their channels, levels, and the head as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import is_op
from onnxgrad.ir.names import described


@dataclass(frozen=True)
class MapPart:
    """MapPart of a raw map [N, C, H, W], or the last axis of queries [N, Q, C].

    Attributes:
        value: the name of the map.
        start: the first channel.
        size: how many channels.
    """

    value: str
    start: int
    size: int


@dataclass(frozen=True)
class Level:
    """The raw maps of one size. A head of queries has one level, of no size.

    Attributes:
        shape: (height, width).
        scores: of the classes.
        boxes: encoded boxes.
        objects: objectness, where the head has one.
        anchors: how many boxes a place has.
        masks: weights of the maps of masks, where the head has them.
    """

    shape: tuple[int, int]
    scores: MapPart
    boxes: MapPart
    objects: MapPart | None = None
    anchors: int = 1
    masks: MapPart | None = None


@dataclass(frozen=True)
class Head:
    """A detector's head.

    Attributes:
        kind: see the module.
        classes: their number, without background.
        levels: from the largest map to the smallest.
        image: the name of the input.
        size: (height, width) of pictures.
        anchors: float32 [A, 4], x1, y1, x2, y2 in pixels of a picture, of ``ssd``, ``fcos`` and ``retinanet``;
            [L, a, 2], width and height, of ``yolo5``.
        bins: of a distribution over distances.
        offset: the centre of a place, in places.
        one_to_one: each object has one prediction, and nothing is suppressed.
        background: the class of no object: 0 (first), -1 (last), or None.
        others: last layers that no loss trains, of masks or key points.
        maps: the output of maps whose weighted sums are masks (see `masks`); empty without masks.
        varifocal: scores learn the overlaps of their boxes (RT-DETR, D-FINE).
    """

    kind: str
    classes: int
    levels: tuple[Level, ...]
    image: str
    size: tuple[int, int]
    anchors: np.ndarray | None = None
    bins: int = 1
    offset: float = 0.5
    one_to_one: bool = False
    background: int | None = None
    others: tuple[str, ...] = ()
    maps: str = ""
    varifocal: bool = False

    @property
    def strides(self) -> list[float]:
        """Pixels between the places of each level: a power of two where maps are rounded up."""
        ratios = [self.size[0] / level.shape[0] for level in self.levels]
        return [r if r == int(r) else 2.0 ** round(np.log2(r)) for r in ratios]

    @property
    def values(self) -> list[str]:
        """The raw values that a loss reads, each once."""
        parts = [p for level in self.levels for p in (level.scores, level.boxes, level.objects) if p is not None]
        return list(dict.fromkeys(p.value for p in parts))

    @property
    def mask_values(self) -> list[str]:
        """The values that masks are drawn of; none without masks."""
        return [self.maps, *(level.masks.value for level in self.levels if level.masks)] if self.maps else []

    @property
    def text(self) -> str:
        """The head in words."""
        if self.kind == "detr":
            return f"a head of queries ({'RT-DETR' if self.varifocal else 'DETR'}), {self.classes} classes"
        names = {
            "dfl": "YOLOv8",
            "yolox": "YOLOX",
            "yolo5": "YOLOv5",
            "ssd": "SSD",
            "fcos": "FCOS",
            "retinanet": "RetinaNet",
        }
        maps = ", ".join(f"{h}x{w}" for h, w in (level.shape for level in self.levels))
        rest = "; its masks or key points are not trained" if self.others else ""
        name = names[self.kind]
        if self.kind == "dfl" and self.bins == 8:
            name = "PicoDet" if self.offset else "NanoDet-Plus"
        return f"a head like {name}'s on maps of {maps}, {self.classes} classes{rest}"


class UnknownHead(Exception):
    """A head that no kind fits."""


def nodes_behind(graph: ir.Graph, start: Sequence[ir.Value], until: frozenset[str] = frozenset()) -> list[ir.Node]:
    """The nodes that compute from `start`, up to operators `until`."""
    reached, found = set(start), []
    for node in graph:
        if not reached.isdisjoint(reads(node)) and node.op_type not in until and not is_op(node, "Shape"):
            reached.update(node.outputs)
            found.append(node)
    return found


#: Operators between the result of a layer and the activation that all its elements pass.
_MOVES = ("Reshape", "Concat", "Transpose", "Split", "Unsqueeze", "Gather", "Squeeze", "Identity", "Flatten")


def activation_behind(value: ir.Value) -> ir.Node | None:
    """The Sigmoid or Softmax that all elements of `value` pass, with nothing that computes before it."""
    way = [value]
    for each in way:
        for node in (use.node for use in each.uses()):
            if is_op(node, ("Sigmoid", "Softmax")):
                return node
            if is_op(node, _MOVES):
                way.extend(v for v in node.outputs if v not in way)
    return None


def unknown_kind(graph: ir.Graph, ends: Sequence[ir.Value]) -> tuple[str, str]:
    """The kind of a head that is not known, if its parts show it, and the remedy."""
    known = "heads of YOLOv5, YOLOv8 and later, YOLOX, NanoDet, SSD, FCOS, RetinaNet and DETR are known; "
    regions = next((n for n in graph.all_nodes() if is_op(n, ("RoiAlign", "MaxRoiPool"))), None)
    if regions is not None:
        return f"it has two stages (Faster R-CNN), {described(regions)} cuts regions out: ", (
            known + "export one of them, or train on feature maps before the regions with a loss of your own"
        )
    shapes = [list(v.shape or ()) for v in ends]
    channels = sorted(s[1] for s in shapes if len(s) == 4 and isinstance(s[1], int))
    if len(ends) == 3 and channels.count(2) > 1 and len({str(s[2:]) for s in shapes}) == 1:
        return "a heat map beside sizes and offsets of centres (CenterNet): ", (
            known + "train the three maps with a loss of your own"
        )
    return "", known + "others train with a loss of your own"

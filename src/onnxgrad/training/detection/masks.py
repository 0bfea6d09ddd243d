"""Masks of instances: sums of maps, weighted for each box and cut off at it (YOLACT, YOLOv8-seg).

A head with masks has a layer of weights for each level, and the maps are an output of the model. A pixel of the picture
belongs to an object where the sum, interpolated linearly, is above zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import ancestors
from onnxgrad.training.detection.head import Head, MapPart
from onnxgrad.training.detection.letterbox import Placement
from onnxgrad.training.metrics.boxes import Window


def with_masks(graph: ir.Graph, head: Head, others: Sequence[tuple[ir.Value, tuple[int, ...]]]) -> Head:
    """`head` with the weights of masks among `others`, if the model has maps for them.

    Args:
        graph: of the detector.
        head: of boxes.
        others: results of last layers that are neither classes nor boxes, with their shapes [channels, height, width].
    """
    for maps in graph.outputs:
        count = None if maps.shape is None or len(maps.shape) != 4 else maps.shape[1]
        before = set(ancestors(graph, [maps]))
        weights = {shape[1:]: value for value, shape in others if shape[0] == count and value.producer() not in before}
        levels = [
            replace(level, masks=MapPart(weights[level.shape].name or "", 0, count))
            for level in head.levels
            if isinstance(count, int) and level.shape in weights
        ]
        if len(levels) == len(head.levels):
            return replace(head, levels=tuple(levels), maps=maps.name or "")
    return head


@dataclass(frozen=True)
class InstanceMasks:
    """The masks of boxes in a picture, drawn when they are asked for.

    Attributes:
        weights: [k, c].
        maps: [c, h, w].
        boxes: [k, 4] in pixels of the picture.
        placement: of the picture.
        canvas: (height, width) that the maps cover.
    """

    weights: np.ndarray
    maps: np.ndarray
    boxes: np.ndarray
    placement: Placement
    canvas: tuple[int, int]

    def __call__(self, k: int) -> Window:
        """The mask of the k-th box."""
        x1, y1, x2, y2 = np.ceil(self.boxes[k]).astype(int).tolist()
        rows, columns = (self._shares(1, y1, y2), self._shares(0, x1, x2))
        return y1, x1, rows @ np.tensordot(self.weights[k], self.maps, 1) @ columns.T > 0

    def _shares(self, axis: int, start: int, end: int) -> np.ndarray:
        """The shares of cells of the maps in pixels from `start` to `end` along x (0) or y (1), [pixels, cells]."""
        cells = self.maps.shape[2 - axis]
        pixels = (np.arange(start, end) + 0.5) * self.placement.scale[axis] + self.placement.offset[axis]
        at = np.clip(pixels * cells / self.canvas[1 - axis] - 0.5, 0, cells - 1)
        return np.maximum(1 - abs(at[:, None] - np.arange(cells)), 0)

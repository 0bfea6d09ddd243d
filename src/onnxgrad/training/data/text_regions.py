"""Maps of regions of text, which the loss ``db`` learns: polygons, shrunk, and thresholds near their borders."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from onnxgrad.errors import BadInput

#: The least and the largest threshold (Liao et al. 2020).
THRESHOLDS = (0.3, 0.7)


def text_regions(
    polygons: Sequence[np.ndarray], size: tuple[int, int], ratio: float = 0.4, ignored: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """The labels of a picture for the loss ``db``.

    A polygon of area A and perimeter L is shrunk by D = A·(1 - ratio²)/L, so that neighbours do not touch.

    Args:
        polygons: corners [n, 2] as x, y in pixels.
        size: (height, width) of the picture.
        ratio: see above.
        ignored: the places of polygons that are not learned, such as illegible text.

    Returns:
        Maps, float32 [height, width]: ``labels``, 1 in shrunk regions; ``labels_mask``, 0 where nothing is learned:
        in ignored regions, and in those that vanish; ``labels_threshold``, from 0.3 at the distance D of a border to
        0.7 on it; ``labels_threshold_mask``, 1 up to that distance.

    Raises:
        BadInput: a polygon has less than three corners, or numbers that are not finite.
    """
    names = ("labels", "labels_mask", "labels_threshold", "labels_threshold_mask")
    maps = {name: np.full(size, name == "labels_mask", np.float32) for name in names}
    for k, corners in enumerate(polygons):
        points = np.asarray(corners, np.float64)
        if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3 or not np.isfinite(points).all():
            raise BadInput(f"polygon {k} is no array [n, 2] of three or more finite points")
        after = np.roll(points, -1, axis=0)
        area = abs((points[:, 0] * after[:, 1] - points[:, 1] * after[:, 0]).sum()) / 2
        reach = area * (1 - ratio**2) / max(np.linalg.norm(after - points, axis=1).sum(), 1e-9)
        low = np.clip(np.floor(points.min(0) - reach - 1), 0, [size[1], size[0]]).astype(int)
        high = np.clip(np.ceil(points.max(0) + reach + 1), 0, [size[1], size[0]]).astype(int)
        place = (slice(low[1], high[1]), slice(low[0], high[0]))
        x, y = np.meshgrid(np.arange(low[0], high[0]) + 0.5, np.arange(low[1], high[1]) + 0.5)
        inside, distance = _inside(points, after, x, y), _distance(points, after, x, y)
        shrunk = inside & (distance >= reach)
        if k in ignored or not shrunk.any():
            maps["labels_mask"][place][inside] = 0
            continue
        maps["labels"][place][shrunk] = 1
        near = distance <= reach
        share = np.where(near, 1 - distance / reach, 0)
        maps["labels_threshold"][place] = np.maximum(maps["labels_threshold"][place], share)
        maps["labels_threshold_mask"][place][near | inside] = 1
    least, most = THRESHOLDS
    maps["labels_threshold"] = (least + (most - least) * maps["labels_threshold"]).astype(np.float32)
    return maps


def _inside(points: np.ndarray, after: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """True for the places with an odd number of edges to their right."""
    odd = np.zeros(x.shape, bool)
    for (x1, y1), (x2, y2) in zip(points, after):
        if y1 != y2:
            odd ^= ((y1 > y) != (y2 > y)) & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
    return odd


def _distance(points: np.ndarray, after: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The distance of each place from the nearest edge."""
    nearest = np.full(x.shape, np.inf)
    for (x1, y1), (x2, y2) in zip(points, after):
        dx, dy = x2 - x1, y2 - y1
        along = np.clip(((x - x1) * dx + (y - y1) * dy) / max(dx * dx + dy * dy, 1e-12), 0, 1)
        nearest = np.minimum(nearest, np.hypot(x - x1 - along * dx, y - y1 - along * dy))
    return nearest

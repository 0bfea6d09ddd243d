"""Outlines of objects, drawn: COCO's polygons and run-length codes as the pixels that pycocotools makes of them.

A polygon is walked in steps of a fifth of a pixel; where the walk passes from one column of pixels to the next, the
pixels below that place change sides. A run-length code has the lengths of runs of zeros and ones, column by column;
a compressed one writes each as a difference, in groups of five bits, as the C library of COCO does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput

#: The number of steps of the finer grid in a pixel.
_SCALE = 5
#: The farthest corner, in pixels.
_FARTHEST = 1e6


def draw_outline(outline: Any, size: tuple[int, int], place: str) -> np.ndarray:
    """The pixels of an object.

    Args:
        outline: polygons, each a list of x, y, x, y, …; or a run-length code, ``{"size": [h, w], "counts": …}``.
        size: (width, height) of the picture.
        place: the annotation in messages.

    Returns:
        bool [height, width].

    Raises:
        BadInput: it is neither, or a code is of another size.
    """
    width, height = size
    if isinstance(outline, Mapping):
        if list(outline.get("size", ())) != [height, width]:
            raise BadInput(f"{place} has a mask of the size {outline.get('size')}; its picture has {[height, width]}")
        return _of_runs(_runs(outline.get("counts"), place), width, height, place)
    if not isinstance(outline, (list, tuple)) or not outline:
        raise BadInput(f"{place} has no outline, polygons or a run-length code\n  hint: --task detection learns boxes")
    found = np.zeros((height, width), bool)
    for polygon in outline:
        try:
            corners = np.asarray(polygon, np.float64)
        except (TypeError, ValueError):
            corners = np.zeros(0)
        if corners.ndim != 1 or len(corners) < 6 or len(corners) % 2 or not (abs(corners) < _FARTHEST).all():
            raise BadInput(f"{place} has a polygon that is no x, y of three or more corners: {str(polygon)[:60]}")
        found |= _of_polygon(corners.reshape(-1, 2), width, height)
    return found


def _of_polygon(corners: np.ndarray, width: int, height: int) -> np.ndarray:
    x, y = np.trunc(_SCALE * corners.T + 0.5).astype(np.int64)
    columns, rows = [], []
    for xs, ys, xe, ye in zip(x.tolist(), y.tolist(), np.roll(x, -1).tolist(), np.roll(y, -1).tolist()):
        dx, dy = abs(xe - xs), abs(ye - ys)
        steps = np.arange(max(dx, dy) + 1)
        is_flipped = (dx >= dy and xs > xe) or (dx < dy and ys > ye)
        if is_flipped:
            xs, ys, xe, ye = xe, ye, xs, ys
        if dx >= dy:
            u, v = xs + steps, np.trunc(ys + ((ye - ys) / dx if dx else 0.0) * steps + 0.5).astype(np.int64)
        else:
            u, v = np.trunc(xs + (xe - xs) / dy * steps + 0.5).astype(np.int64), ys + steps
        columns.append(u[::-1] if is_flipped else u)
        rows.append(v[::-1] if is_flipped else v)
    u, v = np.concatenate(columns), np.concatenate(rows)
    passes = u[1:] != u[:-1]
    at = (np.where(u[1:] < u[:-1], u[1:], u[1:] - 1)[passes] + 0.5) / _SCALE - 0.5
    down = np.ceil(np.clip((np.minimum(v[1:], v[:-1])[passes] + 0.5) / _SCALE - 0.5, 0, height))
    kept = (np.floor(at) == at) & (at >= 0) & (at <= width - 1)
    changes = at[kept].astype(np.int64) * height + down[kept].astype(np.int64)
    sides = np.cumsum(np.bincount(changes, minlength=width * height)[: width * height]) % 2
    return sides.reshape(width, height).T.astype(bool)


def _of_runs(runs: Sequence[int], width: int, height: int, place: str) -> np.ndarray:
    lengths = np.asarray(runs, np.int64)
    if (lengths < 0).any() or lengths.sum() != width * height:
        raise BadInput(f"{place} has a run-length code that does not fill {width} × {height} pixels")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(width, height).T


def _runs(counts: Any, place: str) -> list[int]:
    """The lengths of runs, from a list of them or a compressed text."""
    if isinstance(counts, list) and all(isinstance(n, int) for n in counts):
        return counts
    if not isinstance(counts, (str, bytes)):
        raise BadInput(f"{place} has a run-length code without counts")
    found: list[int] = []
    number = shift = 0
    for byte in counts.encode() if isinstance(counts, str) else counts:
        bits = byte - 48
        if not 0 <= bits < 64 or shift > 30:
            raise BadInput(f"{place} has a run-length code that is damaged")
        number |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            number -= (bits & 16) << 1 << (shift - 5)
            found.append(number + (found[-2] if len(found) > 2 else 0))
            number = shift = 0
    if shift:
        raise BadInput(f"{place} has a run-length code that is cut off")
    return found

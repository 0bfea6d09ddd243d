"""Drawings of boxes: predictions beside labels on pictures, and curves of precision over recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.figures import drawing, plain, png
from onnxgrad.training.data.images import load_pillow
from onnxgrad.training.metrics.boxes import RECALLS, SHOWN, Detections

#: Colours of labels and of predictions.
LABELLED, PREDICTED = (40, 200, 40), (255, 120, 0)
#: The most classes that have a curve each.
CURVES = 12
#: The longer side of a picture with boxes.
SIDE = 320


def draw_boxes(sample: Mapping[str, Any], found: Detections, names: Sequence[str]) -> np.ndarray:
    """The picture of a sample with its labels in green, and the boxes from the score `SHOWN` on in orange.

    Returns:
        uint8 [H, W, 3], with a longer side of `SIDE`.
    """
    image = load_pillow()
    from PIL import ImageDraw

    picture = image.fromarray(np.asarray(sample["image"]))
    scale = SIDE / max(picture.size)
    picture = picture.resize([max(1, round(s * scale)) for s in picture.size], image.Resampling.BILINEAR)
    canvas = ImageDraw.Draw(picture)
    for box, label in zip(sample["boxes"], sample["labels"]):
        canvas.rectangle([float(v) * scale for v in box], outline=LABELLED, width=2)
        _write(canvas, (box[0] * scale, box[3] * scale - 12), names[label], LABELLED)
    for k in np.flatnonzero(np.asarray(found.scores) >= SHOWN)[::-1]:
        box = found.boxes[k]
        canvas.rectangle([float(v) * scale for v in box], outline=PREDICTED, width=2)
        text = f"{names[int(found.labels[k])]} {found.scores[k]:.2f}"
        _write(canvas, (box[0] * scale, box[1] * scale), text, PREDICTED)
    return np.asarray(picture, np.uint8)


def _write(canvas: Any, place: tuple[float, float], text: str, color: tuple[int, int, int]) -> None:
    """Write `text` on a ground of its colour."""
    shown = plain(text, 24)
    canvas.rectangle(canvas.textbbox(place, shown), fill=color)
    canvas.text(place, shown, fill=(0, 0, 0))


def boxes_picture(pictures: Sequence[tuple[str, np.ndarray]]) -> bytes | None:
    """A PNG file of pictures with their titles, three in a row; None without any."""
    if not pictures:
        return None
    columns = min(3, len(pictures))
    rows = -(-len(pictures) // columns)
    with drawing() as new_figure:
        figure = new_figure(figsize=(3.4 * columns, 3.2 * rows))
        for k, (title, pixels) in enumerate(pictures):
            axis = figure.add_subplot(rows, columns, k + 1)
            axis.imshow(pixels)
            axis.set_axis_off()
            axis.set_title(plain(title), fontsize=8)
        return png(figure)


def curves_picture(curves: Mapping[str, np.ndarray]) -> bytes | None:
    """A PNG file of precision over recall at the IoU 0.5, of each class and their mean; None without classes."""
    if not curves:
        return None
    with drawing() as new_figure:
        figure = new_figure(figsize=(5, 4))
        axis = figure.add_subplot()
        for name, precision in list(curves.items())[:CURVES]:
            axis.plot(RECALLS, precision, linewidth=1, label=f"{plain(name, 24)} {np.mean(precision):.3f}")
        mean = np.mean(list(curves.values()), axis=0)
        axis.plot(RECALLS, mean, color="black", linewidth=2, label=f"all {mean.mean():.3f}")
        axis.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
        axis.legend(fontsize=7)
        return png(figure)

"""Images for the report of a run: the confusion matrix, and the rows with the largest losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import not_none
from onnxgrad.runtime import Options
from onnxgrad.training.data import Data
from onnxgrad.training.detection.feeds import DetectionFeed
from onnxgrad.training.detection.pictures import boxes_picture, curves_picture
from onnxgrad.training.detection.predict import Detector
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.html_report import Picture, write_report
from onnxgrad.training.loop.run import Run
from onnxgrad.training.measure.detections import compare_boxes, feed_of
from onnxgrad.training.measure.evaluate import evaluate_rows, prediction_of
from onnxgrad.training.measure.misses import confusion_picture, misses_picture
from onnxgrad.training.optim.averages import with_averages

#: Rows that are shown.
WORST = 12


def report_pictures(model: ir.Model, held_out: Data | None, options: Options | None = None) -> list[Picture]:
    """Images of the predictions of `model` on `held_out`; empty unless each row has one label."""
    if held_out is not None and (feed := feed_of(held_out)) is not None:
        return _pictures_of_boxes(Detector(model, options=options), feed)
    labels = [] if held_out is None else [f.name for f in held_out.fields if f.label]
    if held_out is None or len(labels) != 1:
        return []
    try:
        found = evaluate_rows(model, held_out, labels[0], prediction_of(model, None), options=options, worst=WORST)
    except BadInput:  # it compares nothing that a picture could show
        return []
    drawn = [(f"The {WORST} rows that the model is most wrong about", misses_picture(found.worst or []))]
    if found.confusion is not None:
        drawn.append(("Confusion matrix", confusion_picture(found.confusion, found.names)))
    return [Picture(f"{title} (validation data)", png) for title, png in drawn if png is not None]


def _pictures_of_boxes(detector: Detector, feed: DetectionFeed) -> list[Picture]:
    """Predictions beside labels, curves and the confusion matrix of the pictures of `feed`."""
    found = compare_boxes(detector, feed.data, worst=WORST, shown=WORST)
    drawn_rows = ((m, m.image) for m in not_none(found.worst) if m.image is not None)
    worst = [(f"row {m.row}: {m.loss:g} errors", np.moveaxis(image, 0, -1)) for m, image in drawn_rows]
    drawn = [
        ("Predictions (orange) beside labels (green)", boxes_picture(found.pictures)),
        (f"The {len(worst)} pictures with the most errors", boxes_picture(worst)),
        ("Precision over recall at the IoU 0.5", curves_picture(not_none(found.curves))),
        ("Confusion matrix", confusion_picture(not_none(found.confusion), found.names)),
    ]
    return [Picture(f"{title} (validation data)", png) for title, png in drawn if png is not None]


class WritesReport(Callback):
    """Writes the report of a run to `path` at its end, as one HTML file."""

    is_told_once = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self, run: Run) -> None:
        """Write it."""
        pictures: list[Picture] = []
        if run.validation is not None and run.step.source is not None:
            model = run.step.inference_model(with_averages(run.step.source, run.inference_state()))
            pictures = report_pictures(model, run.validation)
        write_report(run.history, self.path, pictures=pictures)

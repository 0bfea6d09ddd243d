"""The task detection: a detector in, the same detector for other classes out, with the loss that trains it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.data.annotations.samples import DetectionData
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.batch import open_batch
from onnxgrad.training.detection.classes import with_classes
from onnxgrad.training.detection.feeds import DetectionFeed
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.letterbox import Letterbox, learned
from onnxgrad.training.detection.losses import detection_loss, labels_of
from onnxgrad.training.detection.probe import picture_input, stored_names
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.detection.unfold import unfold
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.metadata import CLASSES, DETECTOR, read_entry
from onnxgrad.wording import name_list

#: Means and deviations of ImageNet, of pictures from 0 to 1.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: The number of pictures that statistics of BatchNormalization are taken of.
_PICTURES = 64


@dataclass
class DetectionTask:
    """A detector with the loss that trains it.

    Attributes:
        model: of the classes that are learned.
        head: of it.
        names: the classes.
        letterbox: the preparation of pictures.
        loss: a term of the objective.
        notes: lines about the changes of the model.
    """

    model: ir.Model
    head: Head
    names: tuple[str, ...]
    letterbox: Letterbox
    loss: Loss
    notes: list[str]

    @classmethod
    def of(
        cls, model: AnyModel, data: DetectionData, recipe: DetectionRecipe, preparation: PreparationRecipe
    ) -> DetectionTask:
        """The task of `model` on `data`.

        Raises:
            BadInput: the head is not known, or a setting does not fit.
        """
        opened = open_model(model).model
        own_tensors(opened)  # before layers get new rows, whose initializers would say that Constants are no weights
        head = find_head(opened, recipe.image_size, model, recipe.place_offset)
        notes = [head.text]
        letterbox = letterbox_of(opened, head, preparation)
        if (note := open_batch(opened, head)) != "":
            notes.append(note)
        old = stored_names(opened, head.classes)
        head, changes = with_classes(opened, head, data.names, old)
        notes += changes
        notes += [*data.notes, *_left_out(data, letterbox)]
        if recipe.unfold_bn:
            feed = DetectionFeed(data, letterbox, head.image)
            rows = np.linspace(0, len(data) - 1, min(_PICTURES, len(data))).astype(int)
            notes.append(unfold(opened, feed(np.unique(rows))[head.image], head.image))
        for key in ("names", "character"):
            opened.metadata_props.pop(key, None)
        opened.metadata_props[CLASSES] = json.dumps(list(data.names))
        opened.metadata_props[DETECTOR] = json.dumps(
            {"letterbox": letterbox.to_json(), "place_offset": head.offset if head.kind == "dfl" else None}
        )
        for name, value in list(opened.graph.initializers.items()):  # of old classes, and shapes of one picture
            if not value.uses() and not value.is_graph_output():
                del opened.graph.initializers[name]
        loss = Loss(detection_loss(opened, head, recipe.box_loss))
        return cls(opened, head, tuple(data.names), letterbox, loss, notes)

    def columns(self, data: DetectionData) -> dict[str, Column]:
        """The inputs of the step for `data`."""
        last = picture_input(self.model.graph).shape
        channels_last = last is not None and last[3] == 3 and last[1] != 3
        labels = labels_of(self.model)
        return DetectionFeed(data, self.letterbox, self.head.image, labels, channels_last=channels_last).columns()


def _left_out(data: DetectionData, letterbox: Letterbox) -> list[str]:
    """A line about boxes that are too small to be learned. Raises BadInput if no box is learned."""
    own, kept = int(data.counts.sum()), 0
    for row in data.rows:
        boxes = letterbox.place(row.size).to_canvas(row.boxes)
        kept += len(learned(boxes, row.labels, row.crowd, letterbox))
    empty = [n for n, count in zip(data.names, data.counts) if not count]
    if not kept:
        small = f"; {own} are smaller than a pixel of {letterbox.width}x{letterbox.height}" if own else ""
        of = f", of {name_list(data.names)}" if data.names else ""
        raise BadInput(f"{data.source} has no boxes to learn{of}{small}")
    notes = [f"no boxes of {name_list(empty)}"] if empty else []
    if own == kept:
        return notes
    return [
        *notes,
        f"{own - kept} of {own} boxes are smaller than a pixel of {letterbox.width}x{letterbox.height}, not learned",
    ]


def letterbox_of(model: ir.Model, head: Head, preparation: PreparationRecipe = PreparationRecipe()) -> Letterbox:
    """The preparation of pictures: as the model notes, as `preparation` says, or as the authors of its head do it.

    Raises:
        BadInput: a note of the model is damaged, or is of another size.
    """
    noted = read_entry(model.metadata_props, DETECTOR, lambda about: Letterbox.of(about["letterbox"]))
    found = replace(noted or Letterbox(*head.size, **_usual(head)), height=head.size[0], width=head.size[1])
    mean, std = _numbers(preparation.image_mean), _numbers(preparation.image_std)
    return replace(found, mean=found.mean if mean is None else mean, std=found.std if std is None else std)


def _numbers(given: Any) -> tuple[float, ...] | None:
    return None if given is None else tuple(map(float, given if isinstance(given, Sequence) else (given,)))


def _usual(head: Head) -> dict[str, Any]:
    """The preparation that the authors of a head train with."""
    if head.kind == "yolox":
        return {"centered": False, "bgr": True, "std": (1 / 255,)}
    if head.kind == "detr" or (head.kind == "dfl" and head.bins == 8):
        return {"keep_ratio": False, "mean": _MEAN, "std": _STD}
    return {"keep_ratio": head.kind not in ("ssd", "retinanet")}


def open_task(
    model: AnyModel, data: Any, validation: Any, recipe: DetectionRecipe, preparation: PreparationRecipe
) -> tuple[DetectionTask, dict[str, Column], Any]:
    """The task of `model`, and the columns of its training and validation data.

    Args:
        model: a detector.
        data: a path, or opened data.
        validation: likewise, or None; it is read with the classes of `data`.
        recipe: of the task.
        preparation: of pictures.

    Raises:
        BadInput: as `find_head` and `read_detection`.
    """
    learned = read_detection(data, recipe.names or None)
    task = DetectionTask.of(model, learned, recipe, preparation)
    held_out = None if validation is None else task.columns(read_detection(validation, learned.names, "val"))
    return task, task.columns(learned), held_out

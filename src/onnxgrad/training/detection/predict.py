"""A detector as a function of pictures: raw values, decoded, and of boxes on the same object only the best.

Boxes are decoded from the raw values that training reads; the nodes that follow them in the file are not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.ir.graph import named_values, prune
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.batch import open_batch
from onnxgrad.training.detection.boxes import decode
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.letterbox import Placement
from onnxgrad.training.detection.probe import picture_input, stored_names
from onnxgrad.training.detection.task import letterbox_of
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.training.metrics.boxes import Detections, overlaps

#: The opset of the decoding.
OPSET = 21
#: The least score of a box.
LEAST = 0.001
#: The overlap from which on two boxes of a class are of the same object.
SAME = 0.7
#: The most boxes of a picture, before and after those of the same object are removed.
CANDIDATES, MOST = 3000, 300


class BoxDecoder:
    """The boxes of raw values of a head, of which the best on each object are kept.

    Args:
        head: of the detector.
        values: the raw values, with their types and shapes.
        options: how ONNX Runtime runs the decoding.
    """

    def __init__(self, head: Head, values: Mapping[str, ir.Value], options: Options | None = None) -> None:
        self.head = head
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="boxes")
        builder = Builder(graph)
        raw = {}
        for name in head.values:
            like = values[name]
            assert like.shape is not None
            value = ir.Value(name=name, type=like.type, shape=ir.Shape(["N", *list(like.shape)[1:]]))
            graph.inputs.append(value)
            raw[name] = builder.var(value)
        found = decode(builder, head, raw)
        self._outputs = [found.boxes.value, found.probabilities(builder, head).value]
        graph.outputs.extend(self._outputs)
        prune(graph)
        self._session = Session(ir.Model(graph, ir_version=10), options or Options())

    def __call__(self, values: Mapping[str, np.ndarray], placements: Sequence[Placement | None]) -> list[Detections]:
        """The boxes in each picture of a batch.

        Args:
            values: the raw values by name.
            placements: the place of each picture on its canvas; None: boxes are in pixels of the canvas.
        """
        results = self._session.run({name: values[name] for name in self._session.inputs})
        boxes, shares = (results[v.name or ""] for v in self._outputs)
        return [self._keep_best(b, s, p) for b, s, p in zip(boxes, shares, placements)]

    def _keep_best(self, boxes: np.ndarray, shares: np.ndarray, placement: Placement | None) -> Detections:
        """The boxes [A, 4] with probabilities [A, classes] that are kept, in pixels of the picture."""
        rows, labels = np.nonzero(shares >= LEAST)
        scores = shares[rows, labels]
        order = np.argsort(-scores, kind="stable")[:CANDIDATES]
        rows, labels, scores = rows[order], labels[order], scores[order]
        corners = boxes[rows].astype(np.float64)
        if not (self.head.one_to_one or self.head.kind == "detr"):
            kept = suppress(corners, labels)
            corners, labels, scores = corners[kept], labels[kept], scores[kept]
        corners, labels, scores = corners[:MOST], labels[:MOST], scores[:MOST]
        return Detections(corners if placement is None else placement.to_picture(corners), scores, labels)


class Detector:
    """A detector, run by ONNX Runtime.

    Args:
        model: with a head that `find_head` knows.
        preparation: mean and deviation of pictures; default: those that the model notes.
        image_size: width and height of pictures, where the model leaves them open.
        options: how ONNX Runtime runs it.

    Attributes:
        head: of the model.
        letterbox: the preparation of its pictures.
        names: of the classes, if the model has them.

    Raises:
        BadInput: the head is not known.
    """

    def __init__(
        self,
        model: AnyModel,
        preparation: PreparationRecipe | None = None,
        image_size: int | None = None,
        options: Options | None = None,
    ) -> None:
        opened = open_model(model).model
        self.head = find_head(opened, image_size or noted_side(opened), model)
        self.letterbox = letterbox_of(opened, self.head, preparation or PreparationRecipe())
        self.names = stored_names(opened, self.head.classes)
        open_batch(opened, self.head)
        image = picture_input(opened.graph)
        assert image.shape is not None
        self._last = image.shape[3] == 3 and image.shape[1] != 3
        self._batch = image.shape[0] if isinstance(image.shape[0], int) else None
        named = named_values(opened.graph)
        self._decoder = BoxDecoder(self.head, named, options)
        opened.graph.outputs[:] = [named[name] for name in self.head.values]
        prune(opened.graph)
        opened.graph.inputs[:] = [
            v for v in opened.graph.inputs if v is image or v.uses()
        ]  # sizes that the ending reads
        self._session = Session(opened, options or Options())

    def __call__(self, pictures: Sequence[np.ndarray]) -> list[Detections]:
        """The boxes in each of `pictures`, uint8 [H, W, 3]."""
        drawn = [self.letterbox.draw(p) for p in pictures]
        arrays = np.stack([self.letterbox.to_array(pixels, self._last) for pixels, _ in drawn])
        size = self._batch or len(arrays)
        found: list[Detections] = []
        for start in range(0, len(arrays), size):
            part = arrays[start : start + size]
            fed = part if len(part) == size else np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
            values = self._session.run({self.head.image: fed})
            found += self._decoder(values, [placement for _, placement in drawn[start : start + size]])
        return found


def suppress(boxes: np.ndarray, labels: np.ndarray, same: float = SAME) -> np.ndarray:
    """The places of `boxes`, sorted by score, that no better one of the same label overlaps by more than `same`."""
    kept = []
    left = np.arange(len(boxes))
    while len(left):
        first, left = left[0], left[1:]
        kept.append(first)
        other = labels[left] != labels[first]
        left = left[other | (overlaps(boxes[first : first + 1], boxes[left])[0] <= same)]
    return np.array(kept, np.int64)


def noted_side(model: ir.Model) -> int | None:
    """The side of the pictures that `model` was trained on, if the training notes a square."""
    try:
        noted = json.loads(model.metadata_props.get(DETECTOR, "{}")).get("letterbox", {})
        return int(noted["height"]) if noted["height"] == noted["width"] else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None

"""A detector as a function of pictures: raw values, decoded, and of boxes on the same object only the best.

Boxes are decoded from the raw values that training reads; the nodes that follow them in the file are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.ir.graph import named_values, prune
from onnxgrad.ir.match import not_none
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.batch import open_batch
from onnxgrad.training.detection.boxes import decode, rows_of
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.letterbox import Placement
from onnxgrad.training.detection.masks import InstanceMasks
from onnxgrad.training.detection.probe import picture_input, stored_names
from onnxgrad.training.detection.task import letterbox_of
from onnxgrad.training.metrics.boxes import Detections, overlaps

#: The opset of the decoding.
OPSET = 21
#: Scores of boxes are above.
LEAST = 0.001
#: The overlap from which on two boxes of a class are of the same object.
SAME = 0.7
#: The most boxes of a picture, before and after those of the same object are removed (Ultralytics).
CANDIDATES, MOST = 30000, 300


class BoxDecoder:
    """The boxes of raw values of a head, of which the best on each object are kept.

    Args:
        head: of the detector.
        values: the raw values, with their types and shapes.
        options: how ONNX Runtime runs the decoding.
        masks: masks are drawn as well, of further values.
    """

    def __init__(
        self, head: Head, values: Mapping[str, ir.Value], options: Options | None = None, masks: bool = False
    ) -> None:
        self.head, self.masks = head, masks
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="boxes")
        builder = Builder(graph)
        raw = {}
        for name in [*head.values, *(head.mask_values[1:] if masks else ())]:
            like = values[name]
            value = ir.Value(name=name, type=like.type, shape=ir.Shape(["N", *list(not_none(like.shape))[1:]]))
            graph.inputs.append(value)
            raw[name] = builder.var(value)
        found = decode(builder, head, raw)
        self._outputs = [found.boxes.value, found.probabilities(builder, head).value]
        parts = [level.masks for level in head.levels if masks and level.masks]
        if parts:
            self._outputs.append(builder.Concat(*(rows_of(builder, p, raw, 1) for p in parts), axis=1).value)
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
        boxes, shares, *weights = (results[v.name or ""] for v in self._outputs)
        found = []
        for k, placement in enumerate(placements):
            rows, labels, scores = choose_best(boxes[k], shares[k], self.head.one_to_one)
            corners = boxes[k][rows].astype(np.float64)
            corners = corners if placement is None else placement.to_picture(corners)
            masks = None
            if weights and placement is not None:
                maps = values[self.head.maps][k]
                masks = InstanceMasks(weights[0][k][rows], maps, corners, placement, self.head.size)
            found.append(Detections(corners, scores, labels, masks))
        return found


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
        self.head = find_head(opened, image_size, model)
        self.letterbox = letterbox_of(opened, self.head, preparation or PreparationRecipe())
        self.names = stored_names(opened, self.head.classes)
        open_batch(opened, self.head)
        image = picture_input(opened.graph)
        assert image.shape is not None
        self._last = image.shape[3] == 3 and image.shape[1] != 3
        self._batch = image.shape[0] if isinstance(image.shape[0], int) else None
        named = named_values(opened.graph)
        self._decoder = BoxDecoder(self.head, named, options, masks=bool(self.head.maps))
        opened.graph.outputs[:] = [named[name] for name in [*self.head.values, *self.head.mask_values]]
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


def choose_best(boxes: np.ndarray, shares: np.ndarray, one_to_one: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The predictions of a picture that are kept, the best first: their rows, labels and scores.

    Args:
        boxes: [A, 4].
        shares: probabilities [A, classes].
        one_to_one: each object has one prediction, and nothing is suppressed.
    """
    rows, labels = np.nonzero(shares > LEAST)
    scores = shares[rows, labels]
    order = np.argsort(-scores, kind="stable")[:CANDIDATES]
    if not one_to_one:
        order = order[suppress(boxes[rows[order]].astype(np.float64), labels[order], most=MOST)]
    order = order[:MOST]
    return rows[order], labels[order], scores[order]


def suppress(boxes: np.ndarray, labels: np.ndarray, same: float = SAME, most: int | None = None) -> np.ndarray:
    """The places of `boxes`, sorted by score, that no better one of the same label overlaps by more than `same`.

    Only the first `most` are computed.
    """
    kept: list[int] = []
    left = np.arange(len(boxes))
    while len(left) and len(kept) != most:
        first, left = left[0], left[1:]
        kept.append(first)
        other = labels[left] != labels[first]
        left = left[other | (overlaps(boxes[first : first + 1], boxes[left])[0] <= same)]
    return np.array(kept, np.int64)

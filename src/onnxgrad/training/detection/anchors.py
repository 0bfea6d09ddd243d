"""Anchors of a head, found in the graph: boxes that no picture changes, or sizes that a decoding multiplies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import ancestors
from onnxgrad.ir.match import constant
from onnxgrad.training.detection.head import Head, UnknownHead, nodes_behind
from onnxgrad.training.detection.probe import noise, run_values

#: The share by which a graph must resize pictures so that its anchors are scaled; maps are rounded up to whole places.
_RESIZED = 0.15


def find_anchors(model: ir.Model, head: Head) -> np.ndarray:
    """Anchors [A, 4] among the values of the graph that no picture changes.

    Raises:
        UnknownHead: there are none of this number.
    """
    counts = [level.shape[0] * level.shape[1] * level.anchors for level in head.levels]
    ends = {v for v in _values(model.graph) if v.name in head.values}
    tail = {v for n in nodes_behind(model.graph, list(ends)) for v in n.outputs}
    feeds = noise(model, 1, head.size)
    before = ancestors(model.graph, ends)
    floats = {v for n in model.graph for v in n.outputs if v.dtype == ir.DataType.FLOAT and v not in tail}
    floats -= {v for n in before for v in n.outputs}
    wanted = [v.name for v in floats if v.name and v.shape is not None and len(v.shape) in (2, 3)]
    found = list(run_values(model, wanted, feeds).values()) if wanted else []
    held = [t for v in model.graph.initializers.values() if (t := v.const_value) is not None]
    found += [t.numpy() for t in held if t.size == 4 * sum(counts) and t.dtype == ir.DataType.FLOAT]
    flat = [a.reshape(-1, 4) for a in found if a.size and a.shape[-1] == 4]
    whole = [a for a in flat if len(a) == sum(counts) and (a[:, 2:] > a[:, :2]).all()]
    if whole:
        return max(whole, key=lambda a: a.max()).astype(np.float32)
    parts = [[a for a in flat if len(a) == count and (a[:, 2:] > a[:, :2]).all()] for count in counts]
    if all(parts):
        return np.concatenate([max(p, key=lambda a: a.max()) for p in parts]).astype(np.float32)
    raise UnknownHead(f"the graph has no {sum(counts)} anchors, which decoding would need")


def centre_offset(model: ir.Model, head: Head) -> float | None:
    """The centre of a place, in places, by the grid with which the graph decodes distances; None if it does not."""
    ends = {v for v in _values(model.graph) if v.name in head.values}
    tail = nodes_behind(model.graph, list(ends))
    inside = {v for n in tail for v in n.outputs}
    read = {v for n in tail for v in n.inputs if v is not None and v not in inside and v not in ends and v.name}
    held = [t.numpy() for v in read if (t := v.const_value) is not None and t.dtype == ir.DataType.FLOAT]
    made = [v.name or "" for v in read if v.const_value is None and v.dtype == ir.DataType.FLOAT]
    held += list(run_values(model, made, noise(model, 1, head.size)).values()) if made else []
    stops = np.cumsum([level.shape[0] * level.shape[1] for level in head.levels])
    spans = [slice(0, stops[-1]), *(slice(start, stop) for start, stop in zip([0, *stops], stops))]
    rows = [r for array in held for r in _pairs(array)]
    for offset in (0.5, 0.0):
        wanted = [centres[span] for centres in _centres(head, offset) for span in spans]
        if any(len(w) > 1 and w.shape == r.shape and np.allclose(w, r, atol=1e-3) for w in wanted for r in rows):
            return offset
    return None


def usual_offset(model: ir.Model, head: Head) -> float:
    """The centre of a place, in places, of a file that does not decode its distances.

    NanoDet (three maps) and PicoDet (Paddle) have it at (i + 0.5) · stride; NanoDet-Plus, with four maps, has priors at
    i · stride (get_single_level_center_priors of its head). Its exporter calls the ends of a model data, output.

    Raises:
        UnknownHead: the file does not show which of them it is.
    """
    if head.bins != 8 or len(head.levels) < 4 or "paddle" in (model.producer_name or "").lower():
        return 0.5
    if "character" in model.metadata_props:  # which PaddleDetection's exports have
        return 0.5
    if [v.name for v in model.graph.outputs] != ["output"] or head.image != "data":
        raise UnknownHead(
            "its distances are from corners of places (NanoDet-Plus, place_offset 0) or from their middle (PicoDet, "
            "place_offset 0.5), which the file does not show; --place-offset says which"
        )
    return 0.0


def _pairs(array: np.ndarray) -> Iterator[np.ndarray]:
    """`array` as points [n, 2], if it is [..., n, 2], [..., n, 4] (the first two of each) or [..., 2, n]."""
    if array.ndim > 1 and array.shape[-1] in (2, 4):
        yield array.reshape(-1, array.shape[-1])[:, :2]
    if array.ndim > 1 and array.shape[-2] == 2:
        yield array.reshape(-1, 2, array.shape[-1])[0].T


def _centres(head: Head, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """Centres of all places, [A, 2], in pixels and in strides."""
    found = []
    for level, stride in zip(head.levels, head.strides):
        y, x = np.meshgrid(*(np.arange(n) + offset for n in level.shape), indexing="ij")
        found.append((np.stack([x, y], -1).reshape(-1, 2), stride))
    return np.concatenate([c * s for c, s in found]), np.concatenate([c for c, _ in found])


def in_pixels(anchors: np.ndarray, head: Head) -> np.ndarray:
    """Anchors in pixels of the input, where the graph resizes pictures: centres lie a stride apart."""
    level = head.levels[0]
    centres = (anchors[:, :2] + anchors[:, 2:])[: level.shape[0] * level.shape[1] * level.anchors] / 2
    x, y = (np.unique(np.round(centres[:, k], 2)) for k in (0, 1))
    if min(len(x), len(y)) < 2:
        return anchors
    inner = np.median(np.diff(x)) * level.shape[1], np.median(np.diff(y)) * level.shape[0]
    scale = np.array([head.size[1], head.size[0]]) / inner
    return anchors if np.abs(scale - 1).max() < _RESIZED else (anchors * np.tile(scale, 2)).astype(np.float32)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    return (v for node in graph for v in node.outputs)


#: Anchors of YOLOv5 and YOLOv7-tiny on COCO, for exports without decoding (Jocher 2020).
_YOLO5 = (((10, 13), (16, 30), (33, 23)), ((30, 61), (62, 45), (59, 119)), ((116, 90), (156, 198), (373, 326)))


def sizes_of_anchors(model: ir.Model, head: Head) -> np.ndarray:
    """Widths and heights [L, a, 2] of anchors: the decoded boxes of raw maps that are zero.

    A decoding is (2 · sigmoid)² · anchor, which is the anchor.
    """
    graph = model.graph
    levels, numbers = len(head.levels), head.levels[0].anchors
    counts = [level.shape[0] * level.shape[1] * level.anchors for level in head.levels]
    raw = {v for v in _values(graph) if v.name in head.values}
    tail = [v for n in nodes_behind(graph, list(raw)) for v in n.outputs if v.name and v.dtype == ir.DataType.FLOAT]
    at = [v.name or "" for v in tail if v.shape is not None and len(v.shape) == 3 and v.shape[-1] == 5 + head.classes]
    copy = model.clone()
    for node in copy.graph:
        for value in node.outputs:
            if value.name in head.values:
                for k, held in enumerate(node.inputs[1:], 1):
                    zeros = ir.tensor(np.zeros_like(constant(held)), name=f"{value.name}_zero_{k}")
                    copy.graph.initializers[zeros.name or ""] = zero = ir.Value(name=zeros.name, const_value=zeros)
                    node.replace_input_with(k, zero)
    found = run_values(copy, at, noise(model, 1, head.size)) if at else {}
    whole = next((a[0] for a in reversed(list(found.values())) if a.shape[1] == sum(counts)), None)
    if whole is None:
        if levels == len(_YOLO5) and numbers == 3:
            return np.array(_YOLO5, np.float32)
        raise UnknownHead("it does not decode its boxes, whose anchors are not known")
    starts = np.cumsum([0, *counts[:-1]])
    rows = [[start + a * (c // numbers) for a in range(numbers)] for start, c in zip(starts, counts)]
    return whole[np.array(rows)][..., 2:4].astype(np.float32)

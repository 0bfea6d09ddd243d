"""Small detectors with the heads and endings of exporters, for one picture of 64 by 64 pixels."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.training.metadata import CLASSES

SIDE, STRIDES = 64, (8, 16)
KINDS = (
    "yolov8",
    "yolov8_nms",
    "yolov8_raw",
    "yolov10",
    "yolov10_plain",
    "yolov5",
    "yolox",
    "nanodet",
    "ssd",
    "fcos",
    "retinanet",
    "detr",
)
#: YOLOv8 with masks beside boxes, a graph that takes its picture out of the batch, as torchvision's transform, and
#: queries of the last of several layers, alone and with the choice of the best (RT-DETR).
OTHERS = ("yolov8_seg", "yolov8_pose", "ssd_unpacked", "detr_stack", "detr_post", "detr_chosen")
#: Anchors of YOLOv5 as widths and heights.
ANCHORS = np.float32([[[8, 10], [14, 12], [12, 24]], [[24, 20], [30, 44], [48, 32]]])


def detector(kind: str, names: list[str], seed: int = 0) -> ir.Model:
    """A detector with random weights, for the classes `names`."""
    return _Writer(kind, names, seed).model


class _Writer:
    """Writes one model."""

    def __init__(self, kind: str, names: list[str], seed: int) -> None:
        self.random = np.random.RandomState(seed)
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name=kind)
        self.model = ir.Model(graph, ir_version=10)
        self.model.metadata_props[CLASSES] = json.dumps(names)
        name = "data" if kind == "nanodet_plus" else "images"  # as NanoDet's own exporter calls it
        image = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 3, SIDE, SIDE]))
        graph.inputs.append(image)
        self.b, self.k = Builder(graph), len(names)
        x = self.unpacked(self.b.var(image)) if kind.endswith("_unpacked") else self.b.var(image)
        maps = []
        for channels in (8, 12, 16, 16):
            x = self.b.Relu(self.conv(x, channels, 3, 2))
            maps.append(x)
        self.maps = maps
        outputs = getattr(self, kind.partition("_")[0])(maps[2:], kind.partition("_")[2])
        for name, var in outputs.items():
            var.value.name = name
            graph.outputs.append(var.value)

    def conv(self, x: Var, channels: int, size: int = 1, stride: int = 1) -> Var:
        """A convolution with a bias."""
        inner = x.dims[1]
        weight = self.random.standard_normal((channels, inner, size, size)) * np.sqrt(2 / (inner * size * size))
        bias = self.b.const((0.01 * self.random.standard_normal(channels)).astype(np.float32))
        pads = [size // 2] * 4
        return self.b.Conv(x, self.b.const(weight.astype(np.float32)), bias, pads=pads, strides=[stride] * 2)

    def unpacked(self, x: Var) -> Var:
        """The only picture, taken out of its batch, shifted, padded and put back, with sizes traced for one."""
        b = self.b
        first = b.Squeeze(b.Split(x, [1], axis=0, outputs=1), [0])
        whole = b.Unsqueeze(first - b.const(np.full((3, 1, 1), 0.5, np.float32)), [0])
        like = b.Concat(np.array([1, 3]), b.Slice(b.Shape(whole), [2], [4], [0]), axis=0)
        whole = b.Resize(whole, None, None, like, mode="linear")
        padded = b.Pad(b.Gather(whole, np.array(0), axis=0), np.array([0, 0, 0, 0, 0, 0]))
        return b.Concat(b.Unsqueeze(padded, [0]), axis=0)

    def places(self, offset: float) -> tuple[np.ndarray, np.ndarray]:
        """Centres [2, A] in places, and strides [1, A]."""
        centres, strides = [], []
        for s in STRIDES:
            y, x = np.meshgrid(*[np.arange(SIDE // s) + offset] * 2, indexing="ij")
            centres.append(np.stack([x.ravel(), y.ravel()]))
            strides.append(np.full((1, x.size), s))
        return np.concatenate(centres, 1).astype(np.float32), np.concatenate(strides, 1).astype(np.float32)

    def yolov8(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """Distributions and classes, decoded as Ultralytics does, with or without suppression."""
        b, k = self.b, self.k
        wide = 4 if ending.startswith("plain") else 64
        joined = [b.Concat(self.conv(m, wide), self.conv(m, k), axis=1) for m in maps]
        flat = b.Concat(*(b.Reshape(j, [1, wide + k, -1]) for j in joined), axis=2)
        if ending == "raw":
            return {"output0": flat}
        sides, scores = b.Split(flat, [wide, k], axis=1, outputs=2)
        count = sum((SIDE // s) ** 2 for s in STRIDES)
        if wide != 4:
            shares = b.Softmax(b.Transpose(b.Reshape(sides, [1, 4, 16, count]), perm=[0, 2, 1, 3]), axis=1)
            sides = b.Conv(shares, b.const(np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)))
            sides = b.Reshape(sides, [1, 4, count])
        centres, strides = self.places(0.5)
        low = b.const(centres[None]) - b.Slice(sides, [0], [2], [1])
        high = b.const(centres[None]) + b.Slice(sides, [2], [4], [1])
        centre = b.Mul(low + high, 0.5)
        decoded = b.Concat(centre, high - low, axis=1) * b.const(strides[None])
        scores = b.Sigmoid(scores)
        if ending in ("seg", "pose", "plainseg"):
            beside = [b.Reshape(self.conv(m, 6), [1, 6, -1]) for m in maps]
            found = b.Concat(b.Concat(decoded, scores, axis=1), b.Concat(*beside, axis=2), axis=1)
            return {"output0": found} | ({"protos": self.conv(maps[0], 6, 3)} if ending.endswith("seg") else {})
        if ending != "nms":
            return {"output0": b.Concat(decoded, scores, axis=1)}
        rows = b.Transpose(decoded, perm=[0, 2, 1])
        chosen = b.NonMaxSuppression(
            rows, scores, np.array([20]), np.float32([0.5]), np.float32([0.01]), center_point_box=1
        )
        return {"chosen": chosen, "boxes": rows, "scores": scores}

    def yolov10(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """The best 20 of all classes, and no suppression; with ``plain``, distances without distributions (YOLO26)."""
        b, k = self.b, self.k
        found = self.yolov8(maps, ending)["output0"]
        rows = b.Transpose(found, perm=[0, 2, 1])
        flat = b.Reshape(b.Slice(rows, [4], [4 + k], [2]), [1, -1])
        scores, places = b.TopK(flat, np.array([20]), outputs=2)
        label, row = b.Mod(places, np.array(k)), b.Div(places, np.array(k))
        boxes = b.GatherElements(rows, b.Expand(b.Unsqueeze(row, [2]), np.array([1, 20, 4])), axis=1)
        last = b.Concat(b.Unsqueeze(scores, [2]), b.Unsqueeze(b.Cast(label, to=1), [2]), axis=2)
        return {"output0": b.Concat(boxes, last, axis=2)}

    def yolov5(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """Three anchors for each place, decoded."""
        b, parts = self.b, []
        for m, s, anchors in zip(maps, STRIDES, ANCHORS):
            side = SIDE // s
            x = b.Reshape(self.conv(m, 3 * (5 + self.k)), [1, 3, 5 + self.k, side, side])
            y = b.Sigmoid(b.Transpose(x, perm=[0, 1, 3, 4, 2]))
            centre, size, others = b.Split(y, [2, 2, 1 + self.k], axis=4, outputs=3)
            grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1)[None, None].astype(np.float32) - 0.5
            centre = b.Mul(b.Mul(centre, 2.0) + b.const(grid), float(s))
            size = b.Mul(size, 2.0) ** 2.0 * b.const(anchors.reshape(1, 3, 1, 1, 2))
            parts.append(b.Reshape(b.Concat(centre, size, others, axis=4), [1, 3 * side * side, 5 + self.k]))
        return {"output": b.Concat(*parts, axis=1)}

    def yolox(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """Boxes, objectness and classes, not decoded."""
        b, parts = self.b, []
        for m in maps:
            each = [self.conv(m, 4), b.Sigmoid(self.conv(m, 1)), b.Sigmoid(self.conv(m, self.k))]
            parts.append(b.Reshape(b.Concat(*each, axis=1), [1, 5 + self.k, -1]))
        return {"output": b.Transpose(b.Concat(*parts, axis=2), perm=[0, 2, 1])}

    def nanodet(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """Classes beside distributions in one layer: of four maps joined (``plus``), or with outputs for each."""
        b, parts = self.b, {}
        for k, m in enumerate(self.maps if ending else maps):
            scores, boxes = b.Split(self.conv(m, self.k + 32), [self.k, 32], axis=1, outputs=2)
            parts |= {f"scores_{k}": b.Sigmoid(scores), f"distances_{k}": boxes}
        if ending == "apart":
            return parts
        every = list(parts.values())
        rows = [b.Reshape(b.Concat(*every[k : k + 2], axis=1), [1, self.k + 32, -1]) for k in range(0, len(every), 2)]
        return {"output": b.Transpose(b.Concat(*rows, axis=2), perm=[0, 2, 1])}

    def anchors(self) -> np.ndarray:
        """Three anchors for each place, x1, y1, x2, y2."""
        found = []
        for s in STRIDES:
            y, x = np.meshgrid(*[(np.arange(SIDE // s) + 0.5) * s] * 2, indexing="ij")
            centres, half = np.stack([x, y], -1).reshape(-1, 1, 2), np.array([[1, 1], [1.5, 1], [1, 1.5]]) * s
            found.append(np.concatenate([centres - half, centres + half], -1).reshape(-1, 4))
        return np.concatenate(found).astype(np.float32)

    def anchored(self, maps: list[Var], count: int, softmax: bool) -> dict[str, Var]:
        """Classes and offsets for anchors, decoded."""
        b, flat = self.b, []
        for each in (4, count):
            parts = []
            for m, s in zip(maps, STRIDES):
                side = SIDE // s
                apart = b.Reshape(self.conv(m, 3 * each), [1, 3, each, side, side])
                parts.append(b.Reshape(b.Transpose(apart, perm=[0, 3, 4, 1, 2]), [1, -1, each]))
            flat.append(b.Concat(*parts, axis=1))
        encoded, scores = flat
        anchors = b.const(self.anchors()[None])
        size = b.Slice(anchors, [2], [4], [2]) - b.Slice(anchors, [0], [2], [2])
        scale = np.float32([0.1, 0.1, 0.2, 0.2] if softmax else [1, 1, 1, 1])
        scaled = encoded * b.const(scale)
        centre = b.Slice(scaled, [0], [2], [2]) * size + b.Slice(anchors, [0], [2], [2]) + b.Mul(size, 0.5)
        half = b.Mul(b.Exp(b.Slice(scaled, [2], [4], [2])) * size, 0.5)
        return {
            "boxes": b.Concat(centre - half, centre + half, axis=2),
            "scores": b.Softmax(scores, axis=2) if softmax else b.Sigmoid(scores),
        }

    def ssd(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """SSD, with a background."""
        return self.anchored(maps, 1 + self.k, softmax=True)

    def fcos(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """FCOS: distances behind Relu from squares whose centres are at corners of places (torchvision)."""
        b = self.b
        parts: list[list[Var]] = [[], [], []]
        for m in maps:
            tower = b.Relu(self.conv(m, 16))
            layers = (self.conv(m, self.k), b.Relu(self.conv(tower, 4)), self.conv(tower, 1))
            for part, layer in zip(parts, layers):
                part.append(b.Transpose(b.Reshape(layer, [1, layer.dims[1], -1]), perm=[0, 2, 1]))
        scores, sides, inner = (b.Concat(*part, axis=1) for part in parts)
        centres, strides = self.places(0.0)
        centre, size = (centres * strides).T[None], np.tile(strides.T[None], (1, 1, 2))
        anchors = b.const(np.concatenate([centre - size / 2, centre + size / 2], -1))
        size_of = b.Slice(anchors, [2], [4], [2]) - b.Slice(anchors, [0], [2], [2])
        middle = b.Mul(b.Slice(anchors, [0], [2], [2]) + b.Slice(anchors, [2], [4], [2]), 0.5)
        low = middle - b.Slice(sides, [0], [2], [2]) * size_of
        high = middle + b.Slice(sides, [2], [4], [2]) * size_of
        joint = b.Sqrt(b.Sigmoid(scores) * b.Sigmoid(inner))
        return {"boxes": b.Concat(low, high, axis=2), "scores": joint}

    def retinanet(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """RetinaNet."""
        return self.anchored(maps, self.k, softmax=False)

    def detr(self, maps: list[Var], ending: str) -> dict[str, Var]:
        """Queries: the places of the last map. ``stack`` picks the last of two layers, ``post`` the best of it.

        ``chosen`` begins with the best places.
        """
        b = self.b
        rows = b.Transpose(b.Reshape(maps[-1], [1, 16, -1]), perm=[0, 2, 1])
        if ending == "chosen":  # where the encoder scores most (RT-DETR)
            scored, _ = self.queries(rows, self.k)
            _, best = b.TopK(b.ReduceMax(scored, [2], keepdims=0), np.array([8]), axis=1, outputs=2)
            rows = b.GatherElements(rows, b.Expand(b.Unsqueeze(best, [2]), np.array([1, 8, 16])), axis=1)
            logits, boxes = self.queries(rows, self.k)
            return {"scores": b.Sigmoid(logits), "pred_boxes": boxes}
        if not ending:
            logits, boxes = self.queries(rows, self.k + 1)
            return {"logits": logits, "pred_boxes": boxes}
        rows = self.attention(rows) if ending == "stack" else rows
        layers = [self.queries(rows, self.k), self.queries(b.Tanh(rows), self.k)]
        if ending == "stack":  # a score of quality is added to those of all classes (D-FINE)
            layers = [(self.queries(boxes, 1)[0] + logits, boxes) for logits, boxes in layers]
        stacks = [b.Concat(*(b.Unsqueeze(v, [1]) for v in part), axis=1) for part in zip(*layers)]
        logits, boxes = (b.Gather(stack, np.array(-1), axis=1) for stack in stacks)
        scores = b.Sigmoid(logits)
        if ending == "stack":
            return {"scores": scores, "pred_boxes": boxes}
        sizes = ir.Value(name="sizes", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1, 2]))
        self.model.graph.inputs.append(sizes)
        best, places = b.TopK(b.Reshape(scores, [1, -1]), np.array([5]), outputs=2)
        row = b.Unsqueeze(b.Div(places, np.array(self.k)), [2])
        chosen = b.GatherElements(boxes, b.Expand(row, np.array([1, 5, 4])), axis=1)
        return {
            "labels": b.Mod(places, np.array(self.k)),
            "boxes": chosen * b.Cast(b.Concat(b.var(sizes), b.var(sizes), axis=1), to=1),
            "scores": best,
        }

    def attention(self, rows: Var) -> Var:
        """Two heads over `rows` and two tokens; pictures and heads share an axis, as in exports of PyTorch."""
        b = self.b
        tokens = b.const(self.random.standard_normal((1, 2, 16)).astype(np.float32))
        rows = b.Concat(tokens, rows, axis=1)
        count = rows.dims[1]
        apart = b.Transpose(b.Reshape(rows, [1, count, 2, 8]), perm=[0, 2, 1, 3])
        heads = b.Reshape(apart, [2, count, 8])
        found = b.MatMul(b.Softmax(b.MatMul(heads, b.Transpose(heads, perm=[0, 2, 1])), axis=-1), heads)
        found = b.Transpose(b.Reshape(found, [1, 2, count, 8]), perm=[0, 2, 1, 3])
        return b.Reshape(found, [1, count, 16])

    def queries(self, rows: Var, classes: int) -> tuple[Var, Var]:
        """Logits and boxes of queries [1, Q, 16]."""
        b, ends = self.b, []
        for count in (classes, 4):
            weight = b.const((0.1 * self.random.standard_normal((rows.dims[-1], count))).astype(np.float32))
            ends.append(b.MatMul(rows, weight) + b.const(np.zeros(count, np.float32)))
        return ends[0], b.Sigmoid(ends[1])

"""Losses of the original implementations on the cases of `raw_maps`; their results are the literals of `test_losses`.

The second line is of the gradient of their sum, see `projections`.

``python -m tests.training.detection.reference_losses KIND [FILE]``, in an environment with PyTorch and

- dfl, plain: ultralytics 8.4.190;
- yolox: yolox 0.3.0, on the path;
- yolo5: FILE, the folder ``yolov5/utils`` of the package yolov5 7.0.14;
- ssd, fcos, retinanet: torchvision 0.28.0;
- detr, deformable, rtdetr, dfine: transformers 5.23.0.

Ultralytics and YOLOv5 multiply the loss by the number of pictures; the results here are divided by it.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.training.detection.raw_maps import ANCHORS, CLASSES, COUNTS, QUERIES, SIZE, STRIDES, Case, case, projections

#: The raw maps of the case that is compared, whose gradients are compared as well.
LEAVES: dict[str, torch.Tensor] = {}


def tensors(c: Case) -> dict[str, torch.Tensor]:
    """The raw maps as tensors."""
    LEAVES.update({name: torch.tensor(array, requires_grad=True) for name, array in c.maps.items()})
    return dict(LEAVES)


#: Terms of a loss by name.
Terms = dict[str, torch.Tensor]


def rows(c: Case) -> list[list[float]]:
    """Labels as picture, class, and the box as centre and size, in shares of the picture."""
    height, width = SIZE
    return [
        [k, r[0], (r[1] + r[3]) / 2 / width, (r[2] + r[4]) / 2 / height, (r[3] - r[1]) / width, (r[4] - r[2]) / height]
        for k, labels in enumerate(c.labels)
        for r in labels
        if r[0] >= 0
    ]


def dfl(kind: str = "dfl") -> Terms:
    """Ultralytics' loss of YOLOv8, or that of the one-to-one head of YOLO26."""
    from ultralytics.utils.loss import v8DetectionLoss

    c = case(kind)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(1))
            self.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
            self.model = [SimpleNamespace(stride=torch.tensor(STRIDES).float(), nc=CLASSES, reg_max=c.head.bins)]

    t, r = tensors(c), torch.tensor(np.float32(rows(c)))
    maps = [t[f"boxes{s}"] for s in STRIDES]
    given = {
        "boxes": torch.cat([m.flatten(2) for m in maps], 2),
        "scores": torch.cat([t[f"scores{s}"].flatten(2) for s in STRIDES], 2),
        "feats": maps,
    }
    candidates = {"tal_topk": 7, "tal_topk2": 1} if kind == "plain" else {}
    loss, _ = v8DetectionLoss(Model(), **candidates)(given, {"batch_idx": r[:, 0], "cls": r[:, 1], "bboxes": r[:, 2:]})
    return dict(zip(("box", "classes", "distances"), loss / len(COUNTS)))


def yolox() -> Terms:
    """YOLOX's loss."""
    from yolox.models.yolo_head import YOLOXHead

    c = case("yolox")
    t, head, parts = tensors(c), YOLOXHead(CLASSES, 0.25), []
    for k, s in enumerate(STRIDES):
        joined = torch.cat([t[f"boxes{s}"], t[f"objects{s}"], t[f"scores{s}"]], 1)
        out, grid = head.get_output_and_grid(joined, k, s, "torch.FloatTensor")
        parts.append((grid[:, :, 0], grid[:, :, 1], torch.full((1, grid.shape[1]), float(s)), out))
    x, y, strides, outputs = map(list, zip(*parts))
    labels = torch.zeros(c.labels.shape)
    for picture, row, (number, *box) in [(k, j, r) for k, p in enumerate(c.labels) for j, r in enumerate(p)]:
        if number >= 0:
            low, high = torch.tensor(box[:2]), torch.tensor(box[2:])
            labels[picture, row] = torch.cat([torch.tensor([number]), (low + high) / 2, high - low])
    found = head.get_losses(None, x, y, strides, labels, torch.cat(outputs, 1), [], torch.float32)
    return {"box": found[1], "objects": found[2], "classes": found[3]}


def yolo5(folder: str) -> Terms:
    """YOLOv5's loss, whose file is read without its package."""
    metrics, names = (Path(folder) / "metrics.py").read_text(), {"torch": torch, "math": math}
    start = metrics.index("def bbox_iou(")
    exec(metrics[start : metrics.index("\ndef ", start + 5)], names)
    source = re.sub(r"^from yolov5.*$", "", (Path(folder) / "loss.py").read_text(), flags=re.M)
    source = source.replace("lcls)).detach()", "lcls))")  # the terms, with their derivatives
    space: dict[str, Any] = {"bbox_iou": names["bbox_iou"], "de_parallel": lambda m: m}
    exec(source, space)
    gains = {"box": 0.05, "obj": SIZE[0] * SIZE[1] / 640**2, "cls": 0.5 * CLASSES / 80}
    strides = torch.tensor(STRIDES).float()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(1))
            self.hyp = {**gains, "cls_pw": 1, "obj_pw": 1, "fl_gamma": 0, "anchor_t": 4.0}
            anchors = torch.tensor(ANCHORS) / strides.view(-1, 1, 1)
            self.model = [SimpleNamespace(stride=strides, na=3, nc=CLASSES, nl=3, anchors=anchors)]

    c = case("yolo5")
    maps = [
        m.view(len(COUNTS), 3, 5 + CLASSES, *m.shape[2:]).permute(0, 1, 3, 4, 2).contiguous()
        for m in tensors(c).values()
    ]
    _, parts = space["ComputeLoss"](Model())(maps, torch.tensor(np.float32(rows(c))))
    return dict(zip(("box", "objects", "classes"), parts))


def anchored(kind: str) -> Terms:
    """torchvision's losses of SSD and RetinaNet."""
    from torchvision.models.detection import _utils, retinanet, ssd
    from torchvision.ops import boxes as box_ops

    c = case(kind)
    t, background = tensors(c), kind == "ssd"
    flat = {}
    for name, n in (("boxes", 4), ("scores", CLASSES + background)):
        apart = [t[f"{name}{s}"].view(len(COUNTS), 3, n, -1).permute(0, 3, 1, 2) for s in STRIDES]
        flat[name] = torch.cat([m.reshape(len(COUNTS), -1, n) for m in apart], 1)
    there = [torch.tensor(p[p[:, 0] >= 0]) for p in c.labels]
    targets = [{"boxes": p[:, 1:], "labels": p[:, 0].long() + background} for p in there]
    anchors = torch.tensor(c.head.anchors)
    matcher = _utils.SSDMatcher(0.5) if background else _utils.Matcher(0.5, 0.4, allow_low_quality_matches=True)
    matched = [
        matcher(box_ops.box_iou(p["boxes"], anchors)) if len(p["boxes"]) else torch.full((len(anchors),), -1)
        for p in targets
    ]
    outputs = {"bbox_regression": flat["boxes"], "cls_logits": flat["scores"]}
    whole = [anchors] * len(COUNTS)
    if background:
        model = ssd.SSD.__new__(ssd.SSD)
        torch.nn.Module.__init__(model)
        model.box_coder, model.neg_to_pos_ratio = _utils.BoxCoder((10.0, 10.0, 5.0, 5.0)), 3
        found = model.compute_loss(targets, outputs, whole, matched)
        return {"box": found["bbox_regression"], "classes": found["classification"]}
    classes = retinanet.RetinaNetClassificationHead(8, 3, CLASSES).compute_loss(targets, outputs, matched)
    boxes = retinanet.RetinaNetRegressionHead(8, 3).compute_loss(targets, outputs, whole, matched)
    return {"box": boxes, "classes": classes}


def fcos() -> Terms:
    """torchvision's loss of FCOS."""
    from torchvision.models.detection import fcos as original

    c = case("fcos")
    t = tensors(c)
    flat = {
        name: torch.cat([t[f"{name}{s}"].permute(0, 2, 3, 1).reshape(len(COUNTS), -1, n) for s in STRIDES], 1)
        for name, n in (("scores", CLASSES), ("boxes", 4), ("objects", 1))
    }
    there = [torch.tensor(p[p[:, 0] >= 0]) for p in c.labels]
    self: Any = SimpleNamespace(center_sampling_radius=1.5, head=original.FCOSHead(32, 1, CLASSES, 1))
    found = original.FCOS.compute_loss(
        self,
        [{"boxes": p[:, 1:], "labels": p[:, 0].long()} for p in there],
        {"cls_logits": flat["scores"], "bbox_regression": flat["boxes"].relu(), "bbox_ctrness": flat["objects"]},
        [torch.tensor(c.head.anchors)] * len(COUNTS),
        [level.shape[0] * level.shape[1] for level in c.head.levels],
    )
    names = {"box": "bbox_regression", "objects": "bbox_ctrness", "classes": "classification"}
    return {ours: found[theirs] for ours, theirs in names.items()}


def queries(kind: str) -> Terms:
    """The losses in transformers of DETR, Deformable DETR, and the last layer of RT-DETR and D-FINE."""
    from transformers import DFineConfig, RTDetrConfig
    from transformers.loss import loss_d_fine as dfine
    from transformers.loss import loss_deformable_detr as deformable
    from transformers.loss import loss_for_object_detection as detr
    from transformers.loss import loss_rt_detr as rtdetr

    c = case(kind)
    r = np.float32(rows(c))
    targets = [
        {"class_labels": torch.tensor(r[r[:, 0] == k, 1]).long(), "boxes": torch.tensor(r[r[:, 0] == k, 2:])}
        for k in range(len(COUNTS))
    ]
    if kind in ("rtdetr", "dfine"):
        t = tensors(c)
        about = {"num_labels": CLASSES, "auxiliary_loss": False}
        criterion, config = {
            "rtdetr": (rtdetr.RTDetrForObjectDetectionLoss, RTDetrConfig),
            "dfine": (dfine.DFineForObjectDetectionLoss, DFineConfig),
        }[kind]
        _, found, _ = criterion(t["logits"], targets, "cpu", t["pred_boxes"], config(**about))
        return {"classes": found["loss_vfl"], "box": found["loss_bbox"], "overlap": found["loss_giou"]}
    costs = {"class_cost": 1, "bbox_cost": 5, "giou_cost": 2}
    about = {"num_classes": CLASSES, "losses": ["labels", "boxes"]}
    if kind == "deformable":
        matcher = deformable.DeformableDetrHungarianMatcher(**costs)
        criterion = deformable.DeformableDetrImageLoss(matcher=matcher, focal_alpha=0.25, **about)
    else:
        criterion = detr.ImageLoss(matcher=detr.HungarianMatcher(**costs), eos_coef=0.1, **about)
    found = criterion(tensors(c), targets)
    return {
        "classes": found["loss_ce"],
        "box": 5 * found["loss_bbox"],
        "overlap": 2 * found["loss_giou"],
    }


if __name__ == "__main__":
    which = sys.argv[1]
    runs: dict[str, Any] = {
        "dfl": dfl, "plain": lambda: dfl("plain"), "yolox": yolox, "ssd": lambda: anchored("ssd"), "fcos": fcos,
        "retinanet": lambda: anchored("retinanet"),
        **{kind: lambda kind=kind: queries(kind) for kind in QUERIES}, "yolo5": lambda: yolo5(sys.argv[2]),
    }  # fmt: skip
    terms = runs[which]()
    torch.stack(list(terms.values())).sum().backward()
    print({name: round(float(value), 6) for name, value in terms.items()})
    grads = {name: leaf.grad.numpy() for name, leaf in LEAVES.items() if leaf.grad is not None}
    print({name: float(f"{value:.6g}") for name, value in projections(grads).items()})

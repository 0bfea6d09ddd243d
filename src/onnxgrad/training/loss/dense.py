"""Losses of dense predictions: masks, heat maps and key points, depth, text regions, reconstructions.

They are registered beside the others (see `losses`). Masks are class numbers [N, …] for scores [N, C, …], or 0 and 1 of
the shape of the scores for the names that begin with ``binary_``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.training.loss import label_inputs
from onnxgrad.training.loss.label_inputs import Labels
from onnxgrad.training.loss.loss_function import LossFunction, reduce_loss, total
from onnxgrad.training.metrics.dense import sigmas_of
from onnxgrad.wording import shape_text

#: Metadata of a node whose result is compared with labels: their name, the task of metrics, the label that is ignored.
COMPARED = "onnxgrad.compared"
DENSE: dict[str, LossFunction] = {}
#: Of a denominator.
_TINY = 1e-7


def _dense(name: str, labels: Any = label_inputs.classes, contains: tuple[str, ...] = (), mean: str = "rows",
           compares: str = "", **options: Any) -> Callable[[Any], Any]:  # fmt: skip
    def register(function: Callable[..., Var]) -> Callable[..., Var]:
        DENSE[name] = LossFunction(function, {"reduction": "mean", **options}, labels, contains, mean, compares)
        return function

    return register


def _rows(b: Builder, x: Var, groups: int = 1) -> Var:
    """`x` as [N, size], or [N, C, size] for 2 `groups`."""
    return b.Reshape(x, b.join(b.Shape(x, end=groups), [-1]))


def _shares(b: Builder, y: Var, labels: Var, axis: int, ignore_index: int | None) -> tuple[Var, Var, Var | None]:
    """Probabilities and targets [N, C, size], and 1 where a label counts, [N, 1, size]; None: all do."""
    axis %= y.rank
    if axis != 1:
        y = b.Transpose(y, perm=[0, axis, *(a for a in range(1, y.rank) if a != axis)])
    p, t = _rows(b, b.Softmax(y, axis=1), 2), b.Unsqueeze(_rows(b, labels), [1])
    _note(p, labels, "classes", ignore_index)
    classes = b.Reshape(b.places_along(p, 1), [1, -1, 1])
    hot = b.cast_like(b.Equal(b.Cast(t, to=int(ir.DataType.INT64)), classes), p)
    if ignore_index is None:
        return p, hot, None
    counts = b.cast_like(b.Not(b.Equal(t, b.const(ignore_index, t.dtype))), p)
    return p * counts, hot * counts, counts


def _note(y: Var, labels: Var, kind: str, ignored: int | None = None) -> Var:
    """Note at the node of `y` what it is compared with, for the metrics of a run."""
    not_none(y.value.producer()).metadata_props[COMPARED] = json.dumps([labels.name, kind, ignored])
    return y


def _overlap(b: Builder, p: Var, t: Var, smooth: float, batch: bool) -> Var:
    """1 - (2·Σpt + s)/(Σp + Σt + s) along the last axis, of [N, size] or [N, C, size]; with `batch` also along N."""
    axes = [0, p.rank - 1] if batch else [p.rank - 1]
    both, one, other = (b.ReduceSum(x, axes, keepdims=0) for x in (p * t, p, t))
    return b.Sub(1.0, b.Add(b.Mul(both, 2.0), smooth) / b.Add(one + other, smooth))


@_dense("dice", contains=("Softmax",), compares="classes", axis=None, ignore_index=None, smooth=1e-5, batch=False)
def dice(b, y, labels, reduction, axis, ignore_index, smooth, batch):  # type: ignore[no-untyped-def]
    """1 - (2·Σp·t + s)/(Σp + Σt + s) of each class of a picture, or of a batch; the mean over classes"""
    p, t, _ = _shares(b, y, labels, axis, ignore_index)
    found = _overlap(b, p, t, smooth, batch)
    return reduce_loss(b, b.ReduceMean(found, [found.rank - 1], keepdims=0), reduction)


@_dense("binary_dice", label_inputs.as_prediction, ("Sigmoid",), compares="binary", smooth=1e-5, batch=False)
def binary_dice(b, y, labels, reduction, smooth, batch):  # type: ignore[no-untyped-def]
    """1 - (2·Σp·t + s)/(Σp + Σt + s) for p = σ(y), of each picture, or of a batch"""
    logits = _note(_rows(b, y), labels, "binary")
    return reduce_loss(b, _overlap(b, b.Sigmoid(logits), _rows(b, labels), smooth, batch), reduction)


def _extension(b: Builder, errors: Var, wanted: Var, counts: Var | None) -> Var:
    """The Lovász extension of the Jaccard loss of `errors`, along the last axis.

    Σ e·(J - J before) over the errors from the largest down, with J = 1 - (T - cum t)/(T + cum (1 - t)).
    """
    last = errors.rank - 1
    if counts is not None:  # what is ignored comes last, where it changes nothing before it
        errors = b.Where(counts > 0.0, errors, -1e4)
    ordered, order = b.TopK(errors, b.Shape(errors, start=last), axis=last, outputs=2)
    t = b.GatherElements(wanted, order, axis=last)
    everything = b.ReduceSum(t, [last], keepdims=1)
    axis = b.const(np.int64(last))
    missing = everything - b.CumSum(t, axis)
    union = everything + b.CumSum(b.Sub(1.0, t), axis)
    jaccard = b.Sub(1.0, missing / union)
    before = b.Concat(b.zeros_like(b.Slice(jaccard, [0], [1], [last])), b.Slice(jaccard, [0], [-1], [last]), axis=last)
    return b.ReduceSum(b.Relu(ordered) * (jaccard - before), [last], keepdims=0)


def _join_pictures(b: Builder, x: Var) -> Var:
    """[N, C, size] of all pictures as one, [1, C, N·size]."""
    return b.Unsqueeze(_rows(b, b.Transpose(x, perm=[1, 0, 2])), [0])


@_dense("lovasz", contains=("Softmax",), compares="classes", axis=None, ignore_index=None, batch=True)
def lovasz(b, y, labels, reduction, axis, ignore_index, batch):  # type: ignore[no-untyped-def]
    """the Lovász extension of 1 - IoU of each class that occurs in a batch, or in each picture; the mean over these"""
    p, t, counts = _shares(b, y, labels, axis, ignore_index)
    if counts is not None:
        counts = b.Expand(counts, b.Shape(p))
    if batch:
        p, t = (_join_pictures(b, x) for x in (p, t))
        counts = None if counts is None else _join_pictures(b, counts)
    found = _extension(b, b.Abs(t - p), t, counts)
    occurs = b.cast_like(b.ReduceMax(t, [2], keepdims=0) > 0.0, found)
    rows = b.ReduceSum(found * occurs, [1], keepdims=0) / b.Max(b.ReduceSum(occurs, [1], keepdims=0), 1.0)
    return reduce_loss(b, rows, reduction)


@_dense("binary_lovasz", label_inputs.as_prediction, ("Sigmoid",), compares="binary", batch=False)
def binary_lovasz(b, y, labels, reduction, batch):  # type: ignore[no-untyped-def]
    """the Lovász extension of 1 - IoU, of the hinge 1 - y·(2t - 1), of each picture, or of a batch"""
    y, t = (b.Reshape(x, [1, -1]) if batch else _rows(b, x) for x in (y, labels))
    _note(y, labels, "binary")
    return reduce_loss(b, _extension(b, b.Sub(1.0, y * b.Sub(b.Mul(t, 2.0), 1.0)), t, None), reduction)


@_dense("boundary", contains=("Softmax",), compares="classes", axis=None, width=3, tolerance=5)
def boundary(b, y, labels, reduction, axis, width, tolerance):  # type: ignore[no-untyped-def]
    """1 - 2PR/(P + R) of the boundaries of each class, that match within a tolerance; the mean over classes"""
    if any(not isinstance(w, int) or w < 1 or w % 2 == 0 for w in (width, tolerance)):
        raise BadInput(f"boundary: width and tolerance are odd numbers of pixels, not {width} and {tolerance}")
    if y.rank != 4:
        raise BadInput(f"boundary: {y.name!r} has shape {shape_text(y.value.shape)}; it takes scores [N, C, H, W]")
    axis %= y.rank
    shape = b.Shape(y if axis == 1 else b.Transpose(y, perm=[0, 3, 1, 2]))

    def widen(x: Var, size: int) -> Var:
        return b.MaxPool(x, kernel_shape=[size, size], pads=[size // 2] * 4, strides=[1, 1])

    edges = []
    for x in _shares(b, y, labels, axis, None)[:2]:
        outside = b.Sub(1.0, b.Reshape(x, shape))
        edges.append(widen(outside, width) - outside)
    (p, t), (near_p, near_t) = edges, [widen(edge, tolerance) for edge in edges]
    precision, recall = (
        b.ReduceSum(edge * near, [2, 3], keepdims=0) / b.Add(b.ReduceSum(edge, [2, 3], keepdims=0), _TINY)
        for edge, near in ((p, near_t), (t, near_p))
    )
    f1 = b.Mul(precision * recall, 2.0) / b.Add(precision + recall, _TINY)
    return reduce_loss(b, b.ReduceMean(b.Sub(1.0, f1), [1], keepdims=0), reduction)


def _points(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """x, y and visibility of each key point, [N, K, 3], for heat maps [N, K, H, W] or points [N, K, 2]."""
    dims = None if y.shape is None else tuple(y.shape)
    if dims is not None and len(dims) != (3 if "sigmas" in options else 4):
        what = "points [N, K, 2]" if "sigmas" in options else "heat maps [N, K, H, W]"
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; this loss takes {what}")
    found: Labels = {"": (y.dtype or ir.DataType.FLOAT, None if dims is None else (*dims[:2], 3))}
    if "sigmas" in options:
        found["_area"] = (y.dtype or ir.DataType.FLOAT, None if dims is None else dims[:1])
    return found


def _visibility(b: Builder, labels: Var) -> Var:
    """1 for the key points that are labelled, [N, K]."""
    return b.cast_like(b.Squeeze(b.Slice(labels, [2], [3], [2]), [2]) > 0.0, labels)


@_dense("heatmap", _points, mean="elements", sigma=2.0)
def heatmap(b, y, labels, reduction, sigma):  # type: ignore[no-untyped-def]
    """(y - exp(-d²/2σ²))² for the distance d to the key point, in cells of the map; 0 for one that is not labelled"""
    if not sigma > 0:
        raise BadInput(f"heatmap: sigma must be positive, not {sigma}")
    squared = []
    for k, axis in ((0, 3), (1, 2)):
        cells = b.Reshape(b.cast_like(b.places_along(y, axis), y), [1, 1, -1])
        d = cells - b.Slice(labels, [k], [k + 1], [2])
        squared.append(b.Unsqueeze(d * d, [5 - axis]))  # [N, K, 1, W] and [N, K, H, 1]
    target = b.Exp(b.Mul(squared[0] + squared[1], -0.5 / sigma**2))
    d = (y - target) * b.Unsqueeze(_visibility(b, labels), [2, 3])
    return reduce_loss(b, d * d, reduction)


@_dense("oks", _points, sigmas=None)
def oks(b, y, labels, area, reduction, sigmas):  # type: ignore[no-untyped-def]
    """1 - the mean of exp(-d²/(8·σ²·area)) over the key points that are labelled, for their distances d"""
    given = sigmas if sigmas is not None else sigmas_of(y.dims[1] if isinstance(y.dims[1], int) else None)
    spread = b.const(np.square(2 * np.atleast_1d(np.asarray(given, np.float64))), y.dtype)
    d = y - b.Slice(labels, [0], [2], [2])
    squared = b.ReduceSum(d * d, [2], keepdims=0)
    seen = _visibility(b, labels)
    size = b.Mul(b.Add(b.Unsqueeze(area, [1]), 1e-9), 2.0)
    missed = b.Sub(1.0, b.Exp(-(squared / (size * spread)))) * seen
    rows = b.ReduceSum(missed, [1], keepdims=0) / b.Max(b.ReduceSum(seen, [1], keepdims=0), 1.0)
    return reduce_loss(b, rows, reduction)


@_dense("silog", label_inputs.as_prediction, variance=0.85, root=True)
def silog(b, y, labels, reduction, variance, root):  # type: ignore[no-untyped-def]
    """√(mean d² - v·(mean d)²) of each picture, for d = log y - log t where t > 0; or its square"""
    if not 0 <= variance <= 1:
        raise BadInput(f"silog: variance lies between 0 and 1, not at {variance}")
    y, t = _note(_rows(b, y), labels, "numbers", 0), _rows(b, labels)
    known = t > 0.0
    d = b.Where(known, b.Log(b.Max(y, 1e-6)) - b.Log(b.Where(known, t, 1.0)), 0.0)
    count = b.Max(b.ReduceSum(b.cast_like(known, y), [1], keepdims=0), 1.0)
    mean, square = (b.ReduceSum(x, [1], keepdims=0) / count for x in (d, d * d))
    rows = square - b.Mul(mean * mean, float(variance))
    return reduce_loss(b, b.Sqrt(b.Max(rows, 1e-10)) if root else rows, reduction)


def _regions(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Maps [N, H, W] for a prediction [N, 1, 2 or 3, H, W]: shrunk regions, thresholds, and where each counts."""
    dims = None if y.shape is None else tuple(y.shape)
    if dims is None or len(dims) != 4 or dims[1] not in (1, 2, 3):
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; db takes maps [N, 1, H, W], or 2 or 3 of them")
    maps = (y.dtype or ir.DataType.FLOAT, (dims[0], *dims[2:]))
    names = ["", *(["_mask"] if options["mask"] else [])]
    names += ["_threshold", "_threshold_mask"] if dims[1] != 1 else []
    return dict.fromkeys(names, maps)


@_dense("db", _regions, ("Sigmoid",), "batch", mask=False, negatives=3.0, bce=5.0, l1=10.0, steepness=50.0)
def db(b, y, labels, *maps, reduction, mask, negatives, bce, l1, steepness):  # type: ignore[no-untyped-def]
    """dice(σ(k(P - T))) + 5·bce(P) with the hardest negatives, 3 for each positive, + 10·|T - t| near borders"""
    count, given = y.dims[1], list(maps)
    parts = [y] if count == 1 else b.Split(y, num_outputs=count, axis=1, outputs=count)
    logits, *others = [b.Squeeze(x, [1]) for x in parts]
    p, counts = b.Sigmoid(logits), given.pop(0) if mask else b.full_like(labels, 1.0)
    loss = b.Mul(_hardest(b, logits, labels, counts, negatives), float(bce))
    binary = p
    if others:
        t, (limit, near) = b.Sigmoid(others[0]), given
        binary = b.Sigmoid(b.Mul(p - t, float(steepness)))
        off = total(b, b.Abs(t - limit) * near) / b.Max(total(b, near), 1.0)
        loss = loss + b.Mul(off, float(l1))
    both = total(b, binary * labels * counts)
    overlap = b.Mul(both, 2.0) / b.Add(total(b, binary * counts) + total(b, labels * counts), 1e-6)
    loss = loss + b.Sub(1.0, overlap)
    return loss if reduction == "mean" else loss * b.cast_like(b.Squeeze(b.Shape(y, end=1), [0]), loss)


def _hardest(b: Builder, logits: Var, t: Var, mask: Var, negatives: float) -> Var:
    """The mean of the binary cross entropy over positives and their hardest negatives."""
    each = b.Softplus(logits) - t * logits
    right = t * mask
    wrong = mask - right
    positive, others = total(b, right), total(b, wrong)
    count = b.Min(others, b.Floor(b.Mul(positive, float(negatives))))
    k = b.Max(b.Cast(b.Reshape(count, [1]), to=int(ir.DataType.INT64)), [1])
    hardest, _ = b.TopK(b.Reshape(each * wrong, [-1]), k, axis=0, outputs=2)
    chosen = b.Where(count > 0.0, total(b, hardest), 0.0)
    return (total(b, each * right) + chosen) / b.Add(positive + count, 1e-6)


def _pictures(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """A picture like the prediction, [N, C, H, W]."""
    if y.shape is not None and len(y.shape) != 4:
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; ssim takes pictures [N, C, H, W]")
    return label_inputs.as_prediction(y, options)


@_dense("ssim", _pictures, window=11, sigma=1.5, range=1.0)
def ssim(b, y, labels, reduction, window, sigma, range):  # type: ignore[no-untyped-def]
    """1 - (2μν + c)(2σ_yt + d)/((μ² + ν² + c)(σ_y² + σ_t² + d)) of Gaussian windows, c = (r/100)², d = (3r/100)²"""
    if not isinstance(window, int) or window < 1 or not sigma > 0 or not range > 0:
        raise BadInput("ssim: window is a number of pixels, and sigma and range are positive")
    line = np.exp(-0.5 * np.square((np.arange(window) - (window - 1) / 2) / sigma))
    weights = b.const((np.outer(line, line) / line.sum() ** 2)[None, None], y.dtype)
    y, t = (b.Reshape(x, b.join([-1, 1], b.Shape(x, start=2))) for x in (y, labels))
    m, n, yy, tt, yt = (b.Conv(x, weights) for x in (y, t, y * y, t * t, y * t))
    c, d = (0.01 * range) ** 2, (0.03 * range) ** 2
    covariance, variances = yt - m * n, (yy - m * m) + (tt - n * n)
    same = b.Add(b.Mul(m * n, 2.0), c) * b.Add(b.Mul(covariance, 2.0), d)
    found = same / (b.Add(m * m + n * n, c) * b.Add(variances, d))
    rows = b.ReduceMean(b.Reshape(found, b.join(b.Shape(labels, end=1), [-1])), [1], keepdims=0)
    return reduce_loss(b, b.Sub(1.0, rows), reduction)

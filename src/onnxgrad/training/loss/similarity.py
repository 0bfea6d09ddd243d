"""Losses of similar and dissimilar rows: for the embeddings of pairs and triples, and for cosines with class centres.

They are registered beside the others (see `losses`). Embeddings of an encoder that takes several texts or pictures for
each row are [N, roles, size] (see `onnxgrad.training.build.pairs`): the anchor, its positive, and further negatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.training.loss import label_inputs
from onnxgrad.training.loss.label_inputs import Labels
from onnxgrad.training.loss.loss_function import LossFunction, reduce_loss
from onnxgrad.training.option_strings import one_of
from onnxgrad.wording import shape_text

SIMILARITY: dict[str, LossFunction] = {}


def _similarity(name: str, labels: Any, mean: str = "rows", compares: str = "", **options: Any) -> Callable[[Any], Any]:
    def register(function: Callable[..., Var]) -> Callable[..., Var]:
        SIMILARITY[name] = LossFunction(function, {"reduction": "mean", **options}, labels, (), mean, compares)
        return function

    return register


def _of_roles(roles: int, scored: bool = False) -> Callable[[ir.Value, Mapping[str, Any]], Labels]:
    """No labels, or with `scored` a number for each row, of embeddings [N, `roles` or more, size]."""

    def check(y: ir.Value, options: Mapping[str, Any]) -> Labels:
        shape = y.shape
        if shape is not None and (len(shape) != 3 or (isinstance(shape[1], int) and shape[1] < roles)):
            raise BadInput(
                f"{y.name!r} has shape {shape_text(shape)}; this loss takes embeddings [N, {roles}, size]\n"
                f"  hint: --pairs {'anchor,positive,negative'[: 15 if roles < 3 else None]} makes them of an encoder"
            )
        return {"": (y.dtype or ir.DataType.FLOAT, None if shape is None else (shape[0],))} if scored else {}

    return check


def _role(b: Builder, y: Var, k: int) -> Var:
    """The embeddings of role `k`, [N, size]."""
    return b.Squeeze(b.Slice(y, [k], [k + 1], [1]), [1])


def _unit(b: Builder, x: Var) -> Var:
    """Rows of norm 1; a row of zeros stays one, and its derivative finite."""
    return x / b.Sqrt(b.Max(b.ReduceSumSquare(x, [-1], keepdims=1), 1e-16))


def _cosines(b: Builder, y: Var) -> Var:
    """The cosine of each anchor and its positive, [N]."""
    return b.ReduceSum(_unit(b, _role(b, y, 0)) * _unit(b, _role(b, y, 1)), [1], keepdims=0)


@_similarity("multiple_negatives", _of_roles(2), "batch", temperature=0.05, symmetric=False)
def multiple_negatives(b, y, reduction, temperature, symmetric):  # type: ignore[no-untyped-def]
    """-log softmax of the cosines/τ of each anchor to all positives and negatives of a batch, at its own positive

    With `symmetric`, the mean with that of each positive to all anchors.
    """
    if not temperature > 0:
        raise BadInput(f"multiple_negatives: temperature must be positive, not {temperature}")
    unit = _unit(b, y)
    anchors, positives = _role(b, unit, 0), _role(b, unit, 1)
    roles = (y.shape or (0, 2))[1]
    others = [_role(b, unit, k) for k in range(2, roles if isinstance(roles, int) else 2)]
    own = b.places_along(anchors, 0)

    def surprise(rows: Var, columns: Var) -> Var:
        scores = b.Div(rows @ b.Transpose(columns, perm=[1, 0]), float(temperature))
        return b.SoftmaxCrossEntropyLoss(scores, own, reduction=reduction)

    found = surprise(anchors, b.Concat(positives, *others, axis=0) if others else positives)
    return b.Mul(found + surprise(positives, anchors), 0.5) if symmetric else found


@_similarity("triplet_margin", _of_roles(3), margin=1.0, distance="euclidean")
def triplet_margin(b, y, reduction, margin, distance):  # type: ignore[no-untyped-def]
    """max(0, d(a, p) - d(a, n) + margin), d: the Euclidean distance, or 1 - cosine"""
    one_of("triplet_margin: distance", distance, ("euclidean", "cosine"))
    anchor, positive, negative = (_role(b, y if distance == "euclidean" else _unit(b, y), k) for k in range(3))

    def away(x: Var) -> Var:
        if distance == "cosine":
            return b.Sub(1.0, b.ReduceSum(anchor * x, [1], keepdims=0))
        return b.ReduceL2(b.Add(anchor - x, 1e-6), [1], keepdims=0)  # PyTorch's shift keeps its derivative finite

    return reduce_loss(b, b.Relu(b.Add(away(positive) - away(negative), float(margin))), reduction)


@_similarity("cosine_similarity", _of_roles(2, scored=True))
def cosine_similarity(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """(cosine of the pair - t)²"""
    away = _cosines(b, y) - labels
    return reduce_loss(b, away * away, reduction)


@_similarity("cosent", _of_roles(2, scored=True), "batch", scale=20.0)
def cosent(b, y, labels, reduction, scale):  # type: ignore[no-untyped-def]
    """log(1 + Σ exp(scale·(cosine of i - cosine of j))) over rows i, j of a batch with t of i < t of j (Su 2022)"""
    cosines = b.Mul(_cosines(b, y), float(scale))
    lifted = b.Unsqueeze(cosines, [1]) - b.Unsqueeze(cosines, [0])
    wrong = b.Less(b.Unsqueeze(labels, [1]), b.Unsqueeze(labels, [0]))
    terms = b.Reshape(b.Where(wrong, lifted, -1e12), [1, -1])
    return b.ReduceLogSumExp(b.Concat(b.const([[0.0]], terms.dtype), terms, axis=1), keepdims=0)


@_similarity("arcface", label_inputs.classes, "rows", "classes", axis=None, margin=0.5, scale=64.0)
def arcface(b, y, labels, reduction, axis, margin, scale):  # type: ignore[no-untyped-def]
    """-log softmax(s·c)[t], where the cosine c of the label's class is cos(θ + margin) (Deng et al. 2019)

    The prediction holds cosines [N, classes] of embeddings and centres of classes.
    """
    if not 0 <= margin < math.pi or not scale > 0:
        raise BadInput(f"arcface: margin lies in [0, π) and scale is positive, not {margin} and {scale}")
    if axis not in (1, -1) or y.rank != 2:
        raise BadInput("arcface takes cosines [N, classes]")
    cosine = b.Clip(y, -1 + 1e-7, 1 - 1e-7)
    sine = b.Sqrt(b.Sub(1.0, cosine * cosine))
    shifted = b.Mul(cosine, math.cos(margin)) - b.Mul(sine, math.sin(margin))
    places = b.Unsqueeze(b.places_along(y, 1), [0])
    own = b.Equal(places, b.Unsqueeze(b.Cast(labels, to=int(ir.DataType.INT64)), [1]))
    scores = b.Mul(b.Where(own, shifted, y), float(scale))
    return b.SoftmaxCrossEntropyLoss(scores, labels, reduction=reduction)

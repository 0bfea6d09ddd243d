"""Losses, as operators: scalars of a prediction and its labels.

A loss is a function of a builder, the prediction, its labels and its options; its docstring is its formula. Labels have
the type and shape of the prediction, or are class indices (int64) without its class axis, or have the form that
`labels` of the loss declares. If a model ends in the activation that a loss contains, the loss reads the operand of
that activation (see `logits`): the value is the same, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import permutation, producer
from onnxgrad.training.loss import label_inputs
from onnxgrad.training.loss.ctc import ctc_rows
from onnxgrad.training.loss.dense import DENSE
from onnxgrad.training.loss.loss_function import LossFunction, as_scores, counted, reduce_loss, total, weight_of
from onnxgrad.training.loss.score_blocks import OfRows
from onnxgrad.training.loss.similarity import SIMILARITY
from onnxgrad.training.option_strings import completed, looked_up, one_of

LOSSES: dict[str, LossFunction] = {}


def _loss(name: str, labels: Any = label_inputs.as_prediction, contains: Any = (), mean: str = "elements",
          compares: str = "", of_rows: Any = None, **options: Any) -> Callable[[Any], Any]:  # fmt: skip
    def register(function: Callable[..., Var]) -> Callable[..., Var]:
        given = {"reduction": "mean", **options}
        LOSSES[name] = LossFunction(function, given, labels, contains, mean, compares, of_rows)
        return function

    return register


def _classes_second(b: Builder, x: Var, axis: int) -> Var:
    """`x` with its class axis second, where the operators expect it."""
    axis %= x.rank
    if axis == 1:
        return x
    others = [a for a in range(x.rank) if a != axis]
    return b.Transpose(x, perm=[others[0], axis, *others[1:]])


def _rows(b: Builder, y: Var, labels: Var) -> tuple[Var, Var]:
    """Scores [N, C, …] and their labels, as rows of scores [M, C] and as many labels where that moves nothing.

    It does where the class axis was last and a Transpose has made it second: without it, and its way back, a softmax
    runs along memory (3 % of the step of a small language model).
    """
    moved = producer(y.value, "Transpose")
    if y.rank < 3 or moved is None:
        return y, labels
    x = moved.inputs[0]
    if x is None or permutation(moved) != (0, y.rank - 1, *range(1, y.rank - 1)):
        return y, labels
    scores = Var(b, x)
    return b.Flatten(scores, axis=y.rank - 1), b.Reshape(as_scores(b, labels, scores), [-1])


def _positive(what: str, value: float) -> None:
    if not value > 0:
        raise BadInput(f"{what} must be positive, not {value}")


def _cross_entropy_of_rows(weights: Var | None, options: Mapping[str, Any]) -> OfRows:
    """For scores of [rows, classes]."""
    ignored, share = options["ignore_index"], options["label_smoothing"]
    how = {"reduction": "none", "ignore_index": ignored}

    def of_rows(b: Builder, y: Var, labels: Var) -> Var:
        of_classes = None if weights is None else b.var(weights.value)
        if not share:
            return b.SoftmaxCrossEntropyLoss(y, labels, of_classes, **how)
        log_p = b.LogSoftmax(y, axis=1)
        sharp = b.NegativeLogLikelihoodLoss(log_p, labels, of_classes, **how)
        even = -b.ReduceMean(log_p if of_classes is None else log_p * of_classes, [1], keepdims=0)
        if ignored is not None:
            even = b.Where(b.Equal(labels, b.const(ignored, labels.dtype)), 0.0, even)
        return b.Mul(sharp, 1 - share) + b.Mul(even, share)

    return of_rows


@_loss("cross_entropy", label_inputs.classes, ("Softmax", "LogSoftmax"), "weights", "classes", _cross_entropy_of_rows,
       axis=None, ignore_index=None, weight=None, label_smoothing=0.0, block_rows=None)  # fmt: skip
def cross_entropy(b, y, labels, reduction, axis, ignore_index, weight, label_smoothing, block_rows):  # type: ignore[no-untyped-def]
    """-log softmax(y)[t], of which label smoothing ε puts the share ε/C on each of the C classes"""
    y, weights = _classes_second(b, y, axis), weight_of(b, weight, y)
    if not label_smoothing:
        y, labels = _rows(b, y, labels)
        return b.SoftmaxCrossEntropyLoss(y, labels, weights, reduction=reduction, ignore_index=ignore_index)
    log_p = b.LogSoftmax(y, axis=1)
    sharp = b.NegativeLogLikelihoodLoss(log_p, labels, weights, reduction=reduction, ignore_index=ignore_index)
    if weights is not None:
        log_p = log_p * b.reshape(weights, [-1] + [1] * (y.rank - 2))
    even = -b.ReduceMean(log_p, [1], keepdims=0)
    if ignore_index is not None:
        even = b.Where(b.Equal(labels, b.const(ignore_index, labels.dtype)), 0.0, even)
    if reduction == "none":
        return b.Mul(sharp, 1 - label_smoothing) + b.Mul(even, label_smoothing)
    if reduction == "sum":
        even = total(b, even)
    elif weights is None and ignore_index is None:
        even = b.ReduceMean(even, keepdims=0)
    else:
        even = total(b, even) / b.Max(total(b, counted(b, labels, y, ignore_index, weight)), 1e-12)
    return b.Mul(sharp, 1 - label_smoothing) + b.Mul(even, label_smoothing)


@_loss("nll", label_inputs.classes, (), "weights", "classes", axis=None, ignore_index=None, weight=None)
def nll(b, y, labels, reduction, axis, ignore_index, weight):  # type: ignore[no-untyped-def]
    """-y[t] for log-probabilities y"""
    y, weight = _classes_second(b, y, axis), weight_of(b, weight, y)
    return b.NegativeLogLikelihoodLoss(y, labels, weight, reduction=reduction, ignore_index=ignore_index)


@_loss("focal", label_inputs.classes, ("Softmax", "LogSoftmax"), "labels", "classes", axis=None, gamma=2.0,
       ignore_index=None, weight=None)  # fmt: skip
def focal(b, y, labels, reduction, axis, gamma, ignore_index, weight):  # type: ignore[no-untyped-def]
    """-w[t]·(1 - p)^γ·log p for p = softmax(y)[t]"""
    y = _classes_second(b, y, axis)
    nll = b.SoftmaxCrossEntropyLoss(y, labels, reduction="none", ignore_index=ignore_index)
    rows = _power(b, b.Sub(1.0, b.Exp(-nll)), gamma) * nll
    if weight is not None:
        rows = rows * counted(b, labels, y, ignore_index, weight)
    if reduction != "mean" or ignore_index is None:
        return reduce_loss(b, rows, reduction)
    return total(b, rows) / b.Max(total(b, counted(b, labels, y, ignore_index, None)), 1.0)


def _power(b: Builder, x: Var, gamma: float) -> Var:
    """xᵞ for x ≥ 0; away from 0 where its derivative there would be infinite."""
    if gamma < 0:
        raise BadInput(f"gamma must not be negative, but is {gamma}")
    return b.Pow(b.Max(x, 1e-12) if 0 < gamma < 1 else x, float(gamma))


@_loss("mse")
def mse(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """(y - t)²"""
    d = y - labels
    return reduce_loss(b, d * d, reduction)


@_loss("l1")
def l1(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """|y - t|"""
    return reduce_loss(b, b.Abs(y - labels), reduction)


@_loss("huber", delta=1.0)
def huber(b, y, labels, reduction, delta):  # type: ignore[no-untyped-def]
    """d²/2 where |d| ≤ δ, else δ(|d| - δ/2), for d = y - t: c·(d - c/2) with c = d clipped to ±δ"""
    _positive("huber: delta", delta)
    d = y - labels
    c = b.Clip(d, -float(delta), float(delta))
    return reduce_loss(b, c * (d - b.Mul(c, 0.5)), reduction)


@_loss("smooth_l1", beta=1.0)
def smooth_l1(b, y, labels, reduction, beta):  # type: ignore[no-untyped-def]
    """d²/(2β) where |d| ≤ β, else |d| - β/2, for d = y - t: Huber's with δ = β, divided by β"""
    _positive("smooth_l1: beta", beta)
    return b.Div(huber(b, y, labels, reduction, beta), float(beta))


@_loss("bce_with_logits", contains=("Sigmoid",), compares="binary")
def bce_with_logits(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """-t·log σ(y) - (1 - t)·log(1 - σ(y)) = softplus(y) - t·y, which no y overflows"""
    return reduce_loss(b, b.Softplus(y) - labels * y, reduction)


@_loss("binary_focal", contains=("Sigmoid",), compares="binary", gamma=2.0, alpha=0.25)
def binary_focal(b, y, labels, reduction, gamma, alpha):  # type: ignore[no-untyped-def]
    """α_t·(1 - p_t)^γ·bce for p_t = t·p + (1 - t)(1 - p), α_t = t·α + (1 - t)(1 - α); for α < 0, α_t = 1"""
    p = b.Sigmoid(y)
    wrong = p + labels - b.Mul(p * labels, 2.0)  # 1 - p_t
    rows = _power(b, wrong, gamma) * (b.Softplus(y) - labels * y)
    if alpha >= 0:
        rows = rows * b.Add(b.Mul(labels, 2 * alpha - 1), 1 - alpha)
    return reduce_loss(b, rows, reduction)


@_loss("cosine", axis=-1)
def cosine(b, y, labels, reduction, axis):  # type: ignore[no-untyped-def]
    """1 - ⟨y, t⟩/(‖y‖·‖t‖) along `axis`"""
    dot = b.ReduceSum(_unit(b, y, axis) * _unit(b, labels, axis), [axis], keepdims=0)
    return reduce_loss(b, b.Sub(1.0, dot), reduction)


def _unit(b: Builder, x: Var, axis: int) -> Var:
    """`x` with norm 1 along `axis`; a row of zeros stays one, and its derivative finite."""
    return x / b.Sqrt(b.Max(b.ReduceSumSquare(x, [axis], keepdims=1), 1e-16))


@_loss("kl", contains=("Softmax", "LogSoftmax"), axis=None, temperature=1.0,
       targets="logits")  # fmt: skip
def kl(b, y, labels, reduction, axis, temperature, targets):  # type: ignore[no-untyped-def]
    """τ²·Σ p·(log p - log q) along `axis`, for q = softmax(y/τ) and p = softmax(t/τ), or softmax((log t)/τ)"""
    heat, labels = float(temperature), _logits(b, "kl", labels, temperature, targets)
    log_q, log_p = (b.LogSoftmax(b.Div(x, heat) if heat != 1 else x, axis=axis) for x in (y, labels))
    rows = b.ReduceSum(b.Exp(log_p) * (log_p - log_q), [axis], keepdims=0)
    return b.Mul(reduce_loss(b, rows, reduction), heat * heat)


def _logits(b: Builder, name: str, labels: Var, temperature: float, targets: str) -> Var:
    """The logits of a teacher; those of its probabilities are their logarithms."""
    _positive(f"{name}: temperature", temperature)
    one_of(f"{name}: targets", targets, ("logits", "probabilities"))
    return b.Log(b.Max(labels, 1e-30)) if targets == "probabilities" else labels


@_loss("kl_top_k", label_inputs.top_classes, ("Softmax", "LogSoftmax"), mean="rows", axis=None, temperature=1.0,
       targets="logits")  # fmt: skip
def kl_top_k(b, y, labels, classes, reduction, axis, temperature, targets):  # type: ignore[no-untyped-def]
    """τ²·Σ p·(log p - log q) over the k likeliest classes of a teacher, q = softmax(y/τ) there, p = softmax(t/τ)"""
    heat, labels = float(temperature), _logits(b, "kl_top_k", labels, temperature, targets)
    log_q = b.GatherElements(b.LogSoftmax(b.Div(y, heat), axis=-1), classes, axis=-1)
    log_p = b.LogSoftmax(b.Div(labels, heat), axis=-1)
    rows = b.ReduceSum(b.Exp(log_p) * (log_p - log_q), [-1], keepdims=0)
    return b.Mul(reduce_loss(b, rows, reduction), heat * heat)


@_loss("triplet", label_inputs.one_per_row, mean="batch", margin=1.0, mining="all")
def triplet(b, y, labels, reduction, margin, mining):  # type: ignore[no-untyped-def]
    """max(0, ‖a - p‖ - ‖a - n‖ + margin) over all triplets of a batch where a and p have the same label, n another

    With hard mining one triplet per anchor: the farthest p and the nearest n (Hermans et al. 2017).
    """
    one_of("triplet: mining", mining, ("all", "hard"))
    same, apart = _pairs(b, labels)
    d = b.Unsqueeze(y, [1]) - b.Unsqueeze(y, [0])
    distance = b.ReduceL2(b.Add(d, 1e-6), [2], keepdims=0)  # PyTorch's small shift keeps its derivative finite
    if mining == "all":
        rows = b.Relu(b.Add(b.Unsqueeze(distance, [2]) - b.Unsqueeze(distance, [1]), float(margin)))
        counts = b.And(b.Unsqueeze(same, [2]), b.Unsqueeze(apart, [1]))
    else:
        far = b.ReduceMax(b.Where(same, distance, -1e30), [1], keepdims=0)
        near = b.ReduceMin(b.Where(apart, distance, 1e30), [1], keepdims=0)
        both = (b.ReduceMax(b.Cast(x, to=int(ir.DataType.INT32)), [1], keepdims=0) for x in (same, apart))
        counts = b.And(*(b.Cast(x, to=int(ir.DataType.BOOL)) for x in both))
        rows = b.Relu(b.Add(b.Where(counts, far - near, -float(margin)), float(margin)))
    return _mean_where(b, rows, counts, reduction)


@_loss("info_nce", label_inputs.one_per_row, mean="batch", temperature=0.1)
def info_nce(b, y, labels, reduction, temperature):  # type: ignore[no-untyped-def]
    """-log softmax of the cosines/τ of each row to the others, at the rows with the same label

    The mean over these of a row, then over the rows that have any (Khosla et al. 2020); in pairs it is NT-Xent.
    """
    _positive("info_nce: temperature", temperature)
    same, _ = _pairs(b, labels)
    z = _unit(b, y, 1)
    itself = b.Equal(*_indices(b, labels))
    cosines = b.Div(z @ b.Transpose(z, perm=[1, 0]), float(temperature))
    log_p = b.LogSoftmax(b.Where(itself, -1e30, cosines), axis=1)
    positive = b.cast_like(same, y)
    count = b.ReduceSum(positive, [1], keepdims=0)
    rows = -b.ReduceSum(b.Where(same, log_p, 0.0), [1], keepdims=0) / b.Max(count, 1.0)
    return _mean_where(b, rows, count > 0.0, reduction)


def _indices(b: Builder, labels: Var) -> tuple[Var, Var]:
    """The numbers of the rows, as a column and as a row."""
    index = b.places_along(labels, 0)
    return b.Unsqueeze(index, [1]), b.Unsqueeze(index, [0])


def _pairs(b: Builder, labels: Var) -> tuple[Var, Var]:
    """Masks of the pairs of different rows with equal labels, and with different labels: [N, N]."""
    equal = b.Equal(b.Unsqueeze(labels, [1]), b.Unsqueeze(labels, [0]))
    return b.And(equal, b.Not(b.Equal(*_indices(b, labels)))), b.Not(equal)


def _mean_where(b: Builder, x: Var, counts: Var, reduction: str) -> Var:
    """The sum or mean of `x` where it counts; 0 where nothing does."""
    kept = total(b, b.Where(counts, x, 0.0))
    return kept if reduction == "sum" else kept / b.Max(total(b, b.cast_like(counts, x)), 1.0)


@_loss("ctc", label_inputs.sequences, ("Softmax", "LogSoftmax"), "rows", blank=0, time=1, axis=-1, zero_infinity=False,
       label_lengths=False, input_lengths=False)  # fmt: skip
def ctc(  # type: ignore[no-untyped-def]
    b, y, *labels, reduction, blank, time, axis, zero_infinity, label_lengths, input_lengths
):
    """-log of the sum over all alignments of the probability of the labels; a mean divides each by its label length"""
    one_of("ctc: axis", axis, (-1, 2))
    target, *lengths = labels
    given = {name: lengths.pop(0) if asked else None
             for name, asked in (("label", label_lengths), ("input", input_lengths))}  # fmt: skip
    rows, count = ctc_rows(b, y, target, given["label"], given["input"], blank, time)
    if zero_infinity:
        rows = b.Where(rows > 1e29, 0.0, rows)
    if reduction == "mean":
        rows = rows / b.cast_like(b.Max(count, [1]), rows)
    return b.cast_like(reduce_loss(b, rows, reduction), y)


def _of_pairs(b: Builder, x: Var) -> Var:
    """The first less the second of each two rows of `x`."""
    return b.ReduceSum(b.Mul(b.Reshape(x, [-1, 2]), b.const([1, -1], x.dtype)), [1], keepdims=0)


def _log_likelihoods(b: Builder, y: Var, labels: Var, axis: int, ignore_index: int) -> tuple[Var, Var]:
    """Σ log softmax(y)[t] over the labels that count, and their number, of each row."""
    if y.rank < 3:
        raise BadInput(f"a loss of preferences takes scores [rows, tokens, classes], and {y.name!r} has {y.rank} axes")
    scores, own = _rows(b, _classes_second(b, y, axis), labels)
    surprise = b.SoftmaxCrossEntropyLoss(scores, own, reduction="none", ignore_index=ignore_index)
    each = b.Reshape(surprise, b.Shape(labels))
    counts = counted(b, labels, each, ignore_index, None)
    return -b.ReduceSum(each, [1], keepdims=0), b.Max(b.ReduceSum(counts, [1], keepdims=0), 1.0)


@_loss("dpo", label_inputs.preferences, ("Softmax", "LogSoftmax"), "batch", axis=-1, ignore_index=-100, beta=0.1,
       label_smoothing=0.0)  # fmt: skip
def dpo(b, y, labels, reference, reduction, axis, ignore_index, beta, label_smoothing):  # type: ignore[no-untyped-def]
    """-log σ(β·(d of the chosen row - d of the rejected row)): d = Σ log softmax(y)[t] - that of the reference"""
    _positive("dpo: beta", beta)
    found, _ = _log_likelihoods(b, y, labels, axis, ignore_index)
    margin = b.Mul(_of_pairs(b, found) - _of_pairs(b, b.cast_like(reference, found)), beta)
    loss = b.Softplus(-margin)
    if label_smoothing:
        loss = b.Mul(loss, 1 - label_smoothing) + b.Mul(b.Softplus(margin), label_smoothing)
    return reduce_loss(b, loss, reduction)


@_loss("orpo", label_inputs.classes, ("Softmax", "LogSoftmax"), "batch", axis=-1, ignore_index=-100, beta=0.1)
def orpo(b, y, labels, reduction, axis, ignore_index, beta):  # type: ignore[no-untyped-def]
    """-p - β·log σ(o - o of the rejected row): p = mean log softmax(y)[t] of the chosen row, o = p - log(1 - exp(p))"""
    _positive("orpo: beta", beta)
    found, counts = _log_likelihoods(b, y, labels, axis, ignore_index)
    means = found / counts
    odds = means - b.Log(b.Max(1.0 - b.Exp(means), 1e-7))
    chosen = b.ReduceSum(b.Mul(b.Reshape(means, [-1, 2]), b.const([1, 0], means.dtype)), [1], keepdims=0)
    return reduce_loss(b, b.Mul(b.Softplus(-_of_pairs(b, odds)), beta) - chosen, reduction)


@_loss("policy_gradient", label_inputs.rewarded, ("Softmax", "LogSoftmax"), "batch", axis=-1, ignore_index=-100)
def policy_gradient(b, y, labels, advantage, reduction, axis, ignore_index):  # type: ignore[no-untyped-def]
    """-a·mean log softmax(y)[t] over the labels that count, with the advantage a of the row"""
    found, counts = _log_likelihoods(b, y, labels, axis, ignore_index)
    return reduce_loss(b, -(b.cast_like(advantage, found) * (found / counts)), reduction)


LOSSES |= DENSE | SIMILARITY


def loss_named(name: str, options: Mapping[str, Any]) -> tuple[LossFunction, dict[str, Any]]:
    """The loss called `name` and all of its options. Raises BadInput for an unknown name or option."""
    loss = looked_up("loss", name, LOSSES)
    chosen = completed(f"the loss {name!r}", loss.options, options)
    if chosen["reduction"] not in ("mean", "sum"):
        raise BadInput(f"reduction must be 'mean' or 'sum' (a loss is a scalar), not {chosen['reduction']!r}")
    block = chosen.get("block_rows")
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 0):
        raise BadInput(f"the loss {name!r}: block_rows is a number of rows, 0 for all at once, not {block!r}")
    if not 0 <= chosen.get("label_smoothing", 0.0) <= 1:
        raise BadInput(f"cross_entropy: label_smoothing must be between 0 and 1, not {chosen['label_smoothing']}")
    return loss, chosen

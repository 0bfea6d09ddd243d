"""Split conformal prediction, and temperature: a few numbers that held-out data decide, written into the graph."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel
from onnxgrad.runtime import Options
from onnxgrad.training.measure.comparisons import Binary, Classes
from onnxgrad.training.metrics.calibration import probabilities, temperature
from onnxgrad.uncertainty.prediction import PredictionGraph


def conformal(
    model: AnyModel,
    data: Any,
    *,
    coverage: float = 0.9,
    output: str | None = None,
    labels: str | None = None,
    options: Options | None = None,
    **settings: Any,
) -> Any:
    """Intervals, or sets of classes, that contain the label with a probability of `coverage` or more.

    This holds for rows that are exchangeable with those of `data`, which must not have been trained on (Vovk et al.
    2005; sets: Sadinle, Lei, Wasserman 2019). With n rows, the threshold is the ⌈(n + 1)·coverage⌉-th smallest
    nonconformity: ``|t - y|``, divided by ``{output}_spread`` if the model has that output; 1 - p of the true class.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: rows with labels (see `onnxgrad.evaluate`).
        coverage: between 0 and 1.
        output: the prediction. Default: the first output of floats.
        labels: the array of labels.
        options: how ONNX Runtime runs the model.
        settings: how data are prepared (see `onnxgrad.predict`).

    Returns:
        A model with the outputs ``{output}``, and ``{output}_lower`` and ``{output}_upper`` for numbers, or
        ``{output}_set`` [N, classes], booleans.

    Raises:
        BadInput: too few rows for this coverage, or data that do not fit.
    """
    if not 0 < coverage < 1:
        raise BadInput(f"coverage is between 0 and 1, not {coverage}")
    prediction = PredictionGraph(model, output, beside="_spread")
    name, b, spread = prediction.name, prediction.builder, prediction.beside
    beside = [] if spread is None else [spread]
    comparison, batches = prediction.measure(data, labels, options, beside, **settings)
    found = []
    for scores, t, *spreads in batches:
        if comparison.task == "numbers":
            away = np.abs(scores - t)
            found.append(away if spread is None else away / np.maximum(spreads[0].reshape(away.shape), 1e-12))
        else:
            odds = probabilities(np.asarray(scores, np.float64))
            found.append(1 - odds[np.arange(len(t)), t][:, None])
    misfit = np.sort(np.concatenate(found), 0)
    rank = math.ceil((len(misfit) + 1) * coverage - 1e-9)  # a product such as 9.000000000000002 is 9
    if rank > len(misfit):
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise BadInput(f"a coverage of {coverage} needs {least} rows or more, not {len(misfit)}")
    threshold: np.ndarray = misfit[rank - 1]
    y = b.var(prediction.output)
    if comparison.task == "numbers":
        shape = [d if isinstance(d, int) else 1 for d in (y.shape or ())[1:]]
        fits = math.prod(shape) == len(threshold)  # else rows have no fixed size: the widest interval is for all
        half = b.const(threshold.reshape(shape) if fits else threshold.max(), y.dtype)
        size = half if spread is None else half * b.var(spread)
        outputs = {name: y, f"{name}_lower": y - size, f"{name}_upper": y + size}
    elif isinstance(comparison, Classes):
        # thresholds are of float64, probabilities of the model's floats: a margin for rounding
        bound = b.const(1 - threshold[0] - 1e-6, y.dtype)
        chances = y if comparison.probabilities else b.Softmax(y, axis=comparison.axis)
        outputs = {name: y, f"{name}_set": b.GreaterOrEqual(chances, bound)}
    else:
        raise BadInput("one score for two classes has no sets; give the model a score for each class")
    return prediction.close(outputs)


def scaled(
    model: AnyModel,
    data: Any,
    *,
    output: str | None = None,
    labels: str | None = None,
    options: Options | None = None,
    **settings: Any,
) -> Any:
    """`model` with its logits divided by the temperature that minimizes the log loss over `data` (Guo et al. 2017).

    The prediction becomes the probabilities of the divided logits; the most probable class does not change.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, of scores of classes or log-odds.
        data: rows with labels that the model was not trained on (see `onnxgrad.evaluate`).
        output: the prediction. Default: the first output of floats.
        labels: the array of labels.
        options: how ONNX Runtime runs the model.
        settings: how data are prepared (see `onnxgrad.predict`).

    Raises:
        BadInput: a prediction of numbers, or data that do not fit.
    """
    prediction = PredictionGraph(model, output)
    name, b = prediction.name, prediction.builder
    comparison, batches = prediction.measure(data, labels, options, **settings)
    if comparison.task not in ("classes", "binary"):
        raise BadInput("a temperature divides scores of classes, and the labels are numbers")
    parts = [part[:2] for part in batches]
    divisor = temperature(*(np.concatenate(p) for p in zip(*parts)))
    y = b.var(prediction.output)
    is_shares = isinstance(comparison, (Classes, Binary)) and comparison.probabilities
    z = b.Log(b.Max(y, 1e-30)) if is_shares else y
    if isinstance(comparison, Classes):
        odds = b.Softmax(b.Div(z, divisor), axis=comparison.axis)
    else:
        z = z - b.Log(b.Max(b.Sub(1.0, y), 1e-30)) if is_shares else z
        odds = b.Sigmoid(b.Div(z, divisor))
    return prediction.close({name: odds})

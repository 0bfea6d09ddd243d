"""Laplace approximation of the last layer, with the Gauss-Newton matrix (Daxberger et al. 2021, "Laplace Redux").

The posterior of the weights of the last layer is normal around the trained weights, with the precision H + τ·I: H is
the Gauss-Newton matrix of the loss, Σ over rows of Λ ⊗ φφᵀ, for the features φ that the layer reads (and 1 for its
bias) and the curvature Λ of the loss in its logits: diag(p) - ppᵀ of classes, p(1 - p) of one score, 1/σ² of numbers.
The variance of logit c is φᵀΣ_cc φ. Layers of more than `LARGEST` weights take the Kronecker product of the mean of Λ
and Σ φφᵀ in place of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import constant, only_reader
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options
from onnxgrad.training.build.heads import last_layer
from onnxgrad.training.measure.comparisons import Binary, Classes
from onnxgrad.training.measure.kinds import other_outputs
from onnxgrad.training.metrics.calibration import probabilities
from onnxgrad.uncertainty.prediction import PredictionGraph

#: The most weights of a layer whose Gauss-Newton matrix is computed in full.
LARGEST = 2048
#: Prior precisions that are tried.
PRIORS = 10 ** np.linspace(-5, 5, 401)


@dataclass
class Posterior:
    """The normal distribution of the weights of a last layer.

    Attributes:
        eigenvalues: of the Gauss-Newton matrix; of its Kronecker form [outputs, features].
        vectors: its eigenvectors, [weights, weights]; or those of both factors.
        prior: the precision τ.
        noise: the standard deviation of labels around the prediction, of numbers.
    """

    eigenvalues: np.ndarray
    vectors: Sequence[np.ndarray]
    prior: float
    noise: float

    def variance(self, b: Builder, features: Var) -> Var:
        """The variance of each logit, [N, outputs], for features [N, size]."""
        share = 1 / (self.eigenvalues + self.prior)
        if len(self.vectors) == 1:
            size = (features.shape or [0])[-1]
            covariance = (self.vectors[0] * share) @ self.vectors[0].T
            assert isinstance(size, int)
            count = len(covariance) // size
            blocks = covariance.reshape(count, size, count, size)
            own = np.stack([blocks[c, :, c] for c in range(count)])  # [outputs, size, size]
            moved = b.Unsqueeze(features, [0]) @ b.const(own, features.dtype)
            each = b.ReduceSum(moved * b.Unsqueeze(features, [0]), [2], keepdims=0)
            return b.Transpose(each, perm=[1, 0])
        outer, inner = self.vectors
        turned = features @ b.const(inner, features.dtype)
        return turned * turned @ b.const(share.T @ (outer**2).T, features.dtype)


def laplace(
    model: AnyModel,
    data: Any,
    *,
    prior: float | None = None,
    noise: float | None = None,
    output: str | None = None,
    labels: str | None = None,
    options: Options | None = None,
    **settings: Any,
) -> Any:
    """Predictions with their spread by a Laplace approximation of the last layer.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, trained, which ends in a linear layer.
        data: the rows that it was trained on, with labels (see `onnxgrad.evaluate`).
        prior: the precision of the prior of the weights. Default: the one with the largest evidence.
        noise: the standard deviation of labels around the prediction. Default: that of the residuals.
        output: the prediction. Default: the first output of floats.
        labels: the array of labels.
        options: how ONNX Runtime runs the model.
        settings: how data are prepared (see `onnxgrad.predict`).

    Returns:
        A model with the outputs ``{output}`` and ``{output}_spread``. Of numbers, these are the prediction and the
        standard deviation of labels around it. Of classes, they are probabilities, softmax(z/√(1 + π/8·variance))
        (MacKay 1992), and the standard deviation of each logit z.

    Raises:
        BadInput: the model does not end in a linear layer, or data that do not fit.
    """
    prediction = PredictionGraph(model, output)
    b, name = prediction.builder, prediction.name
    ending = prediction.logits()
    z = b.var(prediction.output) if ending is None else ending.write(b, b.var)
    try:
        features, weights = _layer(b, z.value)
    except BadInput as error:
        raise BadInput(f"{error}{other_outputs(as_given(model), name)}") from None
    phi, kind, residuals = _measured(prediction, features, z, data, labels, options, settings)
    posterior = _fit(phi, kind, residuals, weights, prior, noise)
    variance = posterior.variance(b, features)
    variance = variance if z.rank == 2 else b.reshape(variance, b.shape_of(z))
    if kind == "numbers":
        return prediction.close({name: z, f"{name}_spread": b.Sqrt(variance + posterior.noise**2)})
    flat = z / b.Sqrt(1.0 + b.Mul(variance, math.pi / 8))
    odds = b.Softmax(flat, axis=1) if kind == "classes" else b.Sigmoid(flat)
    return prediction.close({name: odds, f"{name}_spread": b.Sqrt(variance)})


def _layer(b: Builder, logits: ir.Value) -> tuple[Var, list[np.ndarray]]:
    """The inputs of the last layer, with a column of ones if it has a bias, and its weights.

    Raises:
        BadInput: the logits are not those of a linear layer.
    """
    node = logits.producer()
    while node is not None and node.op_type in ("Squeeze", "Identity", "Reshape", "Flatten"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    found = None if node is None else last_layer(node.outputs[0])
    misfit = BadInput("the prediction is not that of a linear layer (Gemm, or MatMul and Add) of [N, features]")
    if found is None:
        raise misfit
    layer, value = found
    bias = None
    if node is not layer:
        sums = only_reader(layer.outputs[0], "Add")
        if sums is None or sums is not node:
            raise misfit
        bias = next((constant(v) for v in sums.inputs if v is not layer.outputs[0]), None)
        if bias is None:
            raise misfit
    alpha, beta = (layer.attributes.get_float(n, 1.0) for n in ("alpha", "beta"))
    turned = layer.attributes.get_int("transA", 0)
    if layer.op_type not in ("Gemm", "MatMul") or turned or value.shape is None or len(value.shape) != 2:
        raise misfit
    if layer.op_type == "Gemm" and len(layer.inputs) > 2 and layer.inputs[2] is not None:
        bias = constant(layer.inputs[2])
    kernel = next((constant(v) for v in layer.inputs[:2] if v is not value), None)
    if kernel is None or kernel.ndim != 2 or value.dtype not in FLOATS:
        raise misfit
    features = b.var(value) if alpha == 1 else b.var(value) * alpha
    arrays = [kernel]
    if bias is not None:
        ones = b.full_like(b.ReduceSum(features, [1], keepdims=1), beta)
        features = b.Concat(features, ones, axis=1)
        arrays.append(np.asarray(bias))
    return features, arrays


def _measured(
    prediction: PredictionGraph, features: Var, z: Var, data: Any, labels: str | None, options: Options | None,
    settings: dict[str, Any],
) -> tuple[np.ndarray, str, np.ndarray]:  # fmt: skip
    """The features of all rows, the kind of prediction, and the probabilities of all rows, or residuals of numbers."""
    comparison, batches = prediction.measure(data, labels, options, [features.value, z.value], **settings)
    parts = []
    for scores, wanted, phi, logits in batches:
        if isinstance(comparison, Classes):
            own = probabilities(logits.astype(np.float64))
        elif isinstance(comparison, Binary):
            own = 1 / (1 + np.exp(-logits.astype(np.float64).reshape(len(logits), -1)))
        else:
            own = scores - wanted
        parts.append((phi.astype(np.float64), own))
    phi, own = (np.concatenate(p) for p in zip(*parts))
    return phi, comparison.task, own


def _fit(
    phi: np.ndarray, kind: str, outputs: np.ndarray, weights: list[np.ndarray], prior: float | None, noise: float | None
) -> Posterior:
    """The posterior of the last layer for features `phi` [N, size].

    Args:
        phi: features.
        kind: of the prediction.
        outputs: probabilities [N, outputs], or residuals.
        weights: of the layer, all together.
        prior, noise: see `laplace`.
    """
    count, scale = outputs.shape[1], 0.0
    if kind == "numbers":
        scale = float(np.sqrt((outputs**2).mean())) if noise is None else noise
        if not scale > 0:
            raise BadInput("the noise of the labels must be positive; the residuals of the data are all 0")
        curvature = np.broadcast_to(np.eye(count) / scale**2, (len(phi), count, count))
    elif kind == "binary":
        curvature = (outputs * (1 - outputs))[:, :, None] * np.eye(count)
    else:
        curvature = outputs[:, :, None] * np.eye(count) - outputs[:, :, None] * outputs[:, None]
    size = phi.shape[1]
    vectors: Sequence[np.ndarray]
    if count * size <= LARGEST:
        blocks = np.empty((count, size, count, size))
        for c in range(count):
            for d in range(c, count):
                blocks[c, :, d] = phi.T @ (curvature[:, c, d, None] * phi)
                blocks[d, :, c] = blocks[c, :, d].T
        values, eigenvectors = np.linalg.eigh(blocks.reshape(count * size, count * size))
        vectors = [eigenvectors]
    else:
        (outer, u), (inner, v) = np.linalg.eigh(curvature.mean(0)), np.linalg.eigh(phi.T @ phi)
        values, vectors = np.maximum(outer, 0)[:, None] * np.maximum(inner, 0), [u, v]
    values = np.maximum(values, 0)
    if prior is None:
        norm = float(sum((w.astype(np.float64) ** 2).sum() for w in weights))
        evidence = [values.size * np.log(t) - t * norm - np.log(values + t).sum() for t in PRIORS]
        prior = float(PRIORS[int(np.argmax(evidence))])
    if not prior > 0:
        raise BadInput(f"the precision of the prior must be positive, not {prior}")
    return Posterior(values, vectors, prior, scale)

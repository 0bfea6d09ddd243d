"""Estimators of scikit-learn that fine-tune an .onnx model: `Classifier` and `Regressor`.

They are trained by `onnxgrad.train`, so that a model takes part in pipelines, cross-validation and searches.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from onnxgrad.errors import BadInput, json_text
from onnxgrad.model_io import AnyModel, save_model
from onnxgrad.model_io.read import as_given
from onnxgrad.model_io.save import gathered
from onnxgrad.training import train
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.measure.comparisons import are_shares
from onnxgrad.training.measure.evaluate import prediction_of
from onnxgrad.training.measure.predict import fields_of, predict
from onnxgrad.training.metadata import CLASSES
from onnxgrad.training.metrics.calibration import probabilities


def perceptron(features: int, outputs: int, hidden: Sequence[int] = (32,), seed: int = 0) -> onnx.ModelProto:
    """A network of fully connected layers with ReLU between them, [N, features] → [N, outputs], not yet trained.

    Weights are drawn uniformly from ±√(6/(inputs + outputs)) of their layer (Glorot, Bengio 2010), biases are 0.
    """
    draw, sizes = np.random.default_rng(seed), [features, *hidden, outputs]
    nodes, weights, last = [], [], "x"
    for k, (m, n) in enumerate(itertools.pairwise(sizes)):
        bound = np.sqrt(6 / (m + n))
        for name, array in ((f"w{k}", draw.uniform(-bound, bound, (m, n))), (f"b{k}", np.zeros(n))):
            weights.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
        is_last = k == len(hidden)
        nodes.append(onnx.helper.make_node("Gemm", [last, f"w{k}", f"b{k}"], ["scores" if is_last else f"h{k}"]))
        if not is_last:
            nodes.append(onnx.helper.make_node("Relu", [f"h{k}"], [f"a{k}"]))
        last = f"a{k}"
    declared = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", size])
        for name, size in (("x", features), ("scores", outputs))
    ]
    graph = onnx.helper.make_graph(nodes, "perceptron", declared[:1], declared[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


class _Estimator(BaseEstimator):
    """The parameters and the training that both estimators share."""

    def __init__(
        self,
        model: AnyModel | Callable[[int, int], onnx.ModelProto] | None = None,
        *,
        epochs: int = 50,
        learning_rate: float | None = 0.01,
        batch_size: int = 32,
        optimizer: str = "adam",
        loss: Any = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.loss = loss
        self.seed = seed
        self.settings = settings

    def _start(self, features: int, outputs: int) -> ir.Model:
        """The model to train."""
        model = perceptron(features, outputs, seed=self.seed) if self.model is None else self.model
        if callable(model) and not isinstance(model, (onnx.ModelProto, ir.Model)):
            model = model(features, outputs)
        return as_given(model)

    def _rows(self, model: ir.Model, x: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of numbers as the input of `model`. Raises BadInput if its shape is not that of the rows."""
        fields = fields_of(model)
        if len(fields) != 1:
            raise BadInput(f"an estimator of scikit-learn has one input, and the model has {len(fields)}")
        (field,) = fields
        dims = [d if isinstance(d, int) else -1 for d in field.shape]
        if len(dims) > 1 and -1 not in dims and np.prod(dims) == x.shape[1]:
            x = x.reshape(len(x), *dims)
        elif len(dims) != 1 or dims[0] not in (-1, x.shape[1]):
            raise BadInput(f"X has {x.shape[1]} features, but the model takes {list(field.shape)} for each row")
        return {field.name: x.astype(field.dtype, copy=False)}

    def _train(self, model: ir.Model, x: np.ndarray, labels: np.ndarray, loss: str) -> None:
        given = {"progress": False, "seed": self.seed, **(self.settings or {})}
        rows = {**self._rows(model, x), "labels": labels}
        trainer = train(
            model, rows, loss=self.loss or loss, epochs=self.epochs, batch_size=self.batch_size,
            optimizer=self.optimizer, learning_rate=self.learning_rate, **given,
        )  # fmt: skip
        self.model_ = trainer.inference_model()
        self.history_ = trainer.history.epochs
        self.n_iter_ = len(self.history_)

    def _scores(self, x: Any) -> tuple[ir.Value, np.ndarray]:
        """The prediction of the trained model, and its values for `x`."""
        check_is_fitted(self)
        x = validate_data(self, x, dtype=[np.float64, np.float32], reset=False)
        model = as_given(self.model_)
        output = prediction_of(model, None)
        return output, predict(model, self._rows(model, x), outputs=[output.name or ""])[output.name or ""]

    def save(self, path: str | os.PathLike) -> None:
        """Write the trained model to `path`, a plain ``.onnx`` file."""
        check_is_fitted(self)
        save_model(as_given(self.model_), path)


class Classifier(ClassifierMixin, _Estimator):
    """A classifier of scikit-learn that fine-tunes an .onnx model.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with one input of rows and an output of a score
            for each class, or one score for two classes; or a function of the numbers of features and outputs that
            returns one. Default: `perceptron`.
        epochs, learning_rate, batch_size, optimizer, loss, seed: see `onnxgrad.train`. The loss is cross_entropy, or
            bce_with_logits of one score.
        settings: further settings of `onnxgrad.train`, as ``{"weight_decay": 0.01, "callbacks": [...]}``.

    Attributes:
        model_: the trained model.
        classes_: the labels, in the order of the scores.
        history_: the records of epochs.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((80, 3))
    >>> bool(Classifier(epochs=20).fit(x, x[:, 0] > 0).score(x, x[:, 0] > 0) > 0.9)
    True
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train a copy of `model` on rows `X` [N, features] with labels `y` [N]."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count < 2:
            raise BadInput("a classifier needs rows of at least 2 classes, and y has one class")
        model = self._start(X.shape[1], count)
        output = prediction_of(model, None)
        size = output.shape[-1] if output.shape is not None and len(output.shape) else None
        if size == 1 and count == 2:
            self._train(model, X, numbers[:, None].astype(_dtype_of(output)), "bce_with_logits")
        elif isinstance(size, int) and size != count:
            raise BadInput(
                f"y has {count} classes, and the model has {size} scores\n"
                f"  hint: onnxgrad.training.with_head(model, {count}) gives it as many"
            )
        else:
            self._train(model, X, numbers.astype(np.int64), "cross_entropy")
        trained = as_given(self.model_)
        trained.metadata_props[CLASSES] = json_text([str(c) for c in self.classes_])
        self.model_ = gathered(trained, "save a model of this size by onnxgrad.train(…, output=…)")
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [N, classes] of rows `X`."""
        output, scores = self._scores(X)
        scores, (low, high) = scores.astype(np.float64), bounds(output)
        if scores.ndim == 1 or scores.shape[1] == 1:
            ones = scores.reshape(-1)
            ones = ones if low >= 0 and high <= 1 else 1 / (1 + np.exp(-ones))
            return np.stack([1 - ones, ones], 1)
        if (low >= 0 and high <= 1) or are_shares(scores, 1):
            return scores
        return probabilities(scores)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


class Regressor(RegressorMixin, _Estimator):
    """A regressor of scikit-learn that fine-tunes an .onnx model.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with one input of rows and one number, or several,
            for each row; or a function of the numbers of features and outputs that returns one. Default: `perceptron`.
        epochs, learning_rate, batch_size, optimizer, loss, seed: see `onnxgrad.train`. The loss is mse.
        settings: further settings of `onnxgrad.train`.

    Attributes:
        model_: the trained model.
        history_: the records of epochs.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train a copy of `model` on rows `X` [N, features] with numbers `y`, [N] or [N, outputs]."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
        wanted = y[:, None] if y.ndim == 1 else y
        model = self._start(X.shape[1], wanted.shape[1])
        output = prediction_of(model, None)
        if output.shape is not None and len(output.shape) == 1:
            wanted = wanted[:, 0]
        self.flat_ = y.ndim == 1
        self._train(model, X, wanted.astype(_dtype_of(output)), "mse")
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The numbers that belong to each row, in the shape of `y`."""
        _, found = self._scores(X)
        found = found.astype(np.float64)
        return found.reshape(len(found)) if self.flat_ else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _dtype_of(output: ir.Value) -> np.dtype:
    return np.dtype(np.float32) if output.dtype is None else output.dtype.numpy()

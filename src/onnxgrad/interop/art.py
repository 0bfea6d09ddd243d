"""An ``.onnx`` classifier for gradient attacks of the Adversarial Robustness Toolbox.

ART's own estimators need the framework of the original model. Its gradient attacks (FGSM, PGD, Carlini & Wagner,
DeepFool, AutoAttack, …) need scores, the gradient of the loss, and the gradient of single classes with respect to the
input: all of these come from `onnxgrad.Function`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from art.estimators.classification.classifier import ClassifierNeuralNetwork
from art.utils import check_and_transform_label_format

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.function import Function
from onnxgrad.ir.builder import FLOATS
from onnxgrad.model_io import save_model
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options
from onnxgrad.training.metrics.calibration import probabilities


class Classifier(ClassifierNeuralNetwork):
    """An ``.onnx`` model as an estimator of ART.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, with one input ``[N, …]`` of floats.
        of: the scores, float ``[N, classes]``; default: the first output.
        probabilities: the scores are probabilities, as behind a Softmax; else they are logits.
        clip_values: the least and the largest value of an input, as ``(0, 1)``.
        channels_first: True if the channels are the first axis of an image.
        options: how ONNX Runtime runs it.
        art: further arguments of ART's `ClassifierNeuralNetwork`: ``preprocessing``, ``preprocessing_defences``, …

    Raises:
        BadInput: a model of several inputs, or scores of another rank or of a number of classes that is left open.
        UnknownName: there is no output `of`.
    """

    estimator_params = ClassifierNeuralNetwork.estimator_params

    def __init__(
        self,
        model: AnyModel,
        *,
        of: str | None = None,
        probabilities: bool = False,
        clip_values: tuple[float, float] | None = None,
        channels_first: bool = True,
        options: Options | None = None,
        **art: Any,
    ) -> None:
        f = Function(model, options=options)
        graph = f.model.graph
        if len(f.inputs) != 1:
            raise BadInput(f"a classifier for ART has one input, and the model has {len(f.inputs)}: {f.inputs}")
        outputs = {v.name or "": v for v in graph.outputs}
        self.of = next(iter(outputs)) if of is None else of
        if self.of not in outputs:
            raise UnknownName(self.of, outputs, "output")
        (self.wrt,) = f.inputs
        shape = outputs[self.of].shape
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            raise BadInput(f"the scores {self.of!r} are [N, classes], with a fixed number of classes, not {shape}")
        taken = next(v for v in graph.inputs if v.name == self.wrt)
        if taken.shape is None or taken.dtype not in FLOATS:
            raise BadInput(f"the input {self.wrt!r} holds floats and has a rank that is known")
        self._dtype = taken.dtype.numpy()
        self._input_shape = tuple(d if isinstance(d, int) else None for d in taken.shape[1:])
        self.probabilities = probabilities
        self._scores = Function(f.model, outputs=self.of, options=options)
        self._pull = f.vjp(wrt=self.wrt, of=self.of)
        super().__init__(model=f, clip_values=clip_values, channels_first=channels_first, **art)
        self.nb_classes = shape[1]

    @property
    def input_shape(self) -> tuple[Any, ...]:
        """The shape of one example; None for a size that the model leaves open."""
        return self._input_shape

    def _predict(self, x: np.ndarray) -> np.ndarray:
        return self._scores(x.astype(self._dtype, copy=False))

    def predict(self, x: np.ndarray, batch_size: int = 128, **_: Any) -> np.ndarray:
        """The scores ``[N, classes]`` of examples ``[N, …]``."""
        x, _y = self._apply_preprocessing(x, None, fit=False)
        parts = [self._predict(x[i : i + batch_size]) for i in range(0, len(x), batch_size)]
        return self._apply_postprocessing(np.concatenate(parts), fit=False)

    def _odds(self, scores: np.ndarray) -> np.ndarray:
        return scores if self.probabilities else probabilities(scores)

    def compute_loss(self, x: np.ndarray, y: np.ndarray, reduction: str = "none", **_: Any) -> np.ndarray:
        """The cross-entropy of each example ``[N]``, or their ``"mean"`` or ``"sum"``.

        `y` are labels ``[N]``, or their distribution ``[N, classes]``.
        """
        x, y = self._apply_preprocessing(x, self._distributions(y), fit=False)
        losses = -(y * np.log(np.maximum(self._odds(self._predict(x)), np.finfo(self._dtype).tiny))).sum(1)
        return {"none": losses, "mean": losses.mean(), "sum": losses.sum()}[reduction]

    def _distributions(self, y: np.ndarray) -> np.ndarray:
        # attacks pass bytes, and the negative of a byte is one
        return check_and_transform_label_format(np.asarray(y), self.nb_classes).astype(self._dtype)

    def loss_gradient(self, x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
        """The gradient of each example's cross-entropy with respect to it, of the shape of `x`."""
        given, labels = self._apply_preprocessing(x, self._distributions(y), fit=False)
        odds = self._odds(self._predict(given))
        if self.probabilities:
            cotangent = -labels / np.maximum(odds, np.finfo(self._dtype).tiny)
        else:
            cotangent = odds * labels.sum(1, keepdims=True) - labels
        return self._apply_preprocessing_gradient(x, self._pulled(given, cotangent))

    def _pulled(self, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        return self._pull(x.astype(self._dtype, copy=False), cotangent.astype(self._dtype, copy=False))

    def class_gradient(self, x: np.ndarray, label: Any = None, **_: Any) -> np.ndarray:
        """The gradients of scores with respect to their example: ``[N, classes, …]``, or ``[N, 1, …]`` of one `label`.

        `label` is that of all examples, or one for each.
        """
        given, _y = self._apply_preprocessing(x, None, fit=False)
        chosen = range(self.nb_classes) if label is None else [label]
        columns = []
        for k in chosen:
            rows = np.zeros((len(given), self.nb_classes), self._dtype)
            rows[np.arange(len(given)), k] = 1
            columns.append(self._apply_preprocessing_gradient(x, self._pulled(given, rows)))
        return np.stack(columns, axis=1)

    @property
    def layer_names(self) -> list[str]:
        """The values that `get_activations` can return: all results of nodes."""
        return [v.name or "" for node in self.model.model.graph for v in node.outputs if v.name]

    def get_activations(self, x: np.ndarray, layer: int | str, batch_size: int = 128, framework: bool = False) -> Any:
        """The value `layer`, by its name or its place in `layer_names`, for examples ``[N, …]``."""
        if framework:
            raise BadInput("there is no tensor of a framework: an .onnx model runs without one")
        name = self.layer_names[layer] if isinstance(layer, int) else layer
        x, _y = self._apply_preprocessing(x, None, fit=False)
        inner = Function(self.model.model, outputs=name, options=self.model.options)
        parts = [inner(x[i : i + batch_size].astype(self._dtype, copy=False)) for i in range(0, len(x), batch_size)]
        return np.concatenate(parts)

    def fit(self, *_: Any, **__: Any) -> None:
        """ART does not train the model."""
        raise BadInput("ART does not train an .onnx model\n  hint: train it with onnxgrad.train, and wrap it again")

    def save(self, filename: str, path: str | None = None) -> None:
        """Write the model to ``path/filename``."""
        save_model(self.model.model, filename if path is None else f"{path}/{filename}")

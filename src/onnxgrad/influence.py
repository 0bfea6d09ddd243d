"""The rows of the training data that speak for or against predictions: gradients that point the same way (TracIn)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.settings import settings_of
from onnxgrad.training.build.attach import attached
from onnxgrad.training.build.recipe import ALGORITHM
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.loop.trainer import Trainer
from onnxgrad.training.step.accumulate import BUCKET, KEEP, TOTAL, split_step


def influence(
    models: AnyModel | Sequence[AnyModel],
    training: Any,
    test: Any,
    *,
    rates: Sequence[float] | None = None,
    trainable: Sequence[str] | None = None,
    options: Options | None = None,
    **settings: Any,
) -> np.ndarray:
    """The loss of each test row that a step on each training row saves, to first order (Pruthi et al. 2020).

    The sum over the models of rate · ⟨gradient of the training row, gradient of the test row⟩: positive for rows that
    help, negative for rows that harm.

    Args:
        models: one model, or several that were saved during training (TracInCP).
        training, test: rows with labels (see `onnxgrad.train`).
        rates: the learning rate of each model. Default: 1.
        trainable: the weights whose gradients count (see `onnxgrad.training.attach`); those of the last layer,
            ``["last:1"]``, need least memory. Default: all that train by default.
        options: how ONNX Runtime runs the model.
        settings: of `onnxgrad.training.attach`, such as ``loss``, and of the preparation of data, such as ``inputs``.

    Returns:
        Influences [test rows, training rows].

    Raises:
        BadInput: as `onnxgrad.training.attach`; or a loss that compares the rows of a batch with each other.
    """
    listed: list[Any] = list(models) if isinstance(models, (list, tuple)) else [models]
    factors = [1.0] * len(listed) if rates is None else list(rates)
    if len(factors) != len(listed) or not listed:
        raise BadInput(f"there are {len(listed)} models and {len(factors)} rates")
    preparing = {n: v for n, v in settings.items() if n in settings_of(PreparationRecipe)}
    losing = {n: v for n, v in settings.items() if n not in preparing}
    if unknown := [n for n in losing if n not in settings_of(*ALGORITHM)]:
        raise BadInput(f"influence has no argument {unknown[0]!r}")
    total: np.ndarray | float = 0.0
    for model, factor in zip(listed, factors):
        gradients = _Gradients(model, trainable, options, losing)
        wanted = gradients.rows(test, preparing)
        tests = np.stack(list(wanted))
        total = total + factor * np.stack([tests @ g for g in gradients.rows(training, preparing)], 1)
    return np.asarray(total)


class _Gradients:
    """The gradient of the loss of one row at a time, as a flat vector."""

    def __init__(
        self, model: AnyModel, trainable: Sequence[str] | None, options: Options | None, settings: dict[str, Any]
    ) -> None:
        plain = {"trainable": trainable, "train_mode": False, "optimizer": "sgd", **settings}
        source = attached(as_given(model), accumulate=True, **plain)
        self.trainer = Trainer(source.model, accumulate=1)
        split = split_step(source)
        self.runner = StepRunner(split.gradient, options=options)
        self.runner.held[KEEP][...] = 0

    def rows(self, data: Any, preparing: dict[str, Any]) -> Any:
        """The gradient of each row of `data`."""
        rows = self.trainer.data(data, "the data", PreparationRecipe(**preparing))
        for batch in rows.batches(1):
            self.runner.step(batch)
            yield np.array(self.runner.now[BUCKET], np.float64) / (float(self.runner.now[TOTAL]) or 1.0)

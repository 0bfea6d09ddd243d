"""A model trained on data in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_keyword, keywords_of
from onnxgrad.training.build.attach import known_arguments
from onnxgrad.training.data import open_data
from onnxgrad.training.data.class_weights import balanced_weights, labels_in
from onnxgrad.training.data.columns import Column
from onnxgrad.training.loop.trained import AnyData
from onnxgrad.training.loop.trainer import Trainer
from onnxgrad.training.loss.class_axis import with_class_axis
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.measure.predict import as_given


def train(model: Any, data: AnyData, *, output: str | os.PathLike | None = None, **settings: Any) -> Trainer:
    """Train `model` on `data`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` (see `Trainer`).
        data: arrays by name, rows that are dicts, or a path (see `Trainer.fit`).
        output: where to save the trained model, a plain ``.onnx`` file. Default: nowhere; `Trainer.save` does it later.
        settings: arguments of `Trainer` (``loss="cross_entropy"``, ``optimizer="adam"``, ``learning_rate=1e-3``, …)
            and of `Trainer.fit` (``epochs=10``, ``batch_size=32``, ``validation_split=0.2``, …).

    Returns:
        The trainer, at the end of its run: ``.history``, ``.predict(…)``, ``.evaluate(…)``, ``.save(…)``.

    Raises:
        BadInput: as `Trainer` and `Trainer.fit`; or an argument that neither of them has.
    """
    fitting = {*keywords_of(Trainer.fit)} - {"data"}
    for name in settings:
        check_keyword(
            "train", name, [*keywords_of(train), *fitting, *keywords_of(Trainer.__init__), *known_arguments()]
        )
    if _asks_for_balance(settings.get("loss")):
        columns = open_data(data, inputs=settings.get("inputs"))
        settings["loss"] = balanced(settings["loss"], as_given(model), columns, settings.get("labels"))
    making = {k: v for k, v in settings.items() if k not in fitting}
    if "memory" in settings and "batch_size" in settings:  # the memory is that of such a batch
        making["batch_size"] = settings["batch_size"]
    trainer = Trainer(model, **making)
    trainer.fit(data, **{k: v for k, v in settings.items() if k in fitting})
    if output is not None:
        trainer.save(output)
    return trainer


def _asks_for_balance(loss: Any) -> bool:
    listed = loss if isinstance(loss, (list, tuple)) else [loss]
    return any(
        "weight=balanced" in term if isinstance(term, str) else getattr(term, "options", {}).get("weight") == "balanced"
        for term in listed
    )


def balanced(loss: Any, model: ir.Model, columns: Mapping[str, Column], labels: str | None = None) -> Any:
    """`loss` with numbers for each ``weight="balanced"``: those that make up for how often each class occurs.

    Args:
        loss: one or several, as `attach` takes them.
        model: tells how many classes there are.
        columns: hold the labels.
        labels: under which name.

    Raises:
        BadInput: the number of classes is not known, or the labels are no classes.
    """
    if not _asks_for_balance(loss):
        return loss
    listed = loss if isinstance(loss, (list, tuple)) else [loss]
    return [_balanced(Loss.of(t) if isinstance(t, str) else t, model, columns, labels) for t in listed]


def _balanced(term: Any, model: ir.Model, columns: Mapping[str, Column], labels: str | None) -> Any:
    if not isinstance(term, Loss) or term.options.get("weight") != "balanced":
        return term
    floats = [v for v in model.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
    prediction = next((v for v in floats if term.output in (None, v.name)), None)
    shape = None if prediction is None else prediction.shape
    axis = 1
    if prediction is not None:
        axis = with_class_axis({"axis": term.options.get("axis")}, prediction)["axis"]
    classes = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if not isinstance(classes, int):
        raise BadInput("balanced weights need the number of classes, which the model does not declare; give numbers")
    numbers = labels_in(columns, term.labels or labels)
    weights = balanced_weights(numbers, classes, term.options.get("ignore_index"))
    options = {**term.options, "weight": weights}
    own = {"factor": term.factor, "output": term.output, "labels": term.labels, "teacher": term.teacher}
    return Loss(term.loss, **own, **options)

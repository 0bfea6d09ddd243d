"""Type and shape of the labels of a loss, given its prediction and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.training.option_strings import one_of
from onnxgrad.wording import shape_text

Dims = tuple[int | ir.SymbolicDim, ...]
#: Type and shape of each label input, by the suffix of its name.
Labels = dict[str, tuple[ir.DataType, Dims | None]]
INT64 = ir.DataType.INT64

#: Names of arrays that a loss compares with, and that the model does not read.
LABELS = ("y", "t", "label", "labels", "target", "targets", "class", "classes")
#: Names of the prediction in formulas.
PREDICTIONS = ("scores", "score", "prediction", "predictions", "pred", "y_pred", "logits", "output")


def as_prediction(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Labels of the type and shape of the prediction."""
    return {"": (y.dtype or ir.DataType.FLOAT, None if y.shape is None else tuple(y.shape))}


def classes(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Class numbers, without the class axis of the prediction."""
    dims = None if y.shape is None else tuple(y.shape)
    if dims is not None:
        if len(dims) < 2:
            raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; classes need an axis beside that of the batch")
        axis = options["axis"] % len(dims)
        if dims[axis] == 1:
            raise BadInput(
                f"{y.name!r} has one score for each row, and a loss of classes needs one for each class\n"
                "  hint: bce_with_logits takes one score, and labels 0 and 1"
            )
        dims = dims[:axis] + dims[axis + 1 :]
    return {"": (INT64, dims)}


def top_classes(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """The scores of the likeliest classes of a teacher for scores [rows, …, classes], and which classes they are."""
    dims = None if y.shape is None else tuple(y.shape)
    if dims is not None and (len(dims) < 2 or options["axis"] % len(dims) != len(dims) - 1):
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; kl_top_k takes scores [rows, …, classes]")
    few = None if dims is None else (*dims[:-1], ir.SymbolicDim("top_k"))
    return {"": (y.dtype or ir.DataType.FLOAT, few), "_classes": (INT64, few)}


def preferences(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Class numbers for scores [rows, places, classes], and the log-likelihood of each row by the reference."""
    return _add_row_number(y, options, "_reference")


def rewarded(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Class numbers for scores [rows, places, classes], and the advantage of each row."""
    return _add_row_number(y, options, "_advantage")


def _add_row_number(y: ir.Value, options: Mapping[str, Any], suffix: str) -> Labels:
    found = classes(y, options)
    dims = found[""][1]
    return {**found, suffix: (y.dtype or ir.DataType.FLOAT, None if dims is None else dims[:1])}


def one_per_row(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """A class number for each row of [batch, features]."""
    if y.shape is not None and len(y.shape) != 2:
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; this loss compares rows of [batch, features]")
    return {"": (INT64, None if y.shape is None else (y.shape[0],))}


def sequences(y: ir.Value, options: Mapping[str, Any]) -> Labels:
    """Rows of class numbers for scores [batch, time, classes], and their lengths where the options ask for them."""
    if y.shape is not None and len(y.shape) != 3:
        raise BadInput(f"{y.name!r} has shape {shape_text(y.shape)}; ctc takes scores [batch, time, classes]")
    one_of("ctc: time", options["time"], (0, 1))
    n = None if y.shape is None else y.shape[1 - options["time"]]
    found: Labels = {"": (INT64, (_dim(n), ir.SymbolicDim("label_length")))}
    for name in ("label_lengths", "input_lengths"):
        if options[name]:
            found[f"_{name}"] = (INT64, (_dim(n),))
    return found


def _dim(n: int | ir.SymbolicDim | None) -> int | ir.SymbolicDim:
    return ir.SymbolicDim(None) if n is None else n

"""The kind of comparison that predictions and labels of these shapes and values are for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.graph.row_axis import row_axis, rows_first
from onnxgrad.training.loss.class_axis import CLASS_AXIS, axis_beside, class_axis
from onnxgrad.training.measure.comparisons import Binary, Classes, Comparison, Known, Points, are_shares
from onnxgrad.training.metadata import read_entry
from onnxgrad.training.metrics.registry import METRICS
from onnxgrad.wording import name_list


def other_outputs(model: ir.Model, name: str | None, flag: str = "--prediction") -> str:
    """A hint at the outputs of floats that `model` has beside `name`, which `flag` chooses; empty if there are none."""
    floats = [v.name or "" for v in model.graph.outputs if holds_floats(v)]
    others = name_list([n for n in floats if n != name])
    return f"\n  hint: {flag} chooses another output: {others}" if others else ""


def are_sequences(metrics: Sequence[str], y: np.ndarray, t: np.ndarray) -> bool:
    """True if all `metrics` compare sequences, and the shapes are scores [N, T, C] and labels [N, L]."""
    names = (m.partition(":")[0] for m in metrics)
    return all("sequences" in METRICS[n].tasks for n in names) and y.ndim == 3 and t.ndim == 2


def alike(y: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels, without an axis of size 1 that only one of them has."""
    if y.ndim == t.ndim + 1 and y.shape[-1] == 1:
        return y[..., 0], t
    if t.ndim and t.shape[-1] == 1 and (y.ndim == t.ndim - 1 or (y.ndim == t.ndim and y.shape[-1] > 1)):
        return y, t[..., 0]
    return y, t


def choose_comparison(
    model: ir.Model,
    y: np.ndarray,
    t: np.ndarray,
    every: np.ndarray,
    output: ir.Value,
    called: str,
    metrics: Sequence[str] | None = None,
    ignored: int | None = None,
    class_axis: int | None = None,
) -> Comparison:
    """The comparison of predictions `y` with labels `t` of a batch, which are `called` so; `every` one decides it.

    `class_axis`: that of the classes in `y`, if the caller names it.
    """
    low, high = bounds(output)
    probabilities = low >= 0 and high <= 1
    y, t = alike(y, t)
    if t.dtype.kind == "f" and t.ndim == 3 and t.shape == (*y.shape[:2], 3) and (y.ndim == 4 or y.shape[2:] == (2,)):
        return Points()
    shapes = f"the labels {called!r} are {list(t.shape)} and the predictions {output.name!r} {list(y.shape)}"
    sequences = y.ndim == 3 and t.ndim == 2 and len(y) == len(t)
    hint = "\n  hint: sequences of symbols, as of CTC, are compared by --metrics cer or exact" if sequences else ""
    misfit = BadInput(f"{shapes}{other_outputs(model, output.name) or hint}")
    if y.ndim == t.ndim + 1 and (every.dtype.kind in "iub" or (every == np.trunc(every)).all()):
        if class_axis is None:
            class_axis = read_entry(output.metadata_props, CLASS_AXIS, int)
        axes = (1, y.ndim - 1) if class_axis is None else (class_axis + y.ndim if class_axis < 0 else class_axis,)
        fitting = [a for a in dict.fromkeys(axes) if a and [*y.shape[:a], *y.shape[a + 1 :]] == list(t.shape)]
        if not fitting:
            raise misfit
        axis = fitting[0] if len(fitting) == 1 else _find_class_axis(model, output, y)
        probabilities = probabilities or are_shares(y, axis)
        return Classes(axis, ignored, probabilities, y.ndim == 3, called, y.ndim > 3)
    if y.shape != t.shape:
        raise misfit
    asked = [m for m in metrics or () if "numbers" not in METRICS[m.partition(":")[0]].tasks]
    if np.isin(every, (0, 1)).all() and (asked or (not metrics and (probabilities or every.dtype.kind in "iub"))):
        return Binary(probabilities)
    return Comparison() if ignored is None or t.dtype.kind != "f" else Known(ignored)


def _find_class_axis(model: ir.Model, output: ir.Value, y: np.ndarray) -> int:
    """The axis of the classes of scores `y` with rows first, where the sizes fit two axes.

    Raises:
        BadInput: it cannot be told.
    """
    if output.shape is None or len(output.shape) != y.ndim:
        raise BadInput(
            f"the predictions {output.name!r} are {list(y.shape)}: along which axis are the classes?\n"
            "  hint: declare the shape of the output in the model, with a number for the classes"
        )
    if rows := row_axis(model, output):
        return rows_first(y.ndim, rows).index(axis_beside(output, rows))
    copy = model.clone()
    with contextlib.suppress(OnnxGradError):  # then what the file declares
        infer_types(copy)
    return class_axis(next(v for v in copy.graph.outputs if v.name == output.name), square=True)

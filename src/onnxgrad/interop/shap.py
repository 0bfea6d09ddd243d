"""Explanations of an ``.onnx`` model for the plots of SHAP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import shap

from onnxgrad.errors import BadInput
from onnxgrad.function import Function
from onnxgrad.ir.builder import FLOATS
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options
from onnxgrad.transforms.attribution import expected_gradients


def explanation(
    model: AnyModel,
    rows: np.ndarray,
    background: np.ndarray,
    *,
    of: str | None = None,
    target: int | None = None,
    names: Sequence[str] | None = None,
    options: Options | None = None,
) -> Any:
    """SHAP values of `rows` by expected gradients, as a ``shap.Explanation`` that ``shap.plots`` take.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with one input of floats.
        rows: what is explained, [N, …].
        background: rows of the training data, in random order; a hundred or more.
        of: the output, [N] or [N, outputs]. Default: the only one.
        target: the column of the output that is explained, such as a class.
        names: of the features.
        options: how ONNX Runtime runs it.

    Raises:
        BadInput: a model of several inputs, or several numbers for each row.
    """
    f = Function(model, options=options)
    inputs = [v for v in f.model.graph.inputs if v.name in f.inputs]
    if len(inputs) != 1 or inputs[0].dtype not in FLOATS:
        raise BadInput(f"SHAP values are of one input of floats, and the model has {len(inputs)}: {f.inputs}")
    name = inputs[0].name or ""
    dtype = inputs[0].dtype.numpy()
    rows, background = (np.asarray(a).astype(dtype, copy=False) for a in (rows, background))
    output = of or f.model.graph.outputs[0].name or ""
    bases = np.asarray(Function(model, outputs=output, options=options)(background))
    bases = bases if target is None else bases[:, target]
    if bases.size != len(background):
        raise BadInput("SHAP values are of one number for each row; say which column with target=")
    part = output if target is None else f"{output}[:, {target}]"
    explained = Function(expected_gradients(model, wrt=name, of=part), options=options)
    values = explained(**{name: rows, f"{name}_background": background})
    mean = float(bases.mean())
    return shap.Explanation(
        values, np.full(len(rows), mean), rows, feature_names=None if names is None else list(names)
    )

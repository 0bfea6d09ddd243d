"""Inference without a model's declarations of results, to find those that contradict its operators.

Declared shapes of results are trusted where inference finds none. Only a derivation can show that one is wrong: a rule
then returns a cotangent of another shape. If the same derivation succeeds without the declarations, they are wrong, and
not the rule.
"""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxgrad.errors import OnnxGradError
from onnxgrad.model_io.read import load_model, read_proto


def undeclared(model: object) -> ir.Model | None:
    """Return a copy of `model` that declares the shapes of its inputs and weights alone.

    None if it declares no others, or cannot be copied.
    """
    try:
        if isinstance(model, ir.Model):
            copy = model.clone()
        elif isinstance(model, onnx.ModelProto):
            copy = read_proto(model)
        elif isinstance(model, (str, os.PathLike)):
            copy = load_model(model)
        else:
            return None
    except OnnxGradError:
        return None
    results = [v for graph in copy.graphs() for node in graph for v in node.outputs if v.shape is not None]
    for value in results:
        value.shape = None
    return copy if results else None

"""Types and shapes of the operators of ai.onnx.ml, for which neither library has any.

Most give float32, one row for each row of their operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.infer.context import Infer

ML = "ai.onnx.ml"
_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def _set(value: ir.Value, held: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
    value.type = value.type or held
    value.shape = value.shape if value.shape is not None else shape


def _alike(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """float32 in the shape of the operand."""
    x = node.inputs[0]
    _set(node.outputs[0], _FLOAT, None if x is None or x.shape is None else ir.Shape(x.shape))


def _imputer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """The type and shape of the operand."""
    x = node.inputs[0]
    if x is not None:
        _set(node.outputs[0], x.type, None if x.shape is None else ir.Shape(x.shape))


def _rows(columns: Callable[[ir.Node], int]) -> Infer:
    """float32, as many rows as the operand has and `columns`."""

    def infer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        x = node.inputs[0]
        rows = x.shape[0] if x is not None and x.shape is not None and len(x.shape) == 2 else None
        _set(node.outputs[0], _FLOAT, None if rows is None else ir.Shape([rows, columns(node)]))

    return infer


def _classifier(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """A label for each row, and float32 scores of all classes."""
    numbers, texts = (node.attributes.get(f"classlabels_{kind}") for kind in ("ints", "strings"))
    count = max(len(given.value) if given is not None else 0 for given in (numbers, texts))
    x = node.inputs[0]
    rows = x.shape[0] if x is not None and x.shape is not None and len(x.shape) == 2 else None
    held = ir.TensorType(ir.DataType.STRING if texts is not None and len(texts.value) else ir.DataType.INT64)
    _set(node.outputs[0], held, None if rows is None else ir.Shape([rows]))
    if len(node.outputs) > 1:
        _set(node.outputs[1], _FLOAT, None if rows is None or count < 2 else ir.Shape([rows, count]))


def _infer_feature_extractor(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
    """Infer ArrayFeatureExtractor: the type of x, and the number of indices as last axis; a vector gives one row."""
    x, index = node.inputs
    if x is None or index is None:
        return
    shape = None
    if x.shape is not None and index.shape is not None:
        whole = [d for d in index.shape if d != 1]
        count = math.prod(whole) if all(isinstance(d, int) for d in whole) else whole[0] if len(whole) == 1 else None
        shape = ir.Shape([*(x.shape[:-1] or [1]), count])
    _set(node.outputs[0], x.type, shape)


#: The operators that the library does not know, or infers wrongly (ArrayFeatureExtractor of a vector).
OPERATORS: dict[str, Infer] = {
    "Scaler": _alike,
    "Normalizer": _alike,
    "Imputer": _imputer,
    "LinearClassifier": _classifier,
    "LinearRegressor": _rows(lambda node: node.attributes.get_int("targets", 1)),
    "SVMRegressor": _rows(lambda node: 1),
    "FeatureVectorizer": _rows(lambda node: sum(node.attributes.get_ints("inputdimensions", ()))),
    "ArrayFeatureExtractor": _infer_feature_extractor,
}

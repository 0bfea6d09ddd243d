"""Types and shapes of the operators of ai.onnx.ml, for which neither library has any.

Most give float32, one row for each row of their operand.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import onnx_shape_inference as osi

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


def _rows(columns: Callable[[ir.Node], int]) -> Callable[[osi.ShapeInferenceContext, ir.Node], None]:
    """float32, as many rows as the operand has and `columns`."""

    def infer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        x = node.inputs[0]
        rows = x.shape[0] if x is not None and x.shape is not None and len(x.shape) == 2 else None
        _set(node.outputs[0], _FLOAT, None if rows is None else ir.Shape([rows, columns(node)]))

    return infer


def register() -> None:
    """Add them to the table of the library, where it has none."""
    table = {
        "Scaler": _alike,
        "Normalizer": _alike,
        "Imputer": _imputer,
        "LinearRegressor": _rows(lambda node: node.attributes.get_int("targets", 1)),
        "SVMRegressor": _rows(lambda node: 1),
        "FeatureVectorizer": _rows(lambda node: sum(node.attributes.get_ints("inputdimensions", ()))),
    }
    for name, infer in table.items():
        if osi.registry.get(ML, name, 1) is None:
            osi.registry.register(ML, name, 1)(infer)

"""Graphs with rounding to quantized numbers: pairs of nodes, and their derivatives in training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.rules.registry import straight_through
from onnxgrad.training.metadata import QUANTIZED


def is_rounding(node: ir.Node | None) -> bool:
    """True if `node` quantizes or dequantizes its first operand."""
    return is_op(node, ("QuantizeLinear", "DequantizeLinear"))


def is_quantized(node: ir.Node) -> bool:
    """True if `node` computes with quantized numbers."""
    kind = node.op_type
    return (
        "QuantizeLinear" in kind
        or "DequantizeLinear" in kind
        or kind.startswith("QLinear")
        or (kind in ("ConvInteger", "MatMulInteger", "MatMulNBits", "QGemm", "QAttention", "DynamicQuantizeMatMul"))
    )


def rounded(node: ir.Node) -> ir.Value | None:
    """The float that `node`, the DequantizeLinear of a QuantizeLinear, rounds; None for another node."""
    held = node.inputs[0] if node.op_type == "DequantizeLinear" and is_rounding(node) else None
    maker = None if held is None else held.producer()
    if maker is None or not is_rounding(maker) or maker.op_type != "QuantizeLinear":
        return None
    return maker.inputs[0]


def standardize(model: ir.Model) -> None:
    """Have the QuantizeLinears and DequantizeLinears of ONNX Runtime's own domain be those of ONNX, in place.

    They compute the same; ONNX has numbers of 4 and of 16 bits from opset 21 on.
    """
    small = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)
    recent = model.opset_imports.get("", 1) >= 21
    for graph in model.graphs():
        typed = {v: v.dtype for v in (*graph.inputs, *graph.initializers.values())}
        for node in graph:
            if node.domain != "com.microsoft" or node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
                continue
            kind = typed.get(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
            if recent or kind in small:
                node.domain = ""


def through_rounding(model: ir.Model) -> AbstractContextManager[None]:
    """Differentiate a model that is marked as quantized through its rounding, within the ``with`` block."""
    return straight_through("QuantizeLinear") if QUANTIZED in model.metadata_props else nullcontext()

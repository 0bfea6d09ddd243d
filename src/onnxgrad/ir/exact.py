"""Exact evaluation of nodes over constants: only operators whose bits are the same in every runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.constants import MOST_ELEMENTS, evaluate
from onnxgrad.ir.match import constant_tensor
from onnxgrad.ir.operators import traits_of

_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def exact(node: ir.Node, opset: int, known: Mapping[ir.Value, np.ndarray] | None = None) -> np.ndarray | None:
    """The output of `node`, if every runtime computes the same bits; None for NaN and denormals.

    Some runtimes flush denormals to zero.

    Args:
        node: whose operands are constants (`constant`), or `known`; else the result is None.
        opset: of the standard operators.
        known: what operands are that become constants where this is done for all nodes.
    """
    operands = [v for v in node.inputs if v is not None]
    if not traits_of(node).exact or len(node.outputs) != 1 or not operands:
        return None
    feeds = {}
    for v in operands:
        if known is not None and v in known:
            feeds[v] = known[v]
            continue
        tensor = constant_tensor(v)
        if tensor is None or tensor.size > MOST_ELEMENTS:  # `evaluate` computes with small ones only
            return None
        feeds[v] = tensor.numpy()
    if any(v.dtype not in _DTYPES for v in (*feeds, node.outputs[0])):
        return None
    if node.op_type == "Div" and node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    with np.errstate(all="ignore"):
        array = evaluate(node, feeds, opset)
    if array is None or array.dtype.kind != "f":
        return array
    tiny = np.finfo(array.dtype).tiny
    arrays = [array, *(a for a in feeds.values() if a.dtype.kind == "f")]
    plain = all(not np.isnan(a).any() and not ((a != 0) & (np.abs(a) < tiny)).any() for a in arrays)
    return array if plain else None

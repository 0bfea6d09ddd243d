"""Values that no input can change: constants, and what small arithmetic on constants comes to.

Each node is evaluated by the onnx package's reference evaluator.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

#: What is computed is a shape or a parameter; larger tensors are data.
MOST_ELEMENTS = 256


def constant(value: ir.Value) -> np.ndarray | None:
    """What `value` holds if it is a constant, or an initializer that is no input; else None."""
    tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def known_value(value: ir.Value, opset: int, depth: int = 16) -> np.ndarray | None:
    """`constant`, or what at most `depth` nodes compute from constants; else None."""
    held = constant(value)
    node = value.producer()
    if held is not None or node is None or not depth or len(node.outputs) != 1 or not node.inputs:
        return held
    feeds = {}
    for operand in node.inputs:
        if operand is not None:
            array = known_value(operand, opset, depth - 1)
            if array is None:
                return None
            feeds[operand] = array
    return evaluate(node, feeds, opset)


def evaluate(node: ir.Node, feeds: Mapping[ir.Value, np.ndarray], opset: int) -> np.ndarray | None:
    """The one output of a deterministic standard `node` on small operands; None if it cannot be had."""
    small = all(a.size <= MOST_ELEMENTS for a in feeds.values())
    if node.domain or not small or not is_repeatable(node.op_type, "", opset) or node.outputs[0].dtype is None:
        return None
    try:
        proto = ir.to_proto(node)
        named = {v.name or "": a for v, a in feeds.items()}
        result: Any = ReferenceEvaluator(proto, opsets={"": opset}).run(None, named)
        result = result[0]
    except Exception:  # the reference does not know the operator, or the node is wrong: nothing is known
        return None
    if not isinstance(result, (np.ndarray, np.generic)) or result.size > MOST_ELEMENTS:
        return None
    return np.asarray(result).astype(node.outputs[0].dtype.numpy())


@functools.cache
def is_repeatable(op_type: str, domain: str, opset: int) -> bool:
    """Whether equal operands give equal results (false for random operators and unknown ones)."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return False
    determinism = schema.node_determinism  # type: ignore[attr-defined]
    return determinism != onnx.defs.OpSchema.NodeDeterminism.NonDeterministic

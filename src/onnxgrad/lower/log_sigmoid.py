"""log σ(x) as -log(1 + exp(-x)), which is x where σ(x) is 0.

PyTorch's exporters write logsigmoid as Sigmoid and Log, and ONNX Runtime's Sigmoid is 0 below -17 already: the value
would be infinite, and a derivative of the two nodes NaN.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.ir.match import is_op, producer
from onnxgrad.lower.registry import replace


def expand_log_sigmoid(builder: Builder, node: ir.Node, kept: Collection[ir.Value]) -> list[ir.Node] | None:
    """Replace `node` if it is the Log of a Sigmoid that is not among the values `kept`; the new nodes, or None."""
    sigmoid = producer(node.inputs[0], "Sigmoid") if is_op(node, "Log") else None
    if sigmoid is None or sigmoid.outputs[0] in kept or sigmoid.inputs[0] is None:
        return None
    x = sigmoid.inputs[0]
    return replace(builder, node, lambda b, _: [-b.Softplus(-b.var(x))])

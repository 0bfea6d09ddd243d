"""Products with a transposed constant matrix: one node, for which no second copy of the matrix is made.

ONNX Runtime computes a Transpose of a constant when it loads a graph, and stores the result in addition to the
constant. A step that trains factors with frozen weights reads each weight in both directions, so it would store every
weight twice. For a Transpose that cannot be computed ahead, the runtime emits a FusedMatMul, which reads the matrix in
place. This pass writes that node itself.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.graph import prune, take_over
from onnxgrad.ir.match import constant_tensor, exchanged, is_op
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.setting import Setting

#: The domain of FusedMatMul, a part of the stock runtime.
_DOMAIN = "com.microsoft"


def _transposed_constants(node: ir.Node) -> list[ir.Value | None]:
    """For both operands of a product in float32: the constant that is transposed; None for another operand."""
    if not is_op(node, "MatMul"):
        return [None, None]
    return [x if (x := exchanged(v)) is not None and _is_weight(x) else None for v in node.inputs]


def _is_weight(value: ir.Value) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _write(model: ir.Model) -> int:
    places = 0
    for node in list(model.graph):
        constants = _transposed_constants(node)
        if constants == [None, None]:
            continue
        operands = [v if x is None else x for v, x in zip(node.inputs, constants)]
        flags = [ir.AttrInt64(name, int(x is not None)) for name, x in zip(("transA", "transB"), constants)]
        old = node.outputs[0]
        fused = ir.Node(_DOMAIN, "FusedMatMul", operands, flags, num_outputs=1, name=node.name)
        model.graph.insert_before(node, fused)
        take_over(fused.outputs[0], old)
        model.graph.remove(node, safe=True)
        places += 1
    if places:
        model.graph.opset_imports[_DOMAIN] = 1
        prune(model.graph)
    return places


def _keeps_copies(setting: Setting) -> str:
    return setting.keeps_layout() or ("the session packs constants" if setting.packs else "")


CONSTANT_TRANSPOSES = Pass(
    "constant_transposes",
    "memory",
    "a product that reads a constant matrix as it is stored",
    "MatMul with a transposed constant of float32",
    lambda model, _: any(_transposed_constants(node) != [None, None] for node in model.graph),
    lambda model, _: _write(model),
    _keeps_copies,
)

"""bfloat16 models: operators of which no provider has such a kernel run in float32, between Casts.

ONNX Runtime does so itself with float16. Of bfloat16, its CPU provider only moves numbers, and refuses a model that
computes with them. Each result is rounded to bfloat16, so the numbers are those of kernels that add up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.names import Names
from onnxgrad.runtime.kernels_of_provider import CPU, has_kernel

BFLOAT16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def has_bfloat16(model: ir.Model) -> bool:
    """True if a weight, an input or an output of `model` is of bfloat16, or something is cast to it."""
    graph = model.graph
    ends = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    if any(v.dtype == BFLOAT16 for v in ends):
        return True
    return any(n.op_type == "Cast" and n.attributes["to"].as_int() == int(BFLOAT16) for g in scopes(graph) for n in g)


def widen(model: ir.Model, providers: Sequence[str] = (CPU,)) -> int:
    """Run operators of `model` in float32 where none of `providers` has a bfloat16 kernel. Returns the count."""
    infer_model(model)
    names = Names.of(model)
    count = 0
    for graph in scopes(model.graph):
        opsets = model.opset_imports
        for node in list(graph):
            values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype == BFLOAT16]
            if not values or subgraphs(node) or node.op_type == "Constant":
                continue
            opset = opsets.get(node.domain, 1)
            if not any(has_kernel(provider, node, opset, BFLOAT16) for provider in providers):
                _widen(graph, node, names)
                count += 1
    return count


def _widen(graph: ir.Graph, node: ir.Node, names: Names) -> None:
    for i, value in enumerate(node.inputs):
        if value is not None and value.dtype == BFLOAT16:
            cast = _cast(value, FLOAT, names)
            graph.insert_before(node, cast)
            node.replace_input_with(i, cast.outputs[0])
    for value in node.outputs:
        if value.dtype != BFLOAT16 or not value.name:
            continue
        value.type = ir.TensorType(FLOAT)
        cast = _cast(value, BFLOAT16, names)
        (narrow,) = cast.outputs
        graph.insert_after(node, cast)
        for user, i in tuple(value.uses()):
            if user is not cast:
                user.replace_input_with(i, narrow)
        for scope in (graph, *[g for g in scopes(graph) if g is not graph]):
            for i, end in enumerate(scope.outputs):
                if end is value:
                    scope.outputs[i] = narrow
        value.name, narrow.name = narrow.name, value.name


def _cast(value: ir.Value, to: ir.DataType, names: Names) -> ir.Node:
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(to))], num_outputs=1, name=names.fresh("cast"))
    (out,) = node.outputs
    out.name, out.type, out.shape = names.fresh("cast"), ir.TensorType(to), value.shape
    return node

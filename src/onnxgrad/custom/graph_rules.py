"""Rules of a user's own that are ONNX graphs."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, NotDifferentiable
from onnxgrad.ir import Var
from onnxgrad.ir.graph import required_inputs
from onnxgrad.lower.function_bodies import BodyCopies, means_the_same
from onnxgrad.model_io import open_model
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Function

Graph = onnx.ModelProto | onnx.FunctionProto | ir.Model


def model_of(graph: Graph) -> onnx.ModelProto | ir.Model:
    """`graph` as a model; one of a function has operands of any type."""
    if not isinstance(graph, onnx.FunctionProto):
        return graph
    call = onnx.helper.make_node(graph.name, graph.input, graph.output, domain=graph.domain, overload=graph.overload)
    inputs, outputs = ([onnx.helper.make_empty_tensor_value_info(n) for n in g] for g in (graph.input, graph.output))
    imports = {i.domain: i.version for i in graph.opset_import} | {graph.domain: 1}
    return onnx.helper.make_model(
        onnx.helper.make_graph([call], "rule", inputs, outputs),
        functions=[graph],
        opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in imports.items()],
        ir_version=10,
    )


def written(rule: Graph, mode: str) -> Function:
    """The rule function that writes the nodes of a graph."""
    if not isinstance(rule, (onnx.ModelProto, onnx.FunctionProto, ir.Model)):
        raise BadInput(f"a rule is a Python function, an ONNX model or an ONNX function, not a {type(rule).__name__}")
    opened = open_model(model_of(rule)).model

    def write(op: Op, g: Any, *given: Var | None) -> list[Var | None]:
        graph = opened.graph
        written_for = graph.opset_imports
        have = {d: op.builder.infer.context.get_opset_version(d) for d in written_for}
        if not means_the_same(graph, written_for, have):
            raise NotDifferentiable(f"the rule is written for opset {written_for['']}, which differs from {have['']}")
        seeds = list(g) if isinstance(g, tuple) else [g]
        rule = registry.get(op.node.domain, op.node.op_type, op.opset)
        wrt = None if rule is None else rule.wrt
        places = list(wrt) if wrt is not None else [i for i, x in enumerate(op.inputs) if op.is_float(x)]
        models = [op.inputs[i] for i in places] if mode == "jvp" else op.outputs
        seeds = [seeds[i] for i in places] if mode == "jvp" else seeds
        due = len(op.node.outputs) if mode == "jvp" else len(places)
        if len(graph.outputs) != due:
            raise NotDifferentiable(f"the rule gives {len(graph.outputs)} results, but {due} are due")
        whole = [s if s is not None or m is None else op.builder.zeros_like(m) for s, m in zip(seeds, models)]
        formals = required_inputs(graph)
        actual = [*whole, *given]
        if len(formals) > len(actual):
            raise NotDifferentiable(f"the rule takes {len(formals)} operands, but there are {len(actual)}")
        operands = {f: None if a is None else a.value for f, a in zip(formals, actual)}
        copy = BodyCopies(op.builder, "rule", {}, operands)
        for v in graph.initializers.values():
            assert v.const_value is not None
            copy.values[v] = op.builder.const(v.const_value.numpy(), v.const_value.dtype).value
        for node in graph:
            op.builder.append(copy.node(node))
        made = [copy.values[v] for v in graph.outputs]
        results: list[Var | None] = [None if v is None else op.builder.var(v) for v in made]
        if mode == "jvp":
            return results
        parts: list[Var | None] = [None] * len(op.inputs)
        for i, r in zip(places, results):
            parts[i] = r
        return parts

    return write

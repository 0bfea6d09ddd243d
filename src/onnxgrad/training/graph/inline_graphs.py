"""Inline foreign graphs: a loss, a teacher or an optimizer that is an ONNX model.

Accepted graphs: an ``onnx.ModelProto``, an ``onnx_ir.Model`` or a path; an ``onnx.FunctionProto``; an onnxscript
function. The nodes are copied behind the existing ones, inputs are replaced by their operands, and initializers become
initializers of the graph.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import required_inputs, subgraphs
from onnxgrad.ir.match import is_standard, not_none
from onnxgrad.ir.names import described, rename_inside
from onnxgrad.ir.schemas import schema_of
from onnxgrad.model_io import open_model, to_proto
from onnxgrad.wording import type_text


def is_graph(thing: Any) -> bool:
    """True if `thing` is a graph that `Inlined` accepts, other than a string."""
    return isinstance(thing, (onnx.ModelProto, onnx.FunctionProto, ir.Model, os.PathLike)) or hasattr(
        thing, "to_function_proto"
    )


class Inlined:
    """A model or function to be written into a graph.

    Attributes:
        inputs: the names of its inputs.
        typed: its inputs with the types that they declare; a function declares none.
    """

    def __init__(self, thing: Any, what: str) -> None:
        self.what = what
        self.function: onnx.FunctionProto | None = None
        self.model: ir.Model | None = None
        if hasattr(thing, "to_function_proto"):
            thing = thing.to_function_proto()
        if isinstance(thing, onnx.FunctionProto):
            if thing.attribute:
                raise BadInput(f"{what} needs values for its attributes: {', '.join(thing.attribute)}")
            self.function = thing
            self.inputs = list(thing.input)
            self.typed: dict[str, ir.Value] = {}
        else:
            self.model = open_model(thing).model
            ir.external_data.load_to_model(self.model)
            values = required_inputs(self.model.graph)
            self.inputs = [v.name or "" for v in values]
            self.typed = {v.name or "": v for v in values}

    def write(self, b: Builder, operands: Sequence[Var]) -> list[Var]:
        """Append its nodes, reading `operands`; its outputs. Names get numbers, but those of further outputs stay."""
        model = self.model_of(b, operands)
        graph = model.graph
        formals = [v for v in graph.inputs if v.name in self.inputs]
        for value, operand in zip(formals, operands, strict=True):
            if value.dtype is not None and operand.dtype is not None and value.dtype != operand.dtype:
                raise BadInput(
                    f"{self.what} takes {value.name!r} as a tensor of {type_text(value.dtype)}, and "
                    f"{operand.name!r} is one of {type_text(operand.dtype)}"
                )
            value.replace_all_uses_with(operand.value, replace_graph_outputs=True)
        nodes, held, outputs = list(graph), list(graph.initializers.values()), list(graph.outputs)
        graph.remove(nodes)
        graph.initializers.clear()
        for value in held:
            tensor = not_none(value.const_value)
            name = b.names.fresh(value.name or "weight")
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)  # the caller's keeps its name
            value.name = name
            b.graph.register_initializer(value)
        for node in nodes:
            node.name = b.names.fresh(node.name) if node.name else ""
            for value in node.outputs:
                if value.name:
                    value.name = (b.names.exactly if value in outputs[1:] else b.names.fresh)(value.name)
                    value.shape = None if self.function is not None else value.shape
            for inner in subgraphs(node):
                rename_inside(inner, b.names)
            b.append(node)
        return [Var(b, v) for v in outputs]

    def model_of(self, b: Builder, operands: Sequence[Var]) -> ir.Model:
        """A copy in the opset of the builder; a function becomes a model with the operands' types."""
        assert b.opset is not None
        if self.function is not None:
            return open_model(_called(self.function, operands, b.opset)).model
        assert self.model is not None
        own = self.model.graph.opset_imports[""]
        changed = [n for n in self.model.graph.all_nodes() if not _same(n, own, b.opset)]
        if not changed:
            return self.model.clone()
        try:
            return open_model(onnx.version_converter.convert_version(to_proto(self.model), b.opset)).model
        except Exception as error:
            raise BadInput(
                f"{self.what} has opset {own}, where {described(changed[0])} means something else than in opset "
                f"{b.opset} of the model, and it cannot be converted"
            ) from error


def _same(node: ir.Node, one: int, other: int) -> bool:
    if not is_standard(node):
        return True
    first, second = schema_of("", node.op_type, one), schema_of("", node.op_type, other)
    return first is not None and second is not None and first.since_version == second.since_version


def _called(function: onnx.FunctionProto, operands: Sequence[Var], opset: int) -> onnx.ModelProto:
    """A model of one call of `function` on operands of these types."""
    inputs = []
    for name, operand in zip(function.input, operands, strict=True):
        value = ir.Value(name=name, type=operand.value.type, shape=operand.value.shape)
        inputs.append(ir.to_proto(value))
    node = helper.make_node(function.name, list(function.input), list(function.output), domain=function.domain)
    node.overload = function.overload
    outputs = [onnx.ValueInfoProto(name=name) for name in function.output]
    graph = helper.make_graph([node], function.name, inputs, outputs)
    opsets = {o.domain: o.version for o in function.opset_import if not is_standard(o)}
    opsets |= {"": opset, function.domain: opsets.get(function.domain, 1)}
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=[function])

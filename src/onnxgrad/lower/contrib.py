"""Registration of ONNX Runtime's own operators (domain ``com.microsoft``), which its tools write into files.

No specification package has them, so three things are derived from the one function of a lowering: the derivative; the
types and shapes of the results, by inference on the written nodes; and the row in the table of operators, whose inputs
are the parameters of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.infer.registry import registry
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import Names
from onnxgrad.lower.registry import Writer, inputs_of, lowering, lowering_for

MICROSOFT = "com.microsoft"
#: The inputs of each operator, by (domain, name), and whether each may be a float.
formals: dict[tuple[str, str], list[tuple[str, bool]]] = {}


def contrib(
    *names: str, domain: str = MICROSOFT, whole: Collection[str] = (), operands: type | None = None
) -> Callable[[Writer], Writer]:
    """Register a `lowering`, and by it the inference and the inputs of operators; those in `whole` are never floats."""

    def register(writer: Writer) -> Writer:
        lowering(*names, domain=domain, operands=operands)(writer)
        for name in names:
            formals[domain, name] = [(p.name, p.name not in whole) for p in inputs_of(writer, operands)]
            registry.register(domain, name, 1)(_as_written(name, domain))
        return writer

    return register


def _as_written(name: str, domain: str) -> Infer:
    """Infer an operator by its lowering, written into a temporary graph."""
    lower = not_none(lowering_for(name, domain))

    def infer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        copies: list[ir.Value | None] = []
        for i, v in enumerate(node.inputs):
            known = None if v is None else ir.Value(name=f"x{i}", type=v.type, shape=v.shape, const_value=v.const_value)
            copies.append(known)
        attributes = list(node.attributes.values())
        outputs = [ir.Value(name=f"y{i}" if v.name else "") for i, v in enumerate(node.outputs)]
        copy = ir.Node(node.domain, node.op_type, copies, attributes, outputs=outputs)
        inputs = [v for v in copies if v is not None]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports=dict(ctx.opset_imports))
        try:
            results = lower(Builder(graph, Names.of_graph(graph), Inference.in_context(ctx)), copy)
        except NotDifferentiable:  # an error is raised when a derivative is requested
            first, out = node.inputs[0], node.outputs[0]
            if first is not None and out.type is None:
                out.type = first.type
                out.shape = None if first.shape is None else ir.Shape([ctx.new_symbolic_dim() for _ in first.shape])
            return
        for out, result in zip(node.outputs, results):
            if result is not None and result.dtype is not None:
                out.type = out.type or ir.TensorType(result.dtype)
                out.shape = out.shape if out.shape is not None or result.shape is None else ir.Shape(result.shape)

    return infer


def refuse(node: ir.Node, attribute: str, *allowed: Any, hint: str = "export the model without it") -> None:
    """Raise NotDifferentiable where `attribute` is there and none of `allowed`."""
    value = node.attributes.get(attribute)
    if value is not None and value.value not in allowed:
        raise NotDifferentiable(f"its attribute {attribute} is {value.value}, which is not supported\n  hint: {hint}")


def refuse_operand(x: Var | None, name: str) -> None:
    """Raise NotDifferentiable where an optional operand is there."""
    if x is not None:
        raise NotDifferentiable(f"its input {name} ({x.name!r}) is not supported\n  hint: export the model without it")

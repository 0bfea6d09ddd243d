"""Registration of ONNX Runtime's own operators (domain ``com.microsoft``), which its tools write into files.

No specification package has them, so three things are derived from the one function of a lowering: the derivative; the
types and shapes of the results, by inference on the written nodes; and the row in the table of operators, whose inputs
are the parameters of the function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.infer.registry import registry
from onnxgrad.ir.names import Names
from onnxgrad.lower.registry import Lowering, lowering

MICROSOFT = "com.microsoft"
Writer = Callable[..., Sequence[Var | None]]
#: The inputs of each operator, by (domain, name), and whether each may be a float.
formals: dict[tuple[str, str], list[tuple[str, bool]]] = {}


def contrib(
    *names: str, domain: str = MICROSOFT, whole: Collection[str] = (), operands: type | None = None
) -> Callable[[Writer], Writer]:
    """Register ``f(b, node, *operands)`` as the lowering of operators; missing operands are None.

    The parameters bear the names of the inputs; those named in `whole` are never floats. Of an operator with many
    inputs, ``f(b, node, x)`` takes an instance of the dataclass `operands`, whose fields bear these names.
    """

    def register(writer: Writer) -> Writer:
        parameters = list(inspect.signature(writer if operands is None else operands).parameters.values())
        parameters = parameters[2:] if operands is None else parameters
        inputs = [p.name for p in parameters]
        spread = parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL
        required = [p.annotation == "Var" for p in parameters]

        @functools.wraps(writer)
        def lower(b: Builder, node: ir.Node) -> Sequence[Var | None]:
            given = [None if v is None else b.var(v) for v in node.inputs]
            if len(given) > len(inputs) and not spread:
                raise NotDifferentiable(f"it has {len(given)} operands, and takes {len(inputs)}")
            given += [None] * (len(inputs) - spread - len(given))
            for x, name, must in zip(given, inputs, required):
                if must:
                    require_operand(x, name)
            return writer(b, node, *given) if operands is None else writer(b, node, operands(*given))

        lowering(*names, domain=domain)(lower)
        for name in names:
            formals[domain, name] = [(i, i not in whole) for i in inputs]
            registry.register(domain, name, 1)(_as_written(lower))
        return writer

    return register


def _as_written(lower: Lowering) -> Infer:
    """Infer an operator by its lowering, written into a temporary graph."""

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


def refuse_operand(x: Var | None, name: str, hint: str = "export the model without it") -> None:
    """Raise NotDifferentiable where an optional operand is there."""
    if x is not None:
        raise NotDifferentiable(f"its input {name} ({x.name!r}) is not supported\n  hint: {hint}")


def require_operand(x: Var | None, name: str) -> Var:
    """An operand that every node must have."""
    if x is None:
        raise NotDifferentiable(f"its input {name} is left out\n  hint: export the model again")
    return x

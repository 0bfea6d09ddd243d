"""The view that a rule has of the node it differentiates: attributes, operands, and a builder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import captured
from onnxgrad.ir.schemas import attribute, schema_of


@functools.cache
def float_outputs(domain: str, op_type: str, opset: int) -> int | None:
    """The number of formal outputs that may be float tensors; None if unknown or variadic."""
    schema = schema_of(domain, op_type, opset)
    if schema is None or schema.max_output > 64:
        return None
    return sum("float" in " ".join(map(str, o.types)) for o in schema.outputs)


class Op:
    """One node under differentiation.

    ``op.Mul(a, b)`` writes a node, as on a `Builder`; `attr` reads an attribute, `inputs` and
    `outputs` are the operands as variables (``None`` where an optional one is left out).
    """

    def __init__(self, builder: Builder, node: ir.Node, needs: Sequence[bool] = ()) -> None:
        self.builder = builder
        self.node = node
        self.opset = builder.infer.context.get_opset_version(node.domain)
        self.schema = schema_of(node.domain, node.op_type, self.opset)
        self.inputs: list[Var | None] = [None if v is None else Var(builder, v) for v in node.inputs]
        if self.schema is not None and self.schema.max_input <= 64:
            self.inputs += [None] * (self.schema.max_input - len(self.inputs))
        #: for rules of nodes that capture values: in reverse mode, the values whose cotangents are asked for;
        self.active: Collection[ir.Value] = ()
        #: in forward mode, the tangents that there are
        self.tangents: Mapping[ir.Value, Var] = {}
        #: per input: does anything ask for its cotangent?
        self.needs = [*needs, *[False] * (len(self.inputs) - len(needs))] if needs else [True] * len(self.inputs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the builder, or the function that writes a node of this type."""
        return getattr(self.builder, name)

    @property
    def operands(self) -> list[Var]:
        """The inputs that are not left out: all of a variadic operator."""
        return [x for x in self.inputs if x is not None]

    @property
    def outputs(self) -> list[Var | None]:
        """The outputs that the node has, ``None`` for the unnamed ones."""
        return [Var(self.builder, v) if v.name else None for v in self.node.outputs]

    @property
    def captures(self) -> list[Var]:
        """Values of outer scopes that the graphs inside the node read."""
        return [Var(self.builder, v) for v in captured(self.node)]

    def attr(self, name: str, default: Any = None) -> Any:
        """The attribute `name`: as given, else the schema's default, else `default`."""
        return attribute(self.node, name, default, self.opset)

    def output(self, i: int) -> Var:
        """Output `i` of the primal node; a formal output that the node does not produce yet is added."""
        node = self.node
        if i >= len(node.outputs):
            node.resize_outputs(i + 1)
        value = node.outputs[i]
        if not value.name:
            value.name = self.builder.names.fresh(f"{node.op_type}_out{i}")
            self.builder.infer(node)
        return Var(self.builder, value)

    def replay(self, *inputs: Var | None, **changed: Any) -> Any:
        """The same operator with the same attributes (but for `changed`) on other operands."""
        attrs = {a.name: a for a in self.node.attributes.values()} | changed
        return self.builder.emit(
            self.node.op_type, *inputs, domain=self.node.domain, outputs=len(self.node.outputs), **attrs
        )

    @property
    def single(self) -> bool:
        """True if at most one output can carry a cotangent, so that a rule gets it bare, not in a tuple."""
        count = float_outputs(self.node.domain, self.node.op_type, self.opset)
        return count == 1 if count else len(self.node.outputs) == 1

    def is_float(self, x: Var | None) -> bool:
        """True if `x` is a tensor of a floating-point type."""
        return x is not None and x.dtype in FLOATS

"""Sequences and optionals: what arithmetic means for them. The cotangent of a sequence is a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from onnxgrad.ir.builder import Builder, Var


def is_sequence(x: Var) -> bool:
    """Whether `x` is known to be a sequence of tensors."""
    return isinstance(x.value.type, ir.SequenceType)


def is_optional(x: Var) -> bool:
    """Whether `x` is known to be an optional value."""
    return isinstance(x.value.type, ir.OptionalType)


def each(b: Builder, f: Callable[..., Var], *sequences: Var) -> Var:
    """The sequence of f(element of each of `sequences`), which are equally long."""
    graph = ir.Graph(
        [], [], nodes=[], name=b.names.fresh("each"), opset_imports=dict(b.infer.context.opset_imports)
    )
    inner = b.nested(graph)
    for x in sequences:
        held = x.value.type.elem_type  # type: ignore[union-attr]
        dims = None if x.shape is None else [d if isinstance(d, int) else None for d in x.shape]
        shape = None if dims is None else ir.Shape(dims)
        graph.inputs.append(ir.Value(name=b.names.fresh("element"), type=held, shape=shape))
    result = f(*map(inner.var, graph.inputs))
    graph.outputs.append(result.value)
    node = ir.Node("", "SequenceMap", [x.value for x in sequences], [ir.AttrGraph("body", graph)])
    node.outputs[0].type = ir.SequenceType(result.value.type)
    return b.append(node)[0]


def nothing(b: Builder, x: Var) -> Var:
    """An optional without a value, of the type of `x`."""
    held = x.value.type.elem_type  # type: ignore[union-attr]
    attr = ir.Attr("type", ir.AttributeType.TYPE_PROTO, ir.TypeAndShape(held, None))
    node = ir.Node("", "Optional", [], [attr])
    node.outputs[0].type = x.value.type
    return b.append(node)[0]


def total(b: Builder, x: Var, y: Var) -> Var:
    """The sum of two sequences, element by element."""
    return each(b, lambda d, e: d + e, x, y)

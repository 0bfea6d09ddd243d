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
    graph = ir.Graph([], [], nodes=[], name=b.names.fresh("each"), opset_imports=dict(b.infer.context.opset_imports))
    inner = b.nested(graph)
    for x in sequences:
        held = x.value.type.elem_type  # type: ignore[union-attr]
        dims = None if x.shape is None else [d if isinstance(d, int) else None for d in x.shape]
        shape = None if dims is None else ir.Shape(dims)
        graph.inputs.append(ir.Value(name=b.names.fresh("element"), type=held, shape=shape))  # type: ignore[arg-type]
    result = f(*map(inner.var, graph.inputs))
    if result.value.producer() is None:
        result = inner.Identity(result)
    graph.outputs.append(result.value)
    node = ir.Node("", "SequenceMap", [x.value for x in sequences], [ir.AttrGraph("body", graph)])
    node.outputs[0].type = ir.SequenceType(result.value.type)  # type: ignore[arg-type]
    return b.append(node)[0]


def nothing(b: Builder, x: Var) -> Var:
    """An optional without a value, of the type of `x`."""
    held = x.value.type.elem_type  # type: ignore[union-attr]
    attr = ir.Attr("type", ir.AttributeType.TYPE_PROTO, ir.TypeAndShape(held, None))  # type: ignore[arg-type]
    node = ir.Node("", "Optional", [], [attr])
    node.outputs[0].type = x.value.type
    return b.append(node)[0]


def total(b: Builder, x: Var, y: Var) -> Var:
    """The sum of two sequences, element by element."""
    return each(b, lambda d, e: d + e, x, y)


def extended(b: Builder, x: Var, y: Var, start: Var, count: Var) -> Var:
    """The sequence `x`, and after it `count` elements of `y` from `start` on."""
    inner, number, states = _loop_body(b, x)
    longer = inner.SequenceInsert(states[0], inner.SequenceAt(inner.var(y.value), inner.var(start.value) + number))
    return _loop(b, inner, count, longer, x)


def summed(b: Builder, x: Var, like: Var) -> Var:
    """The sum of the elements of `x`, all of the shape of `like`."""
    inner, number, states = _loop_body(b, like)
    more = states[0] + inner.SequenceAt(inner.var(x.value), number)
    more.value.shape = like.value.shape
    return _loop(b, inner, b.SequenceLength(x), more, b.zeros_like(like))


def _loop_body(b: Builder, state: Var) -> tuple[Builder, Var, list[Var]]:
    """The body of a Loop that carries something like `state`: its builder, step number and state."""
    graph = ir.Graph([], [], nodes=[], name=b.names.fresh("each"), opset_imports=dict(b.infer.context.opset_imports))
    inner = b.nested(graph)
    for hint, dtype in (("step", ir.DataType.INT64), ("goes_on", ir.DataType.BOOL)):
        value = ir.Value(name=b.names.fresh(hint), type=ir.TensorType(dtype), shape=ir.Shape([]))
        graph.inputs.append(value)
    held = ir.Value(name=b.names.fresh("so_far"), type=state.value.type, shape=state.value.shape)
    graph.inputs.append(held)
    return inner, inner.var(graph.inputs[0]), [inner.var(held)]


def _loop(b: Builder, inner: Builder, count: Var, result: Var, first: Var) -> Var:
    graph = inner.graph
    same = inner.Identity(inner.var(graph.inputs[1]))
    result.value.type = graph.inputs[2].type
    graph.outputs.extend([same.value, result.value])
    node = ir.Node("", "Loop", [count.value, None, first.value], [ir.AttrGraph("body", graph)])
    node.outputs[0].type, node.outputs[0].shape = first.value.type, first.value.shape
    return b.append(node)[0]

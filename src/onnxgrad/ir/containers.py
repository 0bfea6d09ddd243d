"""Arithmetic on sequences and optionals; the cotangent of a sequence is a sequence."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.ir.builder import FULL_LIKE, ZEROS_LIKE, Builder, Var
from onnxgrad.ir.match import is_op


def is_sequence(x: Var) -> bool:
    """True if `x` is known to be a sequence of tensors."""
    return isinstance(x.value.type, ir.SequenceType)


def is_optional(x: Var) -> bool:
    """True if `x` is known to be an optional value."""
    return isinstance(x.value.type, ir.OptionalType)


def is_tensor(x: Var) -> bool:
    """True unless `x` is known to be no tensor."""
    return not is_sequence(x) and not is_optional(x)


def map_sequences(b: Builder, f: Callable[..., Var], *sequences: Var) -> Var:
    """The sequence of f(element of each of `sequences`), which are equally long."""
    graph = ir.Graph([], [], nodes=[], name=b.names.fresh("each"), opset_imports=dict(b.infer.context.opset_imports))
    inner = b.nested(graph)
    for x in sequences:
        element = x.value.type.elem_type  # type: ignore[union-attr]
        dims = None if x.shape is None else [d if isinstance(d, int) else None for d in x.shape]
        shape = None if dims is None else ir.Shape(dims)
        graph.inputs.append(ir.Value(name=b.names.fresh("element"), type=element, shape=shape))  # type: ignore[arg-type]
    result = f(*map(inner.var, graph.inputs))
    if result.value.producer() is None:
        result = inner.Identity(result)
    graph.outputs.append(result.value)
    node = ir.Node("", "SequenceMap", [x.value for x in sequences], [ir.AttrGraph("body", graph)])
    node.outputs[0].type = ir.SequenceType(result.value.type)  # type: ignore[arg-type]
    return b.append(node)[0]


def empty_optional(b: Builder, x: Var) -> Var:
    """An optional without a value, of the type of `x`."""
    element = x.value.type.elem_type  # type: ignore[union-attr]
    attr = ir.Attr("type", ir.AttributeType.TYPE_PROTO, ir.TypeAndShape(element, None))  # type: ignore[arg-type]
    node = ir.Node("", "Optional", [], [attr])
    node.outputs[0].type = x.value.type
    return b.append(node)[0]


def either(b: Builder, condition: Var, then: Callable[[Builder], Var], other: Callable[[Builder], Var]) -> Var:
    """Emit an If with the branches `then` and `other`, whose results have the same type."""
    branches, results = [], []
    for name, write in (("then_branch", then), ("else_branch", other)):
        graph = ir.Graph([], [], nodes=[], name=b.names.fresh(name), opset_imports=dict(b.infer.context.opset_imports))
        inner = b.nested(graph)
        result = write(inner)
        maker = result.value.producer()
        if maker is None or maker.graph is not graph:
            kinds = result.value.type, result.value.shape
            result = inner.append(ir.Node("", "Identity", [result.value]))[0]
            result.value.type, result.value.shape = kinds
        graph.outputs.append(result.value)
        branches.append(ir.AttrGraph(name, graph))
        results.append(result.value)
    node = ir.Node("", "If", [condition.value], branches)
    node.outputs[0].type = results[0].type
    return b.append(node)[0]


def inside(b: Builder, f: Callable[[Var], Var], x: Var) -> Var:
    """The optional f(content of `x`), of the same type; empty if `x` is empty."""
    return either(
        b,
        b.OptionalHasElement(x),
        lambda w: w.Optional(f(w.OptionalGetElement(w.var(x.value)))),
        lambda w: empty_optional(w, x),
    )


FULL_LIKE[ir.SequenceType] = lambda b, x, number: map_sequences(b, lambda e: e.builder.full_like(e, number), x)
FULL_LIKE[ir.OptionalType] = lambda b, x, number: inside(b, lambda e: e.builder.full_like(e, number), x)
ZEROS_LIKE[ir.OptionalType] = empty_optional


def contents(b: Builder, x: Var, like: Var) -> Var:
    """The content of the optional `x`; zeros of the shape of `like` if it is empty."""
    maker = x.value.producer()
    if is_op(maker, "Optional"):
        operand = maker.inputs[0] if maker.inputs else None
        return b.zeros_like(like) if operand is None else b.var(operand)
    y = either(
        b,
        b.OptionalHasElement(x),
        lambda w: w.OptionalGetElement(w.var(x.value)),
        lambda w: w.zeros_like(w.var(like.value)),
    )
    y.value.type, y.value.shape = like.value.type, like.value.shape
    return y


def total(b: Builder, x: Var, y: Var) -> Var:
    """The sum of two sequences, element by element; of two optionals, in which nothing counts as zero."""
    if not is_optional(x):
        return map_sequences(b, lambda d, e: d + e if is_tensor(d) else total(d.builder, d, e), x, y)

    def both(w: Builder) -> Var:
        d, e = (w.OptionalGetElement(w.var(v.value)) for v in (x, y))
        return w.Optional(d + e if is_tensor(d) else total(w, d, e))

    def with_x(w: Builder) -> Var:
        return either(w, w.OptionalHasElement(w.var(y.value)), both, lambda v: v.var(x.value))

    return either(b, b.OptionalHasElement(x), with_x, lambda w: w.var(y.value))


def extend_sequence(b: Builder, x: Var, y: Var, start: Var, count: Var) -> Var:
    """The sequence `x`, and after it `count` elements of `y` from `start` on."""
    inner, number, states = _loop_body(b, x)
    longer = inner.SequenceInsert(states[0], inner.SequenceAt(inner.var(y.value), inner.var(start.value) + number))
    return _loop(b, inner, count, longer, x)


def add_sequences(b: Builder, x: Var, like: Var) -> Var:
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
    state_inside = ir.Value(name=b.names.fresh("so_far"), type=state.value.type, shape=state.value.shape)
    graph.inputs.append(state_inside)
    return inner, inner.var(graph.inputs[0]), [inner.var(state_inside)]


def _loop(b: Builder, inner: Builder, count: Var, result: Var, first: Var) -> Var:
    graph = inner.graph
    same = inner.Identity(inner.var(graph.inputs[1]))
    result.value.type = graph.inputs[2].type
    graph.outputs.extend([same.value, result.value])
    node = ir.Node("", "Loop", [count.value, None, first.value], [ir.AttrGraph("body", graph)])
    node.outputs[0].type, node.outputs[0].shape = first.value.type, first.value.shape
    return b.append(node)[0]

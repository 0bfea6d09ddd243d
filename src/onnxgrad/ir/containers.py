"""Arithmetic on sequences and optionals; the cotangent of a sequence is a sequence."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.ir.builder import FULL_LIKE, ZEROS_LIKE, Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.ir.subgraphs import cond, empty, formal, give, loop_lead


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
    inner, graph = empty(b, "each")
    for x in sequences:
        element = x.value.type.elem_type  # type: ignore[union-attr]
        dims = None if x.shape is None else [d if isinstance(d, int) else None for d in x.shape]
        shape = None if dims is None else ir.Shape(dims)
        graph.inputs.append(ir.Value(name=b.names.fresh("element"), type=element, shape=shape))  # type: ignore[arg-type]
    give(inner, [f(*map(inner.var, graph.inputs))])
    node = ir.Node("", "SequenceMap", [x.value for x in sequences], [ir.AttrGraph("body", graph)])
    node.outputs[0].type = ir.SequenceType(graph.outputs[0].type)  # type: ignore[arg-type]
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
    return cond(b, condition, lambda w: [then(w)], lambda w: [other(w)])[0]


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

    def step(w: Builder, number: Var, so_far: Var) -> Var:
        return w.SequenceInsert(so_far, w.SequenceAt(w.var(y.value), w.var(start.value) + number))

    return _loop(b, count, x, step)


def add_sequences(b: Builder, x: Var, like: Var) -> Var:
    """The sum of the elements of `x`, all of the shape of `like`."""

    def step(w: Builder, number: Var, so_far: Var) -> Var:
        more = so_far + w.SequenceAt(w.var(x.value), number)
        more.value.shape = like.value.shape
        return more

    return _loop(b, b.SequenceLength(x), b.zeros_like(like), step)


def _loop(b: Builder, count: Var, first: Var, step: Callable[[Builder, Var, Var], Var]) -> Var:
    """Append a Loop of `count` times ``state = step(builder, number, state)``, from `first` on."""
    inner, graph = empty(b, "each")
    number, goes_on, state = *loop_lead(inner), formal(inner, first.value, "so_far")
    result = step(inner, number, state)
    result.value.type = first.value.type
    give(inner, [goes_on, result])
    graph.inputs.extend([number.value, goes_on.value, state.value])
    node = ir.Node("", "Loop", [count.value, None, first.value], [ir.AttrGraph("body", graph)])
    node.outputs[0].type, node.outputs[0].shape = first.value.type, first.value.shape
    return b.append(node)[0]

"""Types and shapes of Loop and Scan, by induction over the steps; of If, by the intersection of its branches.

A state has the shape of its initial value at every step if the body, given that shape, returns it again. Dimensions for
which that cannot be shown are unknown inside the body and after it. The library trusts more: the body's shape after the
last step, the trip count as the number of steps even with a condition, and for an If with one branch of unknown shape,
the shape of the other. A gradient that trusted any of these could be silently wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.context import InferenceContext
from onnxgrad.ir.infer.onnx_fallback import ask_onnx
from onnxgrad.ir.match import Dim, constant, constant_tensor, producer
from onnxgrad.ir.notes import notes

#: where a value of a body keeps the shape that the model declares for it
DECLARED = "onnxgrad.declared"
#: marks a state that is an empty sequence, while the first step of a Loop is inferred
EMPTY = "onnxgrad.empty"


def remember_declared(graph: ir.Graph) -> None:
    """Record the declarations of values in the bodies of `graph`, before inference overwrites them."""
    for inner in scopes(graph)[1:]:
        for value in (*inner.inputs, *(v for node in inner for v in node.outputs)):
            declared(value)


def declared(value: ir.Value) -> ir.Shape | None:
    """The shape that `value` had before any inference."""
    return value.meta.setdefault(DECLARED, value.shape)


def enter_body(node: ir.Node) -> None:
    """Copy types and shapes of the operands to the states of a Loop or Scan, and to the slices of a Scan."""
    body = node.attributes["body"].as_graph()
    first = 2  # of a Loop, the number of the step and the condition come before the states
    axes: list[int | None] = [None] * len(node.inputs)
    if node.op_type == "Scan":
        count = node.attributes["num_scan_inputs"].as_int()
        first, axes[-count:] = 0, _axes(node, "scan_input_axes", count)
    for formal, x, axis in list(zip(body.inputs, node.inputs, axes))[first:]:
        if x is None:
            continue
        formal.type = formal.type or x.type
        if x.shape is not None and _is_tensor(formal) and _is_tensor(x):
            dims = list(x.shape)
            if axis is not None and -len(dims) <= axis < len(dims):
                dims.pop(axis)
            formal.shape = refined(declared(formal), dims)


def infer_if(ctx: InferenceContext, node: ir.Node) -> None:
    """Types and shapes of the outputs of an If: those of the branch that is taken, or what both have in common."""
    then, other = (node.attributes[name].as_graph().outputs for name in ("then_branch", "else_branch"))
    condition = None if node.inputs[0] is None else constant(node.inputs[0])
    if condition is not None and condition.size == 1:
        then = other = then if condition.all() else other
    for out, a, b in zip(node.outputs, then, other):
        out.type = out.type or a.type or b.type
        if isinstance(out.type, ir.SequenceType):
            out.shape = better(elements_in_common(a, b), out.shape)
        elif out.shape is None or (a.shape is not None and a is b and len(a.shape) != len(out.shape)):
            out.shape = in_common(a.shape, b.shape, ctx.new_symbolic_dim)


def elements_in_common(*values: ir.Value | None) -> ir.Shape | None:
    """The numbers that all elements of these sequences and tensors share; None if even the rank is unknown.

    An empty sequence has no elements that could differ.
    """
    shapes = [None if v is None else v.shape for v in values if v is None or not _is_empty(v)]
    shape = shapes[0] if shapes else None
    for other in shapes[1:]:
        shape = in_common(shape, other, lambda: None)
    return None if shape is None else elements(shape)


def elements(dims: Iterable[Dim | None]) -> ir.Shape:
    """The shape of a sequence of tensors with `dims`."""
    return ir.Shape([d if isinstance(d, int) else None for d in dims])


def better(inferred: ir.Shape | None, declaration: ir.Shape | None) -> ir.Shape | None:
    """The declared shape; the inferred one if none of this rank is declared."""
    return (
        inferred if declaration is None or (inferred is not None and len(inferred) != len(declaration)) else declaration
    )


def _is_empty(value: ir.Value) -> bool:
    """True if `value` provably is an empty sequence."""
    node = value.producer()
    while node is not None and node.op_type == "Identity" and not node.domain and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return EMPTY in (notes(value) or ()) if node is None else node.op_type == "SequenceEmpty" and not node.domain


def in_common(a: ir.Shape | None, b: ir.Shape | None, unknown: Callable[[], Dim | None]) -> ir.Shape | None:
    """The dimensions that both shapes share; `unknown()` where they may differ."""
    if a is None or b is None or len(a) != len(b):
        return None
    return ir.Shape([i if same_dim(i, j) else unknown() for i, j in zip(a, b)])


def infer_loop(ctx: InferenceContext, node: ir.Node, force: bool = False) -> None:
    """Types and shapes of the outputs of a Loop, and of everything in its body."""
    body = node.attributes["body"].as_graph()
    initial = list(node.inputs[2:])
    for formal, dtype in zip(body.inputs, (ir.DataType.INT64, ir.DataType.BOOL)):
        formal.type = formal.type or ir.TensorType(dtype)
        formal.shape = formal.shape if formal.shape is not None else ir.Shape([])
    states, following = list(body.inputs[2:]), list(body.outputs[1 : 1 + len(initial)])
    _settle(ctx, body, states, initial, following, force)
    steps: Dim | None = None
    if node.inputs[0] is not None and always_goes_on(node):
        const = constant_tensor(node.inputs[0])
        known = ctx.get_symbolic_value(node.inputs[0]) if const is None else [int(const.numpy().item())]
        steps = known[0] if known is not None and len(known) == 1 else None
    stacked = list(zip(body.outputs[1 + len(initial) :], [0] * len(body.outputs)))
    _results(node, states, initial, following, stacked, steps if steps is not None else ctx.new_symbolic_dim())


def always_goes_on(node: ir.Node) -> bool:
    """True if a Loop provably makes as many steps as its trip count says."""
    body = node.attributes["body"].as_graph()
    if node.inputs[1] is not None and not _is_true(node.inputs[1]):
        return False
    last: ir.Value | None = body.outputs[0]
    while last is not None and (maker := producer(last, ("Identity", "Cast"))) is not None:
        if maker.op_type == "Cast" and (maker.inputs[0] is None or maker.inputs[0].dtype != ir.DataType.BOOL):
            break
        last = maker.inputs[0]
    return last is not None and (last is body.inputs[1] or last is node.inputs[1] or _is_true(last))


def _is_true(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and bool(array.all())


def infer_scan(ctx: InferenceContext, node: ir.Node, force: bool = False) -> None:
    """Types and shapes of the outputs of a Scan, and of everything in its body."""
    body = node.attributes["body"].as_graph()
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    reads = _axes(node, "scan_input_axes", len(node.inputs) - count)
    writes = _axes(node, "scan_output_axes", len(body.outputs) - count)
    steps: Dim | None = None
    for formal, x, axis in zip(body.inputs[count:], node.inputs[count:], reads):
        if x is None:
            continue
        if formal.type is None and x.dtype is not None:
            formal.type = ir.TensorType(x.dtype)
        if x.shape is not None:
            dims = list(x.shape)
            along = dims.pop(axis)
            steps = along if steps is None or isinstance(along, int) else steps
            shape = refined(declared(formal), dims)
            force |= shape != formal.shape
            formal.shape = shape
    states, following = list(body.inputs[:count]), list(body.outputs[:count])
    initial = list(node.inputs[:count])
    for state, first, after in zip(states, initial, following):
        if state.shape is None and (first is None or first.shape is None):  # ONNX has it keep its shape
            state.shape = after.shape
    _settle(ctx, body, states, initial, following, force)
    stacked = list(zip(body.outputs[count:], writes))
    _results(node, states, initial, following, stacked, steps if steps is not None else ctx.new_symbolic_dim())


def _axes(node: ir.Node, name: str, count: int) -> list[int]:
    return list(node.attributes.get_ints(name, [0] * count))


def refined(declared: ir.Shape | None, dims: Sequence[Dim]) -> ir.Shape:
    """`dims`, but sizes where the body declares them."""
    if declared is None or len(declared) != len(dims):
        return ir.Shape(dims)
    return ir.Shape([d if isinstance(d, int) and not isinstance(g, int) else g for d, g in zip(declared, dims)])


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _settle(
    ctx: InferenceContext,
    body: ir.Graph,
    states: Sequence[ir.Value],
    initial: Sequence[ir.Value | None],
    following: Sequence[ir.Value],
    force: bool,
) -> None:
    """Find shapes of the states that are valid at every step, and infer the body with them."""
    mistaken: dict[ir.Value, ir.TypeProtocol | None] = {}
    for state, first in zip(states, initial):
        if first is None:
            continue
        if _is_tensor(state) and not _is_tensor(first):  # the library takes a state without a type for a tensor
            state.type, force = None, True
            mistaken = {v: v.type for g in scopes(body) for node in g for v in node.outputs}
        state.type = state.type or first.type
        if _is_tensor(state) and first.shape is not None:
            shape = refined(declared(state), list(first.shape))
            force |= shape != state.shape
            state.shape = shape
    for value in mistaken:
        value.type = None
    for state, first, after in zip(states, initial, following):
        if isinstance(state.type, ir.SequenceType) and first is not None:
            force |= _start(state, first, after, force)
    varies: set[tuple[ir.Value, int]] = set()
    while True:
        if force:
            infer_graph(ctx, body)
        force = False
        for state, after in zip(states, following):
            if isinstance(state.type, ir.SequenceType):
                force |= _agree(state, after)
                continue
            agreed = _common(ctx, state, after, varies) if _is_tensor(state) else state.shape
            if agreed is not state.shape:
                state.shape, force = agreed, True
        if not force:
            break
    for value, held in mistaken.items():
        value.type = value.type or held


def _start(state: ir.Value, first: ir.Value, after: ir.Value, force: bool) -> bool:
    """Set the element shape of a sequence from its `first` value. Returns True if the body must be inferred again.

    A shape that a rule wrote down stays if the step, which is typed as it is written, confirms it, unless `force`.
    """
    declaration, empty = declared(state), _is_empty(first)
    if not force and declaration is not None and DECLARED not in (notes(after) or ()):
        begins = empty or elements_in_common(state, first) == declaration
        if begins and declaration == state.shape == elements_in_common(state, after):
            return False
    before, state.shape = state.shape, elements_in_common(first)
    if empty:
        state.meta[EMPTY] = True
    return empty or before != state.shape


def _agree(state: ir.Value, after: ir.Value) -> bool:
    """Reduce the element shape of a sequence to the part shared with the next one. Returns True if it changed."""
    before, declaration = state.shape, declared(state)
    common = elements_in_common(after) if state.meta.pop(EMPTY, False) else elements_in_common(state, after)
    state.shape = declaration if common is None else elements(refined(declaration, list(common)))
    return before != state.shape


def _common(
    ctx: InferenceContext, state: ir.Value, after: ir.Value, varies: set[tuple[ir.Value, int]]
) -> ir.Shape | None:
    """The shape of `state` where the next one provably agrees, with new symbols where not."""
    if state.shape is None:
        return None
    if after.shape is None:  # the body may still declare a rank and sizes, which hold at every step
        declaration = declared(state)
        if declaration is None:
            return None
        if all(isinstance(d, int) or (state, axis) in varies for axis, d in enumerate(declaration)):
            return state.shape
        varies.update((state, axis) for axis in range(len(declaration)))
        return ir.Shape([d if isinstance(d, int) else ctx.new_symbolic_dim() for d in declaration])
    if len(state.shape) != len(after.shape):
        return None
    dims: list[Dim] = list(state.shape)
    for axis, (before, later) in enumerate(zip(state.shape, after.shape)):
        if not same_dim(before, later) and (state, axis) not in varies:
            varies.add((state, axis))
            dims[axis] = ctx.new_symbolic_dim()
    return ir.Shape(dims) if any(a is not b for a, b in zip(dims, state.shape)) else state.shape


def same_dim(a: Dim, b: Dim) -> bool:
    """True if two dimensions are provably equal."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.value is not None and a.value == b.value


def infer_graph(ctx: InferenceContext, graph: ir.Graph) -> None:
    """Infer every value of `graph` again; declarations stay where nothing can be inferred.

    Raises:
        ShapeInferenceError, OpUsageError: a node is not valid.
    """
    for node in graph:
        known = [declared(v) for v in node.outputs]
        for value in node.outputs:
            forget(ctx, value)
            value.shape = None
        for operand in node.inputs:
            if operand is not None and _is_tensor(operand):  # elements of a sequence may have different sizes
                ctx.name_anonymous_dims(operand)
        infer = ctx.function(node)
        if infer in (infer_loop, infer_scan):
            ctx.run(functools.partial(infer, force=True), node)
        else:
            for inner in subgraphs(node):
                infer_graph(ctx, inner)
            if infer is not None:
                ctx.run(infer, node)
            else:
                ask_onnx(node, ctx)
        for value, shape in zip(node.outputs, known):
            value.shape = value.shape if value.shape is not None else shape


def forget(ctx: InferenceContext, value: ir.Value) -> None:
    """Drop the library's notes on the elements of `value`: they were valid for other shapes."""
    value.const_value = None
    ctx._symbolic_values.pop(value, None)  # the library has no public way


def _results(
    node: ir.Node,
    states: Sequence[ir.Value],
    initial: Sequence[ir.Value | None],
    following: Sequence[ir.Value],
    stacked: Sequence[tuple[ir.Value, int]],
    steps: Dim,
) -> None:
    """Types and shapes of the outputs of `node`; declared shapes stay."""
    for out, state, first, after in zip(node.outputs, states, initial, following):
        out.type = out.type or state.type or after.type
        if isinstance(out.type, ir.SequenceType):
            out.shape = better(None if state.shape is None else elements(state.shape), out.shape)
        elif out.shape is None and _is_tensor(out) and state.shape is not None:
            begin = [None] * len(state.shape) if first is None or first.shape is None else list(first.shape)
            out.shape = ir.Shape(
                [
                    d if isinstance(d, int) or (f is not None and same_dim(d, f)) else None
                    for d, f in zip(state.shape, begin)
                ]
            )
    for out, (each, axis) in zip(node.outputs[len(states) :], stacked):
        out.type = out.type or each.type
        if out.shape is None and each.shape is not None:
            dims: list[Dim] = list(each.shape)
            dims.insert(axis if axis >= 0 else axis + len(dims) + 1, steps)
            out.shape = ir.Shape(dims)

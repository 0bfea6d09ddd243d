"""Control flow on the values of arrays, as JAX has it: each call is one If, Loop or Scan on the tape.

The functions are traced once, so that a loop of many steps costs one step of tracing, in a compiled function and
outside. They may read arrays from outside, and have derivatives with respect to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.compiled import graph_model
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.bodies import TracedBody, refuse_custom, trace
from onnxgrad.eager.core.cache import Cache
from onnxgrad.eager.core.tape import compiling, exporting
from onnxgrad.eager.models import EagerModel
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.subgraphs import cond as write_if
from onnxgrad.ir.subgraphs import empty, formal, give, loop_lead

Function = Callable[..., Any]
#: The most steps of a compiled `fori_loop` that is a Scan: it reads their numbers, and stacks what steps keep in place.
_MOST_SCANNED = 1 << 20
#: How many nodes of control flow are kept ready to run.
MOST_NODES = 256
_made: Cache = Cache(MOST_NODES)


def cond(pred: Any, true_fun: Function, false_fun: Function, *operands: Any) -> Any:
    """``true_fun(*operands)`` if `pred`, else ``false_fun(*operands)``; only the chosen function runs.

    Args:
        pred: a boolean, or an array of one.
        true_fun: a function of the operands.
        false_fun: another one, whose result has the same containers, shapes and dtypes.
        operands: arrays or containers of arrays.

    Raises:
        BadInput: `pred` is not one boolean, or the results differ in their structure.
    """
    pred = as_array(pred)
    if pred.size != 1:
        raise BadInput(f"cond chooses by one boolean; pred has the shape {pred.shape}")
    if pred._node is None or not (compiling.get() or exporting.get()):
        return true_fun(*operands) if pred._data.item() else false_fun(*operands)
    leaves = [as_array(x) for _, x in trees.leaves(operands)]
    bodies = [trace(f, operands, [x._data for x in leaves], optional=True) for f in (true_fun, false_fun)]
    _check_alike(bodies[0].output, bodies[1].output, "the results of true_fun and false_fun")

    def write(b: Builder, inputs: list[Var]) -> list[Var]:
        first, *rest = inputs
        shared, captured = rest[: len(leaves)], rest[len(leaves) :]
        own = captured[: len(bodies[0].captured)], captured[len(bodies[0].captured) :]
        branches = [lambda inner, f=f, xs=xs: f.write(inner, [*shared, *xs]) for f, xs in zip(bodies, own)]
        condition = b.Cast(b.Reshape(first, [1]), to=int(ir.DataType.BOOL))
        return write_if(b, condition, *branches)  # type: ignore[arg-type]

    results = _run("cond", bodies, [pred, *leaves], (), write)
    return trees.rebuilt(bodies[0].output, results)


def while_loop(cond_fun: Function, body_fun: Function, init_val: Any) -> Any:
    """Apply `body_fun` while `cond_fun` of the value holds: ``while cond_fun(v): v = body_fun(v)``.

    Reverse mode is supported: the states of the steps that ran are kept.

    Args:
        cond_fun: a function from the value to one boolean.
        body_fun: a function from the value to the next one, with the same containers, shapes and dtypes.
        init_val: an array or a container of arrays.

    Raises:
        BadInput: a result does not have the structure of `init_val`, or the condition is not one boolean.
    """
    first = as_array(cond_fun(init_val))
    leaves = [as_array(x) for _, x in trees.leaves(init_val)]

    def step(value: Any) -> Any:
        after = body_fun(value)
        _check_alike(init_val, after, "init_val and the result of body_fun")
        return as_array(cond_fun(after)), after

    body = trace(step, (init_val,), [x._data for x in leaves])
    if first.size != 1 or body.results[0].size != 1:
        raise BadInput(f"cond_fun returns one boolean; this has the shape {body.results[0].shape}")

    def write(b: Builder, inputs: list[Var]) -> list[Var]:
        start, *rest = inputs
        states, captured = rest[: len(leaves)], rest[len(leaves) :]
        condition = b.Reshape(b.Cast(start, to=int(ir.DataType.BOOL)), np.array([], np.int64))

        def inside(inner: Builder, _: Var, held: Sequence[Var]) -> list[Var]:
            goes_on, *after = body.write(inner, [*held, *captured])
            return [inner.Reshape(inner.Cast(goes_on, to=int(ir.DataType.BOOL)), np.array([], np.int64)), *after]

        return _loop(b, None, condition, states, inside)

    return trees.rebuilt(init_val, _run("while", [body], [first, *leaves], (), write))


def fori_loop(lower: Any, upper: Any, body_fun: Function, init_val: Any) -> Any:
    """Apply ``v = body_fun(i, v)`` for i from `lower` to `upper` - 1.

    Args:
        lower: an integer.
        upper: another one; no step runs if it is not larger.
        body_fun: a function from an integer array and the value to the next value, with the same containers, shapes and
            dtypes.
        init_val: an array or a container of arrays.

    Raises:
        BadInput: a bound is not an integer, or a result does not have the structure of `init_val`.
    """
    bounds = [as_array(lower), as_array(upper)]
    for x in bounds:
        if x.dtype.kind not in "iu" or x.size != 1:
            raise BadInput(f"the bounds of fori_loop are integers; this is {x.dtype} of shape {x.shape}")
    leaves = [as_array(x) for _, x in trees.leaves(init_val)]
    is_known = compiling.get() and bounds[0]._node is bounds[1]._node is None
    first, last = (int(x._data.item()) if is_known else 0 for x in bounds)
    if is_known and last - first <= _MOST_SCANNED:

        def step(value: Any, i: Any) -> Any:
            return body_fun(i, value), ()

        step.__name__ = getattr(body_fun, "__name__", "the function")
        return scan(step, init_val, np.arange(first, last))[0]
    body = trace(body_fun, (0, init_val), [np.zeros((), np.int64), *(x._data for x in leaves)])
    _check_alike(init_val, body.output, "init_val and the result of body_fun")

    def write(b: Builder, inputs: list[Var]) -> list[Var]:
        first, last, *rest = inputs
        states, captured = rest[: len(leaves)], rest[len(leaves) :]
        first, last = (b.Reshape(b.Cast(x, to=int(ir.DataType.INT64)), np.array([], np.int64)) for x in (first, last))

        def inside(inner: Builder, step: Var, held: Sequence[Var]) -> list[Var]:
            return [inner.const(True), *body.write(inner, [inner.Add(step, first), *held, *captured])]

        return _loop(b, b.Max(b.Sub(last, first), b.const(0)), None, states, inside)

    return trees.rebuilt(init_val, _run("fori", [body], [*bounds, *leaves], (), write))


def scan(f: Function, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False) -> tuple[Any, Any]:
    """Apply ``carry, y = f(carry, x)`` to each slice x of `xs` along the first axis, and stack the y.

    Args:
        f: a function that returns a pair; the carry keeps its containers, shapes and dtypes.
        init: the first carry.
        xs: an array or a container of arrays; None: nothing, for `length` steps.
        length: the number of steps, if `xs` does not give it.
        reverse: whether the last slice comes first; the y are stacked in the order of `xs` all the same.

    Returns:
        The last carry, and the y, stacked along a new first axis.

    Raises:
        BadInput: lengths differ, `f` returns no pair, or the carry changes its structure.
    """
    carried = [as_array(x) for _, x in trees.leaves(init)]
    scanned = [as_array(x) for _, x in trees.leaves(xs)]
    if any(x.ndim == 0 for x in scanned):
        raise BadInput("scan takes slices along the first axis; an array of xs has no axes")
    lengths = {x.shape[0] for x in scanned} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise BadInput(
            f"scan runs over one number of slices; there are {', '.join(str(n) for n in sorted(lengths))}"
            if lengths
            else "scan without xs needs `length`"
        )
    (steps,) = lengths
    slices = [x._data[0] if steps else np.zeros(x.shape[1:], x.dtype) for x in scanned]
    body = trace(f, (init, xs), [*(x._data for x in carried), *slices])
    if not isinstance(body.output, tuple) or len(body.output) != 2:
        raise BadInput(f"{body.name} returns a {type(body.output).__name__}; scan takes pairs (carry, y)")
    _check_alike(init, body.output[0], f"init and the carry that {body.name} returns")
    stacked = body.results[len(carried) :]
    if steps == 0:
        return init, trees.rebuilt(body.output[1], [Array(np.zeros((0, *y.shape), y.dtype)) for y in stacked])

    def write(b: Builder, inputs: list[Var]) -> list[Var]:
        states, rest = inputs[: len(carried)], inputs[len(carried) :]
        columns, captured = rest[: len(scanned)], rest[len(scanned) :]
        count = len(states) + len(columns)
        columns = columns or [b.Expand(b.const(False), [steps])]  # what tells the number of steps

        def inside(inner: Builder, held: Sequence[Var]) -> list[Var]:
            return body.write(inner, [*held[:count], *captured])

        return _scan(b, states, columns, inside, reverse, steps)

    results = _run("scan", [body], [*carried, *scanned], (steps, reverse), write)
    return (
        trees.rebuilt(init, results[: len(carried)]),
        trees.rebuilt(body.output[1], results[len(carried) :]),
    )


def map(f: Function, xs: Any) -> Any:
    """``f(x)`` for each slice x of `xs` along the first axis, one after the other, stacked.

    `vmap` processes all slices at once; this needs the memory of one.
    """

    def step(_: Any, x: Any) -> Any:
        return (), f(x)

    step.__name__ = getattr(f, "__name__", "the function")
    return scan(step, (), xs)[1]


# --- nodes -------------------------------------------------------------------------------------------


def _run(
    kind: str,
    bodies: Sequence[TracedBody],
    operands: Sequence[Array],
    settings: tuple[Any, ...],
    write: Callable[[Builder, list[Var]], Sequence[Var]],
) -> list[Array]:
    """The results of a node with `bodies`, as one operation on the tape."""
    captured = [x for body in bodies for x in body.captured]
    whole = [*operands, *captured]
    key = (kind, tuple(body.key for body in bodies), tuple((x.dtype.num, x.shape) for x in operands), settings)
    operators = [n.op for body in bodies for n in body.program.nodes]
    custom = refuse_custom(bodies, whole)
    model: EagerModel = _made.get(
        key, lambda: EagerModel(graph_model([np.asarray(x._data) for x in whole], operators, write), custom)
    )
    return list(model.results(tuple(model.inputs), whole).values())


def _loop(
    b: Builder,
    trips: Var | None,
    condition: Var | None,
    states: Sequence[Var],
    write: Callable[[Builder, Var, Sequence[Var]], list[Var]],
) -> list[Var]:
    """Append a Loop; `write` gives the condition and the states, from the step and the states."""
    inner, graph = empty(b, "body")
    lead = loop_lead(inner)
    carried = [formal(inner, s.value, "state") for s in states]
    graph.inputs.extend(x.value for x in (*lead, *carried))
    results = write(inner, lead[0], carried)
    give(inner, results)
    operands = [None if x is None else x.value for x in (trips, condition, *states)]
    node = ir.Node("", "Loop", operands, [ir.AttrGraph("body", graph)], num_outputs=len(results) - 1)
    _type(node, states, results[1:], None)
    return list(b.append(node))


def _scan(
    b: Builder,
    states: Sequence[Var],
    columns: Sequence[Var],
    write: Callable[[Builder, Sequence[Var]], list[Var]],
    reverse: bool,
    steps: int,
) -> list[Var]:
    """Append a Scan over the first axis of `columns`."""
    inner, graph = empty(b, "body")
    carried = [formal(inner, s.value, "state") for s in states]
    for x in columns:
        assert x.shape is not None
        value = ir.Value(name=b.names.fresh("slice"), type=x.value.type, shape=ir.Shape(list(x.shape)[1:]))
        carried.append(inner.var(value))
    graph.inputs.extend(x.value for x in carried)
    results = write(inner, carried)
    give(inner, results)
    attributes: list[ir.Attr] = [ir.AttrGraph("body", graph), ir.AttrInt64("num_scan_inputs", len(columns))]
    if reverse:
        attributes.append(ir.AttrInt64s("scan_input_directions", [1] * len(columns)))
        attributes.append(ir.AttrInt64s("scan_output_directions", [1] * (len(results) - len(states))))
    operands = [x.value for x in (*states, *columns)]
    node = ir.Node("", "Scan", operands, attributes, num_outputs=len(results))
    _type(node, states, results, steps)
    return list(b.append(node))


def _type(node: ir.Node, states: Sequence[Var], results: Sequence[Var], steps: int | None) -> None:
    """Declare the outputs: states as they came in, others with an axis of steps."""
    for i, (value, result) in enumerate(zip(node.outputs, results)):
        value.type = result.value.type
        if i < len(states):
            value.shape = states[i].value.shape
        elif result.value.shape is not None:
            value.shape = ir.Shape([steps, *result.value.shape])


def _check_alike(expected: Any, found: Any, what: str) -> None:
    """Refuse trees that differ in their containers, shapes or dtypes."""
    if trees.structure(expected) != trees.structure(found):
        raise BadInput(f"{what} differ in their containers")
    for (path, x), (_, y) in zip(trees.leaves(expected), trees.leaves(found)):
        x, y = as_array(x), as_array(y)
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            at = f" at {path}" if path else ""
            raise BadInput(
                f"{what} differ{at}: {x.dtype} of shape {x.shape} and {y.dtype} of shape {y.shape}\n"
                "  hint: begin with an array of that dtype and shape"
            )

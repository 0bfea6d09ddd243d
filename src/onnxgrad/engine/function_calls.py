"""The derivative of a call of a local function is a call of a derived function.

From a body (see `model_io.local_functions`) the engine derives once, for a given set of operands that move and results
that carry something, two functions: the primal with the residuals as further results, and the linear part, which
takes operands, results and residuals of the primal with the cotangents (or tangents) and gives cotangents (tangents).
The call in the primal graph becomes one of the first; the derivative is a call of the second. Both are ordinary
functions, so that the derivative of a derivative is found in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import onnx_ir as ir

from onnxgrad.engine.forward import forward
from onnxgrad.engine.partial_eval import primal_values, residuals
from onnxgrad.engine.reverse import add_cotangents, reverse
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.match import not_none
from onnxgrad.ir.outline import part_of
from onnxgrad.model_io.local_functions import Body, Functions
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Cotangents, Rule

Mode = Literal["backward", "tangent"]
#: An operand, a result, a residual or a seed of a call, or a result of the linear part; by its place.
Source = tuple[Literal["operand", "result", "residual", "seed", "linear"], int]


@dataclass
class Derived:
    """The functions derived from the body of a local function.

    Attributes:
        body: of what.
        primal: the function that also gives the residuals; None if the function itself will do.
        linear: the linear part; None if there is nothing to compute.
        takes: its operands.
        gives: per operand (of a pullback) or result (of a pushforward) of the call, what carries its derivative.
    """

    body: Body
    primal: ir.Function | None = None
    linear: ir.Function | None = None
    residuals: int = 0
    takes: list[Source] = field(default_factory=list)
    gives: dict[int, Source] = field(default_factory=dict)


#: The functions derived from each kind of call, of the models that are being derived.
_derived: WeakKeyDictionary[Functions, dict[Hashable, Derived]] = WeakKeyDictionary()


class CallRule(Rule):
    """The rule of every call."""

    kind = "call"

    def vjp(self, op: Op, cotangents: Cotangents) -> dict[ir.Value, Var]:
        """Cotangents of the operands."""
        operands = list(op.node.inputs)
        moved = tuple(bool(v is not None and v in op.active) for v in operands)
        results = _call(op, "backward", moved, cotangents)
        return add_cotangents((value, g) for i, g in results.items() if (value := operands[i]) is not None)

    def _jvp(self, op: Op, tangents: Cotangents) -> list[Var | None]:
        count = len(op.node.outputs)
        moved = tuple(t is not None for t in tangents[: len(op.node.inputs)])
        results = _call(op, "tangent", moved, tangents)
        return [results.get(i) for i in range(count)]


def _call(op: Op, mode: Mode, moved: tuple[bool, ...], seeds: Cotangents) -> dict[int, Var]:
    """Emit the call of the linear part. Returns its results by index."""
    functions = op.builder.functions
    assert isinstance(functions, Functions)
    body = functions.body(op.node)
    is_seeded = tuple(s is not None for s in seeds)
    key = mode, body.key, moved, is_seeded
    known = _derived.setdefault(functions, {})
    derived = known.get(key)
    if derived is None:
        derived = known[key] = derive(functions, op.node, body, mode, moved, is_seeded)
    operands = list(op.node.inputs)
    results = len(functions.table[op.node.op_identifier()].outputs)
    if derived.primal is not None:
        _become(op, derived)

    def var(source: Source) -> Var:
        kind, i = source
        if kind == "operand":
            return op.builder.var(not_none(operands[i]))
        if kind == "seed":
            return not_none(seeds[i])
        if kind == "linear":
            return given_back[i]
        return op.output(i if kind == "result" else results + i)

    given_back: list[Var] = []
    if derived.linear is not None:
        node = ir.Node(
            derived.linear.domain,
            derived.linear.name,
            [var(s).value for s in derived.takes],
            num_outputs=len(derived.linear.outputs),
        )
        given_back = list(op.builder.append(node))
    return {place: var(source) for place, source in derived.gives.items()}


def _become(op: Op, derived: Derived) -> None:
    """Replace the call in the primal graph by one that also returns the residuals."""
    node, primal = op.node, not_none(derived.primal)
    operands = [node.inputs[i] for i in derived.body.places]
    node.resize_inputs(len(operands))
    for i, value in enumerate(operands):
        node.replace_input_with(i, value)
    node.domain, node.op_type, node.overload = primal.domain, primal.name, ""
    node.attributes.clear()
    have = len(node.outputs)
    node.resize_outputs(len(primal.outputs))
    first = len(primal.outputs) - derived.residuals
    for i in range(have, len(primal.outputs)):
        residual = i >= first
        node.outputs[i].name = op.builder.names.fresh(f"{primal.name}_residual") if residual else ""
    op.builder.infer(node)


def derive(
    functions: Functions, node: ir.Node, body: Body, mode: Mode, moved: Sequence[bool], given: Sequence[bool]
) -> Derived:
    """The functions for the derivative of `body` by the operands that are `moved`, for the seeds that are `given`."""
    graph = body.graph.clone()
    builder = Builder(graph, infer=Inference.of(graph, functions))
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    formals = dict(zip(body.places, inputs))
    seeded = dict(enumerate(outputs)) if mode == "backward" else formals
    seeds: dict[int, ir.Value] = {}
    for i, carries in enumerate(given):
        if carries and i in seeded:
            like = seeded[i]
            name = builder.names.exactly(f"{like.name}_{'cotangent' if mode == 'backward' else 'tangent'}")
            seeds[i] = ir.Value(name=name, type=like.type, shape=like.shape)
    start = [*graph.inputs]
    with builder.record() as emitted:
        derivatives: dict[int, Var] = {}
        variables = {i: builder.var(v) for i, v in seeds.items()}
        if mode == "backward":
            wrt = {i: v for i, v in formals.items() if moved[i]}
            totals = add_cotangents((seeded[i], u) for i, u in variables.items())
            gradients = reverse(builder, list(graph), totals, list(wrt.values()))
            derivatives = {i: gradients[v] for i, v in wrt.items() if v in gradients}
        else:
            pushed = forward(builder, list(graph), {seeded[i]: t for i, t in variables.items()}, outputs)
            derivatives = {i: pushed[v] for i, v in enumerate(outputs) if v in pushed}
    outputs = list(graph.outputs)  # some may have been lowered
    cut = residuals((g.value for g in derivatives.values()), primal_values(graph, emitted, set(seeds.values())))
    sources: dict[ir.Value, Source] = {v: ("operand", i) for i, v in formals.items()}
    sources |= {v: ("result", i) for i, v in reversed(list(enumerate(outputs))) if v not in sources}
    sources |= {v: ("seed", i) for i, v in seeds.items()}
    saved = [v for v in cut if v not in sources]
    sources |= {v: ("residual", k) for k, v in enumerate(saved)}
    made = list(dict.fromkeys(g.value for g in derivatives.values() if g.value not in sources))
    result = Derived(body, residuals=len(saved))
    result.takes = [sources[v] for v in (*cut, *seeds.values())]
    sources |= {v: ("linear", k) for k, v in enumerate(made)}
    result.gives = {i: sources[g.value] for i, g in derivatives.items()}
    graph.inputs.extend(seeds.values())
    if saved:
        part = part_of(graph, start, [*outputs, *saved], builder.names)
        result.primal = functions.add(node.domain, f"{node.op_type}_forward", part)
    if made:
        part = part_of(graph, [*cut, *seeds.values()], made, builder.names)
        result.linear = functions.add(node.domain, f"{node.op_type}_{mode}", part)
    return result


registry.of_calls = CallRule()

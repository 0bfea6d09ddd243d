"""Residuals of the steps of an iteration, stacked by the primal iteration for the backward pass.

Values of the same shape at every step are stacked. Reshapes and Transposes are repeated instead. So are nodes that
only select from values available outside (captured values, the number of the step, a slice of a scan input): stacking
their results would copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.control_flow.indexed_slices import keeps_its_shape, sizes_around
from onnxgrad.control_flow.iteration import Iteration, ScanAxis, add_outputs
from onnxgrad.control_flow.reverse_iteration import StepInput
from onnxgrad.engine.partial_eval import residuals
from onnxgrad.engine.resolve import is_constant
from onnxgrad.ir import Builder
from onnxgrad.ir.graph import ancestors, dependents, reads, stand_in
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.ir.subgraphs import copy_of, give
from onnxgrad.rules.op import Op

#: Operators whose results are recomputed instead of stacked, besides those that move elements.
_CHEAP = frozenset({"Cast", "CastLike", "Shape"})


def stack_saved(
    op: Op,
    b: Builder,
    originals: Mapping[ir.Value, ir.Value],
    primal: Sequence[ir.Node],
    ends: Sequence[ir.Value],
    results: Iterable[ir.Value],
) -> dict[ir.Value, StepInput]:
    """Have the primal iteration stack the values of `primal` that `results` need; these then read columns.

    Args:
        op: the primal iteration.
        b: writes into a copy of its body, of which `primal` are the nodes, and `ends` the outputs.
        originals: what the values of the copy are copies of.
        primal: the nodes of the copy before the backward pass was appended.
        ends: the outputs of the copy.
        results: the results of the backward pass.

    Returns:
        What is stacked, with the column that took its place.
    """
    values = _wanted(op, b.graph, primal, list(results))
    if not values:
        return {}
    it = Iteration.of(op.node)
    place = dict(zip(ends[it.head + it.count :], range(it.count, len(op.node.outputs))))
    stacked = [v for v in place if it.outs[place[v] - it.count] == ScanAxis() and op.node.outputs[place[v]].name]
    places = {v: place[v] for v in values if v in stacked}
    new = [v for v in values if v not in places]
    if all(v in originals for v in new):
        body = it.body
        give(op.builder.nested(body), [*body.outputs, *(originals[v] for v in new)])
    else:  # some belong to the replacement of a node
        b.graph.outputs[:] = [*ends, *new]
        inner, body = copy_of(op.builder, b.graph)
        b.graph.outputs.clear()
        give(inner, list(body.outputs))
    for out, like in zip(body.outputs, [*ends, *new]):
        out.type, out.shape = out.type or like.type, like.shape if out.shape is None else out.shape
    op.node.attributes["body"] = ir.AttrGraph("body", body)
    first = len(op.node.outputs)
    for i, (v, out) in enumerate(zip(new, add_outputs(op.node, len(new))), start=first):
        out.name, out.type = op.builder.names.fresh(f"{v.name}_kept"), v.type
        places[v] = i
    op.builder.infer(op.node)
    columns = {}
    for v in values:
        columns[v] = StepInput(
            stand_in(v, b.names.fresh("kept")), op.node.outputs[places[v]], ScanAxis(0, backwards=True)
        )
    return columns


def _wanted(op: Op, body: ir.Graph, primal: Sequence[ir.Node], results: list[ir.Value]) -> list[ir.Value]:
    """The values of `primal` that must be stacked to compute `results`."""
    inside = set(primal)
    makers = {v: n for n in primal for v in n.outputs}
    back = ancestors([node for node in body if node not in inside], results)
    live = {v for node in back for v in reads(node)} | set(results)
    it = Iteration.of(op.node)
    states = set(body.inputs[it.lead : it.lead + it.count])
    varies = dependents(primal, body.inputs)
    moved = _selections(primal, states, varies)
    sizes = sizes_around(op.node)

    def is_known(v: ir.Value) -> bool:
        """True if a backward step has `v`: stacked, or the same in all steps."""
        if v not in makers or v not in varies:
            return True
        if is_constant(makers[v]):  # a derivative of the derivative must not pass either
            return True
        is_shaped = traits_of(makers[v]).moves_at_most(Moves.PERMUTATION)
        return v not in moved and not is_shaped and keeps_its_shape(v, sizes)

    read = set(residuals((v for v in makers if v in live), is_known))
    return [v for v in makers if v in read and v in varies]


def _selections(nodes: Iterable[ir.Node], states: set[ir.Value], varies: set[ir.Value]) -> set[ir.Value]:
    """The values that only select from values available outside the iteration."""
    own = {v for node in nodes for v in node.outputs}
    selected: set[ir.Value] = set()
    for node in nodes:
        picks = traits_of(node).moves is not None or (node.op_type in _CHEAP and node.domain == "")
        picks = picks and not is_constant(node)
        if picks and all(v in selected or (v not in own and v not in states) or v not in varies for v in reads(node)):
            selected.update(node.outputs)
    return selected

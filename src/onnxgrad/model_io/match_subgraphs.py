"""Sub-graphs that a user has a derivative for: each is cut out and becomes a local function, and a call of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.context import ScopedSetting
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.graph import ancestors, cut, dependents, prune, subgraphs
from onnxgrad.ir.match import producer
from onnxgrad.ir.names import Names, identifier
from onnxgrad.ir.outline import part_of

#: The domain of the functions that cut-out sub-graphs become.
CUT_DOMAIN = "onnxgrad.custom"


class Cut(NamedTuple):
    """The sub-graph that computes the values `outputs` from the values `inputs`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the function that replaces the sub-graph."""
        return identifier("__".join(["_".join(self.outputs), "of", "_".join(self.inputs)]))


class RuleTargets(NamedTuple):
    """The parts of models that rules of the user are for.

    Attributes:
        operators: domains and names; a local function among them stays a function.
        cuts: sub-graphs, which become functions.
    """

    operators: frozenset[tuple[str, str]] = frozenset()
    cuts: tuple[Cut, ...] = ()


#: The targets of the rules that hold now (`custom_rules`).
TARGETS: ScopedSetting[RuleTargets] = ScopedSetting("rule_targets", RuleTargets())


def cut_out(model: ir.Model, cut: Cut, *, required: bool) -> None:
    """Make the sub-graph `cut` of `model` a function, in place; captured values become operands too.

    A model without the values is unchanged, unless they are `required`.

    Raises:
        UnknownName: the model lacks a value.
        BadInput: the values do not bound a sub-graph.
    """
    graph = model.graph
    values = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
    values |= {v.name: v for node in graph for v in node.outputs if v.name}
    for name in (*cut.inputs, *cut.outputs):
        if name not in values:
            if required:
                raise UnknownName(name, values, "value")
            return
    inputs, outputs = [values[n] for n in cut.inputs], [values[n] for n in cut.outputs]
    function = (CUT_DOMAIN, cut.name, "")
    makers = [v.producer() for v in outputs]
    if function in model.functions and all(m is not None and m.op_identifier() == function for m in makers):
        return  # it was cut out before: this model is a derivative
    inside, beside = _inside(graph, inputs, outputs)
    names = Names.of(model)
    operands = [*inputs, *beside]
    body = part_of(graph, operands, outputs, names)
    call = ir.Node(CUT_DOMAIN, cut.name, operands, num_outputs=len(outputs), name=names.fresh(cut.name))
    own = {n for node in inside for n in (node, *(m for g in subgraphs(node) for m in g.all_nodes()))}
    for old, new in zip(outputs, call.outputs):
        new.type, new.shape = old.type, old.shape
        kept = [(node, i) for node, i in old.uses() if node in own]
        outer_name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        for node, i in kept:
            node.replace_input_with(i, old)
        old.name, new.name = names.fresh(f"{outer_name}_before"), outer_name
    graph.append(call)
    try:
        graph.sort()
    except ValueError as e:
        raise BadInput(f"{_describe_cut(cut)} is no sub-graph: its inputs depend on its outputs") from e
    prune(graph)
    graph.opset_imports[CUT_DOMAIN] = 1
    model.functions[function] = ir.Function(CUT_DOMAIN, cut.name, graph=body, attributes=[])


def _inside(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes between `inputs` and `outputs`, and the other values that they read."""
    here = Cut(tuple(v.name or "" for v in inputs), tuple(v.name or "" for v in outputs))
    depends = dependents(graph, inputs)
    for v in outputs:
        if v in inputs or v not in depends:
            raise BadInput(f"{_describe_cut(here)} is no sub-graph: {v.name!r} is not computed from its inputs")
    read = cut(outputs, lambda v: v in inputs or (v not in depends and producer(v, "Constant") is None))
    for v in inputs:
        if v not in read:
            raise BadInput(f"{_describe_cut(here)} is no sub-graph: it does not read {v.name!r}")
    return ancestors(graph, outputs, set(read)), [v for v in read if v not in inputs]


def _describe_cut(cut: Cut) -> str:
    return f"from {', '.join(map(repr, cut.inputs))} to {', '.join(map(repr, cut.outputs))}"

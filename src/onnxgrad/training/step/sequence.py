"""Several training entries as one step: each continues from the state updated by the one before."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.graph import prune, subgraphs
from onnxgrad.ir.names import rename_inside
from onnxgrad.training.step.step import Step


def in_sequence(first: Step, second: Step) -> Step:
    """The step that does `first` and then `second` on the same batch; both are used up.

    Inputs of the same name are one input. Learning rates are not: each entry has its own; where the names
    of results or rates clash, those of `second` get a number.
    """
    graph, names = first.model.graph, Names.of_graph(first.model.graph)
    ends_of_second = list(second.model.graph.outputs)
    own, inputs = _take_over(graph, second, names, _shared_inputs(first, second))
    outputs = {v.name: v for v in graph.outputs}
    rates = dict(first.rates) | {own[n]: t for n, t in second.rates.items()}
    added = {n: replace(t, input=own.get(t.input, t.input), output=own[t.output]) for n, t in second.state.items()}
    state = first.state | added
    results = [*first.results, *(own[n] for n in second.results)]
    outputs |= {v.name: v for v in ends_of_second}
    ends = list(dict.fromkeys([*(t.output for t in state.values()), *results]))
    graph.outputs[:] = [outputs[n] for n in ends]
    batch = list(dict.fromkeys([*first.batch, *(own.get(n, n) for n in second.batch)]))
    reads = {n: t for n, t in {**first.reads, **second.reads}.items() if n not in state}
    hosted = {v.name: v for v in [*graph.inputs, *inputs]}
    graph.inputs[:] = [hosted[n] for n in [*batch, *(t.input for t in state.values()), *reads, *rates]]
    prune(graph)
    first.model.opset_imports.update(second.model.opset_imports)
    loss = first.loss or own.get(second.loss, second.loss)
    return replace(first, state=state, batch=batch, results=results, rates=rates, reads=reads, loss=loss)


def _shared_inputs(first: Step, second: Step) -> dict[str, ir.Value]:
    """The values in `first` for the inputs of `second`: updated state, else an input of the same role."""
    graph = first.model.graph
    updated = {v.name: v for v in graph.outputs}
    known = {}
    for value in graph.inputs:
        name = value.name or ""
        if name in first.state:
            value = updated[first.state[name].output]
        if name not in first.rates and (name in first.batch) == (name in second.batch):
            known[name] = value
    return {n: v for n, v in known.items() if n not in second.rates}


def _take_over(
    graph: ir.Graph, second: Step, names: Names, known: dict[str, ir.Value]
) -> tuple[dict[str, str], list[ir.Value]]:
    """Move the nodes and constants of `second` into `graph`; their new names, and the inputs to add."""
    other = second.model.graph
    inputs, nodes, constants = list(other.inputs), list(other), list(other.initializers.values())
    other.inputs.clear()
    other.outputs.clear()
    other.remove(nodes)
    other.initializers.clear()
    own: dict[str, str] = {}
    added: list[ir.Value] = []

    def rename(value: ir.Value) -> None:
        if value.name:
            own[value.name] = value.name = names.exactly(value.name)

    for value in inputs:
        if value.name in known:
            value.replace_all_uses_with(known[value.name])
        else:
            rename(value)
            added.append(value)
    for value in constants:
        same = graph.initializers.get(value.name or "")
        if same is not None and same.const_value is value.const_value:
            value.replace_all_uses_with(same)
        else:
            rename(value)
            graph.register_initializer(value)
    for node in nodes:
        node.name = names.exactly(node.name or node.op_type)
        for value in node.outputs:
            rename(value)
        for inner in subgraphs(node):
            rename_inside(inner, names)
    graph.extend(nodes)
    return own, added

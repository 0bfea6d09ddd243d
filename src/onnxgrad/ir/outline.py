"""A part of a graph as the body of a function."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import named_values, scopes, stand_in
from onnxgrad.ir.names import Names


def part_of(graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], names: Names) -> ir.Graph:
    """Copy the part of `graph` that computes `outputs` from `inputs`, as the body of a function."""
    copy = graph.clone()
    values = named_values(copy)
    restrict(copy, [values[v.name or ""] for v in inputs], [values[v.name or ""] for v in outputs], names)
    finish(copy, names=names)
    _as_function(copy)
    return copy


def restrict(graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], names: Names) -> None:
    """Set inputs and outputs of `graph`, at values computed anywhere in it; dead code stays, to be pruned."""
    instead = {v: v if v in graph.inputs else stand_in(v) for v in inputs}
    graph.outputs.clear()
    for value in (instead.get(v, v) for v in outputs):
        if value.producer() is None or value in graph.outputs:
            through = ir.Node("", "Identity", [value], num_outputs=1)
            through.outputs[0].name = names.fresh(f"{value.name}_out")
            graph.append(through)
            value = through.outputs[0]
        graph.outputs.append(value)
    graph.inputs[:] = list(instead.values())


def _as_function(graph: ir.Graph) -> None:
    """A function has no initializers, and its types are those of its operands.

    No name of a size may stay inside: where calls are inlined, ONNX Runtime would take it for one size.
    """
    first = graph[0] if len(graph) else None
    for name, value in list(graph.initializers.items()):
        del graph.initializers[name]
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], num_outputs=1)  # type: ignore[arg-type]
        value.replace_all_uses_with(node.outputs[0])
        node.outputs[0].name = name
        value.name = f"{name}_held"
        if first is None:
            graph.append(node)
        else:
            graph.insert_before(first, node)
    for inner in graph.subgraphs():
        for value in (*inner.inputs, *(o for n in inner for o in n.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([d if isinstance(d, int) else None for d in value.shape])
    for value in (*graph.inputs, *(o for n in graph for o in n.outputs)):
        value.shape = value.type = None
    used = {n.domain for g in scopes(graph) for n in g} | {""}
    for domain in [d for d in graph.opset_imports if d not in used]:
        del graph.opset_imports[domain]
    for node in graph:
        node.name = None

"""Dead code elimination inside loops and branches: results and states that no value is computed from are dropped.

The derivative of a loop may need states of the primal loop, which also carries others. In a transpose those others
depend on the input that is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.ir.graph import detach, prune, subgraphs


def drop_unread(graph: ir.Graph) -> None:
    """Drop the nodes of `graph` that are not needed, and the unneeded results and states of its loops and branches."""
    prune(graph)
    for node in reversed(list(graph)):
        if node.graph is not graph or node.domain or not node.attributes.data or not subgraphs(node):
            continue
        if not any(_is_read(v) for v in node.outputs):
            graph.remove(node, safe=True)
            detach([node])
            continue
        if node.op_type in ("Loop", "Scan"):
            _shrink_iteration(graph, node)
        elif node.op_type == "If":
            read = [i for i, v in enumerate(node.outputs) if _is_read(v)]
            for branch in subgraphs(node):
                _keep(branch, [branch.outputs[i] for i in read])
            _replace(graph, node, list(node.inputs), list(node.attributes.values()), read)
        prune(graph)


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _shrink_iteration(graph: ir.Graph, node: ir.Node) -> None:
    it = Iteration.of(node)
    ends = [*it.following, *it.slice_results]
    read = [i for i, v in enumerate(node.outputs) if _is_read(v)]
    head = list(it.body.outputs[: it.head])
    kept = {i for i in read if i < it.count}
    while (more := kept | set(it.states_for([*head, *(ends[i] for i in (*kept, *read))]))) != kept:
        kept = more
    states = sorted(kept)
    outs = [i - it.count for i in read if i >= it.count]
    lead, formals, slices = list(it.body.inputs[: it.lead]), it.states, it.slices
    initial, scanned, ins, slots = it.initial, it.scanned, it.ins, it.outs
    _keep(it.body, [*head, *(ends[i] for i in states), *(ends[it.count + k] for k in outs)])
    columns = [j for j, v in enumerate(slices) if _is_read(v)] or [0][: len(slices)]
    it.body.inputs[:] = [*lead, *(formals[i] for i in states), *(slices[j] for j in columns)]
    inputs = [*node.inputs[: it.lead], *(initial[i] for i in states), *(scanned[j] for j in columns)]
    attributes = [ir.AttrGraph("body", it.body)]
    if not it.lead:
        attributes.append(ir.AttrInt64("num_scan_inputs", len(columns)))
        attributes += _slots("input", [ins[j] for j in columns]) + _slots("output", [slots[k] for k in outs])
    _replace(graph, node, inputs, attributes, [*states, *(it.count + k for k in outs)])


def _keep(body: ir.Graph, outputs: Sequence[ir.Value]) -> None:
    body.outputs[:] = outputs
    drop_unread(body)


def _slots(kind: str, slots: Sequence[ScanAxis]) -> list[ir.Attr]:
    return [
        ir.AttrInt64s(f"scan_{kind}_axes", [slot.axis for slot in slots]),
        ir.AttrInt64s(f"scan_{kind}_directions", [int(slot.backwards) for slot in slots]),
    ]


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    inputs: Sequence[ir.Value | None],
    attributes: Sequence[ir.Attr],
    kept: Sequence[int],
) -> None:
    """Replace `node` by one with `inputs` and `attributes` that has only the outputs `kept`."""
    made = ir.Node("", node.op_type, inputs, attributes, num_outputs=len(kept), name=node.name)
    made.metadata_props.update(node.metadata_props)
    made.meta.update(node.meta)
    graph.insert_before(node, made)
    for i, new in zip(kept, made.outputs):
        old = node.outputs[i]
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=False)
    detach([node], subgraphs(made))

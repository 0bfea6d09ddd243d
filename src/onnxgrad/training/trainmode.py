"""The part of a network that behaves differently in training, copied in training mode.

Exported models have BatchNormalization and Dropout in inference mode, and stay as they are. What depends on
such a node is copied into the algorithm, where BatchNormalization normalizes with the statistics of the
batch and moves its running statistics, ``running = momentum·running + (1 - momentum)·batch`` with the
population variance, as ONNX defines it; and Dropout drops. The copies read the same initializers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, identifier
from onnxgrad.ir.names import described
from onnxgrad.ir.walk import reads, subgraphs

Values = dict[ir.Value, ir.Value]


def _standard(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def _off(node: ir.Node) -> bool:
    """Whether `node` is a BatchNormalization or Dropout that runs in inference mode."""
    if _standard(node, "BatchNormalization"):
        mode = node.attributes.get("training_mode")
        return mode is None or not mode.as_int()
    if _standard(node, "Dropout"):
        given = node.inputs[2] if len(node.inputs) > 2 else None
        if given is None:
            return True
        known = ir.convenience.get_const_tensor(given)
        return known is not None and not known.numpy().any()
    return False


def statistics(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """The running statistics of every BatchNormalization of `nodes`."""
    return {v for n in nodes if _standard(n, "BatchNormalization") for v in list(n.inputs)[3:5] if v is not None}


def ancestors(nodes: Sequence[ir.Node], value: ir.Value) -> list[ir.Node]:
    """Those of `nodes` (in order) that `value` depends on."""
    live = {value}
    found = []
    for node in reversed(nodes):
        if any(v in live for v in node.outputs):
            live.update(reads(node))
            found.append(node)
    return found[::-1]


def switch(builder: Builder, nodes: Sequence[ir.Node], y: ir.Value) -> tuple[Values, Values]:
    """Append a copy, in training mode, of what `y` depends on and training changes.

    Returns:
        The copy of each value that has one, and the next value of each running statistic.
    """
    copies: Values = {}
    updates: Values = {}
    for node in ancestors(nodes, y):
        for inner in (n for g in subgraphs(node) for n in g.all_nodes() if _off(n)):
            raise BadInput(
                f"{described(inner)} is inside a branch or loop body of {described(node)}, "
                f"where training mode is not supported; attach with train_mode=False"
            )
        if not (_off(node) or any(v in copies for v in reads(node))):
            continue
        inputs = [None if v is None else copies.get(v, v) for v in node.inputs]
        attributes = {a.name: a for a in node.attributes.values()}
        count = len(node.outputs)
        statistic: list[ir.Value] = []
        if _standard(node, "BatchNormalization") and _off(node):
            statistic = _running(node)
            inputs[3:5] = [updates.get(v, v) for v in statistic]
            attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            count = 3
        elif _off(node):
            inputs += [None] * (3 - len(inputs))
            inputs[2] = builder.const(np.array(True)).value
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            [rewired(a, copies) for a in attributes.values()],
            num_outputs=count,
            name=builder.names.exactly(identifier(f"train_{node.name or node.op_type}")),
        )
        for old, new in zip(node.outputs, copy.outputs):
            new.name = builder.names.exactly(identifier(f"train_{old.name}")) if old.name else ""
            copies[old] = new
        for running, new in zip(statistic, copy.outputs[1:]):
            new.name = builder.names.fresh(identifier(f"{running.name}_next"))
            updates[running] = new
        builder.append(copy)
    return copies, updates


def _running(node: ir.Node) -> list[ir.Value]:
    found = [v for v in list(node.inputs)[3:5] if v is not None]
    for v in found:
        if not v.is_initializer() or v.is_graph_input():
            raise BadInput(
                f"{described(node)}: its running statistic {v.name!r} is no initializer, "
                "so training cannot update it; attach with train_mode=False"
            )
    return found


def rewired(attribute: ir.Attr, copies: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    """`attribute`; a graph in it as a clone that reads copies where there are some."""
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, _clone(attribute.as_graph(), copies))
    if attribute.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attribute.name, [_clone(g, copies) for g in attribute.as_graphs()])
    return attribute


def _clone(graph: ir.Graph, copies: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    clone = graph.clone(allow_outer_scope_values=True)
    for node in clone.all_nodes():
        for i, value in enumerate(node.inputs):
            if value is not None and value in copies:
                node.replace_input_with(i, copies[value])
    for i, value in enumerate(clone.outputs):
        if value in copies:
            clone.outputs[i] = copies[value]
    return clone

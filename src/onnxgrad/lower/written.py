"""Operators that are written out by hand: in terms of others, with every weight an operand.

A lowering is a function of a builder and the node that returns what the outputs of the node become
(``None`` for one that is not there). What it writes takes the place of the node in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.names import rename_inside
from onnxgrad.lower.bodies import _take_place

Lowering = Callable[[Builder, ir.Node], Sequence[Var | None]]
_table: dict[str, Lowering] = {}


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a function as what standard operators become."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            _table[name] = function
        return function

    return register


def attribute(b: Builder, node: ir.Node, name: str) -> Any:
    """The attribute `name` of a node of a standard operator: as given, else the default, else None."""
    given = node.attributes.get(name)
    if given is None:
        schema = onnx.defs.get_schema(node.op_type, b.infer.context.get_opset_version(node.domain), node.domain)
        default = schema.attributes[name].default_value
        given = ir.from_proto(default) if default.name else None
    if given is None:
        return None
    return list(given.value) if isinstance(given.value, (tuple, list)) else given.value


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by what is written here for it; the new nodes, or None if nothing is."""
    lower = _table.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    graph = node.graph
    if lower is None or not isinstance(graph, ir.Graph):
        return None
    b = builder.nested(graph)
    taken: set[ir.Value] = set()
    results: list[ir.Value | None] = []
    with b.record() as new:
        for r in list(lower(b, node)):
            if r is not None and (r.value in taken or r.value.producer() not in new):
                r = b.append(ir.Node("", "Identity", [r.value]))[0]  # noqa: PLW2901  (an output of its own)
            taken.update([] if r is None else [r.value])
            results.append(None if r is None else r.value)
    graph.remove(new)
    graph.insert_before(node, new)
    for actual, produced in zip(node.outputs, results):
        if actual.name:
            _take_place(builder, actual, produced)
    graph.remove(node, safe=True)
    return new


@lowering("SequenceMap")
def sequence_map(b: Builder, node: ir.Node) -> Sequence[Var | None]:
    """A Loop over the elements of the sequences, that appends what the body gives."""
    graph = node.attributes["body"].as_graph().clone(allow_outer_scope_values=True)
    rename_inside(graph, b.names)
    inner = b.nested(graph)
    number = ir.Value(name=b.names.fresh("step"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    goes_on = ir.Value(name=b.names.fresh("goes_on"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    with inner.record() as early:
        for x, element in zip(node.inputs, graph.inputs):
            assert x is not None
            if isinstance(x.type, ir.SequenceType):
                here = inner.SequenceAt(inner.var(x), inner.var(number)).value
                here.type, here.shape = here.type or element.type, here.shape or element.shape
            else:
                here = x
            element.replace_all_uses_with(here, replace_graph_outputs=True)
    first = next(iter(graph), None)
    if first is not None and early and first is not early[0]:
        graph.remove(early)
        graph.insert_before(first, early)
    so_far, longer = [], []
    for out in graph.outputs:
        kind = ir.SequenceType(out.type)  # type: ignore[arg-type]
        so_far.append(ir.Value(name=b.names.fresh("so_far"), type=kind))
        longer.append(inner.SequenceInsert(inner.var(so_far[-1]), inner.var(out)).value)
        longer[-1].type = kind
    same = inner.Identity(inner.var(goes_on)).value
    results = [out.dtype for out in graph.outputs]
    graph.outputs.clear()
    graph.outputs.extend([same, *longer])
    graph.inputs.clear()
    graph.inputs.extend([number, goes_on, *so_far])
    empties = [b.SequenceEmpty(dtype=int(d or 0)).value for d in results]
    assert node.inputs[0] is not None
    length = b.SequenceLength(b.var(node.inputs[0])).value
    loop = ir.Node(
        "", "Loop", [length, None, *empties], [ir.AttrGraph("body", graph)], num_outputs=len(results)
    )
    for value, seq in zip(loop.outputs, so_far):
        value.type = seq.type
    return list(b.append(loop))

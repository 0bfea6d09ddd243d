"""Normalizations that only elementwise operators read: the kernel finds the statistics, and the groups that read it do
the rest, (x - centre) · gain + shift.

So the backward pass recomputes normalized values from x, which is saved for the cotangent of the normalization anyway,
and saves none of them. This pays off for several readers only: a Relu after a normalization, and the sum of a residual
block, need nothing of it later.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.runtime.kernels.elementwise_steps import DOMAIN, dims, is_written

#: The first of the results that make y of x, by kernel.
_COLUMNS = {"BatchNorm": 3, "GroupNorm": 1}
#: Fewer elements than that take less time than calls do.
_FEWEST = 1 << 14
#: Fewer readers need it in the forward pass alone.
_READERS = 2


def open_norms(graph: ir.Graph) -> None:
    """Let readers of normalizations of `graph` (without nested graphs) read the normalized operand, if possible."""
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type in _COLUMNS:
            _open(graph, node)


def _open(graph: ir.Graph, norm: ir.Node) -> None:
    x, y = norm.inputs[0], norm.outputs[0]
    if x is None or not y.name or y.is_graph_output():
        return
    shape, viewed = dims(x), _view_of(norm)
    if viewed is not None:
        x, y = viewed
    seen = dims(x)
    users = [user for user in y.consumers() if not _asks_for_shape(user)]
    if seen is None or shape is None or len(seen) < 3 or y.is_graph_output() or len(users) < _READERS:
        return
    known = [d for d in seen if isinstance(d, int)]
    if len(known) == len(seen) and math.prod(known) < _FEWEST:
        return
    if any(u.graph is not graph or not is_written(u) or dims(u.outputs[0]) != seen for u in users):
        return
    if viewed is not None:
        groups = _groups_of(norm, shape, seen)
        if groups is None:
            return
        norm.attributes["groups"] = ir.AttrInt64("groups", groups)
    head = seen[1:2] if norm.op_type == "BatchNorm" else seen[:2]
    column = ir.Shape([*head, *[1] * (len(seen) - 2)])
    for value, same in {norm.outputs[0]: norm.inputs[0], y: x}.items():
        for user, place in list(value.uses()):
            if _asks_for_shape(user):
                user.replace_input_with(place, same)
    _write(graph, norm, x, y, column)


def _asks_for_shape(node: ir.Node) -> bool:
    return is_op(node, "Shape")


def _view_of(norm: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The operand and result of a GroupNorm of a view, in the viewed shape, where both have the same one."""
    y, given = norm.outputs[0], norm.inputs[0]
    back = [user for user in y.consumers() if not _asks_for_shape(user)]
    there = given.producer() if given is not None else None
    if norm.op_type != "GroupNorm" or len(back) != 1 or there is None:
        return None
    if not is_op(back[0], "Reshape") or back[0].inputs[0] is not y:
        return None
    if not is_op(there, "Reshape") or there.inputs[0] is None:
        return None
    x, z = there.inputs[0], back[0].outputs[0]
    return (x, z) if dims(x) is not None and dims(x) == dims(z) else None


def _groups_of(norm: ir.Node, shape: tuple[int | str, ...], seen: tuple[int | str, ...]) -> int | None:
    """The groups of channels of shape `seen` that are the channels of its view of `shape`; None if they are not."""
    groups, channels = shape[1], seen[1]
    if shape[0] != seen[0] or not isinstance(groups, int) or not isinstance(channels, int):
        return None
    single = norm.attributes["groups"].as_int() in (0, groups)
    return groups if single and groups and channels and not channels % groups else None


def _write(graph: ir.Graph, norm: ir.Node, x: ir.Value, y: ir.Value, column: ir.Shape) -> None:
    """Replace `y` by (x - centre) · gain + shift."""
    first = _COLUMNS[norm.op_type]
    norm.resize_outputs(first + 3)
    kind = ir.TensorType(ir.DataType.FLOAT)
    for i in range(3):
        made = norm.outputs[first + i]
        made.name, made.type, made.shape = f"{norm.name}.{first + i}", kind, column.copy()
    value = x
    after = norm
    for op, other in zip(("Sub", "Mul", "Add"), norm.outputs[first:]):
        node = ir.Node("", op, [value, other], num_outputs=1, name=f"{norm.name}.{op}")
        value = node.outputs[0]
        value.name, value.type, value.shape = f"{norm.name}.{op}", kind, ir.Shape(dims(x) or ())
        graph.insert_after(after, node)
        after = node
    norm.replace_input_with(0, x)
    y.replace_all_uses_with(value)
    if (view := y.producer()) not in (None, norm) and view is not None:
        graph.remove(view, safe=True)
    if not norm.outputs[0].uses():
        norm.outputs[0].name = ""

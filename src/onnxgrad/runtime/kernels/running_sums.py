"""Sums over the steps of a Scan in one buffer, as calls of ``source/sums.c``.

For a state of a Scan, ONNX Runtime uses the initial buffer, two that alternate, and one for the result. For the
accumulated cotangent of a large matrix, that is four times the matrix. A sum that starts from zeros, to which each step
adds a term and which no other node reads, needs one buffer: the steps add to it in place, and the state that they pass
on is its address.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxgrad.ir.graph import prune, scopes
from onnxgrad.ir.match import constant, is_op, not_none, producer
from onnxgrad.ir.names import Names
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.kernels.elementwise import PHASE
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.runtime.setting import Setting

#: Sums of fewer numbers are not worth two more calls.
_FEWEST = 1 << 16


def _sum_in_place(model: ir.Model, setting: Setting) -> int:
    """Give each running sum of `model` one buffer. Returns the count."""
    names = Names.of_graph(model.graph)
    places = 0
    for graph in scopes(model.graph):
        for found in _sums(graph):
            _write(graph, *found, names)
            places += 1
        prune(graph)
    model.opset_imports[DOMAIN] = 1
    return places


def _sums(graph: ir.Graph) -> list[tuple[ir.Node, ir.Graph, int]]:
    """The Scans of `graph` with their bodies, and the place of a state that is such a sum."""
    scans = [(n, n.attributes["body"].as_graph()) for n in graph if is_op(n, "Scan")]
    states = {node: len(body.inputs) - node.attributes["num_scan_inputs"].as_int() for node, body in scans}
    fitting = [(n, body) for n, body in scans if states[n] <= min(len(n.inputs), len(body.outputs), len(body.inputs))]
    return [(n, body, i) for n, body in fitting for i in range(states[n]) if _is_sum(n.inputs[i], body, i)]


def _is_sum(initial: ir.Value | None, body: ir.Graph, i: int) -> bool:
    state, following = body.inputs[i], body.outputs[i]
    add = producer(following, "Add")
    if add is None or following.uses() or _sizes(initial) is None:
        return False
    alone = list(add.inputs).count(state) == 1 and list(state.consumers()) == [add] and add.graph is body
    part = _part(add, state)
    if not alone or state.is_graph_output() or part.shape is None or not part.shape.is_static():
        return False
    large = math.prod(part.shape.numpy()) >= _FEWEST
    return large and state.dtype == part.dtype == ir.DataType.FLOAT and part.shape == following.shape


def _part(add: ir.Node, state: ir.Value) -> ir.Value:
    """The value that a step adds."""
    first, second = map(not_none, add.inputs)
    return second if first is state else first


def _sizes(initial: ir.Value | None) -> ir.Value | None:
    """The shape that zeros have been given; None if `initial` is something else."""
    node = producer(initial, "Expand")
    if node is None or node.inputs[0] is None:
        return None
    start = constant(node.inputs[0])
    return None if start is None or start.any() else node.inputs[1]


def _write(graph: ir.Graph, scan: ir.Node, body: ir.Graph, i: int, names: Names) -> None:
    initial, state = scan.inputs[i], body.inputs[i]
    add = not_none(body.outputs[i].producer())
    start = _call("RunningSum", [_sizes(initial)], [initial, None], names)
    total, place = start.outputs
    graph.insert_before(scan, start)
    scan.replace_input_with(i, place)
    step = _call("RunningSumAdd", [total, state, _part(add, state)], [None], names)
    body.insert_before(add, step)
    body.outputs[i] = step.outputs[0]
    body.remove(add, safe=True)
    result = scan.outputs[i]
    end = _call("RunningSumEnd", [total, result], [result], names)
    graph.insert_after(scan, end)
    result.replace_all_uses_with(end.outputs[0], replace_graph_outputs=True)
    end.replace_input_with(1, result)
    end.outputs[0].name, result.name = result.name, end.outputs[0].name
    state.name = names.fresh("running_sum")
    for value in (state, result):
        value.type, value.shape = place.type, place.shape


def _call(kernel: str, inputs: list[ir.Value | None], like: list[ir.Value | None], names: Names) -> ir.Node:
    """A call whose results are like others, or are aliases of a sum."""
    node = ir.Node(DOMAIN, kernel, inputs, num_outputs=len(like), name=names.fresh("running_sum"))
    for value, other in zip(node.outputs, like):
        value.name = names.fresh("running_sum")
        value.type = ir.TensorType(ir.DataType.INT64) if other is None else other.type
        value.shape = ir.Shape([1]) if other is None else other.shape
    return node


RUNNING_SUMS = Pass(
    "running_sums",
    PHASE,
    "sums over the steps of a Scan in one buffer",
    "large states that start from zeros and that steps add to",
    lambda model, _: any(_sums(graph) for graph in scopes(model.graph)),
    _sum_in_place,
    Setting.keeps_operators,
)

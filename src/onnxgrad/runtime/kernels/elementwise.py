"""Groups of elementwise operators to calls of one kernel, which makes one pass over memory for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.errors import OnnxGradError
from onnxgrad.ir.execution_order import ordered_by, reorder
from onnxgrad.ir.graph import in_order, prune, scopes, take_over
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.invariants import fault_of, interface_of
from onnxgrad.ir.passes import Declined, Pass
from onnxgrad.runtime.kernels.elementwise_groups import GroupCall, plans
from onnxgrad.runtime.kernels.elementwise_steps import DOMAIN, is_known, is_only_here
from onnxgrad.runtime.kernels.idle_views import drop_idle_views
from onnxgrad.runtime.kernels.open_norms import open_norms
from onnxgrad.runtime.setting import Setting

#: The phase of all passes that call kernels.
PHASE = "kernels"


def may_fuse(model: ir.Model) -> bool:
    """True if an operator that programs have reads another one in `model`, or ONNX Runtime lacks it."""
    for graph in scopes(model.graph):
        for node in filter(is_known, graph):
            makers = (v.producer() for v in node.inputs if v is not None)
            if is_only_here(node) or any(maker is not None and is_known(maker) for maker in makers):
                return True
    return False


def _fuse(model: ir.Model, setting: Setting) -> int:
    """Replace groups of elementwise operators of `model` by calls. Returns the count of changes."""
    see_shapes(model)
    count = idle = 0
    for graph in scopes(model.graph):
        if setting.level == "none":
            idle += drop_idle_views(graph)
        open_norms(graph)
        count += fuse(graph, count)
    if count:
        model.opset_imports[DOMAIN] = 1
    return count + idle


def see_shapes(model: ir.Model) -> None:
    """Infer the shapes in `model` as far as they can be known.

    Raises:
        Declined: they contradict each other.
    """
    if any(
        node.outputs[0].shape is None and (is_known(node) or graph is not model.graph)
        for graph in scopes(model.graph)
        for node in graph
    ):
        declared = interface_of(model.graph)
        try:
            infer_model(model)
        except OnnxGradError as error:
            raise Declined(f"shapes contradict each other: {error}") from error
        if fault := fault_of(model.graph, declared):
            raise Declined(f"shapes contradict each other: {fault}")


def fuse(graph: ir.Graph, serial: int = 0) -> int:
    """Replace groups of elementwise operators of `graph`, without nested graphs. Returns the count.

    Names of calls are numbered from `serial` on.
    """
    calls = plans(graph)
    if calls:
        _write(graph, calls, serial)
    return len(calls)


def _write(graph: ir.Graph, calls: Sequence[GroupCall], serial: int) -> None:
    """Replace the nodes of the calls' results, and drop unused nodes."""
    place: dict[ir.Node, float] = {node: i for i, node in enumerate(graph)}
    new: dict[ir.Value, ir.Value] = {}
    for plan in calls:
        name = f"native.elementwise.{serial}"
        serial += 1
        operands = [None if v is None else new.get(v, v) for v in plan.program.operands]
        attributes = [ir.AttrInt64s(key, list(numbers)) for key, numbers in plan.program.attributes.items()]
        results = plan.program.results
        node = ir.Node(DOMAIN, plan.program.kernel, operands, attributes, num_outputs=len(results), name=name)
        place[node] = max(place[n] for n in plan.nodes) + 0.5
        graph.append(node)
        for i, (old, made) in enumerate(zip(results, node.outputs)):
            made.name = "" if old is None else f"{name}.{i}"
            if old is not None:
                new[old] = made
    for old, made in new.items():
        take_over(made, old)
    _sort(graph, place)
    prune(graph)


def _sort(graph: ir.Graph, place: dict[ir.Node, float]) -> None:
    """A topological order that is that of `place` as far as may be."""
    nodes = list(graph)
    number = {n: i for i, n in enumerate(nodes)}
    order = sorted(nodes, key=place.__getitem__)
    if not in_order(order):
        order = ordered_by(nodes, lambda n: (place[n], number[n]))
    assert len(order) == len(nodes)
    reorder(graph, order)


ELEMENTWISE = Pass(
    "elementwise",
    PHASE,
    "one pass over memory for many elementwise operators",
    "elementwise operators, sums of them, normalizations that they read",
    lambda model, _: any(is_known(n) or n.domain == DOMAIN for g in scopes(model.graph) for n in g),
    _fuse,
    Setting.keeps_operators,
)

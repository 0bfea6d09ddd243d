"""State whose new value may share the memory of the old one, for updates in standard operators.

ONNX Runtime may order nodes arbitrarily, so every reader of the old value must be an ancestor of the operator that
writes the new one: then it has run, in every order. Moments are read by their update alone; a table is read by a
lookup that its gradient depends on. The last operator is elementwise: it reads each number before it writes to its
place. Or it is a ScatterND, which adds rows to its first operand and copies no operand that is in this place already.
A graph optimization may bypass views, casts and factors, so readers of these count too. With a reader of any other
kind, or in a body, there are two buffers: ONNX Runtime may fuse a product and the sum that updates its weight. A step
of a click predictor (Adam, 20 tables of 2,000 × 32) takes .91 of the time, since less memory passes through the
cache. The bits are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.match import is_op
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.ir.schemas import schema_of
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.failures import UNNAMED
from onnxgrad.runtime.kernels.in_place import Before

_ELEMENTWISE = frozenset({"Abs", "Add", "Div", "Max", "Min", "Mul", "Neg", "Pow", "Sign", "Sqrt", "Sub", "Where"})
_WRITERS, _READERS = _ELEMENTWISE | {"ScatterND"}, _ELEMENTWISE | {"Gather"}
#: An optimization may remove these, or move them behind their readers, like operators that move elements.
_SCALES = frozenset({"Cast", "Div", "Mul"})
#: Tensors of fewer bytes gain nothing; counters are among them, which are updated whether or not a step succeeds.
_SMALL = 1 << 14

#: The runtime's text before the node that failed; without a node, for an error of binding.
_BEGINS = "Error in execution: "
_FAILED = re.compile(r"while running (\w+) node\. Name:'(?:fused )?(.*?)(?:_nchwc|/MatmulTransposeFusion/)?'")


@dataclass
class SameMemory:
    """Inputs of a graph that are overwritten, and when.

    Attributes:
        inputs: their names.
        first: the names of the nodes that have run before any of them is overwritten.
        later: the types of the other nodes. None: one of them may be written in operators of other types.
    """

    inputs: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)
    later: set[str] | None = None

    def take(self, other: SameMemory) -> None:
        """Add the records of `other`."""
        vars(self).update(vars(other))

    def may_have_changed(self, failure: str) -> bool:
        """True if a run that failed with this message of ONNX Runtime may have overwritten one of them."""
        if not self.inputs:
            return False
        if (failed := _FAILED.search(failure)) is None:
            return _BEGINS not in failure
        op_type, name = failed.groups()
        if name:
            return name not in self.first
        # The runtime has written a node in other operators, which have no names (SoftmaxCrossEntropyLoss has a body).
        return self.later is None or op_type in self.later


def same_memory(graph: ir.Graph, renewed: Mapping[str, str], shared: SameMemory) -> None:
    """Add to `shared` those of `renewed` (inputs of `graph`, and new values) that may share one buffer."""
    outputs = {v.name: v for v in graph.outputs}
    updates = {
        x: node for x in graph.inputs if (node := _update(x, outputs.get(renewed.get(x.name or "")))) is not None
    }
    if not updates:
        return
    before = Before(graph, [])
    updates = {x: node for x, node in updates.items() if _read_before(x, node, before)}
    if not updates:
        return
    first = {n for n in graph if all(before.is_before(n, node) for node in updates.values())}
    later = [n for n in graph if n not in first]
    shared.inputs |= {x.name or "" for x in updates}
    shared.first |= {n.name for n in first if n.name}
    shared.later = None if any(map(_has_body, later)) else {n.op_type for n in later}


def name_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Name the unnamed nodes of `graph`, so that an error of the runtime names one. Returns them."""
    nodes = [n for n in graph if not n.name]
    for i, node in enumerate(nodes):
        node.name = f"{UNNAMED}{i}"
    return nodes


def _has_body(node: ir.Node) -> bool:
    """True if the runtime may write the node in other operators, or if it contains nodes."""
    schema = None if node.domain else schema_of("", node.op_type, onnx.defs.onnx_opset_version())
    if schema is None or schema.has_function or schema.has_context_dependent_function:  # type: ignore[attr-defined]
        return node.op_type not in _ELEMENTWISE
    return any(True for _ in subgraphs(node))


def _update(x: ir.Value, y: ir.Value | None) -> ir.Node | None:
    """The operator that computes `y`, the new value of a state `x`; None if sharing does not pay off."""
    node = None if y is None else y.producer()
    if y is None or node is None or not is_op(node, _WRITERS) or x.is_graph_output():
        return None
    if (
        x.shape is None
        or x.dtype is None
        or not x.shape.is_static()
        or y.shape is None
        or not same_dims(x.shape.dims, y.shape.dims)
    ):
        return None
    return node if math.prod(x.shape.numpy()) * x.dtype.itemsize >= _SMALL else None


def _read_before(x: ir.Value, update: ir.Node, before: Before) -> bool:
    """True if all that may read the memory of `x` has done so when `update` writes."""
    todo = [(x, False)]
    while todo:
        here, moved = todo.pop()
        if here is not x and here.is_graph_output():
            return False
        for node, place in here.uses():
            if is_op(node, ("Shape", "Size")) or (
                node is update and is_op(node, "ScatterND") and place == 0 and not moved
            ):
                continue  # of no memory, or to its place
            moves = traits_of(node).moves_at_most(Moves.PERMUTATION)
            if not (moves or is_op(node, _READERS | _SCALES)) or node not in before.bits:
                return False
            if moved if node is update else not before.is_before(node, update):
                return False
            if (moves or node.op_type in _SCALES) and node is not update:
                todo += [(v, moved or (moves and node.op_type != "Identity")) for v in node.outputs]
    return True

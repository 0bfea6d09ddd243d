"""State whose new value may lie in the memory of the old one, as standard operators say the update.

ONNX Runtime orders nodes as it likes, so every reader of the old value has to be an ancestor of the operator that
writes the new one: then it has run, in whatever order. Moments are read by their update alone; a table is read by a
lookup that its gradient depends on. The last operator is elementwise: it reads each number before it writes the one in
its place. An optimization of the graph may look through views, casts and factors, so what reads those counts as well.
With a reader of any other kind, or in a body, there are two buffers: ONNX Runtime may make a product and the sum that
updates its weight one node. A step of a click predictor (Adam, 20 tables of 2,000 × 32) takes .91 of the time: less
memory goes through the cache. The bits are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.kernels.in_place import Before

#: What `Options(without=…)` calls it.
NAME = "same_memory"

_ELEMENTWISE = frozenset({"Abs", "Add", "Div", "Max", "Min", "Mul", "Neg", "Pow", "Sign", "Sqrt", "Sub", "Where"})
_READERS = _ELEMENTWISE | {"Gather"}
#: Operators that an optimization may leave out, or move behind what reads their result.
_LOOKED_THROUGH = frozenset(
    {"Cast", "Div", "Flatten", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
#: Operators whose results do not lie as their operands do.
_MOVES = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: Tensors of fewer bytes gain nothing; counters are among them, which are updated whether or not a step succeeds.
_SMALL = 1 << 14

#: What the runtime says before the node that failed; with no node, of what is bound to a run that has not begun.
_BEGINS = "Error in execution: "
_FAILED = re.compile(r"while running \w+ node\. Name:'(?:fused )?(.*?)(?:_nchwc|/MatmulTransposeFusion/)?'")


@dataclass
class SameMemory:
    """Inputs of a graph that are overwritten, and when.

    Attributes:
        inputs: their names.
        first: the names of the nodes that have run before any of them is overwritten.
    """

    inputs: set[str] = field(default_factory=set)
    first: set[str] = field(default_factory=set)

    def may_have_changed(self, failure: str) -> bool:
        """Whether a run that failed with this message of ONNX Runtime may have overwritten one of them."""
        if not self.inputs:
            return False
        node = _FAILED.search(failure)
        return node[1] not in self.first if node is not None else _BEGINS not in failure


def same_memory(graph: ir.Graph, renewed: Mapping[str, str], shared: SameMemory) -> None:
    """Put into `shared` what of `renewed` (inputs of `graph`, and their new values) may have one buffer for both."""
    outputs = {v.name: v for v in graph.outputs}
    updates = {
        x: node for x in graph.inputs if (node := _update(x, outputs.get(renewed.get(x.name or "")))) is not None
    }
    if not updates:
        return
    before = Before(graph, [])
    updates = {x: node for x, node in updates.items() if _read_before(x, node, before)}
    first = [n for n in graph if n.name and all(before.is_before(n, node) for node in updates.values())]
    shared.inputs |= {x.name or "" for x in updates}
    shared.first |= {n.name or "" for n in first if updates}


def _update(x: ir.Value, y: ir.Value | None) -> ir.Node | None:
    """The elementwise operator that gives `y`, the new value of a state `x`; None where there is none worth it."""
    node = None if y is None else y.producer()
    if y is None or node is None or node.domain != "" or node.op_type not in _ELEMENTWISE or x.is_graph_output():
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
    """Whether all that may read the memory of `x` has done so when `update` writes."""
    todo = [(x, False)]
    while todo:
        here, moved = todo.pop()
        if here is not x and here.is_graph_output():
            return False
        for node, _ in here.uses():
            if node.domain == "" and node.op_type in ("Shape", "Size"):
                continue  # of no memory
            if node.domain != "" or node.op_type not in _READERS | _LOOKED_THROUGH or node not in before.bits:
                return False
            if moved if node is update else not before.is_before(node, update):
                return False
            if node.op_type in _LOOKED_THROUGH and node is not update:
                todo += [(v, moved or node.op_type in _MOVES) for v in node.outputs]
    return True

"""State that an update overwrites: new values of an optimizer's kernel in the memory of the old ones.

ONNX Runtime may order nodes arbitrarily, so every reader of an old value must certainly have run before: it is an
ancestor of the update, or the update gets its result as an additional operand. Moments are read by their update alone.
Weights are also read by products and lookups. A graph optimization may bypass a Transpose or Reshape of them, or these
may share their memory, so readers of such a view count too. A reader in a body of a Scan, a Loop or an If is done when
that node is. With any other reader, the state has two buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxgrad.ir.execution_order import sort
from onnxgrad.ir.graph import reads, subgraphs
from onnxgrad.ir.match import is_op
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.runtime.kernels.optimizer_kernels import STATES
from onnxgrad.runtime.kernels.substitute import DOMAIN

#: Operators that read their operands when they run, and that nothing makes read them later.
_READERS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"})
#: Domains whose operators no optimization of the graph changes.
_OWN = frozenset({DOMAIN, "com.microsoft.nchwc"})
#: Weights of fewer bytes are not worth an operand that lives longer for them.
_SMALL = 1 << 14


def in_place(graph: ir.Graph, renewed: Mapping[str, str]) -> set[str]:
    """The inputs of `graph` that their new values may overwrite, after updates were made to wait for all readers.

    Args:
        graph: with calls of kernels; operands are added to these.
        renewed: inputs, and the outputs that are their new values.
    """
    updates = [node for node in graph if _is_update(node)]
    before = Before(graph, updates)
    found = {name for node in updates for name in _of(node, renewed, before)}
    sort(graph)
    return found


def _is_update(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in STATES


def _of(update: ir.Node, renewed: Mapping[str, str], before: Before) -> Iterator[str]:
    """The inputs that `update` may overwrite; `before` is extended by the operands that this uses up."""
    states = STATES[update.op_type]
    for place, (old, new) in enumerate(zip((update.inputs[0], *update.inputs[2 : 2 + states]), update.outputs)):
        if old is None or not old.is_graph_input() or old.is_graph_output() or not new.is_graph_output():
            continue
        name = old.name or ""
        if renewed.get(name) != new.name or list(update.inputs).count(old) > 1:
            continue
        readers = _readers(old, update, before)
        if readers is None or (readers and (place or _bytes(old) < _SMALL)):
            continue
        late = [r for r in readers if not before.is_before(r, update)]
        if any(before.is_updated(r) for r in late):  # it would wait for itself
            continue
        awaited = dict.fromkeys(next((v for v in r.outputs if v.name), None) for r in late)  # an unnamed one is nothing
        if None in awaited:
            continue
        yield name
        update.resize_inputs(len(update.inputs) + len(awaited))
        for i, value in enumerate(awaited, start=len(update.inputs) - len(awaited)):
            update.replace_input_with(i, value)


def _readers(value: ir.Value, update: ir.Node, before: Before) -> list[ir.Node] | None:
    """The nodes of the graph of `update` in which the memory of `value` may be read, but for `update` itself.

    None where that cannot be told.
    """
    found: list[ir.Node] = []
    todo = [value]
    while todo:
        here = todo.pop()
        if here is not value and here.is_graph_output():
            return None
        for node, index in here.uses():
            if node is update and here is value:
                continue
            if _is_update(node):
                return None
            if traits_of(node).moves_at_most(Moves.PERMUTATION) and index == 0:  # perhaps the memory of its operand
                todo.extend(node.outputs)
            elif node.domain in _OWN or (is_op(node, _READERS)):
                if node not in before.outermost:
                    return None
                found.append(before.outermost[node])
            elif is_op(node, ("Shape", "Size")):
                continue  # of no memory
            else:
                return None
    return found


def _bytes(value: ir.Value) -> int:
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(math.prod(value.shape.numpy()) * value.dtype.itemsize)


class Before:
    """The order of nodes that every run of a graph keeps: sets of nodes as bits of a number."""

    def __init__(self, graph: ir.Graph, updates: list[ir.Node]) -> None:
        self.bits: dict[ir.Node, int] = {}
        self.sets: dict[ir.Node, int] = {}
        #: the top-level node that a node is, or is nested in
        self.outermost: dict[ir.Node, ir.Node] = {}
        for i, node in enumerate(graph):
            self.bits[node] = 1 << i
            self.outermost |= {inner: node for body in subgraphs(node) for inner in body.all_nodes()} | {node: node}
            found = 0
            for value in reads(node):
                maker = value.producer()
                if maker is not None and maker in self.bits:
                    found |= self.sets[maker] | self.bits[maker]
            self.sets[node] = found
        self.updates = sum(self.bits[u] for u in updates)

    def is_before(self, node: ir.Node, other: ir.Node) -> bool:
        """True if `other` depends on `node`."""
        return bool(self.sets[other] & self.bits[node])

    def is_updated(self, node: ir.Node) -> bool:
        """True if `node` needs the result of any update."""
        return bool(self.sets[node] & self.updates)

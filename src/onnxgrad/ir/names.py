"""Names that are unique across a model and all of its nested graphs.

ONNX forbids a nested graph to define a name that an outer scope has; one pool of names for the whole
model makes every fresh name safe wherever it lands.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxgrad.ir.aliases import follow, known_as
from onnxgrad.ir.graph import scopes


def identifier(text: str) -> str:
    """`text` with every character that a C identifier cannot have replaced by ``_``."""
    clean = re.sub(r"[^0-9A-Za-z_]", "_", text)
    return f"_{clean}" if clean[:1].isdigit() or not clean else clean


class Names:
    """The pool of names of one model."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken: dict[str, bool] = dict.fromkeys(taken, False)  # and whether `fresh` made them
        self._counters: dict[str, int] = {}

    @classmethod
    def of(cls, model: ir.Model) -> Names:
        """Every value and node name in `model`, nested graphs included."""
        return cls.of_graph(model.graph)

    @classmethod
    def of_graph(cls, graph: ir.Graph) -> Names:
        """Every value and node name in `graph` and its nested graphs."""
        pool = cls()
        for g in scopes(graph):
            pool.reserve(v.name for v in g.inputs)
            pool.reserve(g.initializers)
            pool.reserve(name for node in g for name in (node.name, *[v.name for v in node.outputs]))
        return pool

    def reserve(self, names: Iterable[str | None]) -> None:
        """Mark `names` as taken."""
        self._taken.update((n, False) for n in names if n and n not in self._taken)

    def fresh(self, hint: str) -> str:
        """A new name that starts with `hint` and carries a number."""
        count = self._counters.get(hint, 0)
        while True:
            count += 1
            name = f"{hint}_{count}"
            if name not in self._taken:
                self._counters[hint] = count
                self._taken[name] = True
                return name

    def is_made(self, name: str) -> bool:
        """True if `fresh` made `name`, so that no file or caller refers to it."""
        return self._taken.get(name, False)

    def exactly(self, wanted: str) -> str:
        """`wanted` itself if it is free, else `wanted` with a suffix."""
        if wanted in self._taken:
            return self.fresh(wanted)
        self._taken[wanted] = False
        return wanted


def rename_inside(graph: ir.Graph, names: Names) -> None:
    """Rename everything that `graph` and its nested graphs define, for a copy of a graph."""
    for g in scopes(graph):
        for value in g.initializers.values():
            if value.const_value is not None:  # a value renames its tensor, which copies of a graph share
                value.const_value = own_tensor(value.const_value)
        for value in [*g.inputs, *g.initializers.values(), *(v for node in g for v in node.outputs)]:
            if value.name:
                follow(value, known_as(value))
                value.name = names.fresh(value.name)
        for node in g:
            if node.name:
                node.name = names.fresh(node.name)


def own_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The same data in a tensor whose name can be changed independently."""
    if isinstance(tensor, (ir.Tensor, ir.ExternalTensor)):
        return copy.copy(tensor)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=ir.Shape(tensor.numpy().shape), name=tensor.name)


def described(node: ir.Node | onnx.NodeProto) -> str:
    """The name of `node` in messages: its operator, and its own name or that of its first output."""
    outputs = node.output if isinstance(node, onnx.NodeProto) else [v.name for v in node.outputs]
    return f"{node.op_type} node {node.name or next((name for name in outputs if name), '')!r}"


def unknown_rank(value: ir.Value, names: Names) -> str:
    """The message about a `value` of unknown rank, by the name that it has in the model."""
    own = [name for name in known_as(value) if not names.is_made(name)]
    if own:
        which, remedy = f"{own[0]!r}", "declare its shape in the model"
    else:  # only names of the model's own values can be declared
        which, remedy = "a value of its derivative", "declare the shapes of its operands and results"
    return f"the rank of {which} is not known, and a rule needs it; {remedy} (dimensions may stay symbolic)"

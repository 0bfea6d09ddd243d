"""A digest of what a step computes, by which checkpoints and ranks identify it.

It is taken of the training graph before any derivative is written, without the names of inner values. So it is the same
for every target, and in versions of onnxgrad that write derivatives in another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.custom.rules import RULE
from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.ir.composites import plain_value
from onnxgrad.ir.graph import ancestors, named_values
from onnxgrad.ir.notes import properties
from onnxgrad.transforms.gradient_node import is_gradient

#: Notes on nodes that change what is computed.
_NOTES = (CONSTANT, RULE)


def digest_of(what: str | np.ndarray) -> str:
    """The digest of a text, or of the dtype, the shape and the contents of an array."""
    if isinstance(what, str):
        return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
    found = hashlib.blake2b(f"{what.dtype}{what.shape}".encode(), digest_size=16)
    found.update(np.ascontiguousarray(what).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def step_digest(model: ir.Model, ends: Mapping[str, str], settings: Sequence[object]) -> str:
    """A digest of the values `ends` in a training graph: equal for the same model, loss, optimizer and settings.

    Args:
        model: the training graph, its Gradients bound.
        ends: the names of the loss and of the next values of state, by what they are.
        settings: what else decides the numbers of the step.
    """
    graph, values = model.graph, named_values(model.graph)
    text = _Text(graph)
    text.add(ancestors(graph, [values[name] for name in ends.values() if name in values]))
    lines = [*text.lines, *(f"{what} is {text.name(values.get(name))}" for what, name in ends.items())]
    lines += [
        ir.to_proto(function).SerializeToString(deterministic=True).hex() for function in model.functions.values()
    ]
    return hashlib.sha256("\n".join([*lines, *map(repr, settings)]).encode()).hexdigest()


def architecture(graph: ir.Graph) -> list[str]:
    """The nodes of `graph` as lines that do not depend on the contents of its initializers, only on their names."""
    text = _Text(graph, [*graph.inputs, *graph.initializers.values()])
    text.add(graph)
    return [*text.lines, *(f"output {text.name(v)}" for v in graph.outputs)]


class _Text:
    """The nodes of a graph as lines of text, where inner values are called by numbers in the order of their use."""

    def __init__(self, graph: ir.Graph, bare: Iterable[ir.Value] = ()) -> None:
        self.lines: list[str] = []
        self._inputs = set(graph.inputs)
        self._names: dict[ir.Value | None, str] = {None: "", **{v: v.name or "" for v in bare}}

    def name(self, value: ir.Value | None) -> str:
        """The name of `value`; the first time, a line describes an input or a constant."""
        if value not in self._names and value is not None:
            self._names[value] = name = (value.name or "") if value in self._inputs else f"#{len(self._names)}"
            if value in self._inputs:
                self.lines.append(f"{name}: {value.type} {value.shape}")
            elif value.is_initializer() and value.const_value is not None:
                self.lines.append(f"{name} = {_of_tensor(value.const_value)}")
        return self._names[value]

    def add(self, nodes: Iterable[ir.Node]) -> None:
        """Append a line for each of `nodes`, and lines for the bodies in it before."""
        for node in nodes:
            held = (
                [] if is_gradient(node) else sorted(node.attributes.values(), key=lambda a: a.name)
            )  # names of values
            attributes = [(a.name, self._attribute(a)) for a in held]
            notes = [item for item in (properties(node) or {}).items() if item[0] in _NOTES]
            operands, results = [[self.name(v) for v in values] for values in (node.inputs, node.outputs)]
            self.lines.append(f"{results} = {node.domain}.{node.op_type}{operands} {attributes} {notes}")

    def _attribute(self, a: ir.Attr) -> object:
        if a.is_ref():
            return a.ref_attr_name
        if a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            return [self._body(g) for g in ([a.value] if a.type == ir.AttributeType.GRAPH else a.value)]
        if a.type in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
            return [_of_tensor(t) for t in ([a.value] if a.type == ir.AttributeType.TENSOR else a.value)]
        return plain_value(a.value)

    def _body(self, graph: ir.Graph) -> list[list[str]]:
        inputs = [self.name(v) for v in graph.inputs]
        self.add(graph)
        return [inputs, [self.name(v) for v in graph.outputs]]


def _of_tensor(tensor: ir.TensorProtocol) -> str:
    array = tensor.numpy()
    return digest_of(repr(array.tolist()) if tensor.dtype == ir.DataType.STRING else array)

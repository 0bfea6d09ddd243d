"""A digest of what a step computes, by which checkpoints and ranks identify it.

It is taken of the training graph before any derivative is written, without the names of inner values. So it is the same
for every target, and in versions of onnxgrad that write derivatives in another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.custom.rules import RULE
from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.ir.serialize import serialize
from onnxgrad.model_io import aside
from onnxgrad.transforms.gradient_node import DOMAIN

_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
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
    proto, digests = _without_constants(model)
    graph = proto.graph
    _keep_read(graph, set(ends.values()))
    names = {value.name: value.name for value in graph.input}
    _rename(graph, names)
    lines = [f"{names[name]} {digest}" for name, digest in digests.items() if name in names]
    lines += [f"{what} {names.get(name, name)}" for what, name in ends.items()]
    del proto.metadata_props[:], proto.opset_import[:]
    text = "\n".join([*sorted(lines), *map(repr, settings)])
    found = hashlib.sha256(proto.SerializeToString(deterministic=True))
    found.update(text.encode())
    return found.hexdigest()


def _without_constants(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, str]]:
    """`model` as a message, and digests of its constants where these are too large to be in it."""
    values = {n: v for n, v in model.graph.initializers.items() if v.const_value is not None}
    held = {n: v.const_value for n, v in values.items() if v.const_value is not None}
    if sum(t.nbytes for t in held.values()) < aside.FROM:
        return serialize(model), {}
    digests = {n: digest_of(t.numpy()) for n, t in held.items()}
    try:
        for name, value in values.items():
            value.const_value = ir.tensor([0.0], name=name)
        return serialize(model), digests
    finally:
        for name, value in values.items():
            value.const_value = held[name]


def _keep_read(graph: onnx.GraphProto, needed: set[str]) -> None:
    """Remove what no value called as in `needed` is computed from."""
    nodes = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed |= _names_read(node)
    for i in reversed(range(len(graph.initializer))):  # in place: they may be large
        if graph.initializer[i].name not in needed:
            del graph.initializer[i]
    kept = [*reversed(nodes)], [v for v in graph.input if v.name in needed]
    for field, items in zip((graph.node, graph.input), kept):
        copies = [type(item).FromString(item.SerializeToString()) for item in items]
        del field[:]
        field.extend(copies)
    del graph.output[:]


def _names_read(node: onnx.NodeProto) -> set[str]:
    """The names that `node` reads, in its bodies as well."""
    bodies = [body for a in node.attribute if a.type in _BODIES for body in (a.g, *a.graphs)]
    inner = (_names_read(n) | {v.name for v in body.output} for body in bodies for n in body.node)
    return set(node.input).union(*inner)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename values to numbers in the order of their use; `names` has the known ones."""

    def numbered(name: str) -> str:
        return names.setdefault(name, f"#{len(names)}") if name else ""

    del graph.value_info[:]
    for node in graph.node:
        node.name = node.doc_string = ""
        notes = [onnx.StringStringEntryProto(key=p.key, value=p.value) for p in node.metadata_props if p.key in _NOTES]
        del node.metadata_props[:]
        node.metadata_props.extend(notes)
        if node.domain == DOMAIN and node.op_type == "Gradient":
            del node.attribute[:]  # names of values that are inputs by now
        node.input[:] = [numbered(name) for name in node.input]
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs] if attribute.type in _BODIES else ():
                for value in body.input:
                    value.name = numbered(value.name)
                _rename(body, names)
        node.output[:] = [numbered(name) for name in node.output]
    for held in [*graph.output, *graph.initializer]:
        held.name = numbered(held.name)
    graph.initializer.sort(key=lambda tensor: tensor.name)

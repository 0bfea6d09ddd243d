"""Digests of step graphs, by which checkpoints and ranks identify their training step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import onnx
import onnx_ir as ir

from onnxgrad.model_io import aside
from onnxgrad.training.loop.checkpoint import digest_of

_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def fingerprint(model: ir.Model) -> str:
    """A digest of a step graph: equal for the same model, loss, optimizer and settings."""
    proto, digests = _without_constants(model)
    del proto.metadata_props[:]
    return hashlib.sha256(proto.SerializeToString(deterministic=True) + _list_lines(digests)).hexdigest()


def structure(model: ir.Model) -> str:
    """A digest of a step graph that ignores the names of inner values, which the options of a loss change."""
    proto, digests = _without_constants(model)
    del proto.metadata_props[:]
    names = {value.name: value.name for value in proto.graph.input}
    _rename(proto.graph, names)
    digests = {names[name]: digest for name, digest in digests.items() if name in names}
    return hashlib.sha256(proto.SerializeToString(deterministic=True) + _list_lines(digests)).hexdigest()


def _without_constants(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, str]]:
    """`model` as a message, and digests of its constants where these are too large to be in it."""
    values = {n: v for n, v in model.graph.initializers.items() if v.const_value is not None}
    held = {n: v.const_value for n, v in values.items() if v.const_value is not None}
    if sum(t.nbytes for t in held.values()) < aside.FROM:
        return ir.to_proto(model), {}
    digests = {n: digest_of(t.numpy()) for n, t in held.items()}
    try:
        for name, value in values.items():
            value.const_value = ir.tensor([0.0], name=name)
        return ir.to_proto(model), digests
    finally:
        for name, value in values.items():
            value.const_value = held[name]


def _list_lines(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items())).encode()


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename values to numbers in the order of their use; `names` has the known ones."""

    def numbered(name: str) -> str:
        return names.setdefault(name, f"#{len(names)}") if name else ""

    del graph.value_info[:]
    for node in graph.node:
        node.name = ""
        node.input[:] = [numbered(name) for name in node.input]
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs] if attribute.type in _BODIES else ():
                for value in body.input:
                    value.name = numbered(value.name)
                _rename(body, names)
        node.output[:] = [numbered(name) for name in node.output]
    for held in [*graph.output, *graph.initializer]:
        held.name = numbered(held.name)
    initializers = sorted(graph.initializer, key=lambda tensor: tensor.name)
    del graph.initializer[:]
    graph.initializer.extend(initializers)

"""The names of modules and parameters that PyTorch's newer exporter writes beside graphs and nodes, as metadata."""

from __future__ import annotations

import re

import onnx_ir as ir

_MODULES = "pkg.torch.onnx.name_scopes"
_CALL = "pkg.torch.onnx.fx_node"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


def module_names(node: ir.Node) -> list[str]:
    """The modules that `node` was exported from, the outermost first, and its own name; empty if it does not say so."""
    return [name for name in re.findall(r"'([^']*)'", node.metadata_props.get(_MODULES, "")) if name]


def call_parameters(node: ir.Node) -> list[str]:
    """The parameters and buffers that the call read which `node` was exported from, by their placeholders."""
    return re.findall(r"%([pb]_\w+)", node.metadata_props.get(_CALL, ""))


def parameter_names(graph: ir.Graph) -> dict[str, str]:
    """The name in the state of the module for each placeholder of a parameter or buffer of an exported `graph`."""
    return dict(re.findall(r"(\w+): (?:PARAMETER|BUFFER) target='([^']+)'", graph.metadata_props.get(_SIGNATURE, "")))


def is_parameter(value: ir.Value) -> bool:
    """True if the exporter noted that the initializer `value` was a parameter of the module."""
    return value.metadata_props.get(_KIND) == "PARAMETER"


def is_buffer(value: ir.Value) -> bool:
    """True if the exporter noted that the initializer `value` was a buffer of the module."""
    return value.metadata_props.get(_KIND) == "BUFFER"


def is_detached(node: ir.Node) -> bool:
    """True if `node` is what the exporter made of ``detach()``, if it does not optimize."""
    return node.op_type == "Identity" and "aten.detach" in node.metadata_props.get(_CALL, "")


def lost_detach(graph: ir.Graph) -> bool:
    """True if nodes of `graph` read values that PyTorch detached, and the exporter left that out."""
    calls = [node.metadata_props.get(_CALL, "").partition("=")[2] for node in graph]
    return len({name for call in calls for name in re.findall(r"%detach\w*", call)}) > sum(map(is_detached, graph))


def folded_parameters(graph: ir.Graph) -> list[str]:
    """The parameters that the exporter left out of `graph`, or computed with in advance."""
    shown = {p for node in graph.all_nodes() if not _is_folded_norm(node) for p in call_parameters(node)}
    return [name for p, name in _parameters(graph).items() if p not in shown and name not in graph.initializers]


def dropped_biases(graph: ir.Graph) -> list[str]:
    """The biases that the exporter left out of layers of `graph`, as they were zeros."""
    names, calls = _parameters(graph), dict[str, list[ir.Node]]()
    for node in graph:
        if "aten.linear" in (call := node.metadata_props.get(_CALL, "")):
            calls.setdefault(call, []).append(node)
    layers = [nodes for nodes in calls.values() if len(call_parameters(nodes[0])) == 2]
    bare = [nodes[0] for nodes in layers if len({v for n in nodes for v in n.inputs if _is_float_weight(v)}) == 1]
    return [names[p] for p in dict.fromkeys(call_parameters(node)[1] for node in bare) if p in names]


def _is_float_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.dtype is not None and value.dtype.is_floating_point()


def folded_buffers(graph: ir.Graph) -> set[ir.Value]:
    """The initializers that the exporter of `graph` computed, and not from parameters.

    Such a value, a slice of a buffer for instance, has a name without a module, and its readers read no parameter. If
    parameters are folded, the values may have been computed from them, and the set is empty.
    """
    parameters = _parameters(graph)
    if not parameters or folded_parameters(graph):
        return set()
    return {
        value
        for name, value in graph.initializers.items()
        if "." not in name
        and _KIND not in value.metadata_props
        and all(
            _CALL in n.metadata_props and parameters.keys().isdisjoint(call_parameters(n)) for n in value.consumers()
        )
    }


def _is_folded_norm(node: ir.Node) -> bool:
    """True if `node` is a layer with the factors of the batch normalization that it was exported from."""
    return node.op_type != "BatchNormalization" and "batch_norm" in node.metadata_props.get(_CALL, "")


def _parameters(graph: ir.Graph) -> dict[str, str]:
    """The names of parameters by their placeholders; empty if no exporter noted them."""
    return dict(re.findall(r"(\w+): PARAMETER target='([^']+)'", graph.metadata_props.get(_SIGNATURE, "")))

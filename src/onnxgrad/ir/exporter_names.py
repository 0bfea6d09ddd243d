"""The names of modules and parameters that PyTorch's newer exporter writes beside graphs and nodes, as metadata."""

from __future__ import annotations

import re

import onnx_ir as ir

_MODULES = "pkg.torch.onnx.name_scopes"
_CALL = "pkg.torch.onnx.fx_node"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"


def module_names(node: ir.Node) -> list[str]:
    """The modules that `node` was exported from, the outermost first, and its own name; empty if it does not say so."""
    return [name for name in re.findall(r"'([^']*)'", node.metadata_props.get(_MODULES, "")) if name]


def call_parameters(node: ir.Node) -> list[str]:
    """The parameters and buffers that the call read which `node` was exported from, by their placeholders."""
    return re.findall(r"%([pb]_\w+)", node.metadata_props.get(_CALL, ""))


def parameter_names(graph: ir.Graph) -> dict[str, str]:
    """The name in the state of the module for each placeholder of a parameter or buffer of an exported `graph`."""
    return dict(re.findall(r"(\w+): (?:PARAMETER|BUFFER) target='([^']+)'", graph.metadata_props.get(_SIGNATURE, "")))

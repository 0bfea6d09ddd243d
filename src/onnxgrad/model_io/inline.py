"""Inline local functions: replace calls by the bodies.

``onnx_ir`` inlines. This module handles three special cases: a function written for another opset than the model (its
nodes have their own opset, and are raised later), a function that returns an input as output (which would rename the
caller's value), and nested graphs with names that an outer scope has too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.names import Names
from onnxgrad.model_io.local_functions import all_nodes, unshadow


class _Inliner(InlinePass):
    """Inline functions in time linear in the number of nodes: the library's pass searches every new name from 2 on."""

    def _instantiate_call(self, node: ir.Node, call_site_id: str) -> Any:
        used = self._used_node_names, self._used_value_names
        self._used_node_names, self._used_value_names = set(), set()
        try:
            nodes, values = super()._instantiate_call(node, call_site_id)
        finally:
            self._used_node_names, self._used_value_names = used
        for made in nodes:
            for n in (made, *(n for graph in subgraphs(made) for n in graph.all_nodes())):
                n.name = self._unique(n.name or "node", used[0])
                for value in n.outputs:
                    value.name = self._unique(value.name or "val", used[1])
        return nodes, values

    def _unique(self, name: str, used: set[str]) -> str:
        counts = self.__dict__.setdefault("_onnxgrad_counts", {})
        candidate, count = name, counts.get((id(used), name), 1)
        while candidate in used:
            count += 1
            candidate = f"{name}_{count}"
        counts[id(used), name] = count
        used.add(candidate)
        return candidate


def inline_functions(model: ir.Model, keep: Collection[ir.OperatorIdentifier] = ()) -> None:
    """Inline the local functions of `model` except `keep`, in place, and drop those without calls."""
    if not model.functions:
        return
    imports = model.graph.opset_imports
    for function in model.functions.values():
        if function.identifier() not in keep:
            _carry_versions(function, imports)
        _separate_outputs(function)
        for node in function:  # names that the library generates have no information
            node.name = node.name or next((v.name for v in node.outputs if v.name), None)
    _complete_calls(model, keep)
    try:
        _Inliner(lambda function: function.identifier() not in keep)(model)
    except Exception as e:
        reason = str(e.__cause__ or e).strip().splitlines()[0]
        raise BadInput(f"cannot inline the local functions of the model: {reason}") from e
    own = {name[0] for name in model.functions} | set(imports)
    for name in [name for name in model.functions if name not in keep]:
        del model.functions[name]
    used = {n.domain for n in all_nodes(model)}
    for domain in own - used - {""}:
        imports.pop(domain, None)
    unshadow(model.graph, set(), Names.of(model))


def _carry_versions(function: ir.Function, imports: dict[str, int]) -> None:
    """Note on each node which opset it was written for, where that is not the model's."""
    for domain, version in list(function.opset_imports.items()):
        wanted = imports.setdefault(domain, version)
        if version != wanted:
            if domain != "":
                continue  # InlinePass refuses it
            for node in function.all_nodes():
                if node.domain == domain:
                    node.version = version
            function.opset_imports[domain] = wanted


def _complete_calls(model: ir.Model, keep: Collection[ir.OperatorIdentifier]) -> None:
    """Give every call all outputs of its function, including unused ones.

    ``onnx_ir`` needs all of them to inline a call, and the onnx package to check a call inside a function.
    """
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        names = None
        for node in graph.all_nodes():
            function = model.functions.get(node.op_identifier())
            if function is None or len(node.outputs) >= len(function.outputs):
                continue
            have = len(node.outputs)
            node.resize_outputs(len(function.outputs))
            if node.op_identifier() in keep:
                names = names or Names.of_graph(graph)
                for value in node.outputs[have:]:
                    value.name = names.fresh(f"{node.op_type}_unread")


def _separate_outputs(function: ir.Function) -> None:
    """Add an Identity where two outputs have the same producer."""
    seen: set[ir.Value] = set()
    for i, value in enumerate(function.outputs):
        if value.producer() is None or value in seen:
            copy = ir.Node("", "Identity", [value], num_outputs=1)
            copy.outputs[0].name = f"{value.name}_out{i}"
            function.append(copy)
            function.outputs[i] = value = copy.outputs[0]
        seen.add(value)

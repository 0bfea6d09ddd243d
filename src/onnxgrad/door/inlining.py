"""Put the bodies of local functions in the place of their calls.

``onnx_ir`` does the work. Around it: a function may be written for another opset than the model
(its nodes carry theirs, and are raised later), may hand an input through as an output (which would
rename the caller's value), and may bring nested graphs whose names an outer scope has too.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxgrad.errors import BadInput
from onnxgrad.ir.names import Names
from onnxgrad.ir.walk import subgraphs


def inline_functions(model: ir.Model) -> None:
    """Inline every local function of `model`, in place, and drop those that nothing calls."""
    if not model.functions:
        return
    imports = model.graph.opset_imports
    for function in model.functions.values():
        _carry_versions(function, imports)
        _separate_outputs(function)
    try:
        InlinePass()(model)
    except Exception as e:
        reason = str(e.__cause__ or e).strip().splitlines()[0]
        raise BadInput(f"cannot inline the local functions of the model: {reason}") from e
    own = {f.domain for f in model.functions.values()} | set(imports)
    model.functions.clear()
    used = {n.domain for g in model.graphs() for n in g}
    for domain in own - used - {""}:
        imports.pop(domain, None)
    _unshadow(model.graph, set(), Names.of(model))


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


def _separate_outputs(function: ir.Function) -> None:
    """Give each output a producer of its own."""
    seen: set[ir.Value] = set()
    for i, value in enumerate(function.outputs):
        if value.producer() is None or value in seen:
            copy = ir.Node("", "Identity", [value], num_outputs=1)
            copy.outputs[0].name = f"{value.name}_out{i}"
            function.append(copy)
            function.outputs[i] = value = copy.outputs[0]
        seen.add(value)


def _unshadow(graph: ir.Graph, outer: set[str], names: Names) -> None:
    """Rename what a nested graph defines under a name that an outer scope has."""
    own = [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]
    for value in dict.fromkeys(own):
        if value.name and value.name in outer:
            if value.const_value is not None:  # renaming would go through to the caller's tensor
                value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype)
            value.name = names.fresh(value.name)
    inner = outer | {v.name for v in own if v.name}
    for node in graph:
        for nested in subgraphs(node):
            _unshadow(nested, inner, names)

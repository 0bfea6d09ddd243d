"""Nodes are checked against their schemas, and for what neither shape inference nor a runtime would refuse.

Shape inference refuses operands that do not fit each other, and ONNX Runtime refuses the rest when it loads or runs the
model or its derivative. A check is here only where a derivative would otherwise be computed of a model that cannot run,
or would fail with a message about something else. Only what is known to be wrong is refused: an unknown size may fit,
and so may sizes in a branch or a body, which need not run.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.infer.inference import kind_of
from onnxgrad.ir.names import described
from onnxgrad.model_io.checks.attributes import attribute_complaint
from onnxgrad.model_io.checks.operands import operand_complaint, sizes, written
from onnxgrad.model_io.checks.schema import formal, formal_complaint


def check_nodes(model: ir.Model) -> None:
    """Check every node of `model`, whose types and shapes are inferred, against what its operator requires.

    Raises:
        BadInput: a node that no runtime can run.
    """
    stack: list[tuple[ir.Graph | ir.Function, str]] = [(model.graph, "")]
    stack += [(function, f" in the function {function.name}") for function in model.functions.values()]
    good: set[object] = set()
    while stack:
        graph, where = stack.pop()
        imports = graph.opset_imports if isinstance(graph, ir.Function) else model.graph.opset_imports
        for node in graph:
            kind = kind_of(node)
            if kind in good:
                continue
            why = complaint(node, imports.get(node.domain, 1), certain=not where)
            if why:
                operands = ", ".join("" if v is None else f"{v.name} {written(sizes(v))}" for v in node.inputs)
                raise BadInput(f"the model is not valid: {described(node)}{where}, of ({operands}): {why}")
            if kind is not None:
                good.add(kind)
            if node.attributes and (inner := subgraphs(node)):
                stack += [(g, f" in {described(node)}{where}") for g in inner]


def complaint(node: ir.Node, opset: int, *, certain: bool = True) -> str:
    """The first thing that is wrong with `node`; empty if nothing is known. Sizes count if it is `certain` to run."""
    asked = formal(node.domain, node.op_type, opset)
    if asked is None:
        return ""
    why = formal_complaint(node, asked)
    if why or node.domain:
        return why
    return attribute_complaint(node, asked) or operand_complaint(node, asked, certain)

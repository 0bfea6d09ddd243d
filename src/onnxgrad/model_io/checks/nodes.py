"""Do the attributes of a node fit its operands, and the operands each other? One error if they do not.

A rule trusts that they do: that an axis is one of the operand's, that a kernel has as many channels as what it goes
over, that sizes which meet are equal. ONNX Runtime refuses the model otherwise, when it is loaded or when it runs; a
derivative of it would be wrong, or fail with a message about something else. Only what is known to be wrong is
refused: a size that is open, or an operand that is computed, may yet fit, and so may sizes in a branch or a body,
which need not be run.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.infer.inference import kind_of
from onnxgrad.ir.names import described
from onnxgrad.model_io.checks.examined import ExaminedNode, MisfitError, known
from onnxgrad.model_io.checks.layers import LAYERS
from onnxgrad.model_io.checks.moves import SHAPES
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
                held = ", ".join("" if v is None else f"{v.name} {known(ExaminedNode.sizes(v))}" for v in node.inputs)
                raise BadInput(f"the model is not valid: {described(node)}{where}, of ({held}): {why}")
            if kind is not None:
                good.add(kind)
            if node.attributes and (inner := subgraphs(node)):
                stack += [(g, f" in {described(node)}{where}") for g in inner]


def complaint(node: ir.Node, opset: int, *, certain: bool = True) -> str:
    """What is wrong with `node`; empty if nothing is known to be. Sizes count where it is `certain` to be run."""
    asked = formal(node.domain, node.op_type, opset)
    if asked is None:
        return ""
    why = formal_complaint(node, asked)
    if why or node.domain:
        return why
    checks = (*SHAPES.get(node.op_type, ()), *LAYERS.get(node.op_type, ()))
    if not checks:
        return ""
    site = ExaminedNode(node, asked, opset, certain)
    try:
        for check in checks:
            check(site)
    except MisfitError as e:
        return str(e)
    return ""

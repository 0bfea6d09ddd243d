"""Checks of nodes against their schemas, and of errors that neither inference nor a runtime reports.

Shape inference refuses operands that do not fit each other, and ONNX Runtime refuses other errors when it loads or runs
the model or its derivative. The checks here cover the rest: a model that cannot run, but would get a derivative, or
whose derivation would fail with a misleading message. Only certain errors are refused: an unknown size may fit, and so
may sizes in a branch or a body, which need not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.infer.common import fits
from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.infer.inference import kind_of
from onnxgrad.ir.infer.onnx_fallback import objection
from onnxgrad.ir.match import Dim
from onnxgrad.ir.names import described
from onnxgrad.model_io.checks.attributes import attribute_complaint
from onnxgrad.model_io.checks.schema import formal, formal_complaint
from onnxgrad.wording import shape_text

#: Operators for which a derivative would be built, and run by ONNX Runtime, even with unfitting operands.
_ASKED = frozenset({*BROADCASTING, "Expand", "GridSample", "Slice"})


def check_nodes(model: ir.Model) -> None:
    """Check every node of `model`, after inference, against the requirements of its operator.

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
                operands = ", ".join("" if v is None else f"{v.name} {shape_text(v.shape)}" for v in node.inputs)
                raise BadInput(f"the model is not valid: {described(node)}{where}, of ({operands}): {why}")
            if kind is not None:
                good.add(kind)
            if node.attributes and (inner := subgraphs(node)):
                stack += [(g, f" in {described(node)}{where}") for g in inner]


def complaint(node: ir.Node, opset: int, *, certain: bool = True) -> str:
    """The first error of `node`; empty if none is known. Sizes count only if it is `certain` to run."""
    asked = formal(node.domain, node.op_type, opset)
    if asked is None:
        return ""
    why = formal_complaint(node, asked)
    if why or node.domain:
        return why
    why = attribute_complaint(node, asked)
    if why or not certain:
        return why
    if node.op_type in _ASKED:
        return "" if fits(node) else objection(node, opset)
    return _labels_complaint(node) or _columns_complaint(node)


def _labels_complaint(node: ir.Node) -> str:
    """The shapes of labels and weights of a loss that do not fit: ONNX Runtime reads beyond their ends then."""
    if node.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        return ""
    x, labels, weights = [*node.inputs, None][:3]
    if x is None or x.shape is None:
        return ""
    for v, wanted in ((labels, [x.shape[0], *x.shape[2:]]), (weights, x.shape[1:2])):
        if v is not None and v.shape is not None and not _may_fit(v.shape, wanted):
            return f"{v.name} is {shape_text(v.shape)}, and should be {shape_text(wanted)}"
    return ""


def _may_fit(shape: ir.Shape, wanted: Sequence[Dim]) -> bool:
    sizes = [{d for d in pair if isinstance(d, int)} for pair in zip(shape, wanted)]
    return len(shape) == len(wanted) and all(len(known) < 2 for known in sizes)


def _columns_complaint(node: ir.Node) -> str:
    """An odd number of columns of a RotaryEmbedding, which ONNX Runtime rotates nevertheless."""
    x = node.inputs[0] if node.op_type == "RotaryEmbedding" else None
    if x is None or x.shape is None:
        return ""
    heads, columns = node.attributes.get_int("num_heads", 0), node.attributes.get_int("rotary_embedding_dim", 0)
    if not columns and isinstance(wide := x.shape[-1], int):
        columns = wide // heads if heads and len(x.shape) == 3 else wide
    return f"of {shape_text(x.shape)}, an odd number of columns is rotated" if columns % 2 else ""

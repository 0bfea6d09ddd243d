"""Predictions in the graph of a loss: the values that it compares with labels, and how to score them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import named_values
from onnxgrad.training.loop.loss_by_blocks import LossByBlocks
from onnxgrad.training.loss.ctc import METADATA
from onnxgrad.training.loss.dense import COMPARED
from onnxgrad.training.measure.comparisons import Binary, Classes, Comparison, Known, Ranked, Sequences

CLASS_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


@dataclass(frozen=True)
class Prediction:
    """A value that is compared with labels, and the way in which it is compared.

    Attributes:
        value: name of the value in the tail.
        label: name of the array of labels.
        comparison: lays one beside the other.
        classes: number of classes, if known.
    """

    value: str
    label: str
    comparison: Comparison
    classes: int | None = None

    @property
    def ignored(self) -> int | None:
        """The label that does not count."""
        return self.comparison.ignored if isinstance(self.comparison, Classes) else None


def find_predictions(nodes: list[ir.Node], labels: set[str]) -> list[Prediction]:
    """The predictions that the tail compares with labels in a known way; they become outputs."""
    graph = nodes[0].graph
    assert isinstance(graph, ir.Graph)
    found = [p for node in nodes if (p := _prediction(node, labels) or _of_blocks(node, labels)) is not None]
    shown = {v.name for v in graph.outputs}
    add_outputs(graph, [p.value for p in found if p.value not in shown])
    return found


def _prediction(node: ir.Node, labels: set[str]) -> Prediction | None:
    """The prediction that `node` of the tail compares with labels; None for other nodes."""
    if METADATA in node.metadata_props:
        label, blank, time = node.metadata_props[METADATA].split(" ")
        sequences = Sequences(int(blank), int(time))
        return Prediction(node.outputs[0].name or "", label, sequences) if label in labels else None
    if COMPARED in node.metadata_props:
        label, kind, ignored = json.loads(node.metadata_props[COMPARED])
        return _noted(node.outputs[0], label, kind, ignored) if label in labels else None
    y, other = (*node.inputs, None, None)[:2]
    if y is None or other is None:
        return None
    if y.name in labels:
        y, other = other, y
    source = other
    while (rows := source.producer()) is not None and rows.op_type in ("Reshape", "Expand") and rows.inputs[0]:
        source = rows.inputs[0]  # of tokens, one per row
    in_rows, label = source is not other, source.name or ""
    if label not in labels:
        return None
    if node.op_type in CLASS_LOSSES and y is node.inputs[0]:
        classes = y.shape[1] if y.shape is not None and len(y.shape) > 1 else None
        given = node.attributes.get("ignore_index")
        ignored = None if given is None else given.as_int()
        known = classes if isinstance(classes, int) else None
        rank = _rank(y) or 0
        compared = Classes(1, ignored, words=rank == 3, called=label, pixels=rank > 3)
        return Prediction(y.name or "", label, compared, known)
    if in_rows:
        return None
    if node.op_type == "Mul" and any(u.op_type == "Softplus" for u, _ in y.uses()):
        return Prediction(y.name or "", label, Binary())  # y·t beside Softplus(y): binary cross entropy with logits
    if node.op_type == "Sub":
        return Prediction(y.name or "", label, Comparison())
    return None


def _noted(y: ir.Value, label: str, kind: str, ignored: int | None) -> Prediction:
    """The prediction `y` that a loss of masks or depth notes."""
    if kind != "classes":
        return Prediction(y.name or "", label, Binary() if kind == "binary" else Known(ignored or 0))
    classes = y.shape[1] if y.shape is not None else None
    compared = Classes(1, ignored, True, called=label, pixels=True)
    return Prediction(y.name or "", label, compared, classes if isinstance(classes, int) else None)


def _rank(y: ir.Value) -> int | None:
    """The number of axes of the scores, before they were flattened to rows."""
    node = y.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Flatten" else y
    return None if source is None or source.shape is None else len(source.shape)


def _of_blocks(node: ir.Node, labels: set[str]) -> Prediction | None:
    """The prediction of `node`, a loss by blocks of rows, which gets an output of summary scores."""
    blocks = LossByBlocks.of(node)
    if blocks is None or blocks.label not in labels:
        return None
    ranked = Ranked(1, blocks.ignored, words=blocks.words, called=blocks.label, size=blocks.classes)
    return Prediction(blocks.tell().name or "", blocks.label, ranked, blocks.classes)


def add_outputs(graph: ir.Graph, names: Iterable[str]) -> list[ir.Value]:
    """Make the values of these `names` outputs as well."""
    values = named_values(graph)
    outputs = []
    for name in names:
        if name not in values:
            raise BadInput(f"the model has no value {name!r}, of which the loss is taken")
        value = values[name]
        if not value.is_graph_output():
            graph.outputs.append(value)
        outputs.append(value)
    return outputs

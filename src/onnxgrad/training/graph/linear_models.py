"""Linear models whose weights are attributes (ai.onnx.ml), written with weights that can train.

Converters write a logistic or a linear regression as one LinearClassifier or LinearRegressor. Its coefficients become
initializers, its scores a MatMul and an Add, its transform Softmax or Sigmoid, and its labels those of the largest
scores. A node whose result is not specified stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import not_none
from onnxgrad.ir.schemas import attribute

#: The attributes in which a LinearClassifier lists its labels.
_LABELS = ("classlabels_ints", "classlabels_strings")


def with_own_weights(graph: ir.Graph) -> None:
    """Write out every LinearClassifier and LinearRegressor of `graph`, in place."""
    for node in list(graph):
        if node.domain == "ai.onnx.ml" and node.op_type in ("LinearClassifier", "LinearRegressor"):
            held = _Scores.of(node)
            if held is not None:
                _take_place(graph, node, held)


@dataclass
class _Scores:
    """x·W + b, and its transform.

    Attributes:
        weights: of shape [features, scores].
        biases: of shape [scores], or empty.
        transform: NONE, LOGISTIC or SOFTMAX.
        opposite: True if these are the scores of the second of two classes, and those of the first their negatives.
        labels: by class; empty for a regression.
    """

    weights: np.ndarray
    biases: np.ndarray
    transform: str
    opposite: bool
    labels: Sequence[Any]

    @classmethod
    def of(cls, node: ir.Node) -> _Scores | None:
        """The scores of `node`; None for unknown sizes, or a transform that is not smooth."""
        x, transform = node.inputs[0], attribute(node, "post_transform", "NONE")
        if x is None or x.dtype is None or x.shape is None or len(x.shape) != 2:
            return None
        coefficients, biases = (np.array(attribute(node, k, ()), np.float32) for k in ("coefficients", "intercepts"))
        labels = next((found for k in _LABELS if (found := attribute(node, k, ()))), ())
        count = len(labels) if node.op_type == "LinearClassifier" else attribute(node, "targets", 1)
        width = x.shape[1] if isinstance(x.shape[1], int) else coefficients.size // max(count, 1)
        if transform not in ("NONE", "LOGISTIC", "SOFTMAX") or not count or coefficients.size != count * width:
            return None
        if biases.size not in (0, count) or not width:
            return None
        weights = coefficients.reshape(count, width).T
        opposite = count == 2 and bool(labels) and transform == "LOGISTIC"
        opposite = opposite and bool((weights[:, 0] == -weights[:, 1]).all() and (not biases.size or not biases.sum()))
        return cls(weights[:, 1:], biases[1:], transform, True, labels) if opposite else cls(
            weights, biases, transform, False, labels
        )  # fmt: skip

    def write(self, b: Builder, x: Var, own: dict[str, Var]) -> list[Var]:
        """The outputs of the node: labels of a classifier, and the transformed scores."""
        scores = b.MatMul(b.cast_like(x, own["coefficients"]), own["coefficients"])
        scores = b.Add(scores, own["intercepts"]) if "intercepts" in own else scores
        if self.opposite:  # a sigmoid of each is the softmax of one of them and 0: they stay opposite in training
            scores = b.Pad(scores, [0, 1, 0, 0])
        if self.transform == "SOFTMAX" or self.opposite:
            result = b.Softmax(scores, axis=1)
        else:
            result = b.Sigmoid(scores) if self.transform == "LOGISTIC" else scores
        if not self.labels:
            return [result]
        return [b.Gather(own["labels"], b.ArgMax(scores, axis=1, keepdims=0)), result]


def _take_place(graph: ir.Graph, node: ir.Node, held: _Scores) -> None:
    b = Builder(graph)
    tensors = {"coefficients": ir.tensor(np.ascontiguousarray(held.weights))}
    if held.biases.size:
        tensors["intercepts"] = ir.tensor(held.biases)
    own = {}
    for what, tensor in tensors.items():
        tensor.name = b.names.exactly(identifier(f"{node.name or node.outputs[-1].name}_{what}"))
        own[what] = b.var(add_initializer(graph, tensor))
    if held.labels:
        texts = not isinstance(held.labels[0], int)
        own["labels"] = _texts(b, graph, held.labels) if texts else b.const(np.array(held.labels, np.int64))
    x = not_none(node.inputs[0])
    with b.record() as written:
        results = held.write(b, b.var(x), own)
        for old, var in zip(node.outputs, results):
            if old.name:
                through = b.copy(var)
                through.value.type = old.type or through.value.type
                through.value.shape = through.value.shape if old.shape is None else old.shape
                old.replace_all_uses_with(through.value, replace_graph_outputs=True)
                old.name, through.value.name = None, old.name
    graph.remove(written)
    graph.insert_before(node, written)
    graph.remove(node, safe=True)


def _texts(b: Builder, graph: ir.Graph, texts: Sequence[Any]) -> Var:
    encoded = [t.encode() if isinstance(t, str) else t for t in texts]
    tensor = ir.StringTensor(encoded, shape=ir.Shape([len(encoded)]), name=b.names.fresh("labels"))
    return b.var(add_initializer(graph, tensor))

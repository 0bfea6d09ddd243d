"""Losses by blocks of rows (see `loss.score_blocks`), extended by summary scores of each row."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration
from onnxgrad.ir import Builder
from onnxgrad.ir.match import is_op
from onnxgrad.ir.subgraphs import give

INT64, DOUBLE = int(ir.DataType.INT64), int(ir.DataType.DOUBLE)


@dataclass
class LossByBlocks:
    """A Scan over rows whose body computes a loss of class scores.

    Attributes:
        node: the Scan.
        loss: the node of its body.
        label: name of what the labels of the loss are cut from.
        classes: how many there are.
        ignored: the label that does not count.
    """

    node: ir.Node
    loss: ir.Node
    label: str
    classes: int
    ignored: int | None

    @classmethod
    def of(cls, node: ir.Node) -> LossByBlocks | None:
        """`node` as such a loss; None for other nodes."""
        if not is_op(node, "Scan"):
            return None
        it = Iteration.of(node)
        if it.count or any(slot.axis or slot.backwards for slot in (*it.ins, *it.outs)):
            return None
        columns = dict(zip(it.slices, it.scanned))
        for inner in it.body:
            if inner.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
                continue
            scores, labels = inner.inputs[:2]
            shape = None if scores is None else scores.shape
            if labels not in columns or shape is None or len(shape) != 2 or not isinstance(shape[1], int):
                continue
            source = _skip_back(columns[labels], "Reshape", "Expand", "Pad")
            ignored = inner.attributes.get("ignore_index")
            if source is not None:
                return cls(node, inner, source.name or "", shape[1], None if ignored is None else ignored.as_int())
        return None

    @property
    def words(self) -> bool:
        """True if the rows were tokens, [rows, time, …], before they were flattened."""
        rows = _skip_back(Iteration.of(self.node).scanned[0], "Reshape", "Pad")
        node = None if rows is None else rows.producer()
        source = node.inputs[0] if node is not None and node.op_type == "Flatten" else None
        return source is not None and source.shape is not None and len(source.shape) == 3

    def tell(self) -> ir.Value:
        """Add an output with three numbers per row for the task ``ranked``: [.., .., 3]."""
        node, graph = self.node, self.node.graph
        assert isinstance(graph, ir.Graph)
        outer = Builder(graph)
        body = node.attributes["body"].as_graph()
        b = outer.nested(body)
        y, labels = (b.var(v) for v in self.loss.inputs[:2] if v is not None)
        if self.ignored is not None:
            labels = b.Where(b.Equal(labels, b.const(self.ignored, labels.dtype)), b.const(0, labels.dtype), labels)
        own = b.GatherElements(y, b.Unsqueeze(labels, [1]), axis=1)
        better = b.ReduceSum(b.Cast(y > own, to=INT64), [1], keepdims=1)
        surprise = b.Unsqueeze(b.SoftmaxCrossEntropyLoss(y, labels, reduction="none"), [1])
        columns = [b.Cast(x, to=DOUBLE) for x in (b.ArgMax(y, axis=1, keepdims=1), better, surprise)]
        give(b, [*body.outputs, b.Concat(*columns, axis=1)])
        slots = len(body.outputs)
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [0] * slots)
        node.resize_outputs(slots)
        stack = node.outputs[-1]
        stack.name, stack.type = outer.names.fresh("told"), ir.TensorType(ir.DataType.DOUBLE)
        stack.shape = ir.Shape([None, None, 3])
        return stack


def _skip_back(value: ir.Value | None, *kinds: str) -> ir.Value | None:
    """The source of `value` behind nodes of `kinds`."""
    while value is not None and (node := value.producer()) is not None and node.op_type in kinds:
        value = node.inputs[0]
    return value

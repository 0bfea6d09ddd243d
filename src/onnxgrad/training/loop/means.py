"""The means that a loss is a sum of, and their denominators, by which the means of several batches are weighted."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import constant, is_constant, is_op, producer
from onnxgrad.training.loop.predictions import CLASS_LOSSES, add_outputs
from onnxgrad.training.loss.loss_function import counted, total


class LossMean(NamedTuple):
    """A mean, perhaps with a factor, by the names of outputs of the tail.

    Attributes:
        value: the mean.
        denominator: how many labels count, or their weights. None: unknown, in proportion to the rows.
    """

    value: str
    denominator: str | None


def find_means(loss: ir.Value, batch: Collection[str]) -> list[LossMean]:
    """The means that `loss`, an output of its graph, is a sum of; with their denominators they become outputs.

    Args:
        loss: the loss.
        batch: names of inputs of the graph that hold data.
    """
    graph, pending, found = loss.graph, [loss], []
    assert isinstance(graph, ir.Graph)
    while pending:
        value = pending.pop()
        node = value.producer()
        addends = [] if node is None else [v for v in node.inputs if v is not None and v.producer() is not None]
        if is_op(node, ("Identity", "Cast")) or (is_op(node, "Add") and len(addends) == 2):
            pending += addends
        else:
            count = _denominator(Builder(graph), value, batch)
            found.append(LossMean(value.name or "", None if count is None else count.name))
    add_outputs(graph, [name for mean in found for name in mean if name is not None])
    return found


def _denominator(b: Builder, mean: ir.Value, batch: Collection[str]) -> ir.Value | None:
    """The denominator of `mean`; None where it is not computed from data alone."""
    node = mean.producer()
    if is_op(node, ("Mul", "Div")) and any(map(is_constant, node.inputs)):  # a factor
        return next((_denominator(b, v, batch) for v in node.inputs if v is not None and not is_constant(v)), None)
    if is_op(node, "Div"):
        count = node.inputs[1]
        while (least := producer(count, "Max")) is not None:
            count = least.inputs[0]
        sources = set[str]() if count is None else _sources(count)
        return count if sources and sources <= set(batch) | {""} else None
    if not is_op(node, CLASS_LOSSES) or node.attributes.get_string("reduction", "mean") != "mean":
        return None
    _, labels, weight = (*node.inputs, None)[:3]
    weights = constant(weight)
    if labels is None or (weight is not None and weights is None):
        return None
    ignored = node.attributes.get_int("ignore_index")
    return total(b, counted(b, b.var(labels), b.const(np.float64(0)), ignored, weights)).value


def _sources(value: ir.Value) -> set[str]:
    """The names of the inputs that `value` is computed from; "" for one of which only the size is read."""
    found, pending, seen = set[str](), [value], {value}
    while pending:
        value = pending.pop()
        node = value.producer()
        if is_op(node, ("Shape", "Size")):
            found.add("")
        elif node is not None:
            pending += (new := set(reads(node)) - seen)
            seen |= new
        elif not is_constant(value):
            found.add(value.name or "")
    return found

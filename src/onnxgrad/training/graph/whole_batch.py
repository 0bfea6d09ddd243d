"""Predictions of all rows of a batch, in a graph that computes those of a part of it.

A loss that compares rows with each other needs them. They are the result of an operator that is not ONNX's:
`AllRows`, of the predictions of a part. Its transpose, `OwnRows`, takes the rows of the part out of the cotangents of
all. The runtime cannot run a graph with such operators; `onnxgrad.training.step.cached_gradients` cuts it there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir

from onnxgrad.custom import custom_vjp
from onnxgrad.ir import Var
from onnxgrad.ir.graph import ancestors, named_values, reads
from onnxgrad.ir.match import not_none

DOMAIN, ALL, OWN = "onnxgrad.parts", "AllRows", "OwnRows"
#: The size of the whole batch, which no file has a name for.
_ROWS = "_rows_of_batch"


@custom_vjp(f"{DOMAIN}::{ALL}")
def RULE(op: Any, g: Var, x: Var) -> Var:
    """y = the rows of all parts, x among them: the cotangents of the rows of x"""
    (own,) = op.builder.append(ir.Node(DOMAIN, OWN, [g.value]))
    own.value.type, own.value.shape = x.value.type, x.value.shape
    return own


def gather_rows(graph: ir.Graph, names: Collection[str]) -> None:
    """Have the readers of the values of these `names` read `AllRows` of them, in place.

    The size of the batch gets a name of its own in what else reads it (labels, the loss): a part has another.
    """
    graph.opset_imports[DOMAIN] = 1
    predictions = [named_values(graph)[name] for name in names]
    _rename_rows(graph, predictions)
    for value in predictions:
        producer = not_none(value.producer())
        made = ir.Node(DOMAIN, ALL, [value], name=f"{value.name}_gathered")
        gathered = made.outputs[0]
        gathered.name, gathered.type = made.name, value.type
        gathered.shape = None if value.shape is None else ir.Shape([_ROWS, *tuple(value.shape)[1:]])
        value.replace_all_uses_with(gathered)
        made.replace_input_with(0, value)
        graph.insert_after(producer, made)


def _rename_rows(graph: ir.Graph, predictions: Collection[ir.Value]) -> None:
    """Name the size of the whole batch in all values from which no prediction is computed."""
    forward = {v for node in ancestors(graph, predictions) for v in (*reads(node), *node.outputs)}
    rows = {v.shape[0] for v in predictions if v.shape}
    for value in [*graph.inputs, *(v for node in graph for v in node.outputs)]:
        if value not in forward and value.shape is not None:
            value.shape = ir.Shape([_ROWS if d in rows else d for d in value.shape])

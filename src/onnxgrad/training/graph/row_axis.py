"""The axis of rows in a prediction, if it is not the first.

Recurrent networks compute [time, rows, classes] and often return that, while data have rows on the first axis. Names
and sizes of dimensions identify the axis: rows are on the first axis of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxgrad.errors import OnnxGradError
from onnxgrad.ir.graph import ancestors, required_inputs
from onnxgrad.ir.match import is_op, permutation
from onnxgrad.model_io.local_functions import infer_types

#: The name of the first dimension of the inputs, if sizes do not identify the axes.
_ROWS = "onnxgrad_rows"


def row_axis(model: ir.Model, y: ir.Value) -> int:
    """The axis of the rows of `y`, a value of the inferred `model`; 0 where no other axis provably is.

    Named axes are identified by their names. Several axes may have the same size, and a file may give an output names
    of its own: then shapes are inferred again, with a name for the first dimension of the inputs. A declared shape that
    contradicts the inferred one is replaced.
    """
    inputs = required_inputs(model.graph)
    first = _first_dims(inputs)
    dims = _dims(y)
    found = [axis for axis, dim in enumerate(dims) if dim in first]
    if len(dims) < 2 or (dims[0] == 1 and 0 in found) or (not found and len(dims) == 2):
        return 0
    if found and found != [0] and not isinstance(dims[found[0]], int):
        return found[0]
    if found == [0] and not (len(dims) > 2 and _may_turn(model.graph, y)):
        return 0
    inferred = _inferred_dims(model, y)
    axis = next((axis for axis, dim in enumerate(inferred) if dim == _ROWS), 0)
    if axis and found == [0]:
        y.shape = ir.Shape([dims[0] if dim == _ROWS else dim for dim in inferred])
    return axis


def _may_turn(graph: ir.Graph, y: ir.Value) -> bool:
    """True if a node before `y` may move its rows to another axis than the first."""
    for node in ancestors(graph, [y]):
        if is_op(node, "Transpose") and (order := permutation(node)) is not None and len(order) > 2 and order[0]:
            return True
        if is_op(node, ("LSTM", "GRU", "RNN")) and not node.attributes.get_int("layout", 0):
            return True
    return False


def rows_first(rank: int, axis: int) -> list[int]:
    """The permutation that moves `axis` to the front."""
    return [axis, *(a for a in range(rank) if a != axis)]


def _first_dims(inputs: Iterable[ir.Value]) -> set[int | str]:
    return {dims[0] for v in inputs if (dims := _dims(v)) and dims[0] is not None}


def _dims(value: ir.Value) -> Sequence[int | str | None]:
    return [d if isinstance(d, int) else d.value for d in value.shape or ()]


def _inferred_dims(model: ir.Model, y: ir.Value) -> Sequence[int | str | None]:
    """The dimensions of `y` by an inference in which the rows have a name; empty where that fails."""
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name not in copy.graph.initializers and value.shape is not None and len(value.shape):
            value.shape = ir.Shape([_ROWS, *list(value.shape)[1:]])
    for value in copy.graph.outputs:
        value.shape = None
    for node in copy.graph:
        for value in node.outputs:
            value.shape = None
    try:
        infer_types(copy)
    except OnnxGradError:
        return ()
    values = {v.name: v for node in copy.graph for v in node.outputs}
    return _dims(values[y.name]) if y.name in values else ()

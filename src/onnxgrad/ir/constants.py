"""Values that no input can change: constants, and the results of small arithmetic on constants.

Each node is evaluated by the onnx package's reference evaluator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.match import FLOATS, constant, constant_tensor
from onnxgrad.ir.operators import traits_of
from onnxgrad.ir.schemas import schema_of

#: Frequent operators that numpy computes as the evaluator does, which takes 20 ms to import and .1 ms for each node.
_NUMPY: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "And": np.logical_and,
    "Div": np.divide,  # of floats
    "Equal": np.equal,
    "Expand": lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape))),
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Identity": np.array,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Mul": np.multiply,
    "Not": np.logical_not,
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(axes)),
    "Sub": np.subtract,
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "Where": np.where,
}


def _product(node: ir.Node, x: np.ndarray, axes: Sequence[int] | None = None) -> np.ndarray:
    axes = () if axes is None else axes
    reduced = tuple(axes) if len(axes) or node.attributes.get_int("noop_with_empty_axes", 0) else None
    return np.asarray(np.prod(x, reduced, keepdims=bool(node.attributes.get_int("keepdims", 1))))


def _reshape(node: ir.Node, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    keeps = not node.attributes.get_int("allowzero", 0)
    return x.reshape([x.shape[i] if keeps and not d else int(d) for i, d in enumerate(shape)])


def _slice(
    node: ir.Node, x: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: Any = None, steps: Any = None
) -> np.ndarray:
    for i, (start, end) in enumerate(zip(starts, ends)):
        axis, step = i if axes is None else int(axes[i]), 1 if steps is None else int(steps[i])
        taken = slice_indices(x.shape[axis], int(start), int(end), step)
        x = np.take(x, np.asarray(taken, np.int64), axis)
    return x


#: The same of operators with attributes, as they are from opset 18 on.
_OF_NODE: dict[str, Callable[..., Any]] = {
    "Concat": lambda node, *parts: np.concatenate(parts, node.attributes.get_int("axis")),
    "ConstantOfShape": lambda node, shape: np.full(
        tuple(shape), a.as_tensor().numpy().flat[0] if (a := node.attributes.get("value")) is not None else 0
    ),
    "Mod": lambda node, a, b: (np.fmod if node.attributes.get_int("fmod", 0) else np.mod)(a, b),
    "Range": lambda node, *ends: np.arange(*ends),
    "ReduceProd": _product,
    "Reshape": _reshape,
    "Slice": _slice,
    "Transpose": lambda node, x: np.transpose(x, node.attributes.get_ints("perm", None)),
}
#: Computed constants are shapes or parameters; larger tensors are data.
MOST_ELEMENTS = 256
#: More windows of an axis than these are picked by their indices.
_MOST_WINDOWS = 32
#: Elements of a constant that a rule writes down; a larger one is computed by the graph.
MOST_WRITTEN = 1 << 20


def known_value(value: ir.Value, opset: int, depth: int = 16) -> np.ndarray | None:
    """`constant`, or the result of at most `depth` nodes over constants; else None."""
    value_array = constant(value)
    node = value.producer()
    if value_array is not None or node is None or not depth or len(node.outputs) != 1 or not node.inputs:
        return value_array
    feeds = {}
    for operand in node.inputs:
        if operand is not None:
            tensor = constant_tensor(operand)  # `evaluate` computes with small ones only: larger ones are not read
            is_small = tensor is None or tensor.size <= MOST_ELEMENTS
            array = known_value(operand, opset, depth - 1) if is_small else None
            if array is None:
                return None
            feeds[operand] = array
    return evaluate(node, feeds, opset)


def evaluate(node: ir.Node, feeds: Mapping[ir.Value, np.ndarray], opset: int) -> np.ndarray | None:
    """The one output of a deterministic standard `node` on small operands; None if it cannot be had."""
    small = all(a.size <= MOST_ELEMENTS for a in feeds.values())
    if node.domain or not small or not is_repeatable(node.op_type, "", opset) or node.outputs[0].dtype is None:
        return None
    try:
        if _size(node, feeds) > MOST_ELEMENTS or subgraphs(node):
            return None
        result: Any
        function = _NUMPY.get(node.op_type)
        if function is not None and opset >= 13 and (node.op_type != "Div" or node.outputs[0].dtype in FLOATS):
            result = function(*(feeds[v] for v in node.inputs if v is not None))
        elif (function := _OF_NODE.get(node.op_type)) is not None and opset >= 18:
            result = function(node, *(None if v is None else feeds[v] for v in node.inputs))
        else:
            from onnx.reference import ReferenceEvaluator

            proto = ir.serde.serialize_node(node)
            named = {v.name or "": a for v, a in feeds.items()}
            result = ReferenceEvaluator(proto, opsets={"": opset}).run(None, named)
            result = result[0]
    except Exception:  # the reference does not know the operator, or the node is wrong: nothing is known
        return None
    if not isinstance(result, (np.ndarray, np.generic)) or result.size > MOST_ELEMENTS:
        return None
    return np.asarray(result).astype(node.outputs[0].dtype.numpy())


def _size(node: ir.Node, feeds: Mapping[ir.Value, np.ndarray]) -> float:
    """The number of elements that `node` produces; 0 for operators whose results cannot outgrow their operands.

    The size is checked before the node runs: one number of a file could request a tensor of any size.
    """
    shape = node.outputs[0].shape
    if shape is not None and all(isinstance(d, int) for d in shape):
        return math.prod(d for d in shape if isinstance(d, int))
    if not traits_of(node).grows:
        return 0
    arrays = [feeds[v].astype(np.float64).ravel() for v in node.inputs if v is not None]
    if node.op_type == "Range":
        start, limit, step = (a[0] for a in arrays)
        return abs(limit - start) / abs(step) if step else math.inf
    data, numbers = (np.empty(1), arrays) if node.op_type == "ConstantOfShape" else (arrays[0], arrays[1:2])
    return data.size * float(np.prod([np.maximum(np.abs(n), 1).prod() for n in numbers]))


@functools.cache
def is_repeatable(op_type: str, domain: str, opset: int) -> bool:
    """True if equal operands give equal results; False for random and unknown operators."""
    schema = schema_of(domain, op_type, opset)
    if schema is None:
        return False
    determinism = schema.node_determinism  # type: ignore[attr-defined]
    return determinism != onnx.defs.OpSchema.NodeDeterminism.NonDeterministic


def slice_indices(size: int, start: int, end: int, step: int) -> range:
    """The indices that a Slice selects along an axis of `size`.

    As Python's, but for a negative step from before the first element: that is clamped to the first, and taken.
    """
    first, last, stride = slice(start, end, step).indices(size)
    return range(max(first, 0) if size else first, last, stride)


def window_slices(size: Any, places: np.ndarray) -> tuple[int, list[tuple[int, int, int]]] | None:
    """The slices (start, end, step) of an axis that the rows (0) or columns (1) of `places` are, as windows of images.

    None if they are no slices, too many, or leave out more of the axis than they have.
    """
    if places.ndim != 2 or not places.size or not isinstance(size, int) or places.min() < 0 or places.max() >= size:
        return None
    for along in sorted((0, 1), key=lambda k: places.shape[k]):
        rows = np.moveaxis(places, along, 0)
        steps = np.unique(np.diff(rows))
        if len(steps) == 1 and steps[0] > 0 and 2 * rows.shape[1] >= size and len(rows) <= _MOST_WINDOWS:
            return along, [(int(row[0]), int(row[-1]) + 1, int(steps[0])) for row in rows]
    return None

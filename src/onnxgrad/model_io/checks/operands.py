"""Operands that contradict each other, where a derivative would be computed all the same.

Shape inference refuses most operands that do not fit, and ONNX Runtime refuses the others when it loads or runs a
model. But a derivative may lack the node, or ONNX Runtime may run it nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.model_io.checks.schema import Formal

Dim = int | None
Shape = list[Dim] | None
#: The complaint about the operands of a node, given their shapes; empty if they may fit.
Check = Callable[[ir.Node, Formal, Sequence[Shape]], str]


def sizes(value: ir.Value | None, certain: bool = True) -> Shape:
    """The shape of `value`, with None for unknown sizes; all are unknown unless the node is `certain` to run."""
    if value is None or value.shape is None:
        return None
    return [d if isinstance(d, int) and certain else None for d in value.shape]


def written(shape: Shape) -> str:
    """`shape` as messages have it."""
    return "?" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def operand_complaint(node: ir.Node, asked: Formal, certain: bool) -> str:
    """The first contradiction between operands of `node`, in words; empty if none is known."""
    check = _CHECKS.get(node.op_type)
    return "" if check is None else check(node, asked, [sizes(v, certain) for v in node.inputs])


def _integers(node: ir.Node, i: int) -> list[int] | None:
    """The integers of operand `i`, if it is a small constant."""
    value = node.inputs[i] if i < len(node.inputs) else None
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 1024 or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    return [int(v) for v in tensor.numpy().reshape(-1)]


def _fits(shape: Shape, wanted: Sequence[Dim]) -> bool:
    return shape is None or (
        len(shape) == len(wanted) and all(a is None or b is None or a == b for a, b in zip(shape, wanted))
    )


def _misfit(i: int, shape: Shape, wanted: Sequence[Dim]) -> str:
    return "" if _fits(shape, wanted) else f"operand {i} is {written(shape)}, and should be {written(list(wanted))}"


def _joint(shapes: Sequence[Shape]) -> str:
    known = [s for s in shapes if s is not None]
    for axis in range(-max(map(len, known), default=0), 0):
        if len({s[axis] for s in known if len(s) >= -axis} - {1, None}) > 1:
            return f"{' and '.join(map(written, known))} do not broadcast"
    return ""


def _broadcast(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    return _joint(shapes)


def _expanded(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    wanted = _integers(node, 1)
    return "" if wanted is None else _joint([shapes[0], list(wanted)])


def _sliced(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    held = [_integers(node, i) for i in range(1, 5)]
    lengths = [len(numbers) for numbers in held if numbers is not None]
    if len(set(lengths)) > 1:
        return f"starts, ends, axes and steps have {lengths} elements, and should have equally many"
    x, axes = shapes[0], held[2]
    if x is not None and axes is not None and len({a % max(len(x), 1) for a in axes}) < len(axes):
        return f"axis {axes} names one twice"
    return ""


def _cumulated(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    x, axis = shapes[0], _integers(node, 1)
    wrong = [a for a in axis or () if x is not None and not -len(x) <= a < len(x)]
    return f"axis {wrong[0]} is none of {len(x or ())} axes" if wrong else ""


def _grid(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    x, grid = shapes[:2]
    return "" if x is None or grid is None else _misfit(1, grid, [None] * (len(x) - 1) + [len(x) - 2])


def _labels(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    x, labels, weights = [*shapes, None][:3]
    if x is None:
        return ""
    if len(x) < 2:
        return f"scores are {written(x)}, and should be [N, C, …]"
    return _misfit(1, labels, [x[0], *x[2:]]) or _misfit(2, weights, [x[1]])


def _resized(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    scales, counts = [*shapes, None, None][2:4]
    return _misfit(2, scales, [None]) or _misfit(3, counts, [None])


def _rotated(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    x, heads = shapes[0], node.attributes.get_int("num_heads", 0)
    part = node.attributes.get_int("rotary_embedding_dim", 0)
    if x is None:
        return ""
    if len(x) not in (3, 4) or (len(x) == 3 and not heads):
        return f"x is {written(x)}, and should have 4 axes, or 3 and num_heads"
    columns = part or x[-1]
    odd = columns is not None and (columns if part or len(x) == 4 else columns // heads) % 2
    return f"of {written(x)}, an odd number of columns is rotated" if odd else ""


def _directions(node: ir.Node, asked: Formal, shapes: Sequence[Shape]) -> str:
    ways = 1 + (node.attributes.get_string("direction", "forward") == "bidirectional")
    return _misfit(1, shapes[1], [ways, None, None])


_CHECKS: dict[str, Check] = {
    **dict.fromkeys(BROADCASTING, _broadcast),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _directions),
    **dict.fromkeys(("CumSum", "CumProd"), _cumulated),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _labels),
    "Expand": _expanded,
    "GridSample": _grid,
    "Resize": _resized,
    "RotaryEmbedding": _rotated,
    "Slice": _sliced,
}

"""Which axis of scores the classes lie along, where nobody says: that of [N, C], of [N, C, …] or of [N, …, C].

Scores of tokens come as [N, T, C] and those of pixels as [N, C, H, W]. What the model is tells them apart: the axis of
the Softmax that it ends in; a matrix product at its end, which gives classes last; sizes, as the number of classes is
known before any data are, and the number of tokens often is not.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.training.loss.logits import scores

#: Nodes behind which the last axis is what it was.
_THROUGH = ("Identity", "Cast", "Add", "Sub", "Mul", "Div")


def with_class_axis(options: dict[str, Any], y: ir.Value) -> dict[str, Any]:
    """`options` with the axis of the classes of `y`, where they ask for one and say none.

    Raises:
        BadInput: it cannot be told, or is said to be no number.
    """
    axis = options.get("axis", 0)
    if axis is None:
        return {**options, "axis": class_axis(y)}
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise BadInput(f"the axis of the classes is a number, not {axis!r}")
    return options


def class_axis(y: ir.Value) -> int:
    """The axis of the classes of the scores, or probabilities, `y`. Raises BadInput where that cannot be told."""
    rank = 0 if y.shape is None else len(y.shape)
    if y.shape is None or rank <= 2:
        return 1
    ends = (1, rank - 1)
    activated = [a for a in ends if scores(y, a) is not None]
    if len(activated) == 1:
        return activated[0]
    if _is_product(y):
        return rank - 1
    known = [a for a in ends if isinstance(y.shape[a], int)]
    if len(known) == 1:
        return known[0]
    if known and y.shape[1] == y.shape[-1] and y.producer() is not None and not _is_convolution(y):
        raise BadInput(
            f"{y.name!r} is {list(y.shape)}: along which axis are the classes?\n"
            "  hint: say so, as cross_entropy:axis=1 or cross_entropy:axis=-1"
        )
    return 1


def _behind(y: ir.Value) -> ir.Node | None:
    """The node that makes `y`, but for what adds a bias or a factor to it."""
    node = y.producer()
    while node is not None and node.op_type in _THROUGH and node.domain == "":
        wide = [v for v in node.inputs if v is not None and v.shape is not None and len(v.shape) > 2]
        node = wide[0].producer() if len(wide) == 1 else None
    return node


def _is_product(y: ir.Value) -> bool:
    node = _behind(y)
    weight = node.inputs[1] if node is not None and node.op_type == "MatMul" and node.domain == "" else None
    return weight is not None and weight.shape is not None and len(weight.shape) == 2


def _is_convolution(y: ir.Value) -> bool:
    node = _behind(y)
    return node is not None and node.op_type in ("Conv", "ConvTranspose")

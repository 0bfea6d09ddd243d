"""The class axis of scores, if the caller names none: that of [N, C], of [N, C, …] or of [N, …, C].

Scores of tokens are [N, T, C] and those of pixels [N, C, H, W]. Three properties of the model identify the axis: the
axis of its final Softmax; a final matrix product, which has classes last; and sizes, as the number of classes is fixed
in a model and the number of tokens often is not.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import is_op
from onnxgrad.training.loss.logits import scores
from onnxgrad.wording import shape_text

#: Of an output: the class axis that a loss was told.
CLASS_AXIS = "onnxgrad.class_axis"
#: Nodes that keep the last axis.
_THROUGH = ("Identity", "Cast", "Add", "Sub", "Mul", "Div")


def with_class_axis(options: dict[str, Any], y: ir.Value, rows: int = 0) -> dict[str, Any]:
    """`options` with the class axis of `y`, if the loss has that option and it is not set.

    Args:
        options: of the loss.
        y: the prediction.
        rows: the axis of `y` along which the rows lie.

    Raises:
        BadInput: it cannot be told, or is said to be no number, or the axis of the rows.
    """
    axis = options.get("axis", 0)
    if axis is None:
        return {**options, "axis": class_axis(y) if not rows else axis_beside(y, rows)}
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise BadInput(f"the axis of the classes is a number, not {axis!r}")
    if rows and y.shape is not None and axis in (rows, rows - len(y.shape)):
        raise BadInput(
            f"axis={axis} of {y.name!r} {shape_text(y.shape)} is that of the rows, not of the classes\n"
            "  hint: leave the axis out, or give that of the classes"
        )
    return options


def axis_beside(y: ir.Value, rows: int) -> int:
    """The class axis of `y`, whose rows are along the axis `rows` instead of the first."""
    dims = list(y.shape or ())
    others = [a for a in range(len(dims)) if a != rows]
    activated = [a for a in others if scores(y, a) is not None]
    known = [a for a in others if isinstance(dims[a], int)]
    if len(activated) == 1 or len(known) == 1:
        return activated[0] if len(activated) == 1 else known[0]
    return others[-1] if rows < len(dims) - 1 else others[0]


def class_axis(y: ir.Value, square: bool = False) -> int:
    """The class axis of the scores, or probabilities, `y`. Raises BadInput if it cannot be determined.

    `square`: axis 1 and the last are known to have one size, by predictions that are evaluated.
    """
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
    is_square = square or bool(known and y.shape[1] == y.shape[-1])
    if is_square and y.producer() is not None and not _is_convolution(y):
        named = "--class-axis 1 or -1 (in Python class_axis=)" if square else "cross_entropy:axis=1 or axis=-1"
        raise BadInput(
            f"{y.name!r} is {shape_text(y.shape)}: along which axis are the classes?\n"
            f"  hint: say so, as {named}, or declare the number of classes in the model"
        )
    return 1


def _scoring_node(y: ir.Value) -> ir.Node | None:
    """The producer of `y`, behind nodes that add a bias or multiply by a factor."""
    node = y.producer()
    while is_op(node, _THROUGH):
        wide = [v for v in node.inputs if v is not None and v.shape is not None and len(v.shape) > 2]
        node = wide[0].producer() if len(wide) == 1 else None
    return node


def _is_product(y: ir.Value) -> bool:
    node = _scoring_node(y)
    weight = node.inputs[1] if is_op(node, "MatMul") else None
    return weight is not None and weight.shape is not None and len(weight.shape) == 2


def _is_convolution(y: ir.Value) -> bool:
    node = _scoring_node(y)
    return node is not None and node.op_type in ("Conv", "ConvTranspose")

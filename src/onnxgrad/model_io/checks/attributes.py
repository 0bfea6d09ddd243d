"""Attributes that no runtime runs, and that shape inference accepts: unknown choices, windows of no size, lost axes."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.match import single_constant
from onnxgrad.model_io.checks.schema import Formal

_Choices = dict[str, tuple[object, ...]]

_WINDOWS: _Choices = {"auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")}
_LOSSES: _Choices = {"reduction": ("none", "mean", "sum")}
_SCATTERS: _Choices = {"reduction": ("none", "add", "mul", "max", "min")}
_RECURRENT: _Choices = {"direction": ("forward", "reverse", "bidirectional")}

#: The values that attributes of an operator may have, which its schema lists in prose only.
_CHOICES: dict[str, _Choices] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), _WINDOWS),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _LOSSES),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _SCATTERS),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _RECURRENT),
    "DepthToSpace": {"mode": ("DCR", "CRD")},
    "Gelu": {"approximate": ("none", "tanh")},
    "GridSample": {
        "padding_mode": ("zeros", "border", "reflection"),
        "mode": ("linear", "nearest", "cubic", "bilinear", "bicubic"),
    },
    "LpNormalization": {"p": (1, 2)},
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap")},
    "Resize": {
        "mode": ("nearest", "linear", "cubic"),
        "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
        "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    },
    "ReverseSequence": {"batch_axis": (0, 1), "time_axis": (0, 1)},
    "RoiAlign": {"mode": ("avg", "max")},
    "TensorScatter": {"mode": ("linear", "circular")},
}

#: Attributes of any operator that are positive, or consist of positive numbers.
_POSITIVE = ("kernel_shape", "strides", "dilations", "group", "blocksize", "num_groups", "size")

#: Operators whose `axis` is one of their first operand's; inference itself refuses other ones of Concat, Split, Gather.
_WITH_AXIS = frozenset(
    {"Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "LayerNormalization", "RMSNormalization", "ArgMax"}
    | {"ArgMin", "Compress", "Unique", "TensorScatter", "SplitToSequence", "GatherElements", "ScatterElements"}
)


def attribute_complaint(node: ir.Node, asked: Formal) -> str:
    """The first invalid attribute of `node` by its schema, as a message; empty if there is none."""
    choices = _CHOICES.get(node.op_type, {})
    for name, a in node.attributes.items():
        if a.is_ref():
            continue
        if name in choices and a.value not in choices[name]:
            return f"{name} is {a.value!r}, and may be {', '.join(map(repr, choices[name]))}"
        if name in _POSITIVE:
            numbers = list(a.value) if isinstance(a.value, (list, tuple)) else [a.value]
            if min(numbers, default=1) <= 0:
                return f"{name} is {numbers if len(numbers) > 1 else numbers[0]}"
    along = single_constant(node.inputs[1]) if node.op_type in ("CumSum", "CumProd") else None
    if (node.op_type in _WITH_AXIS or along is not None) and (x := node.inputs[0]) is not None and x.shape is not None:
        given = node.attributes.get("axis")
        axis = asked.defaults.get("axis") if given is None else None if given.is_ref() else given.value
        axis = axis if along is None else int(along.item())
        if axis is not None and not -len(x.shape) <= axis < len(x.shape):
            return f"axis {axis} is none of {len(x.shape)} axes"
    return ""

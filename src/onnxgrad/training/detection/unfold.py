"""BatchNormalization that an exporter has folded into convolutions, written out again with the statistics of data.

A folded convolution computes y = W·x + b. Behind it stands BatchNormalization with the mean m and the variance v of y
over data, the scale √(v + ε) and the shift m, which is the identity at first. In training it uses the statistics of the
batch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import is_constant, is_op
from onnxgrad.ir.names import Names
from onnxgrad.training.detection.heads import last_layers
from onnxgrad.training.detection.probe import PORTABLE
from onnxgrad.training.graph.inner_values import inner_values

#: Channels of a variance below are constant, and are left alone with the variance 1.
_LEAST, _EPSILON, _MOMENTUM = 1e-8, 1e-3, 0.97
#: Pictures of a run.
_TOGETHER = 8


def unfold(model: ir.Model, pictures: np.ndarray, name: str) -> str:
    """Insert BatchNormalization behind the folded convolutions of `model`, in place. Returns a note.

    Args:
        model: a detector with a dynamic batch.
        pictures: as the model takes them, [N, 3, H, W].
        name: of the input of pictures.

    Raises:
        BadInput: the model has no such convolutions.
    """
    graph, ends = model.graph, set(last_layers(model.graph))
    layers = [n for n in graph if _is_folded(n) and n.outputs[0] not in ends]
    if not layers:
        raise BadInput("unfold_bn: no convolution has a bias in the place of BatchNormalization")
    single = isinstance(next(v for v in graph.inputs if v.name == name).shape[0], int)  # type: ignore[index]
    size = 1 if single else _TOGETHER
    totals: dict[str, tuple[np.ndarray, np.ndarray, int]] = {}
    batches = ({name: pictures[start : start + size]} for start in range(0, len(pictures), size))
    for found in inner_values(model, [n.outputs[0].name or "" for n in layers], batches, PORTABLE):
        for key, array in found.items():
            flat = array.astype(np.float64).swapaxes(0, 1).reshape(array.shape[1], -1)
            before = totals.get(key, (0.0, 0.0, 0))
            totals[key] = (before[0] + flat.sum(1), before[1] + (flat**2).sum(1), before[2] + flat.shape[1])
    names = Names.of(model)
    for node in layers:
        value = node.outputs[0]
        total, squares, count = totals[value.name or ""]
        mean = total / count
        variance = np.maximum(squares / count - mean**2, 0)
        variance = np.where(variance < _LEAST, 1.0, variance)
        parts = {"scale": np.sqrt(variance + _EPSILON), "shift": mean, "mean": mean, "variance": variance}
        held = [
            add_initializer(graph, ir.tensor(a.astype(np.float32), name=names.exactly(f"{value.name}_{k}")))
            for k, a in parts.items()
        ]
        uses = list(value.uses())
        follower = next(n for n in graph if any(n is use.node for use in uses))
        b = Builder(graph, names, before=follower)
        (normal,) = b.append(
            ir.Node(
                "", "BatchNormalization", [value, *held],
                [ir.AttrFloat32("epsilon", _EPSILON), ir.AttrFloat32("momentum", _MOMENTUM)],
            )
        )  # fmt: skip
        for use in uses:
            use.node.replace_input_with(use.idx, normal.value)
    return (
        f"BatchNormalization stands behind {len(layers)} convolutions, with the statistics of {len(pictures)} pictures"
    )


def _is_folded(node: ir.Node) -> bool:
    """True for a convolution with constant weights and a bias, and no BatchNormalization behind."""
    if not is_op(node, "Conv") or len(node.inputs) < 3 or not all(map(is_constant, node.inputs[1:3])):
        return False
    readers = [use.node for use in node.outputs[0].uses()]
    return bool(readers) and not any(is_op(n, "BatchNormalization") for n in readers)

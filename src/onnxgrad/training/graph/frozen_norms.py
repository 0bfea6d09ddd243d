"""The numbers of normalizations that never trained: frozen and written out, or ones and zeros of groups.

Detectors (torchvision's FrozenBatchNorm2d) keep scale, shift and statistics as buffers. An exporter writes
x·(w/√(v + ε)) + (b - m·w/√(v + ε)), with the four by their names, or with the factor and the term computed in advance.
PyTorch's GroupNorm becomes an InstanceNormalization of groups, with ones and zeros, and then a product and a sum with
its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var", "moving_variance")
_MOVES = frozenset(("Identity", "Cast", "Reshape", "Unsqueeze", "Expand"))
_CONVOLUTIONS = frozenset(("Conv", "ConvTranspose"))


def frozen_norms(candidates: Mapping[str, ir.Value], made_up: Callable[[str], bool]) -> set[ir.Value]:
    """The `candidates` that belong to a frozen normalization.

    Args:
        candidates: float initializers by name; statistics that a BatchNormalization reads are none of them.
        made_up: tells whether a name was made up by an exporter.
    """
    found: set[ir.Value] = set()
    for name, value in candidates.items():
        head, dot, tail = name.rpartition(".")
        if tail in _STATISTICS:
            found.add(value)
            parts = [candidates.get(f"{head}{dot}{part}") for part in ("weight", "bias", "gamma", "beta")]
            found |= {v for v in parts if v is not None and _meets_constants(v)}
        elif _is_vector(value) and made_up(name):
            shift = _shift_behind(value)
            if shift is not None and shift.name in candidates and made_up(shift.name or ""):
                found |= {value, shift}
    return found


def is_statistic(name: str) -> bool:
    """True if frameworks use such a name for running statistics."""
    return name.replace("/", ".").rpartition(".")[-1] in _STATISTICS


def _is_vector(value: ir.Value) -> bool:
    """True if the shape is [1, C, 1, …], with three axes or more."""
    dims = [] if value.shape is None else list(value.shape)
    return len(dims) > 2 and all(d == 1 for k, d in enumerate(dims) if k != 1)


def norms_groups(node: ir.Node, at: int) -> bool:
    """True if input `at` of `node` is the ones or the zeros of an InstanceNormalization of groups."""
    if node.op_type != "InstanceNormalization" or at not in (1, 2):
        return False
    data, value = node.inputs[0], node.inputs[at]
    groups = None if data is None else data.producer()
    array = None if value is None or value.const_value is None else value.const_value.numpy()
    return groups is not None and groups.op_type == "Reshape" and array is not None and bool(np.all(array == 2 - at))


def _shift_behind(scale: ir.Value) -> ir.Value | None:
    """The vector added to the product of a convolution and `scale`; None if either has other uses."""
    users = list(scale.uses())
    if len(users) != 1 or users[0][0].op_type != "Mul":
        return None
    product = users[0][0]
    others = [v for v in product.inputs if v is not None and v is not scale]
    maker = others[0].producer() if len(others) == 1 else None
    after = list(product.outputs[0].uses())
    if maker is None or maker.op_type not in _CONVOLUTIONS or len(after) != 1 or after[0][0].op_type != "Add":
        return None
    shifts = [v for v in after[0][0].inputs if v is not None and v is not product.outputs[0]]
    return shifts[0] if len(shifts) == 1 and _is_vector(shifts[0]) and len(list(shifts[0].uses())) == 1 else None


def _meets_constants(value: ir.Value) -> bool:
    """True if `value` is combined only with values computed from initializers, not from a batch."""
    for node, _ in value.uses():
        if node.op_type in _MOVES and node.inputs[0] is value:
            if not _meets_constants(node.outputs[0]):
                return False
        elif not all(v is None or _is_constant(v) for v in node.inputs):
            return False
    return bool(list(value.uses()))


def _is_constant(value: ir.Value, depth: int = 16) -> bool:
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return bool(depth) and all(v is None or _is_constant(v, depth - 1) for v in node.inputs)

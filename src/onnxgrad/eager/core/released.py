"""Large values of the tape that no derivative reads: their memory is reused while the function still runs.

The derivative of ``x * 2.0 + y`` reads neither the product nor the sum. Once no array of the program refers to such a
value, and one node alone, its memory returns to the pool: the next operation writes where the last one has read, in the
processor's cache. A value that is needed nevertheless is computed again from the operands of its node.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import numpy as np

from onnxgrad.eager.core.primitives import LEAF, StandardOp

#: Operators whose derivatives do not read their result, with numpy's function.
_KERNELS: dict[Any, np.ufunc] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Neg": np.negative}
#: Operators whose derivatives do not read their operands (of Mul: none that is multiplied by a constant).
_BLIND = frozenset({"Add", "Exp", "Mul", "Neg", "Sub", "Tanh"})
#: How many nodes wait for their arrays to die.
_MOST = 8
_waiting: list[weakref.ref[Any]] = []


class ReleasedOp(StandardOp):
    """The operator of a node whose value was released."""

    __slots__ = ()


@functools.lru_cache(64)
def _released(op: StandardOp) -> ReleasedOp:
    return ReleasedOp(*op.key)


def value_of(node: Any) -> np.ndarray:
    """The value of a node, computed again if it was released."""
    if type(node.op) is not ReleasedOp:
        return node.value
    kernel: np.ufunc = _KERNELS[node.op.key[0]]
    return np.asarray(kernel(*[x if isinstance(x, np.ndarray) else value_of(x) for x in node.inputs]))


def offer_operands(node: Any) -> None:
    """Note the operands of a new node whose values its derivative does not read."""
    kind = node.op.key[0]
    operands = [x for x in node.inputs if not isinstance(x, np.ndarray)]
    if kind in _BLIND and (kind != "Mul" or len(operands) == 1):
        _waiting.extend(weakref.ref(x) for x in operands if _is_reproducible(x))


def _is_reproducible(node: Any) -> bool:
    return type(node.op) is StandardOp and node.op.key[0] in _KERNELS and node.value.dtype.kind == "f"


def release() -> None:
    """Release the values of noted nodes that one node, and no array, refers to."""
    kept = []
    for waiting in _waiting:
        if _references(waiting) == _ALONE:
            node = waiting()
            if node is not None:
                node.value = np.broadcast_to(np.array(np.nan, node.value.dtype), node.value.shape)
                node.op = _released(node.op)
        else:
            kept.append(waiting)
    _waiting[:] = kept[-_MOST:]


def _references(waiting: weakref.ref[Any]) -> tuple[int, int]:
    """The numbers of references to a node and to its value."""
    node = waiting()
    return (0, 0) if node is None else (sys.getrefcount(node), sys.getrefcount(node.value))


class _Node:
    """An object like a node."""

    __slots__ = ("__weakref__", "inputs", "op", "value")
    inputs: Any
    op: Any
    value: Any


def _count_alone() -> tuple[int, int]:
    """The numbers for a node that is an operand of one other, as this interpreter counts."""
    node, user = _Node(), _Node()
    node.op, node.value, user.inputs = LEAF, np.zeros(1), (node,)
    waiting = weakref.ref(node)
    del node
    return _references(waiting)


#: Without the global lock, other threads may be counting.
_ALONE = _count_alone() if getattr(sys, "_is_gil_enabled", lambda: True)() else None

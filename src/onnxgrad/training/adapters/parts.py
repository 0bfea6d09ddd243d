"""Parts of a weight: some of its outputs, such as the queries of a fused query-key-value projection.

Which outputs are the queries is seen from where they go. A tensor that holds in each place the number of its output is
taken through the nodes behind the weight that only move numbers (Split, Slice, Gather, Reshape, Transpose, …), until
less than all of the numbers are left. If three such sets divide the outputs, they are queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import is_standard
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.training.adapters.sites import CONV, Weight

NAMES = "qkv"
#: Operators that leave numbers in their places, the other operand being a constant.
_STAYS = {"Identity", "Cast", "Add", "Mul"}
_LARGEST = 1 << 24


@dataclass(frozen=True)
class WeightPart:
    """The outputs from `start` up to `stop` of every `every` ones.

    Raises:
        ValueError: they are none, or no whole numbers.
    """

    start: int
    stop: int
    every: int

    def __post_init__(self) -> None:
        if not all(type(n) is int for n in (self.start, self.stop, self.every)) or not (
            0 <= self.start < self.stop <= self.every
        ):
            raise ValueError(f"no part of a weight: {self}")

    def columns(self, size: int) -> np.ndarray:
        """The indices of this part among `size` outputs."""
        numbers = np.arange(size)
        return numbers[(numbers % self.every >= self.start) & (numbers % self.every < self.stop)]

    def spread(self, array: np.ndarray, axis: int, size: int) -> np.ndarray:
        """`array`, with zeros for the other outputs along `axis`."""
        shape = list(array.shape)
        shape[axis] = size
        out = np.zeros(shape, array.dtype)
        np.moveaxis(out, axis, 0)[self.columns(size)] = np.moveaxis(array, axis, 0)
        return out

    def written(self, size: int) -> str:
        """The spelling of this part, as it is used in brackets."""
        return f"{self.start}:{self.stop}" + (f" of {self.every}" if self.every < size else "")


def named_part(weight: Weight, text: str) -> WeightPart:
    """The part of `weight` that `text` names: ``q``, or ``0:768``.

    Raises:
        BadInput: it has no such part.
    """
    size = outputs(weight)
    start, colon, stop = text.partition(":")
    if colon:
        if not int(start) < int(stop) <= size:
            raise BadInput(f"{weight.name!r} has {size} outputs; {text} are none of them")
        return WeightPart(int(start), int(stop), size)
    found = _detect_qkv(weight)
    if text not in found:
        raise BadInput(
            f"the {size} outputs of {weight.name!r} are not seen to be queries, keys and values\n"
            f"  hint: say which are meant by numbers, as {weight.module}[0:{size // 3}]"
        )
    return found[text]


def outputs(weight: Weight) -> int:
    """The number of outputs of a weight, over all groups."""
    return weight.shape[0] if weight.kind == CONV else weight.ends[1]


def _detect_qkv(weight: Weight) -> dict[str, WeightPart]:
    """The parts for queries, keys and values, if the graph splits the output into these."""
    site = weight.sites[0]
    out = site.node.outputs[0]
    size, shape = outputs(weight), _sizes(out)
    if shape is None or math.prod(shape) > _LARGEST:
        return {}
    axis = 1 if weight.kind == CONV else len(shape) - (2 if site.is_left else 1)
    ends = [1] * len(shape)
    ends[axis] = size
    if shape[axis] != size:
        return {}
    numbers = np.broadcast_to(np.arange(size).reshape(ends), shape)
    sets = sorted({tuple(found.tolist()) for found in _pieces(out, numbers, size)})
    if len(sets) != len(NAMES) or sorted(n for s in sets for n in s) != list(range(size)):
        return {}
    parts = [_part(np.array(s), size) for s in sets]
    return {name: part for name, part in zip(NAMES, parts) if part is not None}


def _part(columns: np.ndarray, size: int) -> WeightPart | None:
    breaks = np.flatnonzero(np.diff(columns) > 1)
    every = size if not len(breaks) else int(columns[breaks[0] + 1] - columns[0])
    last = columns[-1] if not len(breaks) else columns[breaks[0]]
    if last >= every:
        return None
    found = WeightPart(int(columns[0]), int(last) + 1, every)
    return found if np.array_equal(found.columns(size), columns) else None


def _pieces(value: ir.Value, numbers: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The first sets of less than `size` numbers behind `value`, which has `numbers` in its places."""
    for node, at in value.uses():
        if not is_standard(node) or (at > 0 and node.op_type not in _STAYS):
            continue
        for out, moved in _move_numbers(node, at, numbers):
            found = np.unique(moved)
            if len(found) < size:
                yield found
            else:
                yield from _pieces(out, moved, size)


def _move_numbers(node: ir.Node, at: int, numbers: np.ndarray) -> Iterator[tuple[ir.Value, np.ndarray]]:
    """The outputs of `node` with the numbers in them; none if that is not known."""
    others = [v for i, v in enumerate(node.inputs) if i != at and v is not None]
    (out, *_) = node.outputs
    if node.op_type in _STAYS:
        constant = all(v.is_initializer() or ir.convenience.get_const_tensor(v) is not None for v in others)
        if constant and _sizes(out) is not None and len(_sizes(out) or ()) == numbers.ndim:
            yield out, numbers
    elif node.op_type == "Reshape":  # its operand may be computed
        shape = _sizes(out)
        if shape is not None and math.prod(shape) == numbers.size:
            yield out, numbers.reshape(shape)
    elif traits_of(node).moves_at_most(Moves.SELECTION):
        constants = [ir.convenience.get_const_tensor(v) for v in others]
        if all(c is not None for c in constants):
            feeds = {v.name or "": c.numpy() for v, c in zip(others, constants) if c is not None}
            feeds[node.inputs[at].name or ""] = numbers  # type: ignore[union-attr]
            from onnx.reference import ReferenceEvaluator  # it takes 20 ms

            try:
                found = ReferenceEvaluator(ir.to_proto(node), opsets={"": 18}).run(None, feeds)
            except (ValueError, IndexError, RuntimeError, TypeError):
                return
            yield from zip(node.outputs, found)


def _sizes(value: ir.Value) -> list[int] | None:
    """The shape of `value`, 1 for each dimension that is not known; None if nothing is."""
    if value.shape is None:
        return None
    return [d if isinstance(d, int) else 1 for d in value.shape]

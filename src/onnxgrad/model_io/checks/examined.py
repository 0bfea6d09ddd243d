"""What is known of a node and its operands while it is checked, and checks that many operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.model_io.checks.schema import Formal

Dim = int | None
Check = Callable[["ExaminedNode"], None]


class MisfitError(Exception):
    """What does not fit."""


def need(fits: bool, otherwise: str) -> None:
    """Raise MisfitError(`otherwise`) unless something `fits`."""
    if not fits:
        raise MisfitError(otherwise)


class ExaminedNode:
    """A node under examination: its attributes, and what is known of its operands (an unknown size is None)."""

    def __init__(self, node: ir.Node, asked: Formal, opset: int, certain: bool = True) -> None:
        self.node, self.asked, self.opset, self.certain = node, asked, opset, certain

    @staticmethod
    def sizes(value: ir.Value) -> list[Dim] | None:
        """The shape of `value`, as far as it is known."""
        return None if value.shape is None else [d if isinstance(d, int) else None for d in value.shape]

    def shape(self, i: int) -> list[Dim] | None:
        """The sizes of operand `i`; None if it is left out, or its rank is not known."""
        value = self.node.inputs[i] if i < len(self.node.inputs) else None
        sizes = None if value is None else self.sizes(value)
        return sizes if sizes is None or self.certain else [None] * len(sizes)

    def rank(self, i: int = 0) -> int | None:
        """The number of axes of operand `i`, or None."""
        shape = self.shape(i)
        return None if shape is None else len(shape)

    def attr(self, name: str) -> Any:
        """The attribute, as given or by default; None if there is neither, or it is a function's."""
        given = self.node.attributes.get(name)
        if given is None:
            held = self.asked.defaults.get(name)
            return held.decode() if isinstance(held, bytes) else held
        return None if given.is_ref() else given.value

    def held(self, i: int) -> list[int] | None:
        """The whole numbers that operand `i` holds, if it is a small constant."""
        value = self.node.inputs[i] if i < len(self.node.inputs) else None
        tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
        if tensor is None or tensor.size > 1024 or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            return None
        return [int(v) for v in tensor.numpy().reshape(-1)]


def may_be(a: Dim, b: Dim) -> bool:
    """Whether two sizes may be equal."""
    return a is None or b is None or a == b


def within(
    what: str, axes: Iterable[int] | None, rank: int | None, low: int | None = None, distinct: bool = True
) -> None:
    """Every one of `axes` is an axis of a tensor of `rank`, and none is there twice."""
    if axes is None or rank is None:
        return
    listed = list(axes)
    bottom = -rank if low is None else low
    for axis in listed:
        need(bottom <= axis < rank, f"{what} {axis} is none of {rank} axes")
    if distinct and rank:
        need(len({a % rank for a in listed}) == len(listed), f"{what} {listed} names one twice")


def known(shape: list[Dim] | None) -> str:
    """How messages write a shape."""
    return "?" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def equal(site: ExaminedNode, i: int, j: int) -> None:
    """Operands `i` and `j` have one shape."""
    a, b = site.shape(i), site.shape(j)
    if a is not None and b is not None:
        fits = len(a) == len(b) and all(map(may_be, a, b))
        need(fits, f"operands {i} and {j}, {known(a)} and {known(b)}, should have one shape")


def vector(i: int, size: Callable[[ExaminedNode], Dim], what: str) -> Check:
    """Operand `i` is a vector of as many elements as `size` says."""

    def check(site: ExaminedNode) -> None:
        shape, wanted = site.shape(i), size(site)
        if shape is not None and wanted is not None:
            need(
                len(shape) == 1 and may_be(shape[0], wanted),
                f"operand {i} is {known(shape)}, and should be [{wanted}], {what}",
            )

    return check


def joint(shapes: Sequence[list[Dim] | None]) -> list[Dim]:
    """What `shapes` broadcast to, as far as it is known."""
    given = [s for s in shapes if s is not None]
    dims: list[Dim] = []
    for axis in range(-max(map(len, given), default=0), 0):
        sizes = {s[axis] for s in given if len(s) >= -axis} - {1}
        numbers = sizes - {None}
        need(len(numbers) <= 1, f"{' and '.join(map(known, given))} do not broadcast")
        dims.append(numbers.pop() if numbers else None if sizes else 1)
    return dims


def broadcast(site: ExaminedNode) -> None:
    """All operands broadcast."""
    joint([site.shape(i) for i in range(len(site.node.inputs))])


def onto(shape: list[Dim] | None, wide: list[Dim] | None, i: int) -> None:
    """`shape`, of operand `i`, broadcasts to `wide` and not further."""
    if shape is None or wide is None:
        return
    fits = len(shape) <= len(wide)
    for a, b in zip(reversed(shape), reversed(wide)):
        fits &= a in (None, 1) or may_be(a, b)
    need(fits, f"operand {i}, {known(shape)}, does not broadcast to {known(wide)}")


def ranked(i: int, *, least: int = 0, exactly: int | None = None) -> Check:
    """Operand `i` has so many axes."""

    def check(site: ExaminedNode) -> None:
        rank = site.rank(i)
        if rank is not None:
            wanted = f"{exactly}" if exactly is not None else f"at least {least}"
            need(rank == exactly or (exactly is None and rank >= least), f"operand {i} has {rank} axes, not {wanted}")

    return check


class Checks(dict[str, list[Check]]):
    """The checks of each operator."""

    def add(self, checks: Sequence[Check], *op_types: str) -> None:
        """Have nodes of `op_types` pass `checks` too, in order."""
        for op_type in op_types:
            self.setdefault(op_type, []).extend(checks)

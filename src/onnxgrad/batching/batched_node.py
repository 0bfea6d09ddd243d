"""The view that a batching rule has of one node: its operands, of which some are stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var

#: Writes the stacked form of a node.
Write = Callable[["BatchedNode"], Any]


class Unstackable(Exception):
    """The node has no batching rule for these operands."""


class BatchedNode:
    """One node whose operands may be stacks."""

    def __init__(
        self,
        b: Builder,
        node: ir.Node,
        stacks: Mapping[ir.Value, Var],
        plain: Mapping[ir.Value, Var],
        count: Var | list[int],
    ) -> None:
        self.b, self.node, self.count = b, node, count
        self.int_attr = node.attributes.get_int
        self.values = list(node.inputs)
        self.stacked = [v in stacks for v in self.values]
        self.x: list[Any] = [
            None if v is None else stacks[v] if v in stacks else plain.get(v, Var(b, v)) for v in self.values
        ]

    def rank(self, i: int) -> int:
        """The rank of operand `i`, without the direction."""
        value = self.values[i]
        if value is None:
            raise Unstackable
        return rank_of(value)

    @property
    def out_rank(self) -> int:
        """The rank of the result, without the direction."""
        return rank_of(self.node.outputs[0])

    def constant_ints(self, i: int) -> list[int]:
        """The elements of the vector operand `i`, which must be constant; none if it is omitted."""
        if i >= len(self.x) or self.x[i] is None:
            return []
        array = None if self.stacked[i] else self.x[i].const
        if array is None:
            raise Unstackable
        return [int(n) for n in array.reshape(-1)]

    def only(self, *which: int) -> Var:
        """The first of the operands `which`, which must all be stacks, and the only ones."""
        if self.stacked != [i in which for i in range(len(self.x))]:
            raise Unstackable
        return self.x[which[0]]

    def lift(self, i: int, rank: int) -> Var:
        """Operand `i` as one that broadcasts with stacks of this rank."""
        missing = rank - self.rank(i)
        if not self.stacked[i] or missing <= 0:
            return self.x[i]
        return self.b.Unsqueeze(self.x[i], list(range(1, missing + 1)))

    def stack(self, i: int) -> Var:
        """Operand `i` as a stack; an unbatched operand is expanded."""
        return self.x[i] if self.stacked[i] else repeat_rows(self.b, self.x[i], self.count)

    def emit_again(self, *operands: Any, **changed: Any) -> Any:
        """The node on other operands, with some attributes changed."""
        attributes: dict[str, Any] = dict(self.node.attributes.items()) | changed
        return self.b.emit(
            self.node.op_type, *operands, domain=self.node.domain, outputs=len(self.node.outputs), **attributes
        )


def repeat_rows(b: Builder, x: Var, count: Var | list[int]) -> Var:
    """`x` repeated along a new batch axis."""
    return b.Expand(x, b.join(count, b.shape_of(x)))


def rank_of(value: ir.Value) -> int:
    """The rank of `value`, which must be known."""
    if value.shape is None:
        raise Unstackable
    return len(value.shape)

"""Nodes of a linear map, written once more for a stack of operands: the first axis is the direction.

A matrix that meets a vector in every step of a Scan meets a matrix here, which is many times faster. Derivatives are
linear in their seed, so few operators suffice; where another occurs, the caller falls back on a Scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.walk import subgraphs

#: Writes the stacked form of a node.
Write = Callable[["Step"], Var]


class Unstackable(Exception):
    """A node that has no stacked form here."""


class Step:
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
        self.stacked = [v in stacks for v in node.inputs if v is not None]
        if len(self.stacked) != len(node.inputs):  # one is left out
            raise Unstackable
        self.values = [v for v in node.inputs if v is not None]
        self.x = [stacks[v] if v in stacks else plain.get(v, Var(b, v)) for v in self.values]

    def rank(self, i: int) -> int:
        """The rank of operand `i`, without the direction."""
        return _rank(self.values[i])

    @property
    def out_rank(self) -> int:
        """The rank of the result, without the direction."""
        return _rank(self.node.outputs[0])

    def known(self, i: int) -> list[int]:
        """What the vector operand `i` holds, which must be constant."""
        held = None if i >= len(self.x) or self.stacked[i] else self.x[i].const
        if held is None:
            raise Unstackable
        return [int(n) for n in held.reshape(-1)]

    def only_first(self) -> Var:
        """The first operand, which must be the only stack."""
        if not self.stacked[0] or any(self.stacked[1:]):
            raise Unstackable
        return self.x[0]

    def lifted(self, i: int, rank: int) -> Var:
        """Operand `i` as one that broadcasts with stacks of this rank."""
        missing = rank - self.rank(i)
        if not self.stacked[i] or missing <= 0:
            return self.x[i]
        return self.b.Unsqueeze(self.x[i], list(range(1, missing + 1)))

    def int_attr(self, name: str, default: int) -> int:
        """An attribute of the node."""
        a = self.node.attributes.get(name)
        return default if a is None else a.as_int()


def stack(
    builder: Builder,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Var],
    wanted: Sequence[ir.Value],
    count: Var | list[int],
) -> list[Var]:
    """The stacks of `wanted`, from those of other values (`seeds`), as `nodes` compute them.

    Raises:
        Unstackable: a node has no stacked form; what was written so far is left to be pruned.
    """
    stacks = dict(seeds)
    plain: dict[ir.Value, Var] = {}
    first = next(iter(seeds.values())).value.shape[:1]  # type: ignore[index]
    for node in nodes:
        if node.domain or subgraphs(node):
            raise Unstackable
        if not any(v in stacks for v in node.inputs if v is not None):
            plain |= zip(node.outputs, _again(builder, node, plain))  # it follows from sizes alone
            continue
        (out,) = node.outputs if len(node.outputs) == 1 else (None,)
        if out is None or (node.op_type not in _WRITE and node.op_type != "Shape"):
            raise Unstackable
        step = Step(builder, node, stacks, plain, count)
        if node.op_type == "Shape":
            plain[out] = _shape(step)
            continue
        y = stacks[out] = _WRITE[node.op_type](step)
        if y.value.producer() is not None and out.shape is not None:
            assert y.shape is None or y.rank == len(out.shape) + 1, f"{node.op_type} gave a stack of shape {y.shape}"
            y.value.shape = ir.Shape([*first, *out.shape])
    return [stacks[v] if v in stacks else _repeated(builder, plain.get(v, Var(builder, v)), count) for v in wanted]


def _again(b: Builder, node: ir.Node, plain: Mapping[ir.Value, Var]) -> tuple[Var, ...]:
    """The same node, which is the same in all directions."""
    inputs = [plain[v].value if v is not None and v in plain else v for v in node.inputs]
    return b.append(ir.Node("", node.op_type, inputs, node.attributes.values(), num_outputs=len(node.outputs)))


def _rank(value: ir.Value) -> int:
    if value.shape is None:
        raise Unstackable
    return len(value.shape)


def _repeated(b: Builder, x: Var, count: Var | list[int]) -> Var:
    """A stack of nothing but `x`."""
    return b.Expand(x, b.join(count, b.shape_of(x)))


# --- the operators ---------------------------------------------------------------------------------


def _shape(s: Step) -> Var:
    """The sizes of one: they are no stack."""
    rank = s.rank(0)
    start, end, _ = slice(s.int_attr("start", 0), s.int_attr("end", rank)).indices(rank)
    return s.b.Shape(s.x[0], start=start + 1, end=max(start, end) + 1)


def _elementwise(s: Step) -> Var:
    rank = max(s.rank(i) for i in range(len(s.x)))
    return s.b.emit(s.node.op_type, *(s.lifted(i, rank) for i in range(len(s.x))), **_attributes(s.node))


def _matmul(s: Step) -> Var:
    (a, b), (n, m) = s.x, (s.rank(0), s.rank(1))
    if all(s.stacked):
        if min(n, m) < 2:
            raise Unstackable
        return s.lifted(0, max(n, m)) @ s.lifted(1, max(n, m))
    if s.stacked[0]:
        if m > 2 and n < 2:
            raise Unstackable
        return (a if n == 1 else s.lifted(0, max(n, m))) @ b
    if m == 1:  # a column for each direction: together, the rows of a matrix
        if n > 2:
            raise Unstackable
        return b @ (a if n == 1 else s.b.Transpose(a, perm=[1, 0]))
    return a @ s.lifted(1, max(n, m))


def _gemm(s: Step) -> Var:
    if len(s.x) != 2:
        raise Unstackable
    turned = []
    for i, name in enumerate(("transA", "transB")):
        perm = [0, 2, 1] if s.stacked[i] else [1, 0]
        turned.append(s.b.Transpose(s.x[i], perm=perm) if s.int_attr(name, 0) else s.x[i])
    alpha = s.node.attributes.get("alpha")
    return (turned[0] @ turned[1]) * (1.0 if alpha is None else alpha.as_float())


def _transpose(s: Step) -> Var:
    perm = s.node.attributes.get("perm")
    axes = list(perm.as_ints()) if perm is not None else list(range(s.rank(0)))[::-1]
    return s.b.Transpose(s.x[0], perm=[0, *(p + 1 for p in axes)])


def _reshape(s: Step) -> Var:
    x = s.only_first()
    return s.b.Reshape(x, s.b.join(s.count, s.x[1]), allowzero=s.int_attr("allowzero", 0) or None)


def _expand(s: Step) -> Var:
    s.only_first()
    if s.x[1].shape != (s.out_rank,):
        raise Unstackable
    return s.b.Expand(s.lifted(0, s.out_rank), s.b.join(s.count, s.x[1]))


def _reduce(s: Step) -> Var:
    x = s.only_first()
    axes = s.known(1) if len(s.x) > 1 else []
    if not axes:
        if s.int_attr("noop_with_empty_axes", 0):
            return x
        axes = list(range(s.rank(0)))
    if not axes:  # of a scalar
        return x
    return s.b.emit(s.node.op_type, x, _shifted(axes, s.rank(0)), keepdims=s.int_attr("keepdims", 1))


def _unsqueeze(s: Step) -> Var:
    return s.b.Unsqueeze(s.only_first(), _shifted(s.known(1), s.out_rank))


def _squeeze(s: Step) -> Var:
    return s.b.Squeeze(s.only_first(), _shifted(s.known(1), s.rank(0)))


def _slice(s: Step) -> Var:
    x = s.only_first()
    axes = s.known(3) if len(s.x) > 3 else list(range(len(s.known(1))))
    return s.b.Slice(x, s.x[1], s.x[2], _shifted(axes, s.rank(0)), *s.x[4:])


def _concat(s: Step) -> Var:
    parts = [x if s.stacked[i] else _repeated(s.b, x, s.count) for i, x in enumerate(s.x)]
    return s.b.Concat(*parts, axis=_shifted([s.int_attr("axis", 0)], s.rank(0))[0])


def _gather(s: Step) -> Var:
    x = s.only_first()
    return s.b.Gather(x, s.x[1], axis=_shifted([s.int_attr("axis", 0)], s.rank(0))[0])


def _shifted(axes: Sequence[int], rank: int) -> list[int]:
    """The same axes of a stack."""
    return [axis % rank + 1 for axis in axes]


def _attributes(node: ir.Node) -> dict[str, Any]:
    return dict(node.attributes.items())


_WRITE: dict[str, Write] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Neg", "Sum", "Where", "Cast", "Identity"), _elementwise),
    **dict.fromkeys(("ReduceSum", "ReduceMean"), _reduce),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Slice": _slice,
    "Concat": _concat,
    "Gather": _gather,
}

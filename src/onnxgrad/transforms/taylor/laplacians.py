"""The forward Laplacian: the sum of the second derivatives by every element, in one walk forward.

With each value, its first derivatives by every element are propagated as a stack, and the sum of its second derivatives
(Li et al. 2023, arXiv:2307.08214). A linear operator maps the sum directly, so that the matrix products of a network
have one operand more than those of the Jacobian, where a Hessian has a stack of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.engine.activity import prepare
from onnxgrad.engine.forward import push_forward
from onnxgrad.engine.resolve import rule_of
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, same_shape
from onnxgrad.ir.graph import captured
from onnxgrad.ir.match import not_none
from onnxgrad.model_io import AnyModel
from onnxgrad.rules.rule import Elementwise, add
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.jacobians import check_axis, check_rows, unit_directions
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names
from onnxgrad.transforms.taylor.operators import has_equation
from onnxgrad.transforms.taylor.propagate import push
from onnxgrad.transforms.taylor.series import plus


@transform
def laplacian(model: AnyModel, *, wrt: str, of: Names | None = None, batch: int | None = None) -> Any:
    """The model with the Laplacian of each `of`: Σ ∂²of/∂x² over the elements x of `wrt`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: the name of a graph input, an initializer or an intermediate float value.
        of: names of float values; default: every float output.
        batch: an axis along which the rows of `of` and `wrt` belong together: row n of `of` depends on row n of `wrt`
            only, and its Laplacian is by the elements of that row.

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, and one more output
        ``{of}_laplacian`` (shape and dtype of `of`) for each `of`; ``signature(derived).laplacians`` has the exact
        names. It takes the work of a Jacobian by forward mode and of one jet of order 2.

    Raises:
        BadInput: a value without an axis `batch` or of unknown rank.
        OnnxGradError: as `jvp`.
    """
    check_axis(batch)
    if not isinstance(wrt, str):
        raise BadInput(f"a Laplacian is by one value; name it with `wrt`, not {wrt!r}")
    d = Derivation(model, wrt, of)
    check_rows(d.wrt | d.of, batch)
    ends = list(d.of.values())
    nodes = d.lowered(ends)
    (x,) = (d.builder.now(v) for v in d.wrt.values())
    walk = _Walk(d.builder, {x: unit_directions(d.builder.var(x), batch)})
    for node in prepare(nodes, [x], ends, d.builder):
        walk.propagate(node)
    sums = {v: walk.sums[d.builder.now(v)] for v in ends if d.builder.now(v) in walk.sums}
    for name, value in d.of.items():
        total = sums.get(value) or d.zeros(value)
        d.signature.laplacians[name] = d.output(total, f"{name}_laplacian", value)
    return d.close()


class _Walk:
    """First derivatives (stacks) and sums of second ones of the values met so far."""

    def __init__(self, builder: Builder, stacks: Mapping[ir.Value, Var]) -> None:
        self.b, self.stacks = builder, dict(stacks)
        self.sums: dict[ir.Value, Var] = {}

    def propagate(self, node: ir.Node) -> None:
        """Push both through `node`."""
        b = self.b
        moved = [v for v in dict.fromkeys([*node.inputs, *captured(node)]) if v is not None and v in self.stacks]
        if not moved:
            return
        if self._is_of_one_element(node, moved[0]):
            return self._bend(node, moved[0], node.outputs[0])
        known: list[tuple[ir.Value, int]] = []
        likes: list[Batched] = []  # as many as `write` finds

        def write(slices: list[Var]) -> list[Var]:
            pushed = push(b, node, {v: [b.var(v), s, None] for v, s in zip(moved, slices)}, 2)
            known.extend((v, k) for v, s in pushed.items() for k in (1, 2) if s[k] is not None)
            likes.extend(Batched(b.var(v)) for v, _ in known)
            return [c for s in pushed.values() for c in s[1:] if c is not None]

        results = vmapped(b, [self.stacks[v] for v in moved], write, likes)
        pushed = push_forward(b, node, {v: t for v, t in self.sums.items() if v in moved})
        for (value, k), stack in zip(known, results):
            if k == 1:
                self.stacks[value] = stack
            else:
                pushed[value] = not_none(plus(pushed.get(value), _total(stack, value)))
        self.sums |= pushed

    def _is_of_one_element(self, node: ir.Node, x: ir.Value) -> bool:
        """True if each element of the result depends on only one varying element, in the same place of `x`."""
        if not isinstance(rule_of(node, self.b), Elementwise) or len(node.outputs) != 1:
            return False
        alone = [v for v in node.inputs if v in self.stacks] == [x]
        return alone and same_shape(self.b.var(x), self.b.var(node.outputs[0]))

    def _bend(self, node: ir.Node, x: ir.Value, y: ir.Value) -> None:
        """A function of one element: its slope for all, its second derivative for the sum of squares."""
        b, stack = self.b, self.stacks[x]
        rule = rule_of(node, b)
        simple = rule is not None and has_equation(node, rule)
        one = b.const(1, x.dtype) if simple else b.full_like(b.var(x), 1)
        _, slope, bend = push(b, node, {x: [b.var(x), one, None]}, 2).get(y, [None, None, None])
        if slope is None:
            return
        is_shift = slope.value is one.value
        self.stacks[y] = stack if is_shift else slope * stack
        pushed = [self.sums[x] if is_shift else slope * self.sums[x]] if x in self.sums else []
        if bend is not None:
            pushed.append(bend * _total(stack * stack, y))
        if pushed:
            self.sums[y] = add(pushed)


def _total(stack: Var, like: ir.Value) -> Var:
    """The sum of a stack as a product with ones: ReduceSum along a first axis takes five times as long."""
    b, count = stack.builder, stack.dims[0]
    if not isinstance(count, int):
        return b.ReduceSum(stack, [0], keepdims=0)
    ones = b.Expand(b.const(1, stack.dtype), [count])  # no initializer, which might be taken for a weight
    product = ones @ b.Reshape(stack, [count, -1])
    return b.reshape(product, b.shape_of(b.var(like)))

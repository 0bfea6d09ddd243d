"""Transposes of heads, brought next to attention, which reads and writes through them.

PyTorch's MultiheadAttention puts heads beside the batch, [T, N·H, D], transposes that, cuts N·H again, and scales
queries and keys. A Reshape that cuts axes and a product with one number may as well come before the Transpose; behind a
result, a Reshape that joins axes may as well come after it. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.ir.match import is_op, is_single, not_none, permutation, rank
from onnxgrad.runtime.kernels.elementwise_steps import dims
from onnxgrad.runtime.rewrites.rewrite import replace_value

_Sizes = Sequence[int | str]


def bring_transposes_near(b: Builder) -> None:
    """Bring Transposes next to the products of matrices of several heads."""
    products = [n for n in b.graph if is_op(n, "MatMul") and (rank(n.outputs[0]) or 0) > 2]
    for value in dict.fromkeys(v for node in products for v in node.inputs if v is not None):
        _turn_operand(b, value)
    for node in products:
        _turn_result(b, node.outputs[0])
    prune(b.graph)


def _turn_operand(b: Builder, value: ir.Value) -> None:
    """Let a Transpose be the last node that computes `value`."""
    steps: list[ir.Node] = []
    here = value
    while (node := _step(here)) is not None and (here is value or _has_one_reader(here)):
        steps.insert(0, node)
        here = _operand(node)
    while steps and not is_op(steps[0], "Transpose"):
        del steps[0]
    if value.is_graph_output() or all(is_op(node, "Transpose") for node in steps):
        return
    source, shape = _operand(steps[0]), dims(value)
    axes: list[tuple[int, ...]] = [(i,) for i in range(rank(source) or 0)]  # of the source, and which part of each
    for node in steps:
        if is_op(node, "Transpose"):
            axes = [axes[i] for i in permutation(node) or ()]
        elif is_op(node, "Reshape"):
            parts = _parts(_operand(node), node.outputs[0])
            if parts is None:
                return
            axes = [(*axis, k) for axis, count in zip(axes, parts, strict=True) for k in range(count)]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    sizes = None if shape is None else _one_open([shape[i] for i in order])
    if sizes is None:
        return
    b.before = steps[-1]
    x = b.var(source)
    if any(is_op(node, "Reshape") for node in steps):
        x = b.reshape(x, sizes)
    replace_value(b.Transpose(_scaled(x, steps), perm=[order.index(i) for i in range(len(order))]), value)


def _turn_result(b: Builder, value: ir.Value) -> None:
    """Let a Transpose be the first node that reads `value`."""
    steps: list[ir.Node] = []
    here = value
    while _has_one_reader(here):
        node = _step(next(iter(here.consumers())).outputs[0])
        if node is None or _operand(node) is not here:
            break
        steps.append(node)
        here = node.outputs[0]
    while steps and not is_op(steps[-1], "Transpose"):
        del steps[-1]
    if all(is_op(node, "Transpose") for node in steps):
        return
    groups: list[list[int]] = [[i] for i in range(rank(value) or 0)]  # axes of `value` that became one
    for node in steps:
        if is_op(node, "Transpose"):
            groups = [groups[i] for i in permutation(node) or ()]
        elif is_op(node, "Reshape"):
            parts = _parts(node.outputs[0], _operand(node))
            if parts is None:
                return
            rest = iter(groups)
            groups = [[axis for _ in range(count) for axis in next(rest)] for count in parts]
    last = steps[-1].outputs[0]
    shape = dims(last)
    sizes = None if shape is None else _one_open(shape)
    if sizes is None:
        return
    b.before = steps[-1]
    x = _scaled(b.Transpose(b.var(value), perm=[axis for group in groups for axis in group]), steps)
    replace_value(b.reshape(x, sizes) if any(is_op(node, "Reshape") for node in steps) else x, last)


def _step(value: ir.Value) -> ir.Node | None:
    """The Transpose, Reshape or product with one number that computes `value`."""
    node = value.producer()
    if is_op(node, ("Transpose", "Reshape")):
        return node
    scales = is_op(node, ("Mul", "Div")) and is_single(node.inputs[1]) and rank(node.inputs[1]) in (0, 1)
    return node if scales else None


def _operand(node: ir.Node) -> ir.Value:
    """The operand that a step changes."""
    (value, *_) = node.inputs
    return not_none(value)


def _has_one_reader(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _scaled(x: Var, steps: Sequence[ir.Node]) -> Var:
    """`x` multiplied or divided by the numbers of `steps`."""
    for node in steps:
        if not is_op(node, ("Transpose", "Reshape")):
            x = x.builder.emit(node.op_type, x, node.inputs[1])
    return x


def _one_open(sizes: _Sizes) -> list[int] | None:
    """`sizes` for a Reshape, of which one may be known by name alone; None if more are, or one is 0."""
    found = [d if isinstance(d, int) else -1 for d in sizes]
    return found if 0 not in found and found.count(-1) < 2 else None


def _parts(whole: ir.Value, cut: ir.Value) -> list[int] | None:
    """Into how many axes of `cut` each axis of `whole` is cut; None if axes are joined, or sizes are not known."""
    shapes = dims(whole), dims(cut)
    if shapes[0] is None or shapes[1] is None:
        return None
    joined, left = ([d if isinstance(d, int) else None for d in shape] for shape in shapes if shape is not None)
    ends: tuple[list[int], list[int]] = [], []
    for end, counts in zip((0, -1), ends):
        while joined and (size := joined[end]) is not None:
            del joined[end]
            count, product = 0, 1
            while left and (part := left[end]) is not None and (not count or product < size):
                del left[end]
                count, product = count + 1, product * part
            if not count or product != size:
                return None
            counts.append(count)
    if len(joined) > 1 or left.count(None) != len(joined) or (left and not joined):
        return None
    return [*ends[0], *([len(left)] if joined else []), *ends[1][::-1]]

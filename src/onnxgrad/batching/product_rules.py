"""Batching rules of products, and of operators that treat a batch row by row.

A matrix that meets a stack of vectors meets a matrix; directions of a batch are more rows of it; directions of the
filters of a convolution are more filters, and directions of both are more groups.
"""

from __future__ import annotations

from typing import Any

from onnxgrad.batching.batched_node import BatchedNode, Unstackable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.shapes import move_axis


def matmul(s: BatchedNode) -> Var:
    """Write as few and as large products as the ranks allow.

    A vector is a row as left operand and a column as right operand.
    """
    (a, b), (n, m) = s.x, (s.rank(0), s.rank(1))
    if s.stacked == [True, False] and (n > 1 or m <= 2):
        return _product(a if n == 1 else s.lift(0, max(n, m)), b)
    if s.stacked == [False, True] and m > 1:
        return _product(a, s.lift(1, max(n, m)))
    if s.stacked == [False, True] and n <= 2:  # a column for each direction: together, the rows of a matrix
        return _product(b, a if n == 1 else s.b.Transpose(a, perm=[1, 0]))
    rank = max(n, m, 2)
    sides = []
    for i, (x, own) in enumerate(((a, n), (b, m))):
        if own == 1:  # a row on the left, a column on the right
            x, own = s.b.Unsqueeze(x, [-2 if i == 0 else -1]), 2
        if s.stacked[i] and rank > own:
            x = s.b.Unsqueeze(x, list(range(1, rank - own + 1)))
        sides.append(x)
    y = _product(*sides)
    gone = [axis for axis, own in ((rank - 1, n), (rank, m)) if own == 1]
    return s.b.Squeeze(y, gone) if gone else y


def _product(x: Var, y: Var) -> Var:
    """x·y. An empty sum is zero, but ONNX Runtime leaves the memory of a stack of such products uninitialized."""
    product = x @ y
    size = (x.shape or (0,))[-1]
    if (isinstance(size, int) and size) or max(x.rank, y.rank) < 3:
        return product
    b = x.builder
    return b.Where(b.shape_of(x, x.rank - 1) > 0, product, 0)


def gemm(s: BatchedNode) -> Var:
    """Gemm of matrices; for stacks, the transposition, scaling and addition are separate nodes."""
    turned = []
    for i, name in enumerate(("transA", "transB")):
        perm = [0, 2, 1] if s.stacked[i] else [1, 0]
        turned.append(s.b.Transpose(s.x[i], perm=perm) if s.int_attr(name, 0) else s.x[i])
    alpha, beta = (s.node.attributes.get_float(n, 1.0) for n in ("alpha", "beta"))
    product = _product(*turned) if any(s.stacked[:2]) else s.b.Unsqueeze(turned[0] @ turned[1], [0])
    y = product * alpha
    return y if len(s.x) < 3 or s.x[2] is None else y + s.lift(2, 2) * beta


def einsum(s: BatchedNode) -> Var:
    """Add one letter to the stacked terms and to the result."""
    equation = s.node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, right = equation.partition("->")
    letter = next((c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in equation), None)
    if not arrow or letter is None:
        raise Unstackable
    terms = [letter + t if stacked else t for t, stacked in zip(left.split(","), s.stacked)]
    return s.b.emit("Einsum", *s.x, equation=f"{','.join(terms)}->{letter}{right}")


# --- rows of a batch -------------------------------------------------------------------------------


def _merge_axes(b: Builder, x: Var, axis: int) -> Var:
    """`x` with axes `axis` and `axis` + 1 as one."""
    one = b.shape_of(x, axis, axis + 1) * b.shape_of(x, axis + 1, axis + 2)
    return b.reshape(x, b.join(b.shape_of(x, 0, axis) if axis else [], b.folded(one), b.shape_of(x, axis + 2)))


def _split_axis(b: Builder, x: Var, axis: int, *sizes: Any) -> Var:
    """`x` with axis `axis` as several, of these sizes."""
    return b.reshape(x, b.join(b.shape_of(x, 0, axis) if axis else [], *sizes, b.shape_of(x, axis + 1)))


def rows(s: BatchedNode) -> Var:
    """The directions are more rows of the batch."""
    b, x = s.b, s.only(0)
    if len(s.node.outputs) != 1 or s.int_attr("training_mode"):
        raise Unstackable
    return _split_axis(b, s.emit_again(_merge_axes(b, x, 0), *s.x[1:]), 0, s.count, b.shape_of(x, 1, 2))


def affine_grid(s: BatchedNode) -> Var:
    """More rows of the parameters and of the sizes. In a Scan, ONNX Runtime loads no AffineGrid of constant sizes."""
    b, theta, size = s.b, s.only(0), s.x[1]
    sizes = b.join(b.folded(b.Mul(s.count, b.Slice(size, [0], [1]))), b.folded(b.Slice(size, [1], [5])))
    return _split_axis(b, s.emit_again(_merge_axes(b, theta, 0), sizes), 0, s.count, b.shape_of(theta, 1, 2))


def recurrent(s: BatchedNode) -> list[Var]:
    """Rows as well: of sequences, of their lengths and of first states; the weights are shared."""
    b, batch = s.b, {0: 1, 4: 0, 5: 1, 6: 1}
    if s.int_attr("layout", 0) or any(stacked and i not in batch for i, stacked in enumerate(s.stacked)):
        raise Unstackable
    operands = list(s.x)
    for i in [i for i in batch if i < len(s.x) and s.x[i] is not None]:
        x, at = s.stack(i), batch[i]
        operands[i] = _merge_axes(b, move_axis(x, 0, at), at)
    each = b.shape_of(Var(b, s.values[0]), 1, 2) if not s.stacked[0] else b.shape_of(s.x[0], 2, 3)  # type: ignore[arg-type]
    again = s.emit_again(*operands)
    results = []
    for y in again if isinstance(again, tuple) else (again,):
        at = y.rank - 2
        results.append(move_axis(_split_axis(b, y, at, s.count, each), at, 0))
    return results


def resize(s: BatchedNode) -> Var:
    """Rows as well, where it leaves the batch axis alone."""
    scales, axes = s.x[2] if len(s.x) > 2 else None, s.node.attributes.get_ints("axes")
    factors = None if scales is None else scales.const
    if factors is None or not factors.size or s.constant_ints(1):
        raise Unstackable
    at = [a % s.rank(0) for a in axes] if axes is not None else list(range(s.rank(0)))
    if any(a == 0 and scale != 1 for a, scale in zip(at, factors)):
        raise Unstackable
    return rows(s)


def conv(s: BatchedNode) -> Var:
    """Rows, filters or groups, by which of image and filters are stacks; for ConvTranspose as well."""
    if s.stacked[:2] == [True, False]:
        return rows(s)
    if any(s.stacked[2:]) or len([x for x in s.x if x is not None]) > 2:
        raise Unstackable
    return _multiply_groups(s) if s.stacked[0] else _filters(s)


def _filters(s: BatchedNode) -> Var:
    """The directions are more filters of every group."""
    b, w, groups = s.b, s.x[1], s.int_attr("group", 1)
    if s.node.op_type == "ConvTranspose":  # [K, C, M/g, …]
        each = b.shape_of(w, 2, 3)
        w = _merge_axes(b, _swap_first_axes(w), 1)
    else:  # [K, M, C/g, …]
        if groups > 1 and not isinstance((w.shape or (None, None))[1], int):
            raise Unstackable
        each = b.shape_of(w, 1, 2) if groups == 1 else b.const([w.shape[1] // groups])
        if groups > 1:
            w = _merge_axes(b, _swap_first_axes(_split_axis(b, w, 1, [groups], each)), 0)  # [g·K, M/g, …]
        w = _merge_axes(b, w, 0)
    y = s.emit_again(s.x[0], w)
    y = b.Transpose(_split_axis(b, y, 1, [groups], s.count, each), perm=[2, 0, 1, *range(3, s.out_rank + 2)])
    return _merge_axes(b, y, 2)


def _multiply_groups(s: BatchedNode) -> Var:
    """The directions are more groups."""
    b, (x, w), count = s.b, s.x[:2], (s.x[0].shape or (None,))[0]
    if not isinstance(count, int):
        raise Unstackable
    each = b.shape_of(w, 1, 2)
    if s.node.op_type == "ConvTranspose":
        each = b.shape_of(w, 2, 3) * s.int_attr("group", 1)
    y = s.emit_again(_merge_axes(b, _swap_first_axes(x), 1), _merge_axes(b, w, 0), group=count * s.int_attr("group", 1))
    return _swap_first_axes(_split_axis(b, y, 1, [count], each))


def _swap_first_axes(x: Var) -> Var:
    """`x` with its first two axes exchanged."""
    return x.builder.Transpose(x, perm=[1, 0, *range(2, x.rank)])

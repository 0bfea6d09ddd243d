"""Resize: interpolation between the elements of a tensor, axis by axis.

In every mode, y is linear in x and separable: a product with a matrix M along each axis. The cotangent is
multiplied by the transposed matrices. The formulas of the specification do not serve to compute M: runtimes
round them, and even read them, differently. Instead the same operator is applied to an identity matrix in the
same graph, so that M is always that of the runtime in use. For known sizes, ONNX Runtime folds it into a constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoDerivative
from onnxgrad.ir import Var
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.match import HALF
from onnxgrad.ir.shapes import move_axis, same_dim
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule
from onnxgrad.rules.resize.coordinates import Axis, check_moves, crops
from onnxgrad.rules.rule import Result, Tangents

_AVERAGED = lowering("averaged_copies", "Resize to copies", "AveragePool", "products with matrices")

#: How coordinates and rounding combine to copies of every element, where scales are whole numbers.
_COPIES = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")}


def _axes(op: Op, x: Var) -> list[int]:
    """The axes that scales, sizes and roi refer to."""
    given = op.attr("axes")
    return list(range(x.rank)) if given is None else [a % x.rank for a in given]


def _stretches(op: Op) -> bool:
    """True if every axis has a scale of its own, not one scale that keeps the aspect ratio."""
    return op.inputs[3] is None or op.attr("keep_aspect_ratio_policy") in (None, "stretch")


def _is_identity(op: Op, x: Var, y: Var, place: int, axis: int) -> bool:
    """True if an axis is copied. An equal size is not enough: a scale of 1.05 moves elements."""
    scales = op.inputs[2]
    if crops(op) or not _stretches(op):
        return False
    if scales is not None:
        return scales.const is not None and bool(scales.const[place] == 1)
    return x.shape is not None and y.shape is not None and same_dim(x.shape[axis], y.shape[axis])


def _surely_moves(op: Op, x: Var, y: Var, place: int, axis: int) -> bool:
    """True if an axis cannot keep its size while its elements move."""
    scales = op.inputs[2]
    known = [v.shape[axis] if v.shape is not None else None for v in (x, y)]
    if all(isinstance(d, int) for d in known) and known[0] != known[1]:
        return True
    if scales is None:
        return not crops(op)
    return scales.const is not None and not 1 <= float(scales.const[place]) < 2


def _companion(op: Op, x: Var, y: Var) -> Any:
    """The new size, as a vector, of an axis of size 1 beside the matrix: 2 if any axis of x changes its size.

    ONNX Runtime copies a tensor if no axis changes its size, and ignores the scales and the region then.
    The matrix must be copied or interpolated just as x is.
    """
    dims = [*(x.shape or ()), *(y.shape or ())]
    if dims and all(isinstance(d, int) for d in dims):
        return [1 + (dims[: x.rank] != dims[x.rank :])]
    same = op.Cast(op.Equal(op.Shape(x), op.Shape(y)), to=int(ir.DataType.INT64))
    return op.Sub(2, op.ReduceMin(same, None, keepdims=1))


def _matrix(op: Op, x: Var, y: Var, place: int, axes: list[int]) -> Var:
    """The matrix [n, o] along the axis that is at `place` among `axes`: one unit vector per row, resized."""
    count = op.shape_of(x, axes[place], axes[place] + 1 or None)
    dtype = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT  # EyeLike knows no halves
    unit = op.EyeLike(op.ConstantOfShape(op.join(count, count)), dtype=int(dtype or 0))
    if not _stretches(op):
        return op.cast_like(_matrix_of_all(op, x, unit, place, axes), x)

    def mine(v: Var | None, *places: int) -> Any:
        if v is None:
            return None
        return op.const(v.const[list(places)]) if v.const is not None else op.Gather(v, list(places), axis=0)

    region, scale, size = op.inputs[1:4]
    region = mine(region, place, place + len(axes)) if crops(op) else None
    if region is not None and region.dtype in HALF:
        region = op.cast_like(region, unit)  # whose type it must have on ONNX Runtime
    scale, size = mine(scale, place), mine(size, place)
    attrs: dict[str, Any] = {a.name: a for a in op.node.attributes.values()}
    if crops(op):
        attrs["extrapolation_value"] = 0.0
    beside = [1] if _surely_moves(op, x, y, place, axes[place]) else _companion(op, x, y)
    if beside == [1]:
        return op.cast_like(op.Resize(unit, region, scale, size, **attrs | {"axes": [1]}), x)
    if region is not None:
        region = op.Concat(*_pad_region(op, region), axis=0)
    if size is not None:
        size = op.join(size, beside)
    else:
        factor = np.array(beside, np.float32) if isinstance(beside, list) else op.Cast(beside, to=1)
        scale = op.Concat(scale, factor, axis=0)
    wide = op.Resize(op.Unsqueeze(unit, [1, 3]), region, scale, size, **attrs | {"axes": [2, 3]})
    return op.cast_like(op.Squeeze(op.Slice(wide, [0], [1], [3]), [1, 3]), x)


def _pad_region(op: Op, region: Var) -> list[Any]:
    """A region of one axis as one of two axes, of which the second is not cropped."""
    start, end = (op.Slice(region, [k], [k + 1]) for k in (0, 1))
    whole = [op.const(v, region.dtype) for v in ([0.0], [1.0])]
    return [start, whole[0], end, whole[1]]


def _matrix_of_all(op: Op, x: Var, unit: Var, place: int, axes: list[int]) -> Var:
    """The same where the scale depends on every axis: each unit vector is laid out over the other axes.

    A result that is constant along an axis stays so, and one place of the other axes suffices.
    """
    if crops(op):
        raise NoDerivative("there is no rule for a region of interest beside an aspect ratio that is kept")
    extra = [1] if len(axes) > 1 else []  # cubic knows 2 and 4 axes only
    along = list(range(1 + len(extra), 1 + len(extra) + len(axes)))
    others = [k for k in along if k != along[place]]
    dims = [op.shape_of(x, a, a + 1 or None) for a in axes]
    spread = op.Expand(op.Unsqueeze(unit, [*extra, *others]), op.join(dims[place], extra, *dims)) if others else unit
    # ONNX Runtime reads the policy in its own way where axes are counted from the end: count as the node does
    counted = [a - along[-1] - 1 if given < 0 else a for a, given in zip(along, op.attr("axes") or along)]
    attrs = {a.name: a for a in op.node.attributes.values()} | {"axes": counted}
    resized = op.Resize(spread, None, None, op.inputs[3], **attrs)
    if not others:
        return resized
    first = op.Slice(resized, [0] * len(others), [1] * len(others), others)
    return op.Squeeze(first, [*extra, *others])


def _multiply_along(op: Op, g: Var, m: Var, axis: int) -> Var:
    """Σₒ m[·, o]·g[…, o, …] along `axis`."""
    if axis == g.rank - 1:
        return g @ op.Transpose(m, perm=[1, 0])
    if axis == g.rank - 2:
        return m @ g
    rows = m @ op.reshape(g, op.join(op.shape_of(g, 0, axis + 1), [-1]))
    return op.reshape(rows, op.join(op.shape_of(g, 0, axis), op.shape_of(m, 0, 1), op.shape_of(g, axis + 1)))


def _whole_scales(op: Op, x: Var, axes: list[int]) -> list[int] | None:
    """The number of repeats of each element along each spatial axis; None unless Resize only repeats."""
    form = (op.attr("coordinate_transformation_mode"), op.attr("nearest_mode"))
    scales, sizes = op.inputs[2:4]
    if op.attr("mode") != "nearest" or form not in _COPIES or not _stretches(op) or not 3 <= x.rank <= 5:
        return None
    factors = [1.0] * x.rank
    if scales is not None:
        known = None if scales.const is None else scales.const.tolist()
    else:
        dims = [(x.shape or ())[a] for a in axes]
        asked = None if sizes is None or sizes.const is None else sizes.const.tolist()
        static = asked is not None and all(isinstance(d, int) and d > 0 for d in dims)
        known = [s / int(d) for s, d in zip(asked, dims)] if asked is not None and static else None  # type: ignore[arg-type]
    if known is None:
        return None
    for axis, factor in zip(axes, known):
        factors[axis] = factor
    whole = [round(f) for f in factors]
    if any(k < 1 or k != f for k, f in zip(whole, factors)) or whole[:2] != [1, 1]:
        return None
    return whole[2:]


def _axis_first(op: Op, x: Var, axis: int) -> Var:
    """`axis` of x before all the others, which become one."""
    moved = move_axis(x, axis, 0)
    return op.reshape(moved, op.join(op.shape_of(x, axis, axis + 1 or None), [-1])) if x.rank != 2 else moved


def _resize_axes(op: Op, x: Var, y: Var, axes: list[int], but: int | None = None) -> Var:
    """`x` resized along every axis, but not along that at place `but`."""
    z = x
    for place, axis in enumerate(axes):
        if place != but and not _is_identity(op, x, y, place, axis):
            z = _multiply_along(op, z, op.Transpose(_matrix(op, x, y, place, axes), perm=[1, 0]), axis)
    return z


def _moves(op: Op, asked: list[bool]) -> tuple[bool, bool]:
    """Two flags: the region, and the scales, are active and move the coordinates."""
    interpolates = op.attr("mode") != "nearest"
    roi = asked[1] and interpolates and crops(op)
    scales = asked[2] and interpolates and not crops(op)
    check_moves(op, roi, scales)
    return roi, scales


def _moved_places(op: Op, g: Var, x: Var, y: Var) -> list[tuple[Axis, Var]]:
    """For each axis the cotangents of the places that it reads: ĉᵢ = Σⱼ K'(cᵢ - j)·Σ g[…, i, …]·z[…, j, …],
    with z = x resized along the other axes."""
    axes, found = _axes(op, x), []
    for place, axis in enumerate(axes):
        line = Axis(op, x, y, place, axis, len(axes))
        z = _resize_axes(op, x, y, axes, place)
        met = _axis_first(op, g, axis) @ op.Transpose(_axis_first(op, z, axis), perm=[1, 0])
        cast = met if met.dtype == line.dtype else op.Cast(met, to=int(line.dtype))
        found.append((line, op.ReduceSum(cast * line.slopes(), [1], keepdims=0)))
    return found


def _sum_parts(op: Op, parts: list[Var], like: Var) -> Var:
    """Σ of each part, in a vector like `like`."""
    sums = [op.ReduceSum(p, [0], keepdims=1) for p in parts]
    return op.cast_like(sums[0] if len(sums) == 1 else op.Concat(*sums, axis=0), like)


def _resize_jvp(op: Op, tangents: Tangents, x: Var, roi: Var, scales: Var, sizes: Var, y: Var) -> Result:
    """The tangent, resized, which is 0 beyond the edge, plus the effect of moving coordinates."""
    given = [t is not None for t in tangents] + [False] * 3
    by_roi, by_scales = _moves(op, given)
    out = None
    if given[0]:
        out = op.replay(tangents[0], roi, scales, sizes, **({"extrapolation_value": 0.0} if crops(op) else {}))
    axes = _axes(op, x)
    for place, axis in enumerate(axes) if by_roi or by_scales else ():
        line = Axis(op, x, y, place, axis, len(axes))
        if by_roi:
            start, end = (line.at(tangents[1], p) for p in (place, place + len(axes)))
            moved = start * line.by_region()[0] + end * line.by_region()[1]
        else:
            moved = line.at(tangents[2], place) * line.by_scale()
        m = op.cast_like(op.Unsqueeze(moved, [1]) * line.slopes(), x)
        part = _multiply_along(op, _resize_axes(op, x, y, axes, place), m, axis)
        out = part if out is None else out + part
    return op.zeros_like(y) if out is None else out


@rule("Resize", wrt=(0, 1, 2), jvp=_resize_jvp)
def resize(op: Op, g: Var, x: Var, roi: Var | None, scales: Var | None, sizes: Var, y: Var) -> Result:
    """y = M₁ ⊗ … ⊗ Mₖ · x, one matrix of interpolation per axis: M₁ᵀ ⊗ … ⊗ Mₖᵀ · g

    With respect to roi and scales Σᵢ ĉᵢ·∂cᵢ for the places cᵢ that are read along an axis, with ĉᵢ the slope of y
    there; 0 where the nearest element is taken, and for a roi or scales that move no place.
    """
    by_roi, by_scales = _moves(op, [False, op.needs[1] and roi is not None, op.needs[2] and scales is not None])
    moved = _moved_places(op, g, x, y) if by_roi or by_scales else []
    region = scale = None
    if by_roi and roi is not None:
        rates = [(hat * a, hat * b) for line, hat in moved for a, b in [line.by_region()]]
        region = _sum_parts(op, [a for a, _ in rates] + [b for _, b in rates], roi)
    if by_scales and scales is not None:
        scale = _sum_parts(op, [hat * line.by_scale() for line, hat in moved], scales)
    return _pull_back(op, g, x, y) if op.needs[0] else None, region, scale


def _pull_back(op: Op, g: Var, x: Var, y: Var) -> Var:
    """M₁ᵀ ⊗ … ⊗ Mₖᵀ · g"""
    if y.shape is not None and 0 in y.shape:
        return op.zeros_like(x)
    axes = _axes(op, x)
    copies = _whole_scales(op, x, axes) if _AVERAGED.is_enabled else None
    if copies:
        return op.AveragePool(g, kernel_shape=copies, strides=copies) * float(np.prod(copies))
    for place in sorted(range(len(axes)), key=lambda p: -axes[p]):
        if not _is_identity(op, x, y, place, axes[place]):
            g = _multiply_along(op, g, _matrix(op, x, y, place, axes), axes[place])
    if x.shape is not None and g.value.producer() is not None:
        g.value.shape = ir.Shape(x.shape)
    return g

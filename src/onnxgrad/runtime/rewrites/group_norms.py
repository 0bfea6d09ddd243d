"""Normalizations of channels or groups, with statistics that both passes read, and one step for groups and channels.

- ONNX Runtime's InstanceNormalization takes one thread and returns no statistics, which the backward pass computes
  again. Written out, both passes share x - μ and 1/σ, and x itself is free.
- PyTorch writes GroupNorm as an InstanceNormalization of a view of groups, and then a product and a sum with the
  parameters of channels. With d = x - μ and the cotangent g of the product x̂·s, the sums P of g and Q of g·d over
  the pixels of each channel are all that has to be summed: those of groups are sums of s·P and s·Q, and the cotangents
  of the parameters are Σ P and Σ Q/σ. Then neither x̂ nor g·s is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import (
    Found,
    constant,
    is_op,
    is_zero,
    not_none,
    only_reader,
    pattern,
    producer,
    rank,
    single_constant,
)
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_found
from onnxgrad.runtime.rewrites.scaled_channels import is_column
from onnxgrad.runtime.setting import Setting

_AWAY = pattern("Sub", "x", pattern("ReduceMean", "x", "axes", name="mean"), name="away")
_VARIANCE = pattern("ReduceMean", pattern("Mul", _AWAY, "away"), "axes", name="variance")
_INVERSE = pattern("Reciprocal", pattern("Sqrt", pattern("Add", _VARIANCE, "epsilon")), name="inverse")
# The cotangent of x, as the rule of InstanceNormalization writes it.
_LEVEL = pattern("Mul", pattern("ReduceSum", "g", "axes", name="level"), "factor")
_TOTAL = pattern("ReduceSum", pattern("Mul", "g", "away"), "axes", name="slope")
_SLOPE = pattern("Mul", pattern("Mul", pattern("Mul", _TOTAL, "inverse"), "factor"), "inverse")
_COTANGENT = pattern("Sub", pattern("Sub", pattern("Mul", "g", "gain"), _LEVEL), pattern("Mul", "away", _SLOPE))
_SCALED = pattern("Reshape", pattern("Mul", "g", "scale", in_any_order=True), "shape")


#: The lengths of rows of squares.
_SHORTEST, _LONGEST = 64, 1024


class _Channels(NamedTuple):
    """The scale of channels after a normalization of groups, and its cotangents.

    Attributes:
        view: the Reshape of the normalized groups to channels.
        product: the channels times their scale.
        scale: of the channels.
        g: the cotangent of the product.
        factor: 1/σ over the number of elements of a group.
        back: the Reshape of the cotangent of x to channels.
    """

    view: ir.Node
    product: ir.Node
    scale: ir.Value
    g: ir.Value
    factor: ir.Value
    back: ir.Node


class _Site(NamedTuple):
    """The values x - μ and 1/σ that the backward pass of a normalization computes again."""

    away: ir.Value
    inverse: ir.Value
    channels: _Channels | None


def _find(graph: ir.Graph) -> dict[ir.Node, _Site]:
    """The sites of `graph`, by their normalizations."""
    norms = {node.inputs[0]: node for node in graph if is_op(node, "InstanceNormalization")}
    statistics = {}
    for node in graph if norms else ():
        found = _INVERSE.match(node.outputs[0])
        if found is not None and found["x"] in norms and _is_same(norms[found["x"]], found):
            statistics[found["away"]] = found
    sites: dict[ir.Node, _Site] = {}
    if statistics:
        places = {node: k for k, node in enumerate(graph)}
        cotangents = {}
        for node in places:
            scaled = producer(node.inputs[1], "Mul") if is_op(node, "Sub") else None
            given = None if scaled is None else statistics.get(not_none(scaled.inputs[0]))
            if given is not None and (found := next(_COTANGENT.matches(node.outputs[0], given), None)) is not None:
                cotangents[found["away"]] = found, node
        for away, found in statistics.items():
            norm = norms[found["x"]]
            if places[norm] < places[not_none(away.producer())]:
                channels = _channels(norm, *cotangents[away], places) if away in cotangents else None
                sites[norm] = _Site(away, found["inverse"], channels)
    return sites


def _is_same(norm: ir.Node, found: Found) -> bool:
    """True if `found` are the statistics of `norm`."""
    x, axes, epsilon = found["x"], constant(found["axes"]), single_constant(found["epsilon"])
    if x.dtype != ir.DataType.FLOAT or x.shape is None or axes is None or epsilon is None:
        return False
    is_equal = np.float32(norm.attributes.get_float("epsilon", 1e-5)) == epsilon.flat[0]
    return bool(is_equal) and axes.tolist() == list(range(2, len(x.shape))) and _keep_axes(found, "mean", "variance")


def _keep_axes(found: Found, *names: str) -> bool:
    """True if reductions keep the axes of x."""
    return all(rank(found[name]) == rank(found["x"]) for name in names)


def _channels(norm: ir.Node, found: Found, cotangent: ir.Node, places: Mapping[ir.Node, int]) -> _Channels | None:
    """The scale of channels after `norm`, and its cotangents, where they are as PyTorch writes them; else None."""
    view, back = (only_reader(node.outputs[0], "Reshape") for node in (norm, cotangent))
    one, zero = (constant(v) for v in norm.inputs[1:3])
    if view is None or back is None or one is None or zero is None or (one != 1).any() or zero.any():
        return None
    seen = view.outputs[0]
    products = [node for node in seen.consumers() if is_op(node, "Mul")]
    for scaled in _SCALED.matches(found["g"]) if _keep_axes(found, "level", "slope") else ():
        g, scale = scaled["g"], scaled["scale"]
        product = next((node for node in products if scale in node.inputs and g not in node.inputs), None)
        if product is None or not _has_groups(found["x"], seen) or not is_column(scale, seen):
            continue
        is_after = all(places[reader] > places[product] for reader in g.consumers())
        if is_after and all(same_dims(_dims(v), _dims(seen)) for v in (g, back.outputs[0])):
            return _Channels(view, product, scale, g, found["factor"], back)
    return None


def _dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...] | None:
    return None if value.shape is None else value.shape.dims


def _has_groups(x: ir.Value, seen: ir.Value) -> bool:
    """True if `seen` has the channels of the groups x."""
    groups, channels = _dims(x), _dims(seen)
    if groups is None or channels is None or len(channels) < 3 or not same_dim(groups[0], channels[0]):
        return False
    parts, whole = groups[1], channels[1]
    return isinstance(parts, int) and isinstance(whole, int) and parts > 0 and whole > 0 and whole % parts == 0


def _write(b: Builder, sites: Mapping[ir.Node, _Site]) -> int:
    for b.before, site in sites.items():
        _share(b, b.before, site)
    return len(sites)


def _share(b: Builder, norm: ir.Node, site: _Site) -> None:
    """Write a normalization with the statistics of the backward pass."""
    x, scale, shift = (b.var(not_none(v)) for v in norm.inputs)
    axes = list(range(2, x.rank))
    away = x - b.ReduceMean(x, axes, keepdims=1)
    inverse = 1 / b.Sqrt(_mean_square(b, away, axes) + norm.attributes.get_float("epsilon", 1e-5))
    column = np.array([-1, *[1] * (x.rank - 2)], np.int64)
    y = away * (inverse * b.reshape(scale, column))
    if not is_zero(shift.value):
        y = y + b.reshape(shift, column)
    if site.channels is not None:
        _join(b, site.channels, away, inverse)
    for new, old in (away, site.away), (inverse, site.inverse), (y, norm.outputs[0]):
        replace_value(new, old)


def _mean_square(b: Builder, x: Var, axes: list[int]) -> Var:
    """The mean of x² over `axes`, the last: first of rows, whose numbers ONNX Runtime adds one after the other."""
    dims = [d for d in not_none(x.shape)[2:] if isinstance(d, int)]
    count = math.prod(dims) if len(dims) == len(axes) else 0
    row = max((n for n in range(_SHORTEST, _LONGEST + 1) if count and count % n == 0), default=0)
    if not row:
        return b.ReduceMean(x * x, axes, keepdims=1)
    rows = b.Reshape(x, b.const(np.array([0, 0, count // row, row], np.int64)))
    squares = b.ReduceMean(b.ReduceSumSquare(rows, [3], keepdims=1), [2, 3], keepdims=1)
    return b.Reshape(squares * (1 / row), b.const(np.array([0, 0, *[1] * len(axes)], np.int64)))


def _join(b: Builder, at: _Channels, away: Var, inverse: Var) -> None:
    """Scale groups and channels in one step, in both passes."""
    seen, g, scale = b.var(at.view.outputs[0]), b.var(at.g), b.var(at.scale)
    groups, channels = not_none(away.shape)[1], not_none(seen.shape)[1]
    assert isinstance(groups, int)
    assert isinstance(channels, int)
    column = b.const(np.array([0, channels, *[1] * (seen.rank - 2)], np.int64))
    ones = b.const(np.ones(channels // groups, np.float32))

    def spread(v: Var) -> Var:
        return b.Reshape(v * ones, column)

    def add_up(v: Var) -> Var:
        split = b.Reshape(v * scale, b.const(np.array([0, groups, channels // groups], np.int64)))
        return b.ReduceSum(split, [2], keepdims=1)

    b.before = at.product
    d = b.Reshape(away, not_none(at.view.inputs[1]), allowzero=at.view.attributes.get_int("allowzero", 0) or None)
    d.value.shape = seen.value.shape
    gain = spread(inverse) * scale
    replace_value(d * gain, at.product.outputs[0])
    pixels, readers = list(range(2, seen.rank)), set(at.g.consumers())
    b.before = next(node for node in b.graph if node in readers)
    level, slope = (b.ReduceSum(v, pixels, keepdims=1) for v in (g, g * d))
    slope_of_scale = slope * spread(inverse)
    for reader in readers:
        if _adds_up_all(reader, seen.rank):
            reader.replace_input_with(0, level.value)
        elif is_op(reader, "Mul") and seen.value in reader.inputs:
            total = only_reader(reader.outputs[0], "ReduceSum")
            if total is not None and _adds_up_all(total, seen.rank):
                total.replace_input_with(0, slope_of_scale.value)
    b.before, factor = at.back, b.var(at.factor)
    level, slope = add_up(level) * factor, add_up(slope) * inverse * factor * inverse
    replace_value(g * gain - (d * spread(slope) + spread(level)), at.back.outputs[0])


def _adds_up_all(node: ir.Node, count: int) -> bool:
    """True for a sum over all of `count` axes but that of channels."""
    axes = constant(node.inputs[1]) if is_op(node, "ReduceSum") and len(node.inputs) > 1 else None
    return axes is not None and sorted(axes % count) == [0, *range(2, count)]


GROUP_NORMS = replace(
    rewrite_found(
        "group_norms",
        "reductions whose results both passes read; one step for the scales of groups and channels",
        "InstanceNormalization, and GroupNorm as PyTorch writes it, with cotangents, float32",
        _find,
        _write,
    ),
    unless=Setting.keeps_functions,
)

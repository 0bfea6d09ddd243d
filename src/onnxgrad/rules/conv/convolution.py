"""Convolutions: Conv and ConvTranspose, each other's transposes."""

from __future__ import annotations

from onnxgrad.ir import Var
from onnxgrad.rules.conv.geometry import (
    Windows,
    attributes,
    crop,
    dim,
    pad,
    size,
    spatial,
    split,
    spread,
    tap,
    unpad,
    windows,
)
from onnxgrad.rules.conv.weight import correlate
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result


def over_channels(op: Op, x: Var) -> Var:
    """The sum over all axes but that of the channels."""
    return op.ReduceSum(x, [0, *range(2, x.rank)], keepdims=0)


@linear("Conv", wrt=(0, 1), bias=2)
def conv(op: Op, g: Var, x: Var, w: Var) -> Result:
    """y = x ⋆ w + b: (g spread by w, x correlated with g, Σ g)

    x̄[n, c, q] = Σ ḡ[n, m, p]·w[m, c, i] and w̄[m, c, i] = Σ ḡ[n, m, p]·x[n, c, q] over all p, i with
    q = p·stride + i·dilation - head; b̄[m] = Σ ḡ[n, m, p].
    """
    where, pads = windows(op, x, w)
    padded = pad(op, x, pads)
    dims = spatial(op, padded)
    dx = unpad(op, spread(op, g, w, where, dims), pads, x) if op.needs[0] else None
    sizes = [size(x, axis) for axis in range(2, x.rank)]
    if dx is not None and where.rank == 2 and where.exact and not pads and None not in sizes:
        settings = {"strides": where.strides, "dilations": where.dilations, "pads": where.head, "group": where.group}
        op.named("ConvInputGrad", [dx], of=[g, w], size=sizes, **settings)
    dw = correlate(op, padded, g, w, where) if op.needs[1] else None
    return dx, dw, over_channels(op, g) if op.needs[2] else None


@linear("ConvTranspose", wrt=(0, 1), bias=2)
def conv_transpose(op: Op, g: Var, x: Var, w: Var) -> Result:
    """y = x spread by w + b: (g ⋆ w, g correlated with x, Σ g), Conv read backwards"""
    where, g_padded = _outward(op, g, x, w)
    dx = dw = None
    if op.needs[0]:
        dx = op.Conv(
            g_padded,
            w,
            strides=where.strides,
            dilations=where.dilations,
            pads=where.pads,
            group=where.group,
        )
        if any(e >= s for e, s in zip(where.surplus, where.strides)):
            dx = crop(op, dx, spatial(op, x))
    if op.needs[1]:
        dw = correlate(op, g_padded, x, w, where)
    return dx, dw, over_channels(op, g) if op.needs[2] else None


def _outward(op: Op, g: Var, x: Var, w: Var) -> tuple[Windows, Var]:
    """The windows of a ConvTranspose over its output, and `g`, padded if the padding is computed at run time."""
    rank = x.rank - 2
    kernel, strides, dilations = attributes(op, w, rank)
    pads = op.attr("pads") or [0] * 2 * rank
    extra = op.attr("output_padding") or [0] * rank
    asked, mode = op.attr("output_shape"), op.attr("auto_pad")
    same = mode in ("SAME_UPPER", "SAME_LOWER")
    if mode == "VALID":
        pads = [0] * 2 * rank
    heads, tails, fulls = [], [], []
    for i in range(rank):
        reach = (tap(op, w, kernel, i) - 1) * dilations[i] + 1
        full = dim(op, x, i + 2) * strides[i] - strides[i] + reach
        if asked or same:  # SAME gives h·stride rows
            rows = asked[-rank:][i] if asked else None
            total = reach - strides[i] + extra[i] if rows is None else full + (extra[i] - rows)
            total = max(total, 0) if isinstance(total, int) else op.Max(total, 0)
            head, tail = split(op, total, upper=mode == "SAME_UPPER")
            tail = tail - extra[i] if rows is None else full - rows - head
        else:
            head, tail = pads[i], pads[rank + i] - extra[i]
        heads.append(head)
        tails.append(tail)
        fulls.append(full)
    group = op.attr("group") or 1
    if all(isinstance(p, int) for p in heads + tails):
        return Windows(kernel, strides, dilations, heads, tails, [False] * rank, group), g
    clipped = [max(t, 0) if isinstance(t, int) else op.Max(t, 0) for t in tails]
    g = crop(op, pad(op, g, [*heads, *clipped]), fulls)
    return Windows(kernel, strides, dilations, [0] * rank, [0] * rank, [False] * rank, group), g

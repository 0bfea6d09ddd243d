"""Geometry of the windows of convolution and pooling: strides, dilations and padding, static or not.

Along one axis a *big* side of h rows and a *small* side of o rows are related by windows of k taps:
``head + h + tail = (o - 1)·stride + (k - 1)·dilation + 1``. `tail` is negative where rows at the end
are reached by no window. In Conv the big side is the input, in ConvTranspose the output.

Symbolic sizes determine `tail` only up to the stride (`loose`); results computed from it are then cropped to the size
of their operand at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.ir import Var
from onnxgrad.ir.lowerings import lowering
from onnxgrad.rules.op import Op

_MIRRORED = lowering("mirrored_weights", "operand of Conv, stride 1", "Conv with mirrored weights", "ConvTranspose")


@dataclass
class Windows:
    """One entry per spatial axis. Where `loose`, up to stride - 1 rows less than `tail` may be covered."""

    kernel: list[int | None]
    strides: list[int]
    dilations: list[int]
    head: list[int]
    tail: list[int]
    loose: list[bool]
    group: int = 1

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.strides)

    @property
    def exact(self) -> bool:
        """True if sizes and taps are all known."""
        return None not in self.kernel and not any(self.loose)

    @property
    def pads(self) -> list[int]:
        """The padding for the attribute `pads`; negative padding is cropped separately."""
        return [*self.head, *(max(t, 0) for t in self.tail)]

    @property
    def reach(self) -> list[int]:
        """Distance from the first to the last tap."""
        return [d * (k - 1) for d, k in zip(self.dilations, self.kernel)]  # type: ignore[operator]

    @property
    def surplus(self) -> list[int]:
        """The most rows at the end of the padded big side that no window reaches."""
        return [max(-t, s - 1 if free else 0) for t, s, free in zip(self.tail, self.strides, self.loose)]


def size(x: Var, axis: int) -> int | None:
    """A dimension; None if it is unknown."""
    dim = None if x.shape is None else x.shape[axis]
    return dim if isinstance(dim, int) else None


def dim(op: Op, x: Var, axis: int) -> Any:
    """A dimension as an int, or as a vector of one element that is read at run time."""
    known = size(x, axis)
    return known if known is not None else op.Shape(x, start=axis, end=axis + 1)


def spatial(op: Op, x: Var) -> list[Any]:
    """The dimensions after the first two, in the form of `dim`."""
    return [dim(op, x, axis) for axis in range(2, x.rank)]


def view(op: Op, x: Var, dims: Sequence[Any]) -> Var:
    """`x` reshaped to `dims`, each an int (at most one of them -1) or a vector of one element."""
    unknown = [d for d in dims if isinstance(d, Var)]
    if len(unknown) == 1 and not any(isinstance(d, int) and d < 1 for d in dims):
        dims, unknown = [-1 if isinstance(d, Var) else d for d in dims], []
    if not unknown:
        return op.reshape(x, [int(d) for d in dims])
    return op.reshape(x, vector(op, dims))


def vector(op: Op, dims: Sequence[Any]) -> Var:
    """An int64 vector of `dims`, each an int or a vector of one element."""
    if all(isinstance(d, int) for d in dims):
        return op.const(np.array(dims, np.int64))
    return op.Concat(*[[d] if isinstance(d, int) else d for d in dims], axis=0)


def crop(op: Op, x: Var, dims: Sequence[Any]) -> Var:
    """The first `dims` of the axes of `x` after the first two; `x` itself where it has these already."""
    axes = [a for a, d in enumerate(dims, start=2) if isinstance(d, Var) or size(x, a) != d]
    if not axes:
        return x
    return op.Slice(x, [0] * len(axes), vector(op, [dims[a - 2] for a in axes]), axes)


def attributes(op: Op, w: Var | None, rank: int) -> tuple[list[int | None], list[int], list[int]]:
    """Kernel, strides and dilations; a kernel that only the run time knows is None."""
    kernel = op.attr("kernel_shape") or [size(w, a) if w is not None else None for a in range(2, 2 + rank)]
    return list(kernel), op.attr("strides") or [1] * rank, op.attr("dilations") or [1] * rank


def settle(w: Windows, big: Sequence[Any], ceil: bool = False) -> Windows:
    """`w` with exact tails where the sizes `big` are known, and else marked loose.

    With `ceil` one more window may hang over the end, if it starts before that.
    """
    for i, h in enumerate(big):
        k, s, d = w.kernel[i], w.strides[i], w.dilations[i]
        if isinstance(h, int) and k is not None:
            room = w.head[i] + h + w.tail[i] - d * (k - 1) - 1
            if ceil and room % s and (room // s + 1) * s < w.head[i] + h:
                w.tail[i] += s - room % s
            else:
                w.tail[i] -= room % s
        elif s > 1:
            w.loose[i] = True
    return w


def windows(op: Op, x: Var, w: Var | None = None) -> tuple[Windows, list[Any] | None]:
    """The windows of a Conv or a pooling node over `x`, and the padding if only the run time knows it.

    That padding is a list of heads and then tails; `x` is to be padded with it explicitly, and the
    windows are those over the padded operand.
    """
    rank = x.rank - 2
    kernel, strides, dilations = attributes(op, w, rank)
    group = op.attr("group") or 1
    pads = op.attr("pads") or [0] * 2 * rank
    mode = op.attr("auto_pad")
    if mode in ("NOTSET", None):
        given = Windows(kernel, strides, dilations, pads[:rank], pads[rank:], [False] * rank, group)
        return settle(given, spatial(op, x), bool(op.attr("ceil_mode"))), None
    free = Windows(kernel, strides, dilations, [0] * rank, [0] * rank, [False] * rank, group)
    if mode == "VALID":
        return settle(free, spatial(op, x), bool(op.attr("ceil_mode"))), None
    sides = [
        same_padding(op, dim(op, x, i + 2), tap(op, w, kernel, i), strides[i], dilations[i], mode) for i in range(rank)
    ]
    if all(isinstance(side, int) for pair in sides for side in pair):
        free.head, free.tail = [a for a, _ in sides], [b for _, b in sides]
        return settle(free, spatial(op, x)), None
    free.loose = [s > 1 for s in strides]
    return free, [*(a for a, _ in sides), *(b for _, b in sides)]


def tap(op: Op, w: Var | None, kernel: Sequence[int | None], axis: int) -> Any:
    """The number of taps: an int, or a vector of one element."""
    if kernel[axis] is not None or w is None:
        return kernel[axis]
    return dim(op, w, axis + 2)


def same_padding(op: Op, h: Any, k: Any, s: int, d: int, mode: str) -> tuple[Any, Any]:
    """Padding of SAME_UPPER or SAME_LOWER, for which the small side has ⌈h/s⌉ rows."""
    if s == 1:
        total = (k - 1) * d
    else:
        missing = ((h + (s - 1)) // s if isinstance(h, int) else op.Div(h + (s - 1), s)) * s - s + (k - 1) * d + 1 - h
        total = max(missing, 0) if isinstance(missing, int) else op.Max(missing, 0)
    return split(op, total, upper=mode == "SAME_UPPER")


def split(op: Op, total: Any, *, upper: bool) -> tuple[Any, Any]:
    """Split `total` rows of padding into (head, tail); the odd row goes to the tail if `upper`."""
    half = total // 2 if isinstance(total, int) else op.Div(total, 2)
    return (half, total - half) if upper else (total - half, half)


def pad(op: Op, x: Var, pads: Sequence[Any] | None) -> Var:
    """`x` with zeros around its spatial axes; `pads` is heads, then tails, or None."""
    if pads is None:
        return x
    rank = len(pads) // 2
    return op.Pad(x, vector(op, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]))


def unpad(op: Op, x: Var, pads: Sequence[Any] | None, like: Var) -> Var:
    """The part of `x` that is `like` where `x` is `like` padded with `pads`: the transpose of `pad`."""
    if pads is None:
        return x
    rank = len(pads) // 2
    heads, dims = pads[:rank], spatial(op, like)
    ends = vector(op, [a + b for a, b in zip(heads, dims)])
    return op.Slice(x, vector(op, heads), ends, list(range(2, 2 + rank)))


def spread(op: Op, g: Var, w: Var, windows: Windows, dims: Sequence[Any]) -> Var:
    """The transpose of a convolution with weights `w`: small side `g` to a big side of size `dims`.

    With stride 1 it is a convolution with the weights mirrored and their channels exchanged, which needs no
    size (on ONNX Runtime 1.6–2 × PyTorch's kernel, against up to 3.3 for ConvTranspose); else ConvTranspose.
    """
    if _MIRRORED.is_enabled and None not in windows.kernel and all(s == 1 for s in windows.strides):
        head = [r - a for r, a in zip(windows.reach, windows.head)]
        tail = [r - b for r, b in zip(windows.reach, windows.tail)]
        if min(head + tail) >= 0:
            return op.Conv(
                g,
                mirrored(op, w, windows),
                pads=head + tail,
                dilations=windows.dilations,
                group=windows.group,
            )
    extra = windows.surplus
    y = op.ConvTranspose(
        g,
        w,
        strides=windows.strides,
        dilations=windows.dilations,
        group=windows.group,
        pads=windows.pads,
        output_padding=extra if any(extra) else None,
    )
    return crop(op, y, dims) if any(windows.loose) else y


def mirrored(op: Op, w: Var, windows: Windows) -> Var:
    """Weights [M, C/G, k…] as [C, M/G, k…] with the taps in reverse order."""
    rank, group = windows.rank, windows.group
    last = list(range(2, 2 + rank))
    if group == 1:
        w = op.Transpose(w, perm=[1, 0, *last])
    elif not (size(w, 0) == group and size(w, 1) == 1):
        taps, inner = spatial(op, w), dim(op, w, 1)
        mine = size(w, 0)
        outer = -1 if mine is None else mine // group
        w = view(op, w, [group, outer, inner, *taps])
        w = op.Transpose(w, perm=[0, 2, 1, *(a + 1 for a in last)])
        w = view(op, w, [inner * group, outer, *taps])
    axes = [a for a, k in zip(last, windows.kernel) if k != 1]
    if not axes:
        return w
    back, end = [-1] * len(axes), [int(np.iinfo(np.int64).min)] * len(axes)
    return op.Slice(w, back, end, axes, back)

"""Float64 evaluators of the operators that slide windows, tap by tap.

The reference evaluator's ConvTranspose is wrong with groups, its pooling with some dilations, ceilings and
paddings, and all of them are slow. These follow the definitions; ONNX Runtime, which every case is run on
too, is the judge of both.
"""

from __future__ import annotations

import itertools

import numpy as np
from onnx.reference.op_run import OpRun


def _same(total: int, upper: bool) -> tuple[int, int]:
    total = max(total, 0)
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


def _taps(kernel, dilations, strides, out):
    """For each tap: its index, and the rows that it touches, as slices."""
    for tap in itertools.product(*map(range, kernel)):
        yield (
            tap,
            tuple(slice(i * d, i * d + (o - 1) * s + 1, s) for i, d, s, o in zip(tap, dilations, strides, out)),
        )


class Conv(OpRun):
    op_domain = ""

    def _run(
        self,
        X,
        W,
        B=None,
        auto_pad=None,
        dilations=None,
        group=None,
        kernel_shape=None,
        pads=None,
        strides=None,
    ):
        n = X.ndim - 2
        k, s, d, g = W.shape[2:], strides or [1] * n, dilations or [1] * n, group or 1
        p = list(zip(pads[:n], pads[n:])) if pads else [(0, 0)] * n
        h = X.shape[2:]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            totals = [(-(-h[i] // s[i]) - 1) * s[i] + (k[i] - 1) * d[i] + 1 - h[i] for i in range(n)]
            p = [_same(t, auto_pad == "SAME_UPPER") for t in totals]
        x = np.pad(X, [(0, 0), (0, 0), *p])
        out = [(x.shape[i + 2] - (k[i] - 1) * d[i] - 1) // s[i] + 1 for i in range(n)]
        x = x.reshape(x.shape[0], g, -1, *x.shape[2:])
        w = W.reshape(g, -1, *W.shape[1:])
        y = np.zeros((X.shape[0], g, w.shape[1], *out))
        for tap, rows in _taps(k, d, s, out):
            y += np.einsum("ngc...,gmc->ngm...", x[:, :, :, *rows], w[:, :, :, *tap])
        y = y.reshape(X.shape[0], W.shape[0], *out)
        return ((y if B is None else y + B.reshape(-1, *[1] * n)).astype(X.dtype),)


class ConvTranspose(OpRun):
    op_domain = ""

    def _run(
        self, X, W, B=None, auto_pad=None, dilations=None, group=None, kernel_shape=None, output_padding=None,
        output_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        n = X.ndim - 2
        k, s, d, g = W.shape[2:], strides or [1] * n, dilations or [1] * n, group or 1
        extra, h = output_padding or [0] * n, X.shape[2:]
        full = [(h[i] - 1) * s[i] + (k[i] - 1) * d[i] + 1 for i in range(n)]
        heads, outs = [], []
        for i in range(n):
            same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
            if output_shape or same:
                out = output_shape[-n:][i] if output_shape else h[i] * s[i]
                head = _same(full[i] + extra[i] - out, auto_pad == "SAME_UPPER")[0]
                out = out if output_shape else full[i] + extra[i] - max(full[i] + extra[i] - out, 0)
            else:
                head = pads[i] if pads else 0
                out = full[i] + extra[i] - head - (pads[n + i] if pads else 0)
            heads.append(head)
            outs.append(out)
        x = X.reshape(X.shape[0], g, -1, *h)
        w = W.reshape(g, -1, *W.shape[1:])
        room = [max(f, a + o) for f, a, o in zip(full, heads, outs)]
        y = np.zeros((X.shape[0], g, W.shape[1], *room))
        for tap, rows in _taps(k, d, s, h):
            y[:, :, :, *rows] += np.einsum("ngc...,gcm->ngm...", x, w[:, :, :, *tap])
        y = y[:, :, :, *(slice(a, a + o) for a, o in zip(heads, outs))].reshape(X.shape[0], -1, *outs)
        return ((y if B is None else y + B.reshape(-1, *[1] * n)).astype(X.dtype),)


def _pooled(X, fill, kernel_shape=None, strides=None, pads=None, dilations=None, auto_pad=None, ceil_mode=None):
    """Windows of X as [N, C, o…, taps]; for each element, whether it is in X, and in X or its padding."""
    n, kernel = X.ndim - 2, kernel_shape
    h = X.shape[2:]
    s, d = strides or [1] * n, dilations or [1] * n
    p = list(zip(pads[:n], pads[n:])) if pads else [(0, 0)] * n
    reach = [(k - 1) * e for k, e in zip(kernel, d)]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [(-(-h[i] // s[i]) - 1) * s[i] + reach[i] + 1 - h[i] for i in range(n)]
        p = [_same(t, auto_pad == "SAME_UPPER") for t in totals]
    out = []
    for i in range(n):
        room = h[i] + sum(p[i]) - reach[i] - 1
        o = room // s[i] + 1
        out.append(o + 1 if ceil_mode and room % s[i] and o * s[i] < h[i] + p[i][0] else o)
    over = [(a, max(b, (o - 1) * t + r + 1 - a - m)) for (a, b), o, t, r, m in zip(p, out, s, reach, h)]
    x = np.pad(X, [(0, 0), (0, 0), *over], constant_values=fill)
    inside = np.pad(np.ones(h), over)
    around = np.pad(np.pad(np.ones(h), p, constant_values=1), [(0, b - q) for (_, b), (_, q) in zip(over, p)])
    taps = [rows for _, rows in _taps(kernel, d, s, out)]
    return (
        np.stack([x[:, :, *rows] for rows in taps], -1),
        np.stack([inside[rows] for rows in taps], -1),
        np.stack([around[rows] for rows in taps], -1),
        taps,
        over,
    )


class AveragePool(OpRun):
    op_domain = ""

    def _run(self, X, count_include_pad=None, **window):
        held, inside, around, _, _ = _pooled(X, 0, **window)
        return ((held.sum(-1) / (around if count_include_pad else inside).sum(-1)).astype(X.dtype),)


class LpPool(OpRun):
    op_domain = ""

    def _run(self, X, p=None, **window):
        held = _pooled(X, 0, **window)[0]
        return (((np.abs(held) ** p).sum(-1) ** (1 / p)).astype(X.dtype),)


class MaxPool(OpRun):
    op_domain = ""

    def _run(self, X, storage_order=None, **window):
        held, _, _, taps, over = _pooled(X, -np.inf, **window)
        places = np.arange(X.size).reshape(X.shape)
        if storage_order:
            turned = np.arange(X.size).reshape(*X.shape[:2], *X.shape[:1:-1])
            places = turned.transpose(0, 1, *range(X.ndim - 1, 1, -1))
        places = np.pad(places, [(0, 0), (0, 0), *over], constant_values=-1)
        at = np.stack([places[:, :, *rows] for rows in taps], -1)
        first = held.argmax(-1)[..., None]
        y = np.take_along_axis(held, first, -1)[..., 0]
        return (y, np.take_along_axis(at, first, -1)[..., 0])


class GlobalMaxPool(OpRun):
    """The reference evaluator's is right for two spatial axes only."""

    op_domain = ""

    def _run(self, X):
        return (X.max(tuple(range(2, X.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):
    op_domain = ""

    def _run(self, X, p=None):
        total = (np.abs(X) ** p).sum(tuple(range(2, X.ndim)), keepdims=True)
        return ((total ** (1 / p)).astype(X.dtype),)


class GatherElements(OpRun):
    """The reference evaluator's takes at most 64 rows."""

    op_domain = ""

    def _run(self, data, indices, axis=None):
        return (np.take_along_axis(data, indices, axis),)


class ScatterElements(OpRun):
    op_domain = ""

    def _run(self, data, indices, updates, axis=None, reduction=None):
        out, at = data.copy(), list(np.indices(indices.shape, sparse=True))
        at[axis] = indices
        if reduction == "add":
            np.add.at(out, tuple(at), updates)
        else:
            out[tuple(at)] = updates
        return (out,)

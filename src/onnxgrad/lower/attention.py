"""Attention as softmax(scale·Q·Kᵀ + bias)·V in a dozen nodes.

The specification's own function body says the same in sixty, in float32 only, and a row of which every key
is masked turns its gradient into NaN. Such a row gets probabilities 0 here: its bias is taken away before the
softmax, which is then discarded, so that nothing infinite meets a cotangent.

Query heads that share a head of keys are rows of one matrix (head h uses keys h // group), so keys and
values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.shapes import same_dim
from onnxgrad.lower.registry import attribute, lowering

INF = float("inf")


@lowering("Attention")
def attention(b: Builder, node: ir.Node) -> Sequence[Var | None]:
    """Y = P·V with P = softmax(s·Q·Kᵀ + bias); K and V after what is past"""
    q, k, v, mask, past_k, past_v, lengths = [None if x is None else b.var(x) for x in (*node.inputs, *[None] * 7)[:7]]
    assert q is not None and k is not None and v is not None  # noqa: PT018
    flat, dtype = q.rank == 3, q.dtype
    if flat:
        q = _heads(b, q, attribute(b, node, "q_num_heads"))
        k, v = (_heads(b, x, attribute(b, node, "kv_num_heads")) for x in (k, v))
    past = None if past_k is None else b.shape_of(past_k, 2, 3)
    k = k if past_k is None else b.Concat(past_k, k, axis=2)
    v = v if past_v is None else b.Concat(past_v, v, axis=2)

    scores = product(b, q * _scale(b, node, q), b.Transpose(k, perm=[0, 1, 3, 2]))
    shown = [scores]
    cap = attribute(b, node, "softcap")
    if cap:
        scores = b.Tanh(scores / cap) * cap
    shown.append(scores)
    bias = _bias(b, node, (q, k), mask, past, lengths)
    shown.append(scores if bias is None else scores + bias)
    dead = None
    if bias is not None and (mask is not None or lengths is not None or _window(b, node) != (-1, -1)):
        dead = b.Equal(b.ReduceMax(bias, [-1], keepdims=1), -INF)
        bias = b.Where(dead, 0.0, bias)
    scores = scores if bias is None else scores + bias
    precision = attribute(b, node, "softmax_precision")
    p = b.cast_like(b.Softmax(b.Cast(scores, to=precision) if precision else scores, axis=-1), q)
    p = p if dead is None else b.Where(dead, 0.0, p)
    shown.append(p)

    y = product(b, b.cast_like(p, v), v)
    if flat:
        y = b.Reshape(b.Transpose(y, perm=[0, 2, 1, 3]), _joined_heads(y))
    y = y if y.dtype == dtype else b.Cast(y, to=int(dtype or 0))
    return [y, k, v, shown[attribute(b, node, "qk_matmul_output_mode") or 0]]


def _heads(b: Builder, x: Var, count: int) -> Var:
    """[B, S, H·D] as [B, H, S, D]."""
    wide = x.shape[2] if x.shape is not None else None
    return b.Transpose(b.Reshape(x, [0, 0, count, wide // count if isinstance(wide, int) else -1]), perm=[0, 2, 1, 3])


def _joined_heads(y: Var) -> list[int]:
    """The shape for [B, S, H, D] as [B, S, H·D]; 0 copies a dimension."""
    heads, wide = (y.shape[1], y.shape[3]) if y.shape is not None else (None, None)
    return [0, 0, heads * wide if isinstance(heads, int) and isinstance(wide, int) else -1]


def _scale(b: Builder, node: ir.Node, q: Var) -> float | Var:
    given = attribute(b, node, "scale")
    size = q.shape[3] if q.shape is not None else None
    if given is not None:
        return float(given)
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return b.Reciprocal(b.Sqrt(b.Cast(b.Shape(q, start=3), to=int(q.dtype or 0))))


def product(b: Builder, q: Var, k: Var) -> Var:
    """q·k for each head; the heads of q that share one of k are rows of one matrix."""
    if q.rank != 4 or k.rank != 4 or same_dim(q.dims[1], k.dims[1]):
        return q @ k
    rows = b.Reshape(q, b.join([0], b.shape_of(k, 1, 2), [-1], b.shape_of(q, 3)))
    return b.reshape(rows @ k, b.join(b.shape_of(q, 0, 3), b.shape_of(k, 3)))


def _window(b: Builder, node: ir.Node) -> tuple[int, int]:
    """The numbers of keys that a query sees to the left and to the right; -1 for all."""
    left, right = (attribute(b, node, f"{side}_window_size") for side in ("left", "right"))
    return -1 if left is None else left, -1 if right is None else right


def _bias(
    b: Builder, node: ir.Node, qk: tuple[Var, Var], mask: Var | None, past: Var | None, lengths: Var | None
) -> Var | None:
    """The bias of the scores: a float mask, and -∞ for keys that a query must not see."""
    q, k = qk
    assert k.shape is not None
    keys = b.Range(b.const(0), b.Squeeze(b.shape_of(k, 2, 3), [0]), b.const(1))
    left, right = _window(b, node)
    seen = []
    if mask is not None and (mask.shape is None or not same_dim(mask.shape[-1], k.shape[2])) and b.opset >= 24:
        # before, the last dimension of a mask was either that of the keys or 1
        missing = b.Sub(b.shape_of(k, 2, 3), b.Shape(mask, start=-1))
        filler = b.const(False) if mask.dtype == ir.DataType.BOOL else b.const(-INF, mask.dtype)
        mask = b.Pad(mask, b.join([0], missing), filler, [-1])
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        seen.append(mask)
        mask = None
    ends = None if lengths is None else b.Unsqueeze(lengths, [1, 2, 3])
    if attribute(b, node, "is_causal") or (left, right) != (-1, -1):
        count = b.shape_of(q, 2, 3)
        places = b.Unsqueeze(b.Range(b.const(0), b.Squeeze(count, [0]), b.const(1)), [1])
        if past is not None:
            places = b.Add(places, past)
        elif ends is not None:
            places = b.Add(places, b.Sub(ends, count))
        seen += [b.LessOrEqual(keys, places)] if attribute(b, node, "is_causal") else []
        seen += [b.GreaterOrEqual(keys, b.Sub(places, left))] if left >= 0 else []
        seen += [b.LessOrEqual(keys, b.Add(places, right))] if right >= 0 else []
    if ends is not None:
        seen.append(b.Less(keys, ends))
    if not seen:
        return mask
    every = seen[0]
    for more in seen[1:]:
        every = b.And(every, more)
    hidden = b.Where(every, b.const(np.zeros(()), q.dtype), b.const(-INF, q.dtype))
    return hidden if mask is None else mask + hidden

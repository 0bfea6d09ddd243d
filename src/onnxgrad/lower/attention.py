"""Attention as softmax(scale·Q·Kᵀ + bias)·V in a dozen nodes.

The specification's own function body needs sixty nodes, works in float32 only, and a fully masked row turns its
gradient into NaN. Here such a row gets probabilities of 0: its bias is removed before the softmax, whose result is then
discarded, so that no infinite number meets a cotangent.

Query heads that share a head of keys are rows of one matrix (head h uses keys h // group), so keys and
values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.shapes import same_dim
from onnxgrad.lower.registry import attribute, lowering

INF = float("inf")


@lowering("Attention")
def attention(
    b: Builder,
    node: ir.Node,
    q: Var,
    k: Var,
    v: Var,
    mask: Var | None,
    past_k: Var | None,
    past_v: Var | None,
    lengths: Var | None,
) -> Sequence[Var | None]:
    """Y = P·V with P = softmax(s·Q·Kᵀ + bias); K and V after what is past"""
    flat, dtype = q.rank == 3, q.dtype
    if flat:
        q = split_heads(b, q, attribute(b, node, "q_num_heads"))
        k, v = (split_heads(b, x, attribute(b, node, "kv_num_heads")) for x in (k, v))
    past = None if past_k is None else b.shape_of(past_k, 2, 3)
    k = k if past_k is None else b.Concat(past_k, k, axis=2)
    v = v if past_v is None else b.Concat(past_v, v, axis=2)

    bias, dead = _bias(b, node, (q, k), mask, past, lengths), None
    raw = bias
    if bias is not None and (mask is not None or lengths is not None or _window(b, node) != (-1, -1)):
        dead = b.Equal(b.ReduceMax(bias, [-1], keepdims=1), -INF)
        bias = b.Where(dead, 0.0, bias)
    scale, cap = attribute(b, node, "scale"), attribute(b, node, "softcap") or 0.0
    result = attend(b, q, k, v, scale, [bias], cap, precision=attribute(b, node, "softmax_precision"), dead=dead)
    shown = [result.products, result.capped, result.capped if raw is None else result.capped + raw, result.p]
    y = join_heads(b, result.y) if flat else result.y
    y = y if y.dtype == dtype else b.Cast(y, to=int(dtype or 0))
    return [y, k, v, shown[attribute(b, node, "qk_matmul_output_mode") or 0]]


class Attended(NamedTuple):
    """The steps of an attention: its result, Q·Kᵀ scaled, after the cap and with biases, and the probabilities."""

    y: Var
    products: Var
    capped: Var
    scores: Var
    p: Var


def attend(
    b: Builder,
    q: Var,
    k: Var,
    v: Var,
    scale: float | None = None,
    biases: Sequence[Var | None] = (),
    softcap: float = 0.0,
    *,
    sink: Var | None = None,
    precision: int | None = None,
    dead: Var | None = None,
) -> Attended:
    """softmax(cap(scale·Q·Kᵀ) + biases)·V of heads [B, H, S, D].

    Args:
        scale: a factor; None: 1/√D.
        biases: terms that are added to the scores.
        softcap: the bound c of c·tanh(scores/c); 0: none.
        sink: the score, for each head, of one more key, which has no value.
        precision: the type in which the softmax is computed; None: that of `q`.
        dead: True for rows without a probability.
    """
    width = q.shape[3] if q.shape is not None else None
    if scale is not None:
        q = q * float(scale)
    elif isinstance(width, int):
        q = q * (1 / math.sqrt(width))
    else:
        q = q / b.Sqrt(b.Cast(b.shape_of(q, 3, 4), to=int(q.dtype or 0)))
    products = capped = product(b, q, b.Transpose(k, perm=[0, 1, 3, 2]))
    if softcap:
        capped = b.Tanh(products / softcap) * softcap
    scores = capped
    for bias in biases:
        scores = scores if bias is None else scores + bias
    precise = b.Cast(scores, to=precision) if precision else scores
    if sink is None:
        p = b.Softmax(precise, axis=-1)
    else:
        column = b.Expand(b.Unsqueeze(sink, [0, 2, 3]), b.join(b.shape_of(precise, 0, 3), [1]))
        p = b.Slice(b.Softmax(b.Concat(precise, column, axis=-1), axis=-1), [0], [-1], [-1])
    p = b.cast_like(p, q)
    p = p if dead is None else b.Where(dead, 0.0, p)
    return Attended(product(b, b.cast_like(p, v), v), products, capped, scores, p)


def split_heads(b: Builder, x: Var, count: int) -> Var:
    """[B, S, H·D] as [B, H, S, D]."""
    wide = x.shape[2] if x.shape is not None else None
    return b.Transpose(b.Reshape(x, [0, 0, count, wide // count if isinstance(wide, int) else -1]), perm=[0, 2, 1, 3])


def join_heads(b: Builder, y: Var) -> Var:
    """[B, H, S, D] as [B, S, H·D]."""
    y = b.Transpose(y, perm=[0, 2, 1, 3])
    count, wide = (y.shape[2], y.shape[3]) if y.shape is not None else (None, None)
    return b.Reshape(y, [0, 0, count * wide if isinstance(count, int) and isinstance(wide, int) else -1])


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
    keys = b.places_along(k, 2)
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
        places = b.Unsqueeze(b.places_along(q, 2), [1])
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

"""The attentions of ONNX Runtime: with the projection in front, of many heads, of heads that share keys; rotation.

A mask of theirs is a finite number added to the scores (-10000 unless the node has another one). For future keys, the
least number of the type is added. Both enter the softmax, so that fully masked rows give the numbers of the runtime.
Only the keys that a GroupQueryAttention does not see have probability 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var, reshape_to
from onnxgrad.ir.schemas import attribute
from onnxgrad.ir.shapes import same_dim
from onnxgrad.lower.attention import attend, join_heads, split_heads
from onnxgrad.lower.contrib import contrib, refuse, refuse_operand
from onnxgrad.lower.registry import require_operand
from onnxgrad.lower.transformer import rotate

INT64 = int(ir.DataType.INT64)


def _least(dtype: ir.DataType | None) -> float:
    return float(ml_dtypes.finfo((dtype or ir.DataType.FLOAT).numpy()).min)


def _mask_bias(b: Builder, node: ir.Node, q: Var, k: Var, mask: Var | None, past: Var | None) -> Var | None:
    """The bias of the scores [B, H, S, T] from a mask in one of its forms and from causal order.

    `past` are keys that precede those of the tokens.
    """
    filter_value = float(attribute(node, "mask_filter_value", -10000.0))
    low, least, added = b.const(max(filter_value, _least(q.dtype)), q.dtype), b.const(_least(q.dtype), q.dtype), None
    keys = b.places_along(k, 2)
    if mask is not None:
        mask = b.Cast(mask, to=INT64)
        if mask.rank == 1:  # where each sequence ends; then, maybe, where each starts
            count, batch = (mask.shape or (None,))[0], (q.shape or (None,))[0]
            if isinstance(count, int) and isinstance(batch, int) and count not in (batch, 2 * batch, 3 * batch + 2):
                raise NotDifferentiable(
                    f"its mask has {count} elements for a batch of {batch}\n  hint: use one of [batch, total length]"
                )
            size = b.shape_of(q, 0, 1)
            seen = b.Less(keys, b.Unsqueeze(b.Slice(mask, [0], size, [0]), [1]))
            if count != batch or batch is None:
                twice = b.Add(size, size)
                starts = b.Slice(b.Concat(mask, b.Expand(b.const(0), size), axis=0), size, twice, [0])
                starts = b.Where(b.Equal(b.shape_of(mask, 0, 1), twice), starts, b.const(0))
                seen = b.And(seen, b.GreaterOrEqual(keys, b.Unsqueeze(starts, [1])))
        elif mask.rank in (2, 3):
            seen = b.Greater(mask, b.const(0))
        else:
            raise NotDifferentiable(f"its mask has {mask.rank} axes\n  hint: use one of [batch, total length]")
        seen = b.Unsqueeze(seen, [1] if mask.rank == 3 else [1, 2])
        added = b.Where(seen, b.const(0, q.dtype), low)
    if attribute(node, "unidirectional", 0):
        places = b.Unsqueeze(b.places_along(q, 2), [1])
        places = places if past is None else b.Add(places, b.shape_of(past, 2, 3))
        added = b.const(0, q.dtype) if added is None else added
        seen = b.LessOrEqual(keys, places)
        if past is None and not (q.shape is not None and k.shape is not None and same_dim(q.shape[2], k.shape[2])):
            # where there are more keys than tokens, the kernel lets the last token see all of them
            last = b.Sub(b.shape_of(q, 2, 3), b.const(1))
            seen = b.Or(seen, b.Equal(places, last))
        added = b.Where(seen, added, least)
    return added


def _scale(node: ir.Node) -> float | None:
    return float(attribute(node, "scale", 0.0)) or None


def _append_past(b: Builder, past: Var | None, new: Var) -> Var:
    return new if past is None else b.Concat(past, new, axis=2)


def projected(
    b: Builder, node: ir.Node, whole: Var, mask: Var | None, past: Var | None, bias: Var | None
) -> Sequence[Var | None]:
    """Attention of x·W + b, which is [Q, K, V] side by side: the result, and what is present."""
    refuse(node, "do_rotary", 0)
    refuse(node, "past_present_share_buffer", 0)
    heads, sizes = attribute(node, "num_heads", 0), attribute(node, "qkv_hidden_sizes", None)
    if sizes:
        parts = b.Split(whole, sizes, axis=-1, outputs=3)
    else:
        parts = b.emit("Split", whole, num_outputs=3, axis=-1, outputs=3)
    q, k, v = (split_heads(b, x, heads) for x in parts)
    past_k = None
    if past is not None:
        past_k, past_v = (b.Squeeze(x, [0]) for x in b.emit("Split", past, num_outputs=2, axis=0, outputs=2))
        k, v = _append_past(b, past_k, k), _append_past(b, past_v, v)
    result = attend(b, q, k, v, _scale(node), [_mask_bias(b, node, q, k, mask, past_k), bias])
    present = None
    if len(node.outputs) > 1 and node.outputs[1].name:
        present = b.Concat(b.Unsqueeze(k, [0]), b.Unsqueeze(v, [0]), axis=0)
    return [join_heads(b, result.y), present]


@contrib("Attention", whole=("mask_index", "past_sequence_length"))
def attention(
    b: Builder,
    node: ir.Node,
    input: Var,
    weights: Var,
    bias: Var | None,
    mask_index: Var | None,
    past: Var | None,
    attention_bias: Var | None,
    past_sequence_length: Var | None,
) -> Sequence[Var | None]:
    """Y = P·V with [Q, K, V] = x·W + b and P = softmax(s·Q·Kᵀ + mask + bias)"""
    refuse_operand(past_sequence_length, "past_sequence_length")
    whole = input @ weights
    return projected(b, node, whole if bias is None else whole + bias, mask_index, past, attention_bias)


@contrib("MultiHeadAttention", whole=("key_padding_mask", "past_sequence_length", "cache_indirection"))
def multi_head_attention(
    b: Builder,
    node: ir.Node,
    query: Var,
    key: Var | None,
    value: Var | None,
    bias: Var | None,
    key_padding_mask: Var | None,
    attention_bias: Var | None,
    past_key: Var | None,
    past_value: Var | None,
    past_sequence_length: Var | None,
    cache_indirection: Var | None,
) -> Sequence[Var | None]:
    """Y = P·V with P = softmax(s·Q·Kᵀ + mask + bias), each of Q, K and V with its part of the bias"""
    refuse_operand(past_sequence_length, "past_sequence_length")
    refuse_operand(cache_indirection, "cache_indirection")
    heads = attribute(node, "num_heads", 0)
    packed = query.rank == 5 or (key is not None and key.rank == 5)
    if packed and bias is not None:
        raise NotDifferentiable("it has a bias beside packed operands\n  hint: add the bias before the node")
    if query.rank == 5:  # [B, S, H, 3, D]
        q, k, v = (_unpack_heads(b, x) for x in b.emit("Split", query, num_outputs=3, axis=3, outputs=3))
    else:
        key = require_operand(key, "key")
        if key.rank == 5:  # [B, T, H, 2, D]
            q = split_heads(b, query, heads)
            k, v = (_unpack_heads(b, x) for x in b.emit("Split", key, num_outputs=2, axis=3, outputs=2))
        else:
            parts: list[Var | None] = [query, key, require_operand(value, "value")]
            q, k, v = (_add_bias(b, x, c, heads) for x, c in zip(parts, _parts(b, bias, query)))
    k, v = _append_past(b, past_key, k), _append_past(b, past_value, v)
    biases = [_mask_bias(b, node, q, k, key_padding_mask, past_key), attention_bias]
    result = attend(b, q, k, v, _scale(node), biases)
    return [join_heads(b, result.y), k, v, result.scores]


def _unpack_heads(b: Builder, x: Var) -> Var:
    """[B, S, H, 1, D] as [B, H, S, D]."""
    return b.Transpose(b.Squeeze(x, [3]), perm=[0, 2, 1, 3])


def _parts(b: Builder, bias: Var | None, query: Var) -> Sequence[Var | None]:
    """The bias of the queries, of the keys, and of the values, which alone may be of another size."""
    if bias is None:
        return [None] * 3
    wide = b.shape_of(query, 2, 3)
    rest = b.Sub(b.shape_of(bias, 0, 1), b.Add(wide, wide))
    return list(b.Split(bias, b.join(wide, wide, rest), axis=0, outputs=3))


def _add_bias(b: Builder, x: Var | None, bias: Var | None, heads: int) -> Var:
    """[B, S, H·D] with its bias as [B, H, S, D]; an operand in the latter form has no bias."""
    assert x is not None
    if x.rank == 4:
        return x
    return split_heads(b, x if bias is None else x + bias, heads)


# --- rotation --------------------------------------------------------------------------------------


@contrib("RotaryEmbedding", whole=("position_ids",))
def rotary_embedding(
    b: Builder, node: ir.Node, input: Var, position_ids: Var, cos_cache: Var, sin_cache: Var
) -> Sequence[Var]:
    """(a, b) ↦ (a·cos - b·sin, b·cos + a·sin) for pairs of elements of each head"""
    refuse(node, "scale", 1.0)
    refuse(node, "is_packed_batching", 0)
    flat, heads, width = input.rank == 3, attribute(node, "num_heads", 0), attribute(node, "rotary_embedding_dim", 0)
    x = input
    if flat:
        if heads:
            x = split_heads(b, x, heads)
        else:
            half = b.shape_of(cos_cache, 1, 2)
            x = b.Transpose(b.Reshape(x, b.join([0, 0, -1], b.Add(half, half))), perm=[0, 2, 1, 3])
    places = position_ids
    if places.rank == 1:  # where the first token of every sequence is
        places = b.Unsqueeze(b.Add(b.places_along(x, 2), places), [0])
    y = _rotate(b, x, places, cos_cache, sin_cache, bool(attribute(node, "interleaved", 0)), width)
    return [reshape_to(b.Transpose(y, perm=[0, 2, 1, 3]), input) if flat else reshape_to(y, input)]


def _rotate(b: Builder, x: Var, places: Var, cos: Var, sin: Var, paired: bool, width: int = 0) -> Var:
    """Heads [B, H, S, D], of which the first `width` elements (0: twice the width of cos) are turned."""
    half, rest = b.shape_of(cos, 1, 2), None
    have, turned = x.shape[3] if x.shape is not None else None, cos.shape[1] if cos.shape is not None else None
    whole = isinstance(have, int) and isinstance(turned, int) and have == 2 * turned
    if not whole and not (width == 0 and not isinstance(have, int) and not isinstance(turned, int)):
        first = b.Add(half, half)
        x, rest = b.Split(x, b.join(first, b.Sub(b.shape_of(x, 3, 4), first)), axis=-1, outputs=2)
    c, s = (b.Unsqueeze(b.Gather(t, places), [1]) for t in (cos, sin))
    y = rotate(b, x, c, s, half, paired)
    return y if rest is None else b.Concat(y, rest, axis=-1)


# --- heads that share keys -------------------------------------------------------------------------


class _GroupQuery(NamedTuple):
    """The operands of GroupQueryAttention."""

    query: Var
    key: Var | None
    value: Var | None
    past_key: Var | None
    past_value: Var | None
    seqlens_k: Var
    total_sequence_length: Var
    cos_cache: Var | None
    sin_cache: Var | None
    position_ids: Var | None
    attention_bias: Var | None
    head_sink: Var | None
    k_scale: Var | None
    v_scale: Var | None
    q_norm_weight: Var | None
    k_norm_weight: Var | None


@contrib("GroupQueryAttention", whole=("seqlens_k", "total_sequence_length", "position_ids"), operands=_GroupQuery)
def group_query_attention(b: Builder, node: ir.Node, x: _GroupQuery) -> Sequence[Var | None]:
    """Y = P·V with P = softmax(s·Q·Kᵀ + bias) over the keys that each token sees, heads sharing keys"""
    for name in ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight"):
        refuse_operand(getattr(x, name), name)
    refuse(node, "sliding_window_cache", 0)
    refuse(node, "k_quant_type", "NONE", b"NONE")
    refuse(node, "v_quant_type", "NONE", b"NONE")
    query, key, value = x.query, x.key, x.value
    heads, shared = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0)
    if key is None:  # packed
        size = b.Div(b.shape_of(query, 2, 3), b.const([heads + 2 * shared]))
        wide = b.Mul(size, b.const([shared]))
        query, key, value = b.Split(query, b.join(b.Mul(size, b.const([heads])), wide, wide), axis=2, outputs=3)
    q, k, v = (
        split_heads(b, query, heads),
        split_heads(b, key, shared),
        split_heads(b, require_operand(value, "value"), shared),
    )
    length = b.shape_of(q, 2, 3)
    total = b.Reshape(b.Cast(x.total_sequence_length, to=INT64), [1])
    prompt = b.Equal(total, length)
    # how many tokens of each sequence are past: [B, 1]
    ends = b.Reshape(b.Add(b.Cast(x.seqlens_k, to=INT64), b.const(1)), [-1, 1])
    before = b.Where(prompt, b.const(0), b.Sub(ends, length))
    places = b.Add(b.places_along(q, 2), before)
    if attribute(node, "do_rotary", 0):
        at = places
        if x.position_ids is not None:
            first = b.Slice(b.Reshape(x.position_ids, [-1]), [0], [1], [0])
            at = b.Where(prompt, b.Add(b.places_along(q, 2), first), x.position_ids)
        caches = require_operand(x.cos_cache, "cos_cache"), require_operand(x.sin_cache, "sin_cache")
        q, k = (_rotate(b, y, at, *caches, bool(attribute(node, "rotary_interleaved", 0))) for y in (q, k))
    k, v = (_update_cache(b, past, new, before, total) for past, new in ((x.past_key, k), (x.past_value, v)))
    sink = x.head_sink
    if attribute(node, "smooth_softmax", -1) == 1 and sink is None:
        sink = b.const(np.zeros(heads), q.dtype)
    seen = _visible_keys(b, node, k, places, ends)
    hidden = b.Where(seen, b.const(0, q.dtype), b.const(-np.inf, q.dtype))
    cap = float(attribute(node, "softcap", 0.0))
    result = attend(b, q, k, v, _scale(node), [x.attention_bias, hidden], cap, sink=sink)
    shown = b.Where(seen, result.scores, b.const(0, q.dtype)) if attribute(node, "qk_output", 0) == 1 else result.p
    return [join_heads(b, result.y), k, v, shown]


def _update_cache(b: Builder, past: Var | None, new: Var, before: Var, total: Var) -> Var:
    """The first `before` rows of the past, then the new rows, then zeros: [B, H, max(past, total), D]."""
    if past is None or (past.shape is not None and same_dim(past.shape[2], 0)):
        return new
    room = b.shape_of(past, 2, 3)
    places = b.Range(0, b.Squeeze(b.Max(room, total), [0]), 1)
    shift = b.Sub(places, before)  # [B, T]: the index among the new tokens
    every = b.Concat(past, new, axis=2)
    last = b.Sub(b.shape_of(every, 2, 3), b.const(1))
    index = b.Min(b.Where(b.Less(shift, b.const(0)), places, b.Add(shift, room)), last)
    rows = b.GatherND(b.Transpose(every, perm=[0, 2, 1, 3]), b.Unsqueeze(index, [2]), batch_dims=1)
    there = b.Unsqueeze(b.Less(shift, b.shape_of(new, 2, 3)), [2, 3])
    return b.Transpose(b.Where(there, rows, b.const(0, new.dtype)), perm=[0, 2, 1, 3])


def _visible_keys(b: Builder, node: ir.Node, k: Var, places: Var, ends: Var) -> Var:
    """The mask of keys that each token sees: booleans [B, 1, S, T]."""
    keys, at = b.Unsqueeze(b.places_along(k, 2), [0, 1, 2]), b.Unsqueeze(places, [1, 3])
    seen = b.Less(keys, b.Unsqueeze(ends, [1, 3]))
    if attribute(node, "causal", 1):
        seen = b.And(seen, b.LessOrEqual(keys, at))
    window = attribute(node, "local_window_size", -1)
    if window > 0:
        seen = b.And(seen, b.Greater(keys, b.Sub(at, b.const(window))))
    return seen

"""Lowerings of other transformer operators: rotary embedding, gated activation, causal convolution.

The specification's function bodies round intermediate values to float32, are three times as long, or use a Swish that
ONNX Runtime has no kernel for.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir import Builder, Var, reshape_to
from onnxgrad.lower.registry import attribute, lowering


@lowering("RotaryEmbedding")
def rotary_embedding(b: Builder, node: ir.Node, x: Var, cos: Var, sin: Var, places: Var | None) -> Sequence[Var | None]:
    """(a, b) ↦ (a·cos - b·sin, b·cos + a·sin) for pairs of elements of each head"""
    flat, paired, turned = x.rank == 3, attribute(b, node, "interleaved"), attribute(b, node, "rotary_embedding_dim")
    half = b.shape_of(cos, -1)
    z, rest = x, None
    if flat:
        heads, wide = attribute(b, node, "num_heads"), x.shape[2] if x.shape else None
        z = b.Reshape(x, [0, 0, heads, wide // heads if isinstance(wide, int) else -1])
    c, s = (b.Unsqueeze(t if places is None else b.Gather(t, places), [2 if flat else 1]) for t in (cos, sin))
    if turned:
        z, rest = b.Split(z, b.join([turned], b.Sub(b.shape_of(z, 3), [turned])), axis=-1, outputs=2)
    y = rotate(b, z, c, s, half, paired)
    y = y if rest is None else b.Concat(y, rest, axis=-1)
    return [reshape_to(y, x) if flat else y]


def rotate(b: Builder, z: Var, c: Var, s: Var, half: Var, paired: bool) -> Var:
    """Rotate the `half` pairs in the last axis of `z` by angles with the cosine `c` and the sine `s`.

    The two elements of a pair are neighbours if `paired`; otherwise, the first half pairs with the second.
    """
    if paired:
        c, s = b.Unsqueeze(c, [-1]), b.Unsqueeze(s, [-1])
        u, v = b.Split(b.Reshape(z, [0, 0, 0, -1, 2]), [1, 1], axis=-1, outputs=2)
    else:
        u, v = b.Split(z, b.join(half, half), axis=-1, outputs=2)
    y = b.Concat(u * c - v * s, v * c + u * s, axis=-1)
    return reshape_to(y, z) if paired else y


@lowering("CausalConvWithState")
def causal_conv_with_state(
    b: Builder, node: ir.Node, x: Var, w: Var, c: Var | None, past: Var | None
) -> Sequence[Var | None]:
    """y = x ⋆ w + c by channel, over x with the last k - 1 elements of the past before it; then y·sigmoid y"""
    channels = next((d for d in (w.shape or x.shape or ())[:1] if isinstance(d, int)), x.shape[1] if x.shape else None)
    kept = b.Sub(b.shape_of(w, 2, 3), [1])
    if past is None:
        whole = b.Pad(x, b.join(kept, [0]), None, [2])
    else:
        whole = b.Concat(past, x, axis=2)
    y = b.Conv(whole, w, c, group=channels) if isinstance(channels, int) else _by_windows(b, x, whole, w, c)
    if attribute(b, node, "activation") in ("silu", "swish"):
        y = y * b.Sigmoid(y)
    return [y, b.Slice(whole, b.shape_of(x, 2, 3), [2**63 - 1], [2])]


def _by_windows(b: Builder, x: Var, whole: Var, w: Var, c: Var | None) -> Var:
    """The convolution where the number of channels, which is an attribute of Conv, is not known."""
    steps, taps = (b.places_along(v, 2) for v in (x, w))
    windows = b.Gather(whole, b.Add(b.Unsqueeze(steps, [1]), taps), axis=2)
    y = b.Squeeze(windows @ b.Transpose(w, perm=[0, 2, 1]), [3])
    return y if c is None else y + b.Unsqueeze(c, [1])


@lowering("SwiGLU")
def swiglu(b: Builder, node: ir.Node, gate: Var, value: Var) -> Sequence[Var | None]:
    """y = a·sigmoid(αa)·b"""
    return [gate * b.Sigmoid(gate * attribute(b, node, "alpha")) * value]

"""Lowerings of ONNX Runtime's fused blocks: biased activations, normalization with a residual, embeddings.

Source: docs/ContribOperators.md of ONNX Runtime. Details that it leaves open (the precision of intermediate results,
the order of sums) follow the kernels for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.schemas import attribute
from onnxgrad.lower.contrib import contrib
from onnxgrad.lower.registry import require_operand


def gelu_of(b: Builder, x: Var) -> Var:
    """x·Φ(x), with Φ the distribution function of the normal distribution."""
    return x * 0.5 * (b.Erf(x * math.sqrt(0.5)) + 1.0)


@contrib("Gelu")
def gelu(b: Builder, node: ir.Node, X: Var) -> Sequence[Var]:
    """y = x·Φ(x)"""
    return [gelu_of(b, X)]


@contrib("BiasGelu")
def bias_gelu(b: Builder, node: ir.Node, A: Var, B: Var) -> Sequence[Var]:
    """y = h·Φ(h) with h = a + b"""
    return [gelu_of(b, A + B)]


@contrib("FastGelu")
def fast_gelu(b: Builder, node: ir.Node, X: Var, bias: Var | None) -> Sequence[Var]:
    """y = h/2·(1 + tanh(√(2/π)·(h + 0.044715·h³))) with h = x + bias"""
    h = X if bias is None else X + bias
    return [h * 0.5 * (b.Tanh(h * (0.7978845608028654 + 0.035677408136300125 * (h * h))) + 1.0)]


@contrib("QuickGelu")
def quick_gelu(b: Builder, node: ir.Node, X: Var) -> Sequence[Var]:
    """y = x·sigmoid(αx)"""
    return [X * b.Sigmoid(X * float(attribute(node, "alpha", 1.702)))]


@contrib("BiasSplitGelu")
def bias_split_gelu(b: Builder, node: ir.Node, X: Var, bias: Var) -> Sequence[Var]:
    """y = u·v·Φ(v) with [u, v] = x + bias, in halves of the last axis"""
    u, v = b.emit("Split", X + bias, num_outputs=2, axis=-1, outputs=2)
    return [u * gelu_of(b, v)]


def _root_mean_square(b: Builder, x: Var, scale: Var, axes: Sequence[int], epsilon: float) -> tuple[Var, Var]:
    """x·r·scale with r = 1/√(mean x² + ε), and r, in float32 at least."""
    x = b.widen(x)
    r = b.Reciprocal(b.Sqrt(b.ReduceMean(x * x, list(axes), keepdims=1) + epsilon))
    return b.cast_like(x * r * b.cast_like(scale, x), scale), r


@contrib("SimplifiedLayerNormalization", domain="")
def simplified_layer_norm(b: Builder, node: ir.Node, X: Var, scale: Var) -> Sequence[Var | None]:
    """y = x·r·scale with r = 1/√(mean x² + ε)"""
    axis = attribute(node, "axis", -1)
    axes = range(axis if axis < 0 else axis - X.rank, 0)
    y, r = _root_mean_square(b, X, scale, axes, attribute(node, "epsilon", 1e-5))
    return [y, r]


def _add_skip(x: Var, skip: Var, bias: Var | None) -> Var:
    """The operand of the normalization, in the shape of x."""
    whole = x + skip if bias is None else x + skip + bias
    if x.value.shape is not None:  # the others have no more dimensions, and broadcast to it
        whole.value.shape = ir.Shape(x.value.shape)
    return whole


@contrib("SkipLayerNormalization")
def skip_layer_norm(
    b: Builder, node: ir.Node, input: Var, skip: Var, gamma: Var, beta: Var | None, bias: Var | None
) -> Sequence[Var | None]:
    """y = (h - μ)·r·γ + β with h = x + skip + bias"""
    h = _add_skip(input, skip, bias)
    y, mean, r = b.emit(
        "LayerNormalization", h, gamma, beta, axis=-1, epsilon=attribute(node, "epsilon", 1e-12), outputs=3
    )
    return [y, mean, r, h]


@contrib("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_norm(
    b: Builder, node: ir.Node, input: Var, skip: Var, gamma: Var, bias: Var | None
) -> Sequence[Var | None]:
    """y = h·r·γ with h = x + skip + bias and r = 1/√(mean h² + ε)"""
    h = _add_skip(input, skip, bias)
    y, r = _root_mean_square(b, h, gamma, [-1], attribute(node, "epsilon", 1e-12))
    if len(node.outputs) > 1 and node.outputs[1].name:
        raise NotDifferentiable("its output mean is asked for, which it does not compute\n  hint: leave it out")
    return [y, None, r, h]


@contrib("EmbedLayerNormalization", whole=("input_ids", "segment_ids", "mask", "position_ids"))
def embed_layer_norm(
    b: Builder,
    node: ir.Node,
    input_ids: Var,
    segment_ids: Var | None,
    word_embedding: Var,
    position_embedding: Var,
    segment_embedding: Var | None,
    gamma: Var,
    beta: Var,
    mask: Var | None,
    position_ids: Var | None,
) -> Sequence[Var | None]:
    """y = (h - μ)·r·γ + β with h = word + position + segment, looked up"""
    if position_ids is None:
        position_ids = b.places_along(input_ids, 1)
    h = _add_skip(b.Gather(word_embedding, input_ids), b.Gather(position_embedding, position_ids), None)
    if segment_embedding is not None:
        h = h + b.Gather(segment_embedding, require_operand(segment_ids, "segment_ids"))
    y = b.LayerNormalization(h, gamma, beta, axis=-1, epsilon=attribute(node, "epsilon", 1e-12))
    if mask is None:
        zero = b.const(0, ir.DataType.INT32)
        return [y, b.Expand(zero, b.shape_of(input_ids, 0, 1)), h]
    words = b.Cast(b.Equal(mask, b.const(1, ir.DataType.INT32)), to=int(ir.DataType.INT32))
    return [y, b.ReduceSum(words, [1], keepdims=0), h]

"""Differentiable operators of classical machine learning (ai.onnx.ml).

Most return float32 for any operand, so cotangents are cast to the type of x, and tangents to that of y. The
parameters of these operators are attributes, not operands, and have no derivative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Var, reshape_to
from onnxgrad.rules.conv.geometry import size
from onnxgrad.rules.fourier import fitted
from onnxgrad.rules.index import put_rows
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise, linear, rule, undefined
from onnxgrad.rules.rule import Result, Tangents

ML = "ai.onnx.ml"

undefined("DictVectorizer", "ZipMap", domain=ML, reason="one of its sides is a map, which is no tensor")
undefined(
    "SVMClassifier",
    domain=ML,
    reason="its scores are votes between pairs of classes or probabilities fitted to them, which jump or are "
    "found by iteration",
)


# --- Scaler, Imputer, FeatureVectorizer, ArrayFeatureExtractor --------------------------------------


def _factors(op: Op, like: Var) -> Var:
    return op.const(np.array(op.attr("scale")), like.dtype)


def _scaler_jvp(op: Op, tangents: Tangents, x: Var) -> Result:
    return op.cast_like(tangents[0] * _factors(op, x), op.output(0))


@rule("Scaler", wrt=(0,), jvp=_scaler_jvp, domain=ML)
def scaler(op: Op, g: Var, x: Var) -> Result:
    """y = (x - offset)·scale: g·scale"""
    return op.cast_like(g, x) * _factors(op, x)


@elementwise("Imputer", domain=ML, kind=None)  # its attribute holds a number for each column
def imputer(op: Op, g: Var, x: Var) -> Result:
    """y = x, but a constant where x is the value that stands for missing: g where it is not"""
    missing = op.attr("replaced_value_float", 0.0)
    return op.Where(op.IsNaN(x) if np.isnan(missing) else op.Equal(x, float(missing)), 0.0, g)


def _vectorizer_jvp(op: Op, tangents: Tangents) -> Result:
    columns = []
    for x, t, width in zip(op.operands, tangents, op.attr("inputdimensions")):
        t = op.cast_like(op.zeros_like(x) if t is None else t, op.output(0))
        columns.append(fitted(op, t, 1, _width(op, x), width))
    return op.Concat(*columns, axis=1)


def _width(op: Op, x: Var) -> Any:
    if x.rank != 2:
        raise NotDifferentiable("its operands must be matrices; the result for vectors is not specified")
    return size(x, 1) if size(x, 1) is not None else op.Shape(x, start=1)


@rule("FeatureVectorizer", jvp=_vectorizer_jvp, domain=ML)
def feature_vectorizer(op: Op, g: Var) -> Result:
    """y = [x₁ … xₙ], each cut or filled up to its width: g cut into the widths, and filled up or cut"""
    widths, parts, start = op.attr("inputdimensions"), [], 0
    for x, need, width in zip(op.operands, op.needs, widths):
        part = None
        if need:
            part = op.Slice(g, [start], [start + width], [1])
            part = op.cast_like(fitted(op, part, 1, width, _width(op, x)), x)
        parts.append(part)
        start += width
    return parts


@linear("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(op: Op, g: Var, x: Var, index: Var) -> Result:
    """y[…, j] = x[…, i[j]]: Σ over repeated i of g"""
    flat = op.Reshape(index, [-1])
    return put_rows(op, op.Reshape(g, [-1]) if x.rank == 1 else g, flat, x, x.rank - 1)


# --- Normalizer ------------------------------------------------------------------------------------


@rule("Normalizer", wrt=(0,), domain=ML)
def normalizer(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x/n for each row, n its largest element (MAX), Σ |x| (L1) or √Σ x² (L2): (g - n'·Σ g·y)/n with
    n' = 1 at the largest elements, shared evenly, sign x, or y; 0 where n is 0"""
    kind, last = op.attr("norm"), [-1]
    kind = kind.decode() if isinstance(kind, bytes) else kind
    g, y = op.cast_like(g, x), op.cast_like(y, x)
    norm = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[kind](x, last, keepdims=1)
    if kind == "MAX":
        hit = op.cast_like(op.Equal(x, norm), x)
        slope = hit / op.ReduceSum(hit, last, keepdims=1)
    else:
        slope = op.Sign(x) if kind == "L1" else y
    zero = op.Equal(norm, 0.0)
    inv = op.Where(zero, 0.0, 1 / op.Where(zero, 1.0, norm))
    return (g - slope * op.ReduceSum(g * y, last, keepdims=1)) * inv


# --- linear models and support vectors -------------------------------------------------------------


def _through_transform(op: Op, g: Var, y: Var) -> Any:
    """The cotangent of the scores before the post_transform that gave y."""
    kind = op.attr("post_transform")
    kind = kind.decode() if isinstance(kind, bytes) else kind
    if kind == "NONE":
        return g
    if kind == "LOGISTIC":
        return g * (y * (1 - y))
    if kind in ("SOFTMAX", "SOFTMAX_ZERO"):  # the latter keeps scores of 0 at 0, where the same formula gives 0
        return y * (g - op.ReduceSum(g * y, [-1], keepdims=1))
    raise NotDifferentiable(f"its post_transform {kind} is an approximation without a specified derivative")


@rule("LinearRegressor", wrt=(0,), domain=ML)
def linear_regressor(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = f(x·Wᵀ + b) with the post_transform f: f'(g)·W"""
    weights = np.array(op.attr("coefficients")).reshape(op.attr("targets"), -1)
    d = _through_transform(op, op.cast_like(g, x), op.cast_like(y, x))
    d = op.Unsqueeze(d, [0]) if d.rank == 1 else d
    return reshape_to(d @ op.const(weights, x.dtype), x)


@rule("LinearClassifier", wrt=(0,), domain=ML)
def linear_classifier(op: Op, g: Var, x: Var, labels: Var, z: Var) -> Result:
    """z = f(x·Wᵀ + b) with the post_transform f: f'(g)·W; of two classes with one score s, z = (1 - f(s), f(s))"""
    coefficients = np.array(op.attr("coefficients"))
    classes = len(op.attr("classlabels_ints") or op.attr("classlabels_strings") or ())
    scores = len(op.attr("intercepts") or ()) or classes
    width = size(x, x.rank - 1)
    if width is not None:
        scores = coefficients.size // width
    if scores < classes:
        kind = op.attr("post_transform")
        if (kind.decode() if isinstance(kind, bytes) else kind).startswith("SOFTMAX"):
            raise NotDifferentiable("the result of its post_transform of one score for two classes is not specified")
    d = _through_transform(op, op.cast_like(g, x), op.cast_like(z, x))
    if scores < classes:
        d = d @ op.const(np.array([[-1], [1]]), d.dtype)
    weights = op.const(coefficients.reshape(scores, -1), x.dtype)
    return reshape_to(d @ weights, x)


@rule("SVMRegressor", wrt=(0,), domain=ML)
def svm_regressor(op: Op, g: Var, x: Var) -> Result:
    """y = Σⱼ αⱼ·k(x, vⱼ) + ρ: g·Σⱼ αⱼ·∂k/∂x for the kernels x·v, (γx·v + c)ᵈ, tanh(γx·v + c), exp(-γ‖x - v‖²);
    0 if it only says on which side x is (one_class)"""
    if op.attr("one_class"):
        return None
    kind = op.attr("post_transform")
    if (kind.decode() if isinstance(kind, bytes) else kind) != "NONE":
        raise NotDifferentiable("only without a post_transform: its result for a single score is not specified")
    alpha = np.array(op.attr("coefficients"))[None]
    count, kernel = op.attr("n_supports") or 0, op.attr("kernel_type")
    kernel = kernel.decode() if isinstance(kernel, bytes) else kernel
    g = op.cast_like(g, x)
    if not count:
        return reshape_to(g @ op.const(alpha, x.dtype), x)
    support = np.array(op.attr("support_vectors")).reshape(count, -1)
    gamma, shift, degree = op.attr("kernel_params") or (0.0, 0.0, 0.0)
    vectors, weights = op.const(support, x.dtype), op.const(alpha, x.dtype)
    if kernel == "LINEAR":
        return reshape_to(g @ op.const(alpha @ support, x.dtype), x)
    products = x @ op.const(support.T, x.dtype)
    if kernel == "RBF":
        squares = op.ReduceSum(x * x, [-1], keepdims=1) - products * 2 + op.const((support * support).sum(1), x.dtype)
        share = g * weights * op.Exp(squares * -gamma) * (2 * gamma)
        return share @ vectors - x * op.ReduceSum(share, [-1], keepdims=1)
    p = products * gamma + shift
    if kernel == "POLY":
        slope = p ** (float(int(degree)) - 1) * (int(degree) * gamma) if int(degree) else op.zeros_like(p)
    else:
        t = op.Tanh(p)
        slope = (1 - t * t) * gamma
    return (g * weights * slope) @ vectors

"""Normalizations of groups against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of

PORTABLE = Options(target="portable")


def group_norm(shape, groups, channels, ones=1.0, epsilon=1e-3):
    """GroupNorm as PyTorch writes it."""
    axes = ", ".join(map(str, range(1, len(shape) - 1)))
    is_known = all(isinstance(d, int) for d in shape[1:])
    rest = math.prod(shape[1:]) // groups if is_known else -1
    one, zero = (", ".join([str(number)] * groups) for number in (ones, 0.0))
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[{", ".join(map(str, shape))}] x, float[{channels}] s, float[{channels}] b) => (y)
    <int64[3] split = {{0, {groups}, {rest}}}, int64[{len(shape) - 2}] axes = {{{axes}}},
     float[{groups}] one = {{{one}}}, float[{groups}] zero = {{{zero}}}>
    {{ v = Reshape (x, split) n = InstanceNormalization <epsilon = {epsilon}> (v, one, zero) shape = Shape (x)
       back = Reshape (n, shape) sc = Unsqueeze (s, axes) m = Mul (back, sc)
       bc = Unsqueeze (b, axes) y = Add (m, bc) }}"""
    return onnx.parser.parse_model(text)


def expected(x, s, b, g, groups, epsilon=1e-3):
    """y and the cotangents of x, s and b, in float64."""
    x, s, b, g = (v.astype(np.float64) for v in (x, s, b, g))
    column = (-1, *[1] * (x.ndim - 2))
    split = (x.shape[0], groups, int(np.prod(x.shape[1:])) // groups)
    pixels = (0, *range(2, x.ndim))
    d = x.reshape(split) - x.reshape(split).mean(2, keepdims=True)
    r = 1 / np.sqrt((d * d).mean(2, keepdims=True) + epsilon)
    xh = (d * r).reshape(x.shape)
    gs = (g * s.reshape(column)).reshape(split)
    dx = r * (gs - gs.mean(2, keepdims=True) - d * r * (gs * d * r).mean(2, keepdims=True))
    return xh * s.reshape(column) + b.reshape(column), dx.reshape(x.shape), (g * xh).sum(pixels), g.sum(pixels)


def feeds_of(shape, channels, level=0.0):
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    s, b = (rng.standard_normal(channels).astype(np.float32) for _ in range(2))
    return {"x": x + np.float32(level), "s": s, "b": b, "y_cotangent": g}


def check(derived, feeds, groups, tolerance=2e-5):
    found = Session(derived, PORTABLE).run(feeds)
    names = "y", "x_grad", "s_grad", "b_grad"
    for name, true in zip(names, expected(feeds["x"], feeds["s"], feeds["b"], feeds["y_cotangent"], groups)):
        np.testing.assert_allclose(found[name], true, rtol=tolerance, atol=tolerance * max(1, abs(true).max(initial=0)))


def passed(derived):
    found = passes_of(derived, PORTABLE)
    assert not found.failed
    return found


def count(model, *op_types):
    return sum(node.op_type in op_types for node in model.graph)


@pytest.mark.parametrize(
    ("declared", "shape", "groups"),
    [
        (("N", 8, 16, 8), (3, 8, 16, 8), 4),  # rows of 256 squares
        (("N", 6, 5, 7), (2, 6, 5, 7), 2),
        (("N", 6, 1), (2, 6, 1), 6),
        (("N", 4, 3, 2, 2), (2, 4, 3, 2, 2), 1),
        (("N", 8, "H", "W"), (2, 8, 3, 5), 4),
        ((2, 4, 9), (2, 4, 9), 2),
        (("N", 8, 16, 8), (0, 8, 16, 8), 4),
    ],
)
def test_group_norm(declared, shape, groups):
    derived = vjp(ir.from_proto(group_norm(declared, groups, shape[1])), wrt=["x", "s", "b"])
    found = passed(derived)
    assert "group_norms" in found.applied
    assert not count(found.model, "InstanceNormalization")
    check(derived, feeds_of(shape, shape[1]), groups)


def test_a_large_mean():
    derived = vjp(ir.from_proto(group_norm(("N", 4, 32, 32), 2, 4)), wrt=["x", "s", "b"])
    check(derived, feeds_of((2, 4, 32, 32), 4, level=100.0), 2, 1e-4)


def test_neither_normalized_groups_nor_scaled_cotangents_are_written():
    derived = vjp(ir.from_proto(group_norm(("N", 8, 16, 8), 4, 8)), wrt=["x", "s", "b"])
    nodes = [node for node in passed(derived).model.graph if node.op_type in ("Mul", "Sub", "Add")]
    images = [node for node in nodes if math.prod(node.outputs[0].shape[1:]) == 8 * 16 * 8]
    assert len(images) == 8  # d, its product and sum; g·d, two products, a sum and a difference


@pytest.mark.parametrize(("wrt", "level"), [(["x"], 0.0), (["s", "b"], 0.0), (["x", "s", "b"], 0.5)])
def test_some_cotangents_and_scales_of_groups(wrt, level):
    given = group_norm(("N", 6, 4, 4), 3, 6, ones=1.0 + level)
    derived = vjp(ir.from_proto(given), wrt=wrt)
    feeds = feeds_of((2, 6, 4, 4), 6)
    plain = Session(derived, Options(target="portable", without=("group_norms",))).run(feeds)
    for name, value in Session(derived, PORTABLE).run(feeds).items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("extra", ["", "z = Exp (n)", "z = Exp (back)", "z = ReduceSum (v)"])
def test_values_between_that_are_read_elsewhere(extra):
    given = group_norm(("N", 6, 4, 4), 3, 6)
    if extra:
        more = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g () => (z) {{ {extra} }}').graph
        given.graph.node.extend(more.node)
        given.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    else:
        given.graph.output.append(onnx.helper.make_tensor_value_info("n", 1, ["N", 3, 32]))
    derived = vjp(ir.from_proto(given), wrt=["x", "s"], of=["y"])
    feeds = feeds_of((2, 6, 4, 4), 6)
    plain = Session(derived, Options(target="portable", without=("group_norms",))).run(feeds)
    for name, value in Session(derived, PORTABLE).run(feeds).items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [16, 1])
def test_instance_normalization(size):
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 3, {size}, {size}] x, float[3] s, float[3] b) => (y)
    {{ y = InstanceNormalization <epsilon = 1e-3> (x, s, b) }}"""
    derived = vjp(ir.from_proto(onnx.parser.parse_model(text)), wrt=["x", "s", "b"])
    assert "group_norms" in passed(derived).applied
    check(derived, feeds_of((2, 3, size, size), 3), 3)


@pytest.mark.parametrize(("epsilon", "axes"), [(1e-2, 2), (1e-3, 1), (1e-3, 2)])
def test_statistics_are_those_of_the_operator(epsilon, axes):
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g (float[2, 3, 8] x, float[3] s, float[3] b) => (y, r)
    <int64[1] a = {{{axes}}}, float e = {{{epsilon}}}>
    {{ y = InstanceNormalization <epsilon = 1e-3> (x, s, b) m = ReduceMean (x, a) d = Sub (x, m) q = Mul (d, d)
       v = ReduceMean (q, a) ve = Add (v, e) w = Sqrt (ve) r = Reciprocal (w) }}"""
    given = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert ("group_norms" in passed(given).applied) == (epsilon == 1e-3 and axes == 2)

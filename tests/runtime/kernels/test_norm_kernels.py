"""Normalizations of rows and of groups of channels, and their cotangents, in C, against the operators and float64."""

import numpy as np
import pytest
from onnx import helper

from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def normal(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def layer(shape, axis=-1, wrt=("x", "scale", "b"), symbolic=False, scale=None):
    row = shape[axis:] if scale is None else scale
    arrays = {"x": normal(*shape) * 2 + 3, "scale": normal(*row, seed=1), "b": normal(*row, seed=2)}
    node = helper.make_node("LayerNormalization", ["x", "scale", "b"], ["y"], axis=axis, epsilon=1e-3)
    return Pulled([node], arrays, wrt, symbolic, opset=20)


def grouped(shape, groups=None, wrt=("x", "scale", "b"), symbolic=False, per_group=False):
    """GroupNormalization, or InstanceNormalization without a number of groups."""
    size = groups if per_group else shape[1]
    arrays = {"x": normal(*shape) * 2 + 3, "scale": normal(size, seed=1), "b": normal(size, seed=2)}
    kind = "InstanceNormalization" if groups is None else "GroupNormalization"
    settings = {} if groups is None else {"num_groups": groups}
    node = helper.make_node(kind, ["x", "scale", "b"], ["y"], epsilon=1e-3, **settings)
    return Pulled([node], arrays, wrt, symbolic, opset=18 if per_group else 21)


def compare(operators, shape, kernels, seed=None):
    """Cotangents of operators and kernels, and y where a kernel gives it as well."""
    seed = normal(*shape, seed=3) if seed is None else seed
    found = operators.compare(seed, kernels, **CLOSE)
    feeds = {**operators.arrays, operators.seed: seed}
    expected = Session(operators.model, Options(threads=1, target="portable")).run(feeds)["y"]
    for threads in (1, 2):
        y = Session(operators.model, Options(threads=threads, target="native")).run(feeds)["y"]
        np.testing.assert_allclose(y, expected, **CLOSE)
    return found


ROWS = [((4, 7), -1), ((1, 1), -1), ((3, 5, 33), -1), ((300, 16), 1), ((2, 3, 4, 5), 2), ((130, 2, 17), 1),
        ((3, 9000), 1), ((17, 64, 64, 16), -3), ((2, 1, 70000), 2), ((6, 4), 0)]  # fmt: skip


@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_layer_norm(shape, axis):
    operators = layer(shape, axis)
    seed = normal(*shape, seed=3)
    dx, d_scale, d_bias = operators.compare(seed, ["LayerNormGrad"], **CLOSE)
    if shape == (3, 9000):
        x, scale = operators.arrays["x"].astype(np.float64), operators.arrays["scale"]
        inverse = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-3)
        unit, pulled = (x - x.mean(1, keepdims=True)) * inverse, seed.astype(np.float64) * scale
        exact = inverse * (pulled - pulled.mean(1, keepdims=True) - unit * (pulled * unit).mean(1, keepdims=True))
        np.testing.assert_allclose(dx, exact, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_scale, (seed * unit).sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_bias, seed.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrt", [("x",), ("scale",), ("b",), ("scale", "b"), ("x", "b")], ids=",".join)
def test_layer_norm_of_some_operands(wrt):
    layer((70, 19), wrt=wrt).compare(normal(70, 19, seed=3), ["LayerNormGrad"], **CLOSE)


def test_rows_of_symbolic_sizes():
    assert layer((5, 6), symbolic=True).kernels == ["LayerNormGrad"]  # the scale's size is known, and not 1
    layer((5, 6), symbolic=True).compare(normal(5, 6, seed=3), ["LayerNormGrad"], **CLOSE)
    empty = layer((5, 6), symbolic=True)
    empty.arrays["x"] = np.zeros((0, 6), np.float32)
    dx, d_scale, d_bias = empty.compare(np.zeros((0, 6), np.float32), ["LayerNormGrad"])
    assert dx.shape == (0, 6)
    assert not d_scale.any()
    assert not d_bias.any()


def test_a_scale_that_is_broadcast_stays_operators():
    assert layer((4, 6), scale=(1,)).kernels == []
    assert layer((4, 5, 6), axis=1, scale=(6,)).kernels == []
    assert layer((4, 1), symbolic=True).kernels == []


def test_a_row_that_is_not_finite_is_the_only_one():
    operators = layer((20, 33))
    seed = normal(20, 33, seed=3)
    seed[7, 5] = np.nan
    operators.arrays["x"][11, 2] = np.inf
    dx, d_scale = operators.compare(seed, ["LayerNormGrad"], **CLOSE)[:2]
    assert np.isfinite(dx).all(axis=1).tolist() == [row not in (7, 11) for row in range(20)]
    assert not np.isfinite(d_scale[2])


GROUPS = [((2, 4, 5, 7), 2), ((1, 1, 1, 2), 1), ((3, 6, 40), 3), ((2, 32, 33, 9), 8), ((5, 8), 2), ((1, 6, 90, 90), 2),
          ((2, 4, 3, 4, 5), 4), ((40, 4, 2, 2), 1)]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("shape", "groups"), GROUPS, ids=str)
@pytest.mark.parametrize("per_group", [False, True])
def test_group_norm(shape, groups, per_group):
    compare(grouped(shape, groups, per_group=per_group), shape, ["GroupNorm", "GroupNormGrad"])


@pytest.mark.parametrize("shape", [s for s, _ in GROUPS if len(s) > 2], ids=str)
def test_instance_norm(shape):
    compare(grouped(shape), shape, ["GroupNorm", "GroupNormGrad"])


@pytest.mark.parametrize("wrt", [("x",), ("scale",), ("b",), ("x", "scale")], ids=",".join)
def test_group_norm_of_some_operands(wrt):
    compare(grouped((3, 4, 5, 6), 2, wrt=wrt), (3, 4, 5, 6), ["GroupNorm", "GroupNormGrad"])


def test_groups_of_symbolic_sizes():
    for groups in (None, 2):
        compare(grouped((3, 4, 5, 6), groups, symbolic=True), (3, 4, 5, 6), ["GroupNorm", "GroupNormGrad"])
        empty = grouped((3, 4, 5, 6), groups, symbolic=True)
        empty.arrays["x"] = np.zeros((0, 4, 5, 6), np.float32)
        dx, d_scale, _ = empty.native(np.zeros((0, 4, 5, 6), np.float32))
        assert dx.shape == (0, 4, 5, 6)
        assert not d_scale.any()


def test_a_group_that_is_not_finite_is_the_only_one():
    operators = grouped((3, 6, 5, 6), 3)
    seed = normal(3, 6, 5, 6, seed=3)
    seed[1, 2, 0, 0] = np.inf
    dx, d_scale, d_bias = operators.native(seed)
    finite = np.isfinite(dx).all(axis=(2, 3))
    assert finite[[0, 2]].all()
    assert finite[1].tolist() == [True, True, False, False, True, True]
    assert np.isfinite(d_scale).tolist() == np.isfinite(d_bias).tolist() == [True, True, False, True, True, True]


def test_other_types_stay_operators():
    arrays = {"x": normal(3, 4).astype(np.float64), "scale": np.ones(4), "b": np.ones(4)}
    node = helper.make_node("LayerNormalization", ["x", "scale", "b"], ["y"])
    assert Pulled([node], arrays, ["x"], opset=20).kernels == []
    arrays["x"] = normal(3, 4, 5).astype(np.float64)
    node = helper.make_node("InstanceNormalization", ["x", "scale", "b"], ["y"])
    assert Pulled([node], arrays, ["x"], opset=20).kernels == []

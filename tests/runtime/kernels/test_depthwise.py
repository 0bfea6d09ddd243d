"""Depthwise convolutions in C, forwards, turned and their cotangents: against sums in float64 and the operators."""

import numpy as np
import pytest
from onnx import helper

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels import convolutions
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def always(monkeypatch):
    """Small cases have the kernel, too."""
    monkeypatch.setattr(convolutions, "_PLACES", 0)
    monkeypatch.setattr(convolutions, "_TAPS", 7)


#: N, C, size, kernel, strides, dilations, pads
GEOMETRIES = {
    "whole vectors": (2, 32, (8, 16), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "odd sizes": (3, 37, (9, 13), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "one picture of few channels": (1, 8, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "strided": (2, 24, (16, 17), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    "strided, taps that meet nothing": (2, 19, (9, 11), (2, 2), (3, 2), (1, 1), (0, 0, 0, 0)),
    "5×5, strided": (2, 17, (13, 9), (5, 5), (2, 2), (1, 1), (2, 2, 2, 2)),
    "uneven": (2, 9, (11, 14), (3, 5), (1, 2), (1, 1), (2, 0, 1, 3)),
    "dilated": (2, 20, (12, 10), (3, 3), (1, 1), (2, 3), (2, 3, 2, 3)),
    "dilated and strided": (1, 16, (13, 15), (3, 2), (2, 3), (3, 2), (3, 1, 0, 2)),
    "7×7 on 7×7": (2, 16, (7, 7), (7, 7), (1, 1), (1, 1), (3, 3, 3, 3)),
    "one number": (1, 9, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "wider padding than taps": (1, 10, (3, 4), (2, 2), (1, 1), (1, 1), (4, 5, 3, 6)),
    "bands": (1, 18, (70, 65), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "rows": (2, 21, (50,), (4,), (1,), (1,), (3, 0)),
    "rows, strided": (3, 16, (41,), (5,), (2,), (2,), (4, 3)),
    "long rows": (1, 16, (5000,), (31,), (1,), (1,), (15, 15)),
}


BOTH = ["Depthwise", "Depthwise", "ConvWeightGrad"]


def pulled(geometry, kind="Conv", bias=True, dtype=np.float32, **changed):
    """x, w and a bias of a convolution, the cotangent of x for a seed, and that seed."""
    n, c, size, kernel, strides, dilations, pads = geometry
    rng = np.random.default_rng(5)
    arrays = {"x": rng.standard_normal((n, c, *size)), "w": rng.standard_normal((c, 1, *kernel))}
    if bias:
        arrays["b"] = rng.standard_normal(c)
    settings = {"strides": strides, "dilations": dilations, "pads": pads, "group": c, **changed}
    axes = len(size)
    reach = [d * (k - 1) + 1 - a - b for d, k, a, b in zip(dilations, kernel, pads[:axes], pads[axes:])]
    if kind == "Conv":
        results = [(h - r) // s + 1 for h, r, s in zip(size, reach, strides)]
    else:
        more = changed.get("output_padding", [0] * axes)
        results = [(h - 1) * s + r + m for h, r, s, m in zip(size, reach, strides, more)]
    node = helper.make_node(kind, list(arrays), ["y"], **settings)
    arrays = {k: v.astype(dtype) for k, v in arrays.items()}
    return Pulled([node], arrays, ["x", "w"]), rng.standard_normal((n, c, *results)).astype(dtype)


def run(operators, seed, target="native", threads=1):
    """y and the cotangent of x. That of w is a call of a kernel, too: without one, a session has none."""
    session = Session(operators.model, Options(threads=threads, target=target))
    found = session.run({**operators.arrays, operators.seed: seed})
    return found["y"], found[operators.results[0]]


def the_sums(arrays, seed, geometry):
    """y and the cotangent of x as sums in float64, without a zero of padding."""
    _, _, size, kernel, strides, dilations, pads = geometry
    x, w, g = (a.astype(np.float64) for a in (arrays["x"], arrays["w"][:, 0], seed))
    y, dx = np.zeros(seed.shape), np.zeros(x.shape)
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*kernel):
            for at in np.ndindex(*seed.shape[2:]):
                here = tuple(p * s + t * d - b for p, s, t, d, b in zip(at, strides, tap, dilations, pads))
                if all(0 <= p < n for p, n in zip(here, size)):
                    y[(..., *at)] += x[(..., *here)] * w[(..., *tap)]
                    dx[(..., *here)] += g[(..., *at)] * w[(..., *tap)]
    b = arrays.get("b", np.zeros(len(w)))
    return y + b.reshape(-1, *[1] * len(size)), dx


@pytest.mark.parametrize("name", GEOMETRIES)
def test_sums(always, name):
    operators, seed = pulled(GEOMETRIES[name], bias=len(name) % 2 == 0)
    assert operators.kernels == BOTH
    runs = [run(operators, seed), run(operators, seed, threads=2), run(operators, seed, "portable")]
    for one, two, other, sums in zip(*runs, the_sums(operators.arrays, seed, GEOMETRIES[name])):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, sums, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["odd sizes", "strided", "dilated and strided", "rows, strided"])
@pytest.mark.parametrize("more", [0, 1])
def test_transposed(always, name, more):
    geometry = GEOMETRIES[name]
    axes = len(geometry[2])
    padding = [more * (s > 1) for s in geometry[4]]
    operators, seed = pulled(geometry, "ConvTranspose", output_padding=padding)
    assert operators.kernels == BOTH
    turned = (geometry[0], geometry[1], seed.shape[2:], *geometry[3:])
    dx, y = the_sums({"x": seed, "w": operators.arrays["w"]}, operators.arrays["x"], turned)
    y += operators.arrays["b"].reshape(-1, *[1] * axes)
    for found, other, sums in zip(run(operators, seed), run(operators, seed, "portable"), (y, dx)):
        np.testing.assert_allclose(found, sums, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_belongs(value):
    operators, seed = pulled(GEOMETRIES["odd sizes"])
    operators.arrays["x"][0, 0, 0, 0] = operators.arrays["x"][2, 36, 8, 12] = value
    seed[1, 3, 4, 5] = value
    for found, sums in zip(run(operators, seed), the_sums(operators.arrays, seed, GEOMETRIES["odd sizes"])):
        np.testing.assert_allclose(found, sums, rtol=1e-5, atol=2e-5)
        assert not np.isfinite(found).all()


def kernels(geometry, **changed):
    return pulled(geometry, **changed)[0].kernels.count("Depthwise")


def test_where_it_gains():
    fits = GEOMETRIES["odd sizes"]
    assert kernels(fits) == 2
    assert kernels((1, 7, *fits[2:])) == 0  # few channels
    assert kernels((*fits[:3], (1, 1), *fits[4:6], (0, 0, 0, 0))) == 0
    assert kernels((*fits[:2], (9, 11), *fits[3:])) == 0  # few numbers in a picture
    assert kernels((*fits[:3], (7, 7), *fits[4:6], (3,) * 4)) == 0  # many taps
    assert kernels(fits, dtype=np.float64) == 0
    assert kernels((*fits[:5], (1 << 12, 1 << 12), (1 << 12, 1 << 12) * 2)) == 0  # windows reach far
    rng = np.random.default_rng(0)
    pairs = {"x": rng.standard_normal((2, 16, 6, 6)), "w": rng.standard_normal((16, 2, 3, 3))}
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4, group=8)
    assert Pulled([node], {k: v.astype(np.float32) for k, v in pairs.items()}, ["x", "w"]).kernels == ["ConvWeightGrad"]


def test_constant_weights_stay_with_the_runtime():
    w = np.random.default_rng(0).standard_normal((16, 1, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["v"], value=helper.make_tensor("v", 1, w.shape, w.tobytes(), raw=True)),
        helper.make_node("Conv", ["x", "v"], ["r"], pads=[1] * 4, group=16),
        helper.make_node("Conv", ["r", "w"], ["y"], pads=[1] * 4, group=16),
    ]
    arrays = {"x": np.ones((4, 16, 16, 16), np.float32), "w": w}
    assert Pulled(nodes, arrays, ["w"]).kernels == ["Depthwise", "ConvWeightGrad"]


def test_padding_that_the_node_finds():
    operators, _ = pulled(GEOMETRIES["odd sizes"], auto_pad="SAME_UPPER", pads=None)
    assert operators.kernels.count("Depthwise") == 1  # the cotangent, whose padding is known

"""Convolutions of 3×3 taps in C, forwards and of the cotangent: against the sum itself in float64, and PyTorch."""

import numpy as np
import pytest
from onnx import helper

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels import convolutions
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

#: N, C, M, (H, W), pads
GEOMETRIES = {
    "whole tiles": (2, 32, 32, (8, 16), (1, 1, 1, 1)),
    "odd sizes": (3, 33, 47, (9, 13), (1, 1, 1, 1)),
    "one channel": (2, 1, 1, (5, 6), (1, 1, 1, 1)),
    "three to one": (1, 3, 1, (7, 5), (0, 0, 0, 0)),
    "one number": (1, 2, 3, (1, 1), (1, 1, 1, 1)),
    "one number of nine": (2, 16, 16, (3, 3), (0, 0, 0, 0)),
    "as many as taps reach": (1, 5, 17, (1, 2), (2, 2, 2, 2)),
    "uneven padding": (2, 17, 16, (6, 19), (2, 0, 1, 2)),
    "a column": (2, 4, 5, (30, 1), (1, 1, 1, 1)),
    "more than a chain of channels": (1, 70, 70, (10, 4), (1, 1, 1, 1)),
    "parts of rows": (1, 40, 40, (6, 421), (1, 1, 1, 1)),
    "many bands": (35, 16, 20, (12, 12), (1, 1, 1, 1)),
}


@pytest.fixture
def always(monkeypatch):
    """Small cases have the kernel, too."""
    monkeypatch.setattr(convolutions, "gains", lambda *_: True)


def pulled(geometry, bias=True, symbolic=False, dtype=np.float32, **changed):
    """x, w and a bias of a Conv, the cotangent of x for a seed, and that seed."""
    n, c, m, size, pads = geometry
    rng = np.random.default_rng(5)
    arrays = {"x": rng.standard_normal((n, c, *size)), "w": rng.standard_normal((m, c, 3, 3)) / np.sqrt(9 * c)}
    if bias:
        arrays["b"] = rng.standard_normal(m)
    node = helper.make_node("Conv", list(arrays), ["y"], **{"pads": pads, "kernel_shape": [3, 3], **changed})
    seed = rng.standard_normal((n, m, *(k + a + b - 2 for k, a, b in zip(size, pads[:2], pads[2:]))))
    arrays = {k: v.astype(dtype) for k, v in arrays.items()}
    return Pulled([node], arrays, ["x"], symbolic), seed.astype(dtype)


def run(operators, seed, target="native", threads=1):
    """y and the cotangent of x."""
    session = Session(operators.model, Options(threads=threads, target=target))
    found = session.run({**operators.arrays, operators.seed: seed})
    return found["y"], found[operators.results[0]]


def the_sums(arrays, seed, pads):
    """y and the cotangent of x as what they are, in float64, without a zero of padding."""
    x, w, g = (a.astype(np.float64) for a in (arrays["x"], arrays["w"], seed))
    y, dx = np.zeros(seed.shape), np.zeros(x.shape)
    with np.errstate(all="ignore"):
        for i, j, p, q in np.ndindex(3, 3, *seed.shape[2:]):
            row, column = p + i - pads[0], q + j - pads[1]
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                y[:, :, p, q] += np.einsum("nc,mc->nm", x[:, :, row, column], w[:, :, i, j])
                dx[:, :, row, column] += np.einsum("nm,mc->nc", g[:, :, p, q], w[:, :, i, j])
    return y + arrays.get("b", np.zeros(len(w)))[:, None, None], dx


@pytest.mark.sweep(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_sums(always, name, bias):
    operators, seed = pulled(GEOMETRIES[name], bias)
    assert operators.kernels == ["Conv3x3", "Conv3x3"]
    found = run(operators, seed)
    for one, two, expected in zip(
        found, run(operators, seed, threads=2), the_sums(operators.arrays, seed, GEOMETRIES[name][4])
    ):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("channels", [16, 64, 256])
@pytest.mark.parametrize(
    "activation", [lambda x: x, lambda x: np.maximum(x, 0), lambda x: x + 3], ids=["±", "ReLU", "+3"]
)
def test_rounding_is_of_the_size_of_that_of_the_operators(always, channels, activation):
    operators, seed = pulled((1, channels, channels, (16, 16), (1, 1, 1, 1)), bias=False)
    operators.arrays["x"] = activation(operators.arrays["x"])
    exact = the_sums(operators.arrays, seed, (1, 1, 1, 1))
    for kernel, operator, sums in zip(run(operators, seed), run(operators, seed, "portable"), exact):
        assert np.sqrt(np.mean((kernel - sums) ** 2)) < 4 * np.sqrt(np.mean((operator - sums) ** 2))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_belongs(always, value):
    operators, seed = pulled(GEOMETRIES["odd sizes"])
    operators.arrays["x"][0, 0, 0, 0] = operators.arrays["x"][2, 32, 8, 12] = value
    seed[1, 3, 4, 5] = value
    expected = the_sums(operators.arrays, seed, (1, 1, 1, 1))
    for found, sums in zip(run(operators, seed), expected):
        np.testing.assert_allclose(found, sums, rtol=1e-5, atol=3e-5)
        assert not np.isfinite(found).all()


def test_large_numbers_that_only_transforms_exceed(always):
    operators, seed = pulled(GEOMETRIES["whole tiles"])
    operators.arrays["x"] = np.full_like(operators.arrays["x"], 1e38)
    operators.arrays["w"] = (
        np.eye(32, dtype=np.float32)[:, :, None, None]
        * np.eye(3, dtype=np.float32)[1]
        * np.eye(3, 3, dtype=np.float32)[1][:, None]
    )
    np.testing.assert_array_equal(run(operators, seed)[0], operators.arrays["x"] + operators.arrays["b"][:, None, None])


def kernels(geometry, **changed):
    return pulled(geometry, **changed)[0].kernels


def test_where_it_gains():
    fits = (4, 32, 32, (16, 16), (1, 1, 1, 1))
    assert kernels(fits) == ["Conv3x3"] * 2
    assert kernels((1, *fits[1:])) == []  # few tiles
    assert kernels((4, 8, 32, *fits[3:])) == []  # few channels
    assert kernels((4, 32, 17, *fits[3:])) == ["Conv3x3"]  # vectors half empty, but for the cotangent
    assert kernels((8, 32, 32, (5, 5), (1, 1, 1, 1))) == []  # tiles half empty
    assert kernels((1, 512, 512, (32, 32), (1, 1, 1, 1))) == []  # as many weights as would take much memory
    assert kernels(fits, dtype=np.float64) == []
    assert "Conv3x3" not in kernels(fits, strides=[2, 2])
    assert "Conv3x3" not in kernels(fits, dilations=[2, 2])
    assert kernels((4, 32, 32, (16, 16), (3, 3, 3, 3))) == []
    assert kernels(fits, symbolic=True) == []  # sizes of pictures that only a run tells
    assert kernels(fits, symbolic={"x": ["N", 32, 16, 16], "w": [32, 32, 3, 3], "b": [32]}) == ["Conv3x3"] * 2


def test_constant_weights_stay_with_the_runtime(always):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((16, 16, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=helper.make_tensor("w", 1, w.shape, w.tobytes(), raw=True)),
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4),
    ]
    assert Pulled(nodes, {"x": rng.standard_normal((4, 16, 16, 16)).astype(np.float32)}, ["x"]).kernels == []


@pytest.mark.torch
@pytest.mark.parametrize("name", GEOMETRIES)
def test_torch(always, name):
    torch = pytest.importorskip("torch")
    pads = GEOMETRIES[name][4]
    operators, seed = pulled(GEOMETRIES[name])
    x, w, b = (torch.tensor(operators.arrays[k]).double().requires_grad_() for k in "xwb")
    y = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (pads[1], pads[3], pads[0], pads[2])), w, b)
    (dx,) = torch.autograd.grad(y, x, torch.tensor(seed).double())
    for found, expected in zip(run(operators, seed), (y, dx)):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=3e-5)


# --- in depth --------------------------------------------------------------------------------------

#: N, C, M, (D, H, W), taps in depth, pads
DEEP = {
    "whole tiles": (2, 32, 32, (4, 8, 16), 3, (1,) * 6),
    "odd sizes": (2, 19, 33, (5, 9, 13), 3, (1,) * 6),
    "one channel": (2, 1, 1, (3, 5, 6), 3, (1,) * 6),
    "one number": (1, 2, 3, (1, 1, 1), 3, (1,) * 6),
    "no padding": (2, 3, 17, (4, 6, 7), 3, (0,) * 6),
    "uneven padding": (2, 17, 16, (3, 6, 19), 3, (2, 0, 1, 0, 2, 2)),
    "one tap": (3, 16, 16, (5, 8, 8), 1, (0, 1, 1, 0, 1, 1)),
    "five taps": (1, 20, 16, (6, 7, 9), 5, (4, 1, 1, 2, 1, 1)),
    "many bands": (9, 40, 20, (6, 12, 12), 3, (1,) * 6),
    "no pictures": (0, 16, 16, (4, 8, 8), 3, (1,) * 6),
}


def deep(geometry, bias=True):
    """The same as `pulled`, in three dimensions and of pictures that were picked from x, one after the other."""
    n, c, m, size, taps, pads = geometry
    rng = np.random.default_rng(5)
    arrays = {"x": rng.standard_normal((n, c, *size)), "w": rng.standard_normal((m, c, taps, 3, 3)) / np.sqrt(27 * c)}
    if bias:
        arrays["b"] = rng.standard_normal(m)
    arrays = {k: v.astype(np.float32) for k, v in arrays.items()}
    conv = helper.make_node("Conv", ["r", *list(arrays)[1:]], ["y"], pads=pads, kernel_shape=[taps, 3, 3])
    nodes = [helper.make_node("Gather", ["x", "i"], ["r"]), conv]
    arrays["i"] = np.arange(n)
    results = [k + a + b + 1 - t for k, a, b, t in zip(size, pads[:3], pads[3:], (taps, 3, 3))]
    unknown = {} if n else {"x": ["N", c, *size], "i": ["N"]}  # it would be known that nothing is picked
    return Pulled(nodes, arrays, ["x"], unknown), rng.standard_normal((n, m, *results)).astype(np.float32)


def the_deep_sums(arrays, seed, pads):
    x, w, g = (a.astype(np.float64) for a in (arrays["x"], arrays["w"], seed))
    y, dx = np.zeros(seed.shape), np.zeros(x.shape)
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*w.shape[2:]):
            for at in np.ndindex(*seed.shape[2:]):
                here = tuple(p + i - before for p, i, before in zip(at, tap, pads))
                if all(0 <= p < n for p, n in zip(here, x.shape[2:])):
                    picked, there, weights = (
                        (slice(None), slice(None), *here),
                        (slice(None), slice(None), *at),
                        w[(..., *tap)],
                    )
                    y[there] += x[picked] @ weights.T
                    dx[picked] += g[there] @ weights
    return y + arrays.get("b", np.zeros(len(w)))[:, None, None, None], dx


@pytest.mark.sweep(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", DEEP)
def test_sums_in_depth(always, name, bias):
    operators, seed = deep(DEEP[name], bias)
    assert operators.kernels[:1] == ["Conv3x3"]
    found = run(operators, seed)
    for one, two, expected in zip(
        found, run(operators, seed, threads=2), the_deep_sums(operators.arrays, seed, DEEP[name][5])
    ):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=5e-5)


def test_in_depth_what_is_not_finite_stays_where_it_belongs(always):
    operators, seed = deep(DEEP["odd sizes"])
    operators.arrays["x"][0, 0, 0, 0, 0] = np.inf
    operators.arrays["x"][1, 18, 4, 8, 12] = np.inf
    seed[1, 3, 2, 4, 5] = -np.inf
    for found, sums in zip(run(operators, seed), the_deep_sums(operators.arrays, seed, (1,) * 6)):
        np.testing.assert_allclose(found, sums, rtol=1e-5, atol=5e-5)
        assert not np.isfinite(found).all()


@pytest.mark.parametrize("how", [{"strides": [2, 1, 1]}, {"dilations": [2, 1, 1]}, {"group": 16}], ids=str)
def test_other_convolutions_in_depth_stay_operators(always, how):
    arrays = {
        "x": np.ones((2, 16, 5, 8, 8), np.float32),
        "w": np.ones((16, 16 // how.get("group", 1), 3, 3, 3), np.float32),
        "i": np.arange(2),
    }
    conv = helper.make_node("Conv", ["r", "w"], ["y"], pads=[1] * 6, kernel_shape=[3, 3, 3], **how)
    found = Pulled([helper.make_node("Gather", ["x", "i"], ["r"]), conv], arrays, ["x"]).kernels
    assert "GatherGrad" in found
    assert "Conv3x3" not in found

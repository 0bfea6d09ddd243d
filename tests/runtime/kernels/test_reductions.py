"""Sums at the end of groups of elementwise operators: any axes, the same bits for any number of threads."""

import numpy as np
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.reductions import _in_base
from tests.runtime.kernels.test_elementwise import groups, model_of
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import fused

pytestmark = needs_kernels


def run(model, feeds):
    """The results of the groups of `model`: the same bits with one, two and three threads."""
    found = [Session(model, Options(threads=n, target="native")).run(feeds) for n in (1, 2, 3)]
    for other in found[1:]:
        for name, array in found[0].items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)
    return found[0]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sums_left(model):
    return [n for n in fused(model).graph if n.op_type in ("ReduceSum", "ReduceMean", "MatMul")]


SHAPES = [
    (4, 32, 96, 96),
    (3, 5, 33, 31),
    (64, 3, 8, 8),
    (1, 1, 1, 1),
    (2, 300, 1, 17),
    (7, 1, 1030, 9),
    (5, 0, 3, 9),
    (4, 3, 290, 5),
    (2, 300, 3, 63),
]
AXES = [(0, 2, 3), (0,), (3,), (1, 2), (0, 1, 2, 3), (1, 3)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_axes_of_any_shape(shape, axes):
    model = model_of(
        "p = Mul(x, g) q = Mul(p, w) s = ReduceSum(q, a) m = ReduceMean(p, a) y = Add(q, x)",
        "(float[N,C,H,W] x, float[N,C,H,W] g, float[C,1,1] w) => (float[A,B,D,E] s, float[N,C,H,W] y, float[P,Q,R,S] m)"
        f"<int64[{len(axes)}] a={{{', '.join(map(str, axes))}}}>",
    )
    assert not sums_left(model)
    x, g, w = normal(*shape), normal(*shape, seed=1), normal(shape[1], 1, 1, seed=2)
    with np.errstate(invalid="ignore"):
        found = run(model, {"x": x, "g": g, "w": w})
    p = x * g
    q = p * w
    np.testing.assert_array_equal(found["y"], q + x)
    size = np.abs(q).sum(axes, np.float64, keepdims=True)
    exact = q.sum(axes, np.float64, keepdims=True)
    assert found["s"].shape == exact.shape
    assert (np.abs(found["s"] - exact) <= 1e-6 * size + 1e-30).all()
    if q.size:
        np.testing.assert_allclose(found["m"], p.mean(axes, np.float64, keepdims=True), rtol=1e-6, atol=1e-6)
    else:
        assert np.isnan(found["m"]).all()


def test_infinities_and_nan_stay_where_they_are():
    model = model_of(
        "p = Mul(x, g) c = ReduceSum<keepdims=0>(p, first) r = ReduceSum<keepdims=0>(p, second)",
        "(float[N,C] x, float[N,C] g) => (float[C] c, float[N] r) <int64[1] first={0}, int64[1] second={1}>",
    )
    x, g = normal(700, 40), np.ones((700, 40), np.float32)
    x[3, 5], x[699, 7], x[100, 39] = np.inf, np.nan, -np.inf
    found = run(model, {"x": x, "g": g})
    np.testing.assert_allclose(found["c"], x.sum(0, np.float64), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["r"], x.sum(1, np.float64), rtol=1e-5, atol=1e-5)


def test_many_equal_numbers_do_not_lose_their_sum():
    model = model_of(
        "p = Mul(x, g) s = ReduceSum(p) c = ReduceSum<keepdims=0>(p, a)",
        "(float[N,C] x, float[1,C] g) => (float[A,B] s, float[C] c) <int64[1] a={0}>",
    )
    x = np.full((400000, 16), 0.1, np.float32)
    found = run(model, {"x": x, "g": np.ones((1, 16), np.float32)})
    np.testing.assert_allclose(found["s"], x.sum(dtype=np.float64), rtol=2e-7)
    np.testing.assert_allclose(found["c"], x.sum(0, np.float64), rtol=2e-7)


def test_sums_by_ones_and_of_views():
    """The sums that a derivative writes over leading axes; that a product reads the matrix too has no effect."""
    model = model_of(
        "y = Mul(x, g) f = Flatten<axis=2>(y) s = MatMul(ones, f) d = Gemm<transA=1>(f, h)"
        " v = Reshape(y, flat) n = ReduceSum<keepdims=0>(v, a)"
        " u = Unsqueeze(y, one) k = Squeeze(u, one) t = ReduceSum<keepdims=0>(k, b)",
        "(float[6,50,24] x, float[6,50,24] g, float[300,2] h)"
        " => (float[24] s, float[24,2] d, float[300] n, float[6,50] t)"
        "<int64[2] flat={300, 24}, int64[1] a={1}, int64[1] b={2}, int64[1] one={1},"
        f" float[300] ones = {{{', '.join(['1'] * 300)}}}>",
    )
    x, g, h = normal(6, 50, 24), normal(6, 50, 24, seed=1), normal(300, 2, seed=2)
    assert {n.op_type for n in sums_left(model)} == set()
    found, y = run(model, {"x": x, "g": g, "h": h}), (x * g).astype(np.float64)
    np.testing.assert_allclose(found["s"], y.sum((0, 1)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["n"], y.sum(2).reshape(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["t"], y.sum(2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["d"], y.reshape(300, 24).T @ h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("view", "axes", "base", "expected"),
    [
        (("64*N", 192), {0}, ("N", 64, 192), {0, 1}), (("64*N", 192), {1}, ("N", 64, 192), {2}),
        (("N", 8, 36), {2}, ("N", 8, 4, 9), {2, 3}), (("N", 8, 36), {1}, ("N", 16, 2, 9), None),
        ((6, 4), {0}, (2, 3, 4), {0, 1}), ((6, 4), {0}, (4, 6), None), (("M", "N"), {0}, ("N", "M"), None),
        ((1, 3, 1, 5), {0, 1}, (3, 5), {0}), ((24,), {0}, (2, 3, 4), {0, 1, 2}), ((2, 12), {1}, (2, 3, 4), {1, 2}),
    ],
)  # fmt: skip
def test_axes_of_views(view, axes, base, expected):
    assert _in_base(view, axes, base) == expected


def test_what_was_expanded_is_read_as_it_was():
    """The mean's cotangent, say: the result of Expand is never there."""
    model = model_of(
        "e = Expand(m, shape) y = Mul(x, e) z = Add(y, x)",
        "(float[4,64,8,8] x, float[4,64,1,1] m) => (float[4,64,8,8] z) <int64[4] shape={4, 64, 8, 8}>",
    )
    assert [n.op_type for n in fused(model).graph] == ["Elementwise"]
    x, m = normal(4, 64, 8, 8), normal(4, 64, 1, 1, seed=1)
    found = run(model, {"x": x, "m": m})
    np.testing.assert_array_equal(found["z"], x * m + x)


def test_an_expand_that_alone_gives_the_shape_stays():
    model = model_of(
        "e = Expand(m, shape) y = Mul(e, k) z = Add(y, k)",
        "(float[2,64,1] m, float[1] k) => (float[2,64,70] z) <int64[3] shape={2, 64, 70}>",
    )
    found = run(model, {"m": normal(2, 64, 1), "k": normal(1)})
    assert found["z"].shape == (2, 64, 70)


def test_a_sum_over_more_results_than_there_are_stays_outside():
    """Of eight results of floats, all are taken: the ninth sum remains, of a tensor that is written then."""
    sums = " ".join(f"s{k} = ReduceSum(y{k}, a)" for k in range(9))
    tensors = " ".join(f"y{k} = {'Mul' if k % 2 else 'Add'}({f'y{k - 1}' if k else 'x'}, g)" for k in range(9))
    outputs = ", ".join(f"float[A,B{k}] s{k}" for k in range(9))
    model = model_of(f"{tensors} {sums}", f"(float[N,C] x, float[N,C] g) => ({outputs}) <int64[1] a={{0}}>")
    x, g = normal(500, 20), normal(500, 20, seed=1)
    found, y = run(model, {"x": x, "g": g}), x
    for k in range(9):
        y = y * g if k % 2 else y + g
        np.testing.assert_allclose(found[f"s{k}"], y.sum(0, np.float64, keepdims=True), rtol=1e-4, atol=1e-3)
    assert groups(model) is not None

"""Views that only cost their call are dropped at level "none", in bodies too; the numbers stay."""

import numpy as np
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of
from tests.runtime.kernels.test_elementwise import model_of
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels
NONE = Options(threads=1, level="none", target="native")
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")
ENDS = "(double[3,4] x, double[4] v, double[9,4] w) => (double[{}] y) "
INTS = (
    "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1}, int64[2] wide = {1, 4}, "
    "int64[2] x_shape = {3, 4}, int64[2] turned = {4, 3}>"
)


def views_left(model):
    scopes = list(passes_of(model, NONE).model.graphs())
    return sum(n.op_type in VIEWS for g in scopes for n in g)


CASES = {
    "back to the shape before": ("a = Reshape(v, wide) b = Squeeze(a, zero) e = Exp(b) y = Exp(e)", "4", 0),
    "back to an operand": ("e = Exp(x) a = Unsqueeze(e, zero) b = Reshape(a, x_shape) y = Mul(b, x)", "3,4", 0),
    "a view that stays": ("e = Exp(v) a = Reshape(e, wide) y = Add(a, x)", "3,4", 1),
    "another shape of as many axes": ("e = Exp(x) a = Reshape(e, turned) t = Tanh(a) y = Neg(t)", "4,3", 1),
    "a result": ("e = Exp(v) a = Reshape(e, wide) y = Squeeze(a, zero)", "4", 2),
    "a sum that keeps an axis": ("e = Exp(x) s = ReduceSum(e, one) y0 = Squeeze(s, last) y = Exp(y0)", "3", 0),
    "a sum that another reads": (
        "e = Exp(x) s = ReduceSum(e, one) y0 = Squeeze(s, last) d = Div(x, s) t = ReduceMean<keepdims=0>(d, one) "
        "y = Add(y0, t)",
        "3",
        1,
    ),
    "few rows": ("e = Exp(v) c = Unsqueeze(e, last) p = MatMul(x, c) y = Squeeze(p, last)", "3", 0),
    "many rows": ("e = Exp(v) c = Unsqueeze(e, last) p = MatMul(w, c) y = Squeeze(p, last)", "9", 2),
    "in a body": (
        "h = Scan<num_scan_inputs=1, body = b (double[4] h, double[4] r) => (double[4] n) "
        "{ a = Reshape(r, wide) c = Squeeze(a, zero) d = Tanh(c) n = Add(h, d) }>(v, x) y = Neg(h)",
        "4",
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_idle_views(name):
    text, shape, left = CASES[name]
    model = model_of(text, ENDS.format(shape) + INTS)
    assert views_left(model) == left
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s) for n, s in (("x", (3, 4)), ("v", 4), ("w", (9, 4)))}
    expected = Session(model, Options(threads=1, target="portable")).run(feeds)["y"]
    found = Session(model, NONE).run(feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("axes", ["{0}", "{1}", "{0, 1}"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_sums_of_few_numbers_are_in_their_group(axes, keepdims):
    rank = 2 if keepdims else 2 - axes.count(",") - 1
    text = f"p = Mul(x, x) q = Add(p, x) s = ReduceSum<keepdims={keepdims}>(q, a)"
    ends = f"(double[3,4] x) => (double{[None] * rank if rank else '[]'} s)".replace("None", "N")
    model = model_of(text, f"{ends}<int64[{axes.count(',') + 1}] a = {axes}>".replace("[N, N]", "[A,B]"))
    graph = passes_of(model, NONE).model.graph
    assert not [n for n in graph if n.op_type == "ReduceSum"]
    x = np.random.default_rng(0).standard_normal((3, 4))
    where = tuple(int(d) for d in axes.strip("{}").split(","))
    (found,) = Session(model, NONE).run({"x": x}).values()
    np.testing.assert_allclose(found, (x * x + x).sum(where, keepdims=bool(keepdims)), rtol=1e-14)

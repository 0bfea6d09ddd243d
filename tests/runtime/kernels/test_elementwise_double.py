"""Groups of elementwise operators on float64, against ONNX Runtime's operators and, where it has none, numpy's."""

import math

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.test_elementwise import EXACT, groups, model_of, nested, same
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

#: Zeros, denormals, the ends of the range, halves, borders of approximations, infinities, NaN.
SPECIAL = np.array(
    [0, -0.0, 5e-324, -5e-324, 1e-310, 2.2250738585072014e-308, -1e-300, 1e-30, -1e-9, 1e-4, -0.25, 0.5, -0.5, 0.62,
     0.63, 0.99, 1, -1, 1.01, 1.5, 2.5, -2.5, 3, -3.9, 5.9, -6.1, 9, 17.5, -36.7, 90, 709.7, 709.8, -708.5, -745.1,
     -745.2, 1e3, 999999.5, -1000001, 4503599627370497, -4503599627370495, 1e22, -1e200, 1.7e308, -1.7e308,
     np.inf, -np.inf, np.nan]
)  # fmt: skip
ENDS = "(double[N] x, double[N] y, double[N] w) => (double[N] z) "
CONSTANTS = "<double one = {1}, double[1] two = {2}, double three = {3}, double low = {-1.5}, double high = {2.25}>"
#: Those that ONNX Runtime's CPU provider lacks for float64 are compared with numpy below.
LACKED = ("PRelu", "LeakyRelu", "HardSigmoid", "Softsign")


def feeds_of(count):
    rng = np.random.default_rng(0)
    x, y = (a.reshape(-1) for a in np.meshgrid(SPECIAL, SPECIAL))
    x, y = (np.concatenate([a, rng.standard_normal(count) * 3]) for a in (x, y))
    return {"x": x, "y": y, "w": np.ones_like(x)}


@pytest.mark.parametrize("text", [t for t in EXACT if not t.startswith(LACKED) and "to=6" not in t])
def test_the_same_bits(text):
    feeds = feeds_of(500)
    if "Where" in text:  # ONNX Runtime makes a zero that it picks a positive one
        feeds = {name: array + 0.0 for name, array in feeds.items()}
    model = model_of(nested(text.replace("to=1>", "to=11>")), ENDS + CONSTANTS)
    same(model, feeds, threads=(2,), count=1)


def _sigmoid(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x)))


#: Formulas in numpy, and the units in the last place that both may be off together.
FUNCTIONS = {
    **{f"{name}(x)": (getattr(np, f), 3) for name, f in {
        "Exp": "exp", "Log": "log", "Sin": "sin", "Cos": "cos", "Tanh": "tanh", "Tan": "tan", "Asin": "arcsin",
        "Acos": "arccos", "Atan": "arctan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "arcsinh", "Acosh": "arccosh",
        "Atanh": "arctanh",
    }.items()},
    "Erf(x)": (np.vectorize(math.erf), 4), "Sigmoid(x)": (_sigmoid, 5),
    "Softplus(x)": (lambda x: np.logaddexp(x, 0), 4), "Pow(x, high)": (lambda x: np.power(x, 2.25), 1),
    "LeakyRelu<alpha=0.25>(x)": (lambda x: np.where(x < 0, x / 4, x), 0),
    "PRelu(x, three)": (lambda x: np.where(x < 0, x * 3, x), 0),
    "HardSigmoid<alpha=0.25>(x)": (lambda x: np.clip(x / 4 + 0.5, 0, 1), 0),
    "Softsign(x)": (lambda x: x * (1 / (1 + np.abs(x))), 0),
}  # fmt: skip


@pytest.mark.parametrize("text", FUNCTIONS)
def test_functions(text):
    function, units = FUNCTIONS[text]
    x = np.concatenate([SPECIAL, *(np.random.default_rng(0).uniform(-a, a, 3001) for a in (1, 8, 800, 1e6))])
    model = model_of(nested(text), ENDS + CONSTANTS)
    assert len(groups(model)) == 1
    found = Session(model, Options(threads=2, target="native")).run({"x": x, "y": x, "w": np.ones_like(x)})["z"]
    with np.errstate(all="ignore"):
        expected = function(x)
        near = np.abs(found - expected) <= units * np.spacing(np.abs(expected))
    alike = (found == expected) | (np.isnan(found) & np.isnan(expected)) | (near & np.isfinite(expected))
    assert alike.all(), (x[~alike][:5], found[~alike][:5], expected[~alike][:5])
    zero = (x == 0) & (expected == 0)
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]))


def test_operands_and_results_of_other_types():
    text = "n = Cast<to=11>(i) p = Mul(n, x) c = Less(p, y) d = And(c, b) z = Where(d, p, y)"
    ends = "(double[A, B] x, double[B] y, bool[A, B] b, int64[A, 1] i) => (double[A, B] z, bool[A, B] d)"
    rng = np.random.default_rng(0)
    for shape in ((0, 3), (1, 1), (7, 33), (300, 100)):
        x = rng.standard_normal(shape)
        i = rng.integers(-9, 1 << 60, (shape[0], 1))
        same(model_of(text, ends), {"x": x, "y": x.sum(0), "b": x > 1, "i": i}, count=1)


@pytest.mark.parametrize("shape", [(7, 1030, 9), (4, 3), (2, 90000), (5, 0, 3)])
def test_sums(shape):
    axes = ["A", "B", "C"][: len(shape)]
    model = model_of(
        "p = Mul(x, g) s = ReduceSum(p, a) m = ReduceMean(p) t = ReduceSum<keepdims=0>(p, b)",
        f"(double[{','.join(axes)}] x, double[{','.join(axes)}] g) => (double[] s, double[] m, double[] t)"
        "<int64[1] a={0}, int64[1] b={-1}>",
    )
    for value in model.graph.outputs:
        value.shape = None
    assert len(groups(model)) == 1
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal(shape), rng.standard_normal(shape)
    one, two = (Session(model, Options(threads=n, target="native")).run({"x": x, "g": g}) for n in (1, 2))
    p, size = x * g, np.abs(x * g)
    for name, axis in {"s": 0, "t": -1, "m": None}.items():
        np.testing.assert_array_equal(one[name], two[name])
        expected = p.sum(axis) if axis is not None else p.sum() / max(p.size, 1)
        if p.size or axis is not None:
            bound = 1e-14 * (size.sum(axis) if axis is not None else size.sum())
            assert (np.abs(one[name].reshape(expected.shape) - expected) <= bound).all()
    if not p.size:
        assert np.isnan(one["m"]).all()


@pytest.mark.parametrize("steps", [100, 250])
def test_a_long_chain_of_numbers(steps):
    """In one call, or in several where a program has too many steps."""
    text = " ".join(
        f"s{k} = Sin(x{k}) c{k} = Cos(x{k}) p{k} = Mul(x{k}, tenth) x{k + 1} = Add(s{k}, p{k})" for k in range(steps)
    )
    back = f"g{steps} = Identity(one) " + " ".join(
        f"q{k} = Add(c{k}, tenth) g{k} = Mul(q{k}, g{k + 1})" for k in reversed(range(steps))
    )
    ends = f"(double x0) => (double x{steps}, double g0) <double tenth = {{0.1}}, double one = {{1}}>"
    model = model_of(f"{text} {back}", ends)
    assert len(groups(model)) == 1 if steps == 100 else len(groups(model)) < 60
    found = Session(model, Options(target="native")).run({"x0": np.array(0.5)})
    x, g = 0.5, 1.0
    for _ in range(steps):
        x, g = math.sin(x) + x * 0.1, g * (math.cos(x) + 0.1)
    np.testing.assert_allclose([found[f"x{steps}"], found["g0"]], [x, g], rtol=1e-12)


def test_float32_and_float64_side_by_side():
    """A group has one floating-point type; what is between them stays."""
    text = """p = Mul(x, x) q = Add(p, x) d = Cast<to=11>(q) r = Mul(d, d) c = Less(r, d) n = Not(c) z = Where(n, r, d)
        y = Cast<to=1>(z)"""
    ends = "(float[N] x) => (float[N] y, double[N] z)"
    model = model_of(text, ends)
    assert [n.op_type for n in groups(model)] == ["Elementwise", "ElementwiseDouble"]
    same(model, {"x": np.random.default_rng(0).standard_normal(3000).astype(np.float32)}, rtol=2e-7, count=2)


@pytest.mark.parametrize("name", ["Atan", "Erf", "Softplus"])
def test_one_operator_that_onnx_runtime_lacks(name):
    """Also inside a branch, and with a shape that is not known (as far as it can be written in other operators)."""
    model = model_of(f"z = {name}(x)", "(double[N] x) => (double[N] z)")
    x = np.linspace(-3, 3, 101)
    expected = {"Atan": np.arctan, "Erf": np.vectorize(math.erf), "Softplus": lambda x: np.logaddexp(x, 0)}[name](x)
    np.testing.assert_allclose(Session(model).run({"x": x})["z"], expected, rtol=1e-15)
    if name == "Erf":
        hidden = model_of("g = GatherND(x, t) z = Erf(g)", "(double[N] x, int64[M, 1] t) => (double[K] z)")
        hidden.graph.inputs[1].shape = None
        hidden.graph[0].outputs[0].dtype = ir.DataType.DOUBLE
        found = Session(hidden, Options(target="native"))
        np.testing.assert_allclose(found.run({"x": x, "t": np.arange(101)[:, None]})["z"], expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("text", "count"), [("Cos(x)", 1), ("Exp(x)", 1), ("Sqrt(x)", 1), ("Add(x, x)", 0), ("Tan(x)", 1)]
)
def test_one_operator_of_which_onnx_runtime_has_no_vectors(text, count):
    assert len(groups(model_of(f"z = {text}", "(double[N] x) => (double[N] z)"))) == count


def test_the_product_with_a_sigmoid():
    """It is compared with numpy: ONNX Runtime's Sigmoid of float64 has no digit left below -36."""
    model, x = model_of("s = Sigmoid(x) z = Mul(x, s)", "(double[N] x) => (double[N] z)"), SPECIAL[:-3]
    assert len(groups(model)) == 1
    with np.errstate(over="ignore"):
        expected = x / (1 + np.exp(-x))
    np.testing.assert_allclose(Session(model).run({"x": x})["z"], expected, rtol=1e-14, atol=1e-300)

"""Compiled functions against the same functions as they are, alone and with transforms inside and around."""

import math

import numpy
import onnx_ir as ir
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad.eager.core import executable, trees
from onnxgrad.eager.core.executable import Executable
from onnxgrad.errors import BadInput, NotDifferentiable

RNG = numpy.random.default_rng(0)
W, X = RNG.standard_normal((3, 4)), RNG.standard_normal((5, 3))


def close(found, expected, rtol=1e-10):
    numpy.testing.assert_allclose(numpy.asarray(found), numpy.asarray(expected), rtol=rtol, atol=1e-12)


def loss(w, x):
    h = np.tanh(x @ w)
    return np.mean(np.where(h > 0, h**2, np.exp(h))) + np.sum(np.sort(h, axis=0)[0])


TRANSFORMS = {
    "value": lambda f: f,
    "grad": og.grad,
    "hessian": og.hessian,
    "grad of both": lambda f: og.grad(f, argnums=(0, 1)),
    "hvp": lambda f: lambda w, x: og.hvp(f)(w, x, W),
    "jvp": lambda f: lambda w, x: og.jvp(lambda w: f(w, x), (w,), (W,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_and_around_transforms(name):
    t = TRANSFORMS[name]
    expected = t(loss)(W, X)
    for f in (og.jit(t(loss)), t(og.jit(loss)), og.jit(t(og.jit(loss)))):
        for _ in range(2):
            found = f(W, X)
            pairs = zip(found, expected) if isinstance(expected, tuple) else [(found, expected)]
            for a, b in pairs:
                close(a, b)


def test_python_runs_once_for_a_structure():
    calls = []

    @og.jit
    def f(tree, k):
        calls.append(k.shape)
        return {"y": tree["a"] * k, "name": tree["name"]}

    for k in (2.0, 3.0, 4.0):
        found = f({"a": X, "name": "n"}, k)
        close(found["y"], X * k)
        assert found["name"] == "n"
    assert len(calls) == 1
    f({"a": X[:2], "name": "n"}, 2.0)
    f({"a": X, "name": "another"}, 2.0)
    f({"a": X.astype(numpy.float32), "name": "n"}, 2.0)
    assert len(calls) == 4


def test_arrays_of_the_caller_may_change_afterwards():
    def outer(w, x):
        y = og.jit(lambda x: x * w)(x)
        x[:] = 0
        return np.sum(y**2)

    for f in (lambda x: x, lambda x: (x.reshape(-1), x.T)[0], lambda x: x[::-1][::-1]):
        for x in (X.copy(), X.copy()[::2, ::-1], numpy.asfortranarray(X)):
            before = x.copy()
            y = og.jit(f)(x)
            x[:] = 0
            close(numpy.asarray(y).reshape(before.shape), before)
    close(og.grad(outer)(2.0, X.copy()), numpy.sum(4 * X**2))


def test_static_arguments_are_constants():
    f = og.jit(lambda x, n, power=1: sum(x**power for _ in range(n)), static_argnums=1)
    close(f(2.0, 3), 6)
    close(f(2.0, 4, power=3), 32)
    with pytest.raises(BadInput, match="must be hashable"):
        f(2.0, [3])
    shaped = og.jit(lambda x, shape, scale=1.0: x.reshape(shape) * scale, static_argnums=-1)
    close(shaped(X, (3, 5)), X.reshape(3, 5))
    scaled = og.jit(lambda x, scale: x * scale["by"])
    for k in (2.0, 3.0):
        close(scaled(X, scale={"by": X * k}), X * X * k)
    close(og.jit(lambda x: x + 1)(X.astype(">f8")), X + 1)
    with pytest.raises(BadInput, match="which ONNX does not have"):
        og.jit(lambda x: x + 1)(X.astype(numpy.longdouble))
    over = og.jit(lambda x, by: x / by)
    with numpy.errstate(divide="ignore"):
        assert [float(over(1.0, by=k)) for k in (0.0, -0.0)] == [numpy.inf, -numpy.inf]
    calls = []
    counted = og.jit(lambda x, by: (calls.append(by), x + by)[1])  # NaN equals no number, itself neither
    for _ in range(2):
        counted(1.0, by=float("nan"))
    assert len(calls) == 1


CUBE = RNG.standard_normal((2, 3, 4))
ROWS, COLUMNS, BOTH = numpy.array([0, 1, 1]), numpy.array([2, -1, 0]), numpy.array([[1], [-3]])
INDEXED = {
    "two numbers": (lambda x, i, j: x[i[1], j[1]], ROWS, COLUMNS),
    "a number and a slice": (lambda x, i, j: x[i[1], 1:, j[0]], ROWS, COLUMNS),
    "two vectors": (lambda x, i, j: x[i, j], ROWS, COLUMNS),
    "the last axes": (lambda x, i, j: x[..., i, j], BOTH, COLUMNS),
    "in the middle": (lambda x, i, j: x[:, i, 1:], COLUMNS, ROWS),
    "apart": (lambda x, i, j: x[i, :, j], ROWS, COLUMNS),
    "beside a constant": (lambda x, i, j: x[1, :, j], ROWS, COLUMNS),
}


@pytest.mark.parametrize("name", INDEXED)
def test_computed_indices(name):
    pick, i, j = INDEXED[name]
    f = lambda x: np.sum(pick(x, i, j) ** 3)  # noqa: E731
    compiled = lambda x: og.jit(lambda x, i, j: np.sum(pick(x, i, j) ** 3))(x, i, j)  # noqa: E731
    close(og.jit(pick)(CUBE, i, j), pick(CUBE, i, j))
    for t in (og.grad, og.hessian):
        close(t(compiled)(CUBE), t(f)(CUBE))
    rows = numpy.stack([CUBE, 2 * CUBE])
    close(og.vmap(pick, in_axes=(0, None, None))(rows, i, j), [pick(row, i, j) for row in rows])


ASSIGNED = {
    "a row": (lambda x, i, j: i[1], (3, 4)),
    "an element": (lambda x, i, j: (i[1], j[1], i[0]), ()),
    "in the middle": (lambda x, i, j: (slice(None), j), (2, 3, 4)),
    "apart": (lambda x, i, j: (i[:2], slice(None), j[:2]), (2, 3)),
    "a number, broadcast": (lambda x, i, j: (..., j), ()),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_assignment_at_computed_indices(name):
    key, shape = ASSIGNED[name]
    value = RNG.standard_normal(shape)

    def f(x, v, i, j):
        y = np.asarray(x).copy()
        y[key(x, i, j)] = v
        return y

    total = lambda x, v, i, j: np.sum(f(x, v, i, j) ** 3)  # noqa: E731
    expected = CUBE.copy()
    expected[key(CUBE, ROWS, COLUMNS)] = value
    close(og.jit(f)(CUBE, value, ROWS, COLUMNS), expected)
    for a in (0, 1):
        close(
            og.jit(og.grad(total, argnums=a))(CUBE, value, ROWS, COLUMNS),
            og.grad(total, argnums=a)(CUBE, value, ROWS, COLUMNS),
        )
    with pytest.raises(BadInput, match="slices at computed indices"):
        og.jit(lambda x, i: x.__setitem__((i, slice(1)), 0.0))(CUBE, 1)


def test_integers_and_large_numbers():
    for x in (
        numpy.array([3, -3, 2**31 - 1, -(2**31)], numpy.int32),
        numpy.array([5, -7, 2**62]),
        numpy.uint8([3, 200]),
    ):
        for f in (lambda x: x << 2, lambda x: x >> 1, lambda x: x >> 7):
            found = og.jit(f)(x)
            close(found, f(x))
            assert found.dtype == f(x).dtype
    x = numpy.array([1e200, -1e-200, 3.0, 0.0, numpy.inf])
    close(og.jit(np.hypot)(x, 4 * x / 3), numpy.hypot(x, 4 * x / 3))
    close(og.jit(og.elementwise_grad(np.hypot))(x[:3], 4 * x[:3] / 3), [0.6, -0.6, 0.6])


def test_variables_of_an_enclosing_transform_that_it_reads():
    def outer(w):
        inner = og.jit(lambda x: np.sum(np.sin(x @ w)))
        return inner(X) + 2 * inner(2 * X)

    plain = lambda w: np.sum(np.sin(X @ w)) + 2 * np.sum(np.sin(2 * X @ w))  # noqa: E731
    close(og.grad(outer)(W), og.grad(plain)(W))
    kept = {}
    inner = og.jit(lambda x: np.sum(x * kept["w"]))

    def each(w):
        kept["w"] = w
        return inner(np.ones(3))

    for _ in range(2):  # the variable of the first call is not kept for the second
        close(og.grad(each)(RNG.standard_normal(3)), numpy.ones(3))


def test_stop_gradient_stops_in_a_graph():
    f = lambda x: np.sum(og.stop_gradient(x**2) * x)  # noqa: E731
    for g in (og.grad(og.jit(f)), og.jit(og.grad(f)), og.jit(og.grad(og.jit(f)))):
        close(g(X), X**2)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x if x > 0 else -x,
        lambda x: float(x) * x,
        lambda x: float(og.stop_gradient(x)) * x,
        lambda x: x * (x > 0).item(),
        lambda x: x * [1, 2, 3][x > 0],
        lambda x: numpy.asarray(x > 0) * x,
    ],
)
def test_values_cannot_be_read(read):
    with pytest.raises(NotDifferentiable, match=r"the function is compiled|would be a constant"):
        og.jit(read)(1.0)


def test_what_onnx_cannot_hold_is_refused():
    with pytest.raises(BadInput, match="no complex numbers"):
        og.jit(lambda z: z * z)(1j)
    with pytest.raises(BadInput, match="no array"):
        og.jit(lambda x: None)(1.0)


AXES = [(0, 0), (1, 0), (-1, 0), (0, 1)]


@pytest.mark.parametrize(("a", "out"), AXES)
def test_vmap_is_the_loop_over_rows(a, out):
    f = lambda x, w: np.tanh(x @ w) * np.max(x)  # noqa: E731
    x = numpy.moveaxis(X, 0, a)
    expected = numpy.stack([numpy.asarray(f(np.asarray(row), np.asarray(W))) for row in X], axis=out)
    close(og.vmap(f, in_axes=(a, None), out_axes=out)(x, W), expected)
    close(og.jit(og.vmap(f, in_axes=(a, None), out_axes=out))(x, W), expected)


def test_gradients_of_each_row():
    each = numpy.stack([numpy.asarray(og.grad(loss)(W, row[None])) for row in X])
    rows = og.vmap(og.grad(lambda w, x: loss(w, x[None])), in_axes=(None, 0))
    close(rows(W, X), each)
    total = lambda w: np.sum(rows(w, X) ** 2)  # noqa: E731
    close(og.grad(total)(W), og.grad(lambda w: sum(np.sum(og.grad(loss)(w, r[None]) ** 2) for r in X))(W))


def test_vmap_of_containers_and_arguments_by_name():
    f = lambda d, k=1.0: d["a"] * d["b"][0] + k  # noqa: E731
    tree = {"a": X, "b": (W[:, 0],)}
    for axes in ({"a": 0, "b": None}, {"a": 0, "b": (None,)}):
        close(og.vmap(f, in_axes=(axes,))(tree), X * W[:, 0] + 1)
        close(og.vmap(f, in_axes=(axes,))(tree, k=X[:, 0]), X * W[:, 0] + X[:, :1])
    with pytest.raises(BadInput, match="a container of these like the argument"):
        og.vmap(f, in_axes=({"a": 0},))(tree)


def test_vmap_of_no_rows():
    a, b = og.vmap(lambda x, w: (x @ w, np.sum(x)), in_axes=(0, None), out_axes=-1)(X[:0], W)
    assert (a.shape, b.shape) == ((4, 0), (0,))


def test_vmap_refuses_rows_that_differ():
    with pytest.raises(BadInput, match="2, 3 rows"):
        og.vmap(lambda a, b: a + b)(numpy.ones(2), numpy.ones(3))
    with pytest.raises(BadInput, match="no argument has a batch axis"):
        og.vmap(lambda a: a, in_axes=None)(numpy.ones(2))
    with pytest.raises(BadInput, match="axis 1"):
        og.vmap(lambda a: a, in_axes=1)(numpy.ones(2))


# --- custom derivatives ---------------------------------------------------------------------------


@og.custom_vjp
def tripled(x):
    return x * x, np.sin(x)


@tripled.defvjp
def _(arguments, result, cotangent):
    return cotangent[0] * 3 * arguments[0] + cotangent[1] * result[1]


def total(x):
    return sum(np.sum(y) for y in tripled(np.exp(x)))


def test_custom_derivatives_in_compiled_functions():
    x = X[0]
    first = (3 * numpy.exp(x) + numpy.sin(numpy.exp(x))) * numpy.exp(x)
    for f in (og.grad(total), og.jit(og.grad(total)), og.grad(og.jit(total)), og.jit(og.grad(og.jit(total)))):
        for _ in range(2):
            close(f(x), first)
    close(Executable(ir.from_proto(og.export(og.grad(total), x)))([x])[0], first)
    close(og.vmap(og.grad(total))(X), [og.grad(total)(row) for row in X])
    close(og.jit(og.hessian(total))(x), og.hessian(total)(x))
    push = lambda x: og.jvp(total, (x,), (np.ones(3),))[1]  # noqa: E731
    close(og.jit(push)(x), numpy.sum(first))
    close(og.jit(total)(x), numpy.sum(numpy.exp(2 * x) + numpy.sin(numpy.exp(x))))


@pytest.mark.parametrize("wrap", [lambda f: f, og.jit])
def test_custom_derivatives_are_not_lost_in_graphs(wrap):
    def stepped(a):
        return np.sum(og.scan(lambda c, x: (tripled(c)[0] + x, c), a, X)[0])

    wrap(stepped)(X[0])
    for f in (stepped, lambda a: np.sum(og.vmap(tripled)(a)[0])):
        for g in (wrap(og.grad(f)), og.grad(wrap(f))):
            with pytest.raises(NotDifferentiable, match="custom derivative"):
                g(X[0])


# --- values while a function is traced ------------------------------------------------------------


def test_a_gradient_inside_has_no_session_of_its_own(monkeypatch):
    made = []
    session = executable._session
    monkeypatch.setattr(executable, "_session", lambda model: made.append(model) or session(model))
    f = og.jit(lambda x: og.grad(lambda y: np.sum(np.exp(np.sin(y)) * 1.25))(x) * x)
    x = numpy.linspace(0.1, 2, 7)
    expected = 1.25 * numpy.exp(numpy.sin(x)) * numpy.cos(x) * x
    numpy.testing.assert_allclose(numpy.asarray(f(x)), expected, rtol=1e-14)
    assert len(made) == 1
    numpy.testing.assert_allclose(numpy.asarray(f(x)), expected, rtol=1e-14)
    assert len(made) == 1


SLOPE = og.grad(lambda y: np.sin(y) * y)
PULLED = og.vjp(np.sin, 2.0)[1]
CONSTANTS = {
    "grad": lambda x: x * SLOPE(2.0),
    "alone, in containers": lambda x: {"a": [SLOPE(2.0), x, 3, "name", None]},
    "hessian": lambda x: x * og.hessian(lambda y: np.sum(y**3))(np.ones(2))[0],
    "jvp": lambda x: x * og.jvp(np.sin, (2.0,), (1.0,))[1],
    "pullback": lambda x: PULLED(x) + og.vjp(np.sin, 3.0)[1](x),
    "vmap": lambda x: x * og.vmap(SLOPE)(np.ones(3)),
    "auxiliary": lambda x: np.stack(og.grad(lambda y: (y * y, (x * 2, y * 3)), has_aux=True)(2.0)[1]),
    "read": lambda x: x * float(SLOPE(2.0)) if SLOPE(2.0) < 0 else x,
    "branch inside": lambda x: x * og.grad(lambda y: y * y if y > 0 else y)(2.0),
    "scan": lambda x: og.scan(lambda h, t: (h * SLOPE(2.0), t), 1.0, np.ones(3)),
    "integer": lambda x: og.grad(lambda y: y * np.astype(np.asarray(x) > 0, np.float64))(2.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_depends_on_no_argument_is_off_the_tape(name):
    f = CONSTANTS[name]
    compiled = og.jit(f)
    for x in (1.5, 0.5):
        pairs = [(a, b) for (_, a), (_, b) in zip(trees.leaves(compiled(x)), trees.leaves(f(x)), strict=True)]
        for found, expected in pairs:
            close(found, expected)
    numpy.testing.assert_allclose(
        Executable(ir.from_proto(og.export(f, 1.5)))([numpy.array(0.5)])[0], pairs[0][1], rtol=1e-12
    )


def test_what_depends_on_no_argument_keeps_its_value():
    """A derivative at a variable of an enclosing transform."""
    product = lambda w: og.jit(lambda x: x * SLOPE(w))(3.0)  # noqa: E731
    close(product(2.0), 3 * (math.cos(2.0) * 2 + math.sin(2.0)))
    close(og.grad(product)(2.0), 3 * (2 * math.cos(2.0) - 2.0 * math.sin(2.0)))
    close(og.grad(lambda s: PULLED(s) ** 2)(1.0), 2 * math.cos(2.0) ** 2)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: og.grad(lambda y: np.sum((y - x) ** 4))(numpy.zeros(3)),
        lambda x: og.grad(lambda s: np.sum(s * x) ** 2)(2.0) * x,
        lambda x: og.hessian(lambda z: np.sum(z**3 * x))(numpy.ones(3)) @ x,
        lambda x: og.vjp(lambda z: z * z * x, numpy.ones(3))[1](x),
    ],
)
def test_derivatives_at_constants_inside_are_off_the_tape(f):
    calls = []

    def counted(x):
        calls.append(x)
        return f(x)

    x = X[0]
    compiled = og.jit(counted)
    for k in (1.0, 2.0):
        y = compiled(k * x)
        assert y._node is None
        close(y, f(np.asarray(k * x)))
    assert len(calls) == 1
    close(og.jit(og.grad(lambda x: np.sum(f(x))))(x), og.grad(lambda x: np.sum(f(x)))(x))

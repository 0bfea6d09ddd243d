"""cond, scan and the loops against the same steps in Python: values and derivatives, compiled and not."""

import numpy
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad.eager import control_flow
from onnxgrad.eager.core import executable
from onnxgrad.errors import BadInput

RNG = numpy.random.default_rng(0)
A, XS = RNG.uniform(0.5, 1.5, 3), RNG.standard_normal((4, 3))


def close(found, expected):
    numpy.testing.assert_allclose(numpy.asarray(found), numpy.asarray(expected), rtol=1e-10, atol=1e-12)


def agree(f, plain, *args):
    """Value, gradient, second derivative and tangent, compiled and not."""
    ones = tuple(np.ones_like(np.asarray(a)) for a in args)

    def second(h):
        return og.grad(lambda *a: np.sum(og.grad(h)(*a) ** 2))

    def tangent(*a):
        return og.jvp(f, a, ones)[1]

    for wrap in (lambda h: h, og.jit):
        close(wrap(f)(*args), plain(*args))
        close(wrap(og.grad(f))(*args), og.grad(plain)(*args))
        close(og.grad(wrap(f))(*args), og.grad(plain)(*args))
        close(wrap(second(f))(*args), second(plain)(*args))
        close(wrap(tangent)(*args), og.jvp(plain, args, ones)[1])


@pytest.mark.parametrize("most", [control_flow._MOST_SCANNED, 2])
def test_fori_loop(most, monkeypatch):
    monkeypatch.setattr(control_flow, "_MOST_SCANNED", most)  # more steps are a Loop

    def plain(a):
        v = np.ones(3)
        for i in range(2, 6):
            v = np.sin(v * a) + i * a
        return np.sum(v)

    agree(lambda a: np.sum(og.fori_loop(2, 6, lambda i, v: np.sin(v * a) + i * a, np.ones(3))), plain, A)


def test_bounds_may_be_arrays_and_no_step_may_run():
    f = og.jit(lambda n, v: og.fori_loop(0, n, lambda i, v: v * 2.0, v))
    for n, expected in ((3, 8.0), (0, 1.0), (-4, 1.0)):
        close(f(n, 1.0), expected)
        fixed = og.jit(lambda v, n=n: og.fori_loop(0, n, lambda i, v: v * 2.0 + 0 * i, v))
        close(fixed(1.0), expected)
        close(og.grad(fixed)(1.0), expected)


def test_while_loop():
    def plain(a):
        v, count = a, 0
        while np.sum(v) < 50:
            v, count = v * a + 1, count + 1
        return np.sum(v) + count

    def f(a):
        v, count = og.while_loop(lambda s: np.sum(s[0]) < 50, lambda s: (s[0] * a + 1, s[1] + 1), (a, 0))
        return np.sum(v) + count

    agree(f, plain, A)


def test_the_number_of_steps_may_differ_between_calls():
    def power(n):
        return lambda a: np.sum(og.fori_loop(0, n, lambda i, v: v * np.sin(a * v) + v * v / 9, a))

    def plain(n):
        def f(v):
            a = v
            for _ in range(n):
                v = v * np.sin(a * v) + v * v / 9
            return np.sum(v)

        return f

    grown = og.grad(lambda a: np.sum(og.while_loop(lambda v: np.sum(v) < 100, lambda v: v * 1.5, a) * a))
    for n, scale in ((3, 1.0), (5, 0.1), (0, 0.01), (3, 30.0)):
        close(og.grad(power(n))(A), og.grad(plain(n))(A))
        close(og.hessian(power(n))(A), og.hessian(plain(n))(A))
        count = sum(numpy.sum(A * scale) * 1.5**k < 100 for k in range(40))
        close(grown(A * scale), 2 * A * scale * 1.5**count)
        kept = numpy.arange(3) < n - 2
        close(og.grad(lambda a, c=kept: np.sum(np.exp(og.op.Compress(a, c))))(A), numpy.exp(A) * kept)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse):
    def plain(a):
        h, ys = np.zeros(3), []
        for x in XS[::-1] if reverse else XS:
            h = np.tanh(h * a + x)
            ys.append(h * x)
        ys = ys[::-1] if reverse else ys
        return np.sum(h) + np.sum(np.stack(ys) * np.arange(4.0)[:, None])

    def f(a):
        def step(h, x):
            h = np.tanh(h * a + x)
            return h, h * x

        h, ys = og.scan(step, np.zeros(3), XS, reverse=reverse)
        return np.sum(h) + np.sum(ys * np.arange(4.0)[:, None])

    agree(f, plain, A)


def test_functions_of_what_the_steps_read_from_outside():
    """They divide their first operand, or add to it, which is a value of the graph around."""

    def f(a):
        return np.sum(og.map(lambda x: np.hypot(a, x) + np.arctan2(a, x), XS))

    agree(f, lambda a: np.sum(np.hypot(a, XS) + np.arctan2(a, XS)), A)


@pytest.mark.parametrize("wrap", [lambda f: f, og.jit])
def test_the_steps_run_once_for_value_and_gradient(monkeypatch, wrap):
    made = []
    session = executable._session
    monkeypatch.setattr(executable, "_session", lambda model: made.append(model) or session(model))
    f = lambda a: np.sum(og.scan(lambda h, x: (np.cos(h * a) + x / 7, np.sum(h)), a, XS)[1] ** 2)  # noqa: E731
    wrap(og.value_and_grad(f))(A)
    assert sum(node.op_type == "Scan" for model in made for node in model.graph) == 2


def test_gradient_of_what_is_scanned():
    f = lambda xs: og.scan(lambda c, x: (c * np.sum(x) + x[0], ()), 1.0, xs)[0]  # noqa: E731

    def plain(xs):
        c = 1.0
        for i in range(4):
            c = c * np.sum(xs[i]) + xs[i, 0]
        return c

    agree(f, plain, XS)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_nothing_but_a_length(reverse):
    carry, ys = og.scan(lambda c, _: (c * 2, {"c": c}), 1.0, length=4, reverse=reverse)
    close(carry, 16)
    close(ys["c"], [8, 4, 2, 1] if reverse else [1, 2, 4, 8])


def test_scan_over_no_slices():
    carry, ys = og.scan(lambda c, x: (c + x, c), 1.0, numpy.zeros(0))
    close(carry, 1.0)
    assert ys.shape == (0,)


def test_map_and_nested_loops():
    rows = lambda xs: og.map(lambda x: og.fori_loop(0, 3, lambda i, v: v * np.sum(x) + i, 1.0), xs)  # noqa: E731

    def plain(xs):
        found = []
        for k in range(4):
            v = 1.0
            for i in range(3):
                v = v * np.sum(xs[k]) + i
            found.append(v)
        return np.stack(found)

    agree(lambda xs: np.sum(rows(xs) ** 2), lambda xs: np.sum(plain(xs) ** 2), XS)


@pytest.mark.parametrize("value", [2.0, -2.0])
def test_cond(value):
    seen = []
    f = lambda x: og.cond(x > 0, lambda x: np.sin(x) * x, lambda x: -3 * x * x, x)  # noqa: E731
    agree(f, lambda x: np.sin(x) * x if x > 0 else -3 * x * x, value)
    og.cond(value > 0, lambda: seen.append("yes") or np.ones(1), lambda: seen.append("no") or np.ones(1))
    assert seen == (["yes"] if value > 0 else ["no"])


def test_state_keeps_its_structure():
    with pytest.raises(BadInput, match=r"init and the carry .* differ: float64 of shape \(\) and"):
        og.scan(lambda c, x: (c + x, c), 0.0, XS)
    with pytest.raises(BadInput, match=r"int64 .* and float64"):
        og.fori_loop(0, 3, lambda i, v: v * 0.5, 1)
    with pytest.raises(BadInput, match="differ in their containers"):
        og.while_loop(lambda v: v["a"] < 3, lambda v: v["a"], {"a": 1.0})
    with pytest.raises(BadInput, match="results of true_fun and false_fun differ"):
        og.jit(lambda x: og.cond(x > 0, lambda x: (x, x), lambda x: x, x))(1.0)
    with pytest.raises(BadInput, match="4, 5"):
        og.scan(lambda c, x: (c, x), 0.0, (numpy.ones(4), numpy.ones(5)))
    with pytest.raises(BadInput, match="needs `length`"):
        og.scan(lambda c, x: (c, x), 0.0)
    with pytest.raises(BadInput, match="pairs"):
        og.scan(lambda c, x: c, 0.0, XS)
    with pytest.raises(BadInput, match="integers"):
        og.fori_loop(0, 1.5, lambda i, v: v, 1.0)
    with pytest.raises(BadInput, match="one boolean"):
        og.cond(XS > 0, lambda: 1.0, lambda: 2.0)


@pytest.mark.parametrize("x", [0.5, -0.5])
def test_branches_without_operands(x):
    def plain(x, w):
        return np.sum(w * x) ** 2 if x > 0 else og.grad(lambda q: q**3 * w[0])(x)

    def f(x, w):
        return og.cond(x > 0, lambda: np.sum(w * x) ** 2, lambda: og.grad(lambda q: q**3 * w[0])(x))

    for a in (0, 1):
        close(og.jit(og.grad(f, argnums=a))(x, A), og.grad(plain, argnums=a)(x, A))
    close(og.vmap(lambda r: og.cond(r > 0, lambda: r, lambda: 2.0))(XS[0]), numpy.where(XS[0] > 0, XS[0], 2.0))


def test_the_other_branch_has_no_derivative():
    """The slope of log at 0 is infinite, and 0 times infinity is no number."""
    f = lambda x, w: og.cond(x > 0, lambda y: np.log(w) * y, lambda y: w * y, x)  # noqa: E731
    assert float(og.jit(og.grad(f, argnums=1))(-1.0, 0.0)) == -1.0


def test_assignment_in_a_loop():
    def body(i, a, w):
        a = a.copy()
        a[i] = a[i - 1] * w + i
        return a

    def plain(w):
        a = np.ones(5)
        for i in range(1, 5):
            a = body(i, a, w)
        return np.sum(a**2)

    agree(lambda w: np.sum(og.fori_loop(1, 5, lambda i, a: body(i, a, w), np.ones(5)) ** 2), plain, 0.7)


@pytest.mark.parametrize("t", [lambda f: f, og.grad], ids=["value", "grad"])
def test_rows_of_different_numbers_of_steps_in_a_compiled_gradient(t):
    def root(a):  # whose backward pass reads the states of all steps
        x = og.while_loop(lambda x: np.max(np.abs(x * x - a)) > 1e-13, lambda x: 0.5 * (x + a / x), a)
        return np.sum(x * np.arange(1.0, 3.0))

    rows = numpy.array([[0.1, 0.6], [0.5, 0.6], [9.0, 9.0], [1.0, 1.0]])
    expected = [numpy.asarray(t(root)(row)) for row in rows]
    for f in (og.vmap(t(root)), og.jit(og.vmap(t(root)))):
        numpy.testing.assert_allclose(numpy.asarray(f(rows)), expected, rtol=1e-12)
    f = og.jit(t(root))
    for row, y in zip(rows, expected, strict=True):
        numpy.testing.assert_allclose(numpy.asarray(f(row)), y, rtol=1e-12)


def test_stopped_gradients_inside_of_loops():
    """In every order: what a derivative stacks, batches or computes again is still constant for the next one."""
    stop = og.stop_gradient

    def step(c, x):
        return c * stop(x) + stop(c) * x * x, stop(c * x) * x

    def scanned(v):
        c, ys = og.scan(step, v[0], v)
        return c * np.sum(ys)

    def unrolled(v):
        c, ys = v[0], []
        for i in range(v.shape[0]):
            c, y = step(c, v[i])
            ys.append(y)
        return c * np.sum(np.stack(ys))

    def repeated(v):
        return np.sum(
            og.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1.0, s[1] * stop(v) + stop(s[1]) * v), (0.0, v))[1]
        )

    def by_hand(v):
        y = v
        for _ in range(3):
            y = y * stop(v) + stop(y) * v
        return np.sum(y)

    v, several = A, numpy.stack([A, -A])
    for f, plain in ((scanned, unrolled), (repeated, by_hand)):
        agree(f, plain, v)
        close(og.hessian(f)(v), og.hessian(plain)(v))
        close(og.jacobian(og.grad(og.jit(f)), mode="reverse")(v), og.hessian(plain)(v))
        expected = numpy.stack([numpy.asarray(og.grad(plain)(row)) for row in several])
        close(og.vmap(og.grad(f))(several), expected)
        for g in (f, plain):
            close(og.grad(lambda x, g=g: np.sum(og.vmap(g)(x)))(several), expected)


def test_a_gradient_of_a_loop_that_reads_a_stopped_value_is_an_array():
    def f(v):
        return np.sum(og.fori_loop(0, 2, lambda _, y: y * og.stop_gradient(v), v))

    close(numpy.asarray(og.grad(f)(A)), A**2)

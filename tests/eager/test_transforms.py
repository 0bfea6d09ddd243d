"""The transforms: what they return, in which containers, at which order, through which operations."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import autograd
import autograd.numpy as anp
import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, NotDifferentiable
from onnxgrad.eager import GradientMismatch, check_grads

rng = onp.random.default_rng(0)
X = rng.standard_normal((3, 4))
A = rng.standard_normal((4, 4)) + 4 * onp.eye(4)


def close(a, b, tolerance=1e-10):
    onp.testing.assert_allclose(onp.asarray(a), onp.asarray(b), rtol=tolerance, atol=tolerance)


def assigned(x):
    y = x * 1.0
    y[1, :] = x[0] * 2
    y[0, [0, 0]] = x[2, :2]  # the last of two values for one place counts
    y[x > 1] = 0.5
    return y


def loop(x):
    total = 0.0
    for row in x:
        if row[0] > 0:
            total = total + np.sum(row**2)
        else:
            total = total * row[1]
    return total


def newton(x):
    y = np.asarray(1.0)
    while abs(y * y - x[0, 0] ** 2 - 1.0) > 1e-12:
        y = 0.5 * (y + (x[0, 0] ** 2 + 1.0) / y)
    return y


def factorial_like(x, n=4):
    return x[0, 0] if n == 0 else n * np.tanh(factorial_like(x, n - 1)) + x[1, n - 1]


FUNCTIONS = {
    "mask": lambda x: x[x > 0] ** 2,
    "points": lambda x: x[np.asarray([0, 2]), np.asarray([1, 1])] ** 2,
    "columns": lambda x: x[:, np.asarray([1, 1, 3])] ** 2,
    "rows, ellipsis": lambda x: x[..., [3, 0]] * x[[1], ...][:, :2],
    "mixed index": lambda x: x[1:, np.asarray([0, 3])] ** 3,
    "one element": lambda x: x[1, -1] * x[-3][2],
    "steps": lambda x: x[::-2, 3:0:-2] ** 2,
    "nothing": lambda x: np.sum(x[3:]) + x[0],
    "assignment": lambda x: assigned(x) ** 2 * x,
    "sort": lambda x: np.sort(x, axis=1) * onp.arange(4.0) + np.sort(x, axis=0, descending=True) ** 2,
    "take along": lambda x: np.take_along_axis(x, np.argsort(x, axis=0), axis=0) * x,
    "cumulative": lambda x: np.cumulative_prod(x, axis=1) * np.cumulative_sum(x, axis=0),
    "initial": lambda x: np.cumulative_sum(x, axis=1, include_initial=True) ** 2,
    "logaddexp": lambda x: np.logaddexp(x, x[:, ::-1] * 2),
    "where": lambda x: np.where(x > 0, np.sqrt(np.abs(x)), x * x),
    "clip": lambda x: np.clip(x, -0.5, 0.5) * x + np.clip(x, min=0.1),
    "norm": lambda x: np.linalg.norm(x) + np.linalg.vector_norm(x, ord=3) + np.linalg.matrix_norm(x, ord=1),
    "norms of rows": lambda x: np.linalg.vector_norm(x, axis=1, keepdims=True) * x,
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x) ** 2,
    "tensordot": lambda x: np.tensordot(x, x, axes=((0,), (0,))) ** 2,
    "trace": lambda x: np.trace(x @ x.T) ** 2 + np.linalg.diagonal(x, offset=1) @ x[:3, 0],
    "cross": lambda x: np.linalg.cross(x[:, :3], x[:, 1:4]) ** 2,
    "variance": lambda x: np.std(x, axis=0, correction=1.0) * np.var(x),
    "meshgrid": lambda x: np.meshgrid(x[0], x[1])[0] ** 2 * np.meshgrid(x[0], x[1])[1],
    "remainder": lambda x: np.remainder(x, 0.7) * x + x % np.abs(x[::-1]),
    "of numpy": lambda x: onp.sum(onp.exp(x) * onp.sin(x)) + onp.mean(onp.multiply(2.0, x) ** 3, axis=0)[1],
    "list": lambda x: np.asarray([x[0, 0], x[1, 1] * x[2, 2], 3.0]) ** 2,
    "two signs": lambda x: np.hypot(x, x[::-1]) + np.copysign(x, -x) * x,
    "atan2": lambda x: np.atan2(x, x[::-1]),
    "logarithms": lambda x: np.log1p(x * x) + np.expm1(x) + np.log2(x * x + 1) + np.log10(x * x + 1) + np.exp2(x),
    "hyperbolic": lambda x: np.sinh(x) + np.cosh(x) * np.atanh(np.tanh(x) * 0.9) + np.asinh(x) + np.acosh(2 + x * x),
    "circular": lambda x: np.asin(np.tanh(x)) + np.acos(np.tanh(x) * 0.5) * np.atan(x) + np.tan(x * 0.3),
    "repetition": lambda x: np.tile(x, (2, 1))[1:] + np.repeat(x, 2, axis=0)[1:] ** 2,
    "rolls": lambda x: np.roll(x, 2) * x + np.roll(x, 1, axis=1) ** 2 + np.flip(x, axis=0),
    "differences": lambda x: np.diff(x) ** 2 * x[:, 1:],
    "triangles": lambda x: np.tril(x) ** 2 + np.triu(x, k=1) ** 3 * np.triu(x[0], 1)[:3],
    "products": lambda x: np.prod(x, axis=0) * np.max(x) + np.min(x, axis=0),
    "axes": lambda x: np.squeeze(np.expand_dims(np.moveaxis(x, 0, 1), axis=0), axis=0) @ x,
    "split": lambda x: np.split(x, 2, axis=1)[1] ** 2 + np.unstack(x, axis=1)[0][:, None],
    "broadcast": lambda x: np.broadcast_to(x[0], (3, 4)) * x + np.broadcast_arrays(x[0], x)[0] ** 2,
    "linspace": lambda x: np.linspace(x[0, 0], x[1, 1], 5) ** 2,
    "conversion": lambda x: np.astype(x, np.float64) * np.astype(x > 0, np.float64),
    "vecdot": lambda x: np.vecdot(x, x * x) * np.outer(x[0], x[1])[0, 1],
    "inverse": lambda x: np.linalg.inv(x[:, :3] + 3 * onp.eye(3)) ** 2,
    "solve": lambda x: np.linalg.solve(x[:, :3] + 3 * onp.eye(3), x[:, 3]) ** 2,
    "solve many": lambda x: np.linalg.solve(x[:, :3] + 3 * onp.eye(3), x),
    "determinant": lambda x: np.linalg.det(x[:, :3]) + np.linalg.slogdet(x[:, :3]).logabsdet,
    "cholesky": lambda x: np.linalg.cholesky(x @ x.T + onp.eye(3)) ** 3,
    "eigenvalues": lambda x: np.linalg.eigvalsh(x @ x.T) ** 2,
    "eigenvectors": lambda x: np.abs(np.linalg.eigh(x @ x.T).eigenvectors),
    "matrix power": lambda x: np.linalg.matrix_power(x[:, :3], 5) + np.linalg.matrix_power(x[:, :3], 0),
    "loop": loop,
    "while": newton,
    "recursion": factorial_like,
    "operator by name": lambda x: (
        og.op.Erf(x) + og.op.Mish(x) + og.op.Softmax(x, axis=0) * og.op.LeakyRelu(x, alpha=0.3)
    ),
    "checkpoint": og.checkpoint(lambda x: np.tanh(x @ x.T) ** 2),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_central_differences_twice(name):
    check_grads(FUNCTIONS[name], X, order=2)


def test_a_wrong_derivative_is_found():
    @og.custom_vjp
    def f(x):
        return np.sin(x)

    f.defvjp(lambda arguments, y, g: g * np.sin(arguments[0]))
    with pytest.raises(GradientMismatch, match="order 1"):
        check_grads(f, X)

    @og.custom_vjp
    def twice(x):
        return np.sin(x)

    twice.defvjp(lambda arguments, y, g: g * og.stop_gradient(np.cos(arguments[0])))
    check_grads(twice, X, order=1)
    with pytest.raises(GradientMismatch, match="order 2"):
        check_grads(twice, X)


@pytest.mark.parametrize("modes", [("rev",), ("fwd",)])
def test_a_wrong_derivative_inside_of_a_derivative_is_found(modes):
    """The cotangent passes a function that returns it as it is, and whose own derivative is wrong."""

    @og.custom_vjp
    def inner(g):
        return g * 1.0

    inner.defvjp(lambda arguments, y, g: g * 1.001)

    @og.custom_vjp
    def double(x):
        return x * 2.0

    double.defvjp(lambda arguments, y, g: inner(g) * 2.0)
    check_grads(double, X, order=1, modes=("rev",))
    with pytest.raises(GradientMismatch, match=r"order [12]"):
        check_grads(double, X, modes=modes)


def test_the_result_that_a_custom_vjp_is_given_carries_its_derivative():
    @og.custom_vjp
    def exp(x):
        return np.exp(x)

    exp.defvjp(lambda arguments, y, g: g * y)
    check_grads(exp, X, order=3)
    close(og.grad(og.grad(og.grad(exp)))(0.5), math.exp(0.5))


def test_check_grads_takes_numbers():
    check_grads(np.sin, 0.5)
    check_grads(lambda x, y: x * y, onp.float64(0.5), 2.0 + 1j)


# --- orders ----------------------------------------------------------------------------------------


def test_derivatives_nest():
    f, g = np.tanh, anp.tanh
    for _ in range(5):
        f, g = og.grad(f), autograd.grad(g)
        close(f(0.3), g(0.3))


def test_every_mixture_of_modes_gives_the_hessian():
    f = lambda x: np.sum(np.tanh(x) ** 2 * x[::-1])  # noqa: E731
    x = X[0]
    whole = autograd.hessian(lambda x: anp.sum(anp.tanh(x) ** 2 * x[::-1]))(x)
    close(og.hessian(f)(x), whole)
    for outer in ("forward", "reverse"):
        for inner in ("forward", "reverse"):
            close(og.jacobian(og.jacobian(f, mode=inner), mode=outer)(x), whole)
    for i, unit in enumerate(onp.eye(4)):
        close(og.hvp(f)(x, unit), whole[i])
        close(og.jvp(og.grad(f), x, unit)[1], whole[i])
        close(og.vjp(og.grad(f), x)[1](unit), whole[i])
        close(og.grad(lambda x: og.jvp(f, x, unit)[1])(x), whole[i])  # noqa: B023


def test_no_confusion_of_variables():
    """d/dx (x · d/dy (x + y)) is 1, not 2."""
    assert float(og.grad(lambda x: x * og.grad(lambda y: x + y)(1.0))(3.0)) == 1.0
    assert float(og.grad(lambda x: x * og.jvp(lambda y: x * y, 2.0, 1.0)[1])(3.0)) == 6.0
    assert float(og.grad(lambda x: og.grad(lambda y: x * y * y)(x))(3.0)) == 12.0  # 2x² by x
    inner = og.grad(lambda x: og.grad(lambda y: x * y * y)(2.0 * x))
    assert float(inner(3.0)) == pytest.approx(2 * 2 * 2 * 3.0)


def test_a_gradient_in_a_loss():
    """A penalty on a gradient, with parameters that the inner derivative is not of."""
    f = lambda np, w, x: np.sum(np.tanh(x @ w) ** 2)  # noqa: E731
    loss = lambda np, grad: lambda w: np.sum(grad(lambda x: f(np, w, x))(X) ** 2)  # noqa: E731
    close(og.grad(loss(np, og.grad))(A), autograd.grad(loss(anp, autograd.grad))(A))


def test_hvp_through_functions_with_their_own_derivative():
    f = lambda x: np.sum(np.linalg.inv(og.checkpoint(lambda x: x @ x.T + onp.eye(3))(x)) ** 2)  # noqa: E731
    g = lambda x: anp.sum(anp.linalg.inv(x @ x.T + onp.eye(3)) ** 2)  # noqa: E731
    close(og.hessian(f)(X), autograd.hessian(g)(X))
    close(og.hvp(f)(X, X), onp.tensordot(autograd.hessian(g)(X), X, 2))
    close(og.jacobian(og.grad(f), mode="reverse")(X), autograd.hessian(g)(X))


# --- containers ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Layer:
    weight: Any
    bias: Any
    name: str = "dense"
    activation: Any = np.tanh


def network(layers, x):
    for layer in layers:
        x = layer.activation(x @ layer.weight + layer.bias)
    return np.sum(x**2)


def test_containers_come_back_as_they_went_in():
    layers = [Layer(A, A[0]), Layer(A.T, 0.5, name="last")]
    value, g = og.value_and_grad(network)(layers, X)
    assert isinstance(g[0], Layer)
    assert g[0].name is None
    assert g[1].activation is None
    plain = lambda w, b, v, c: anp.sum(anp.tanh(anp.tanh(X @ w + b) @ v + c) ** 2)  # noqa: E731
    expected = autograd.grad(plain, (0, 1, 2, 3))(A, A[0], A.T, 0.5)
    for mine, yours in zip((g[0].weight, g[0].bias, g[1].weight, g[1].bias), expected):
        close(mine, yours)
    close(value, plain(A, A[0], A.T, 0.5))
    nested = {"a": (X, [X, Pair(X[0], 2.0)]), "b": None, 3: True}
    g = og.grad(lambda t: np.sum(t["a"][0] * t["a"][1][0]) * np.sum(t["a"][1][1].left) * t["a"][1][1].right)(nested)
    assert g["b"] is None
    assert g[3] is None
    assert isinstance(g["a"][1][1], Pair)
    assert isinstance(g["a"][1], list)
    close(g["a"][1][1].right, onp.sum(X * X) * onp.sum(X[0]))


def test_jacobian_and_vjp_of_containers():
    f = lambda t: {"s": t[0] * 2.0, "p": (t[0] * t[1], t[1] ** 2)}  # noqa: E731
    x, y = X[0], X[1]
    j = og.jacobian(f)((x, y))
    close(j["s"][0], 2 * onp.eye(4))
    close(j["s"][1], onp.zeros((4, 4)))
    close(j["p"][0][0], onp.diag(y))
    close(j["p"][1][1], onp.diag(2 * y))
    for mode in ("forward", "reverse"):
        close(og.jacobian(f, mode=mode)((x, y))["p"][0][1], onp.diag(x))
    out, pullback = og.vjp(f, (x, y))
    close(out["p"][1], y**2)
    g = pullback({"s": onp.ones(4), "p": (onp.zeros(4), onp.ones(4))})
    close(g[0], 2 * onp.ones(4))
    close(g[1], 2 * y)
    close(pullback({"s": onp.zeros(4), "p": (onp.ones(4), onp.zeros(4))})[0], y)  # the tape is there still
    out, pushed = og.jvp(f, ((x, y),), ((y, x),))
    close(pushed["p"][0], y * y + x * x)
    h = og.hessian(lambda t: np.sum(t["a"] ** 2 * t["b"]))({"a": x, "b": y})
    close(h["a"]["b"], onp.diag(2 * x))
    close(h["b"]["b"], onp.zeros((4, 4)))


def test_arguments_and_extras():
    f = lambda x, y, scale=1.0: (np.sum(x * y) * scale, {"seen": x + y})  # noqa: E731
    (value, aux), (gx, gy) = og.value_and_grad(f, argnums=(0, 1), has_aux=True)(X, 2 * X, scale=3.0)
    close(value, 6 * onp.sum(X * X))
    close(gx, 6 * X)
    close(gy, 3 * X)
    assert aux["seen"]._node is None
    g, aux = og.grad(f, 1, has_aux=True)(X, X)
    close(g, X)
    close(og.grad(lambda x, y: np.sum(x * y), -1)(X, 2 * X), X)
    close(og.elementwise_grad(lambda x, y: np.sin(x) * y)(X, 2.0), 2 * onp.cos(X))
    close(og.grad(lambda x: 3.0)(X), 0 * X)
    close(og.grad(lambda x: np.sum(og.stop_gradient(x) * x))(X), X)
    close(og.jacobian(lambda x: np.zeros(2))(X), onp.zeros((2, 3, 4)))


def test_float32_stays_float32():
    x = X.astype(onp.float32)
    g = og.grad(lambda x: np.sum(np.tanh(x) * 2.0 + x**2 / 3))(x)
    assert g.dtype == onp.float32
    g32, g64 = og.grad(lambda a, b: np.sum(a * b), (0, 1))(x, X)  # float64 beside float32 is float64
    assert (g32.dtype, g64.dtype) == (onp.float32, onp.float64)
    assert og.hessian(lambda x: np.sum(x**3))(x[0]).dtype == onp.float32


# --- functions with a derivative of their own -------------------------------------------------------


def test_custom_vjp():
    calls = []

    @og.custom_vjp
    def log1pexp(x, base=1.0):
        """A docstring."""
        return np.log(base + np.exp(x))

    @log1pexp.defvjp
    def _(arguments, result, cotangent):
        calls.append(float(og.stop_gradient(np.sum(result))))
        (x,) = arguments
        return cotangent * (1 - 1 / (1 + np.exp(x)))

    assert log1pexp.__doc__ == "A docstring."
    close(og.elementwise_grad(log1pexp)(onp.array([0.0, 100.0, 800.0])), [0.5, 1.0, 1.0])
    close(
        og.grad(og.grad(lambda x: log1pexp(x) * x))(0.3),
        autograd.grad(autograd.grad(lambda x: anp.log1p(anp.exp(x)) * x))(0.3),
    )
    close(og.jvp(log1pexp, 0.3, 2.0)[1], 2 / (1 + math.exp(-0.3)))
    assert calls


def test_custom_vjp_of_several_arguments_and_results():
    @og.custom_vjp
    def both(pair, scale):
        return {"s": pair[0] + pair[1], "p": pair[0] * pair[1] * scale}

    @both.defvjp
    def _(arguments, result, g):
        (a, b), scale = arguments
        return [g["s"] + g["p"] * b * scale, g["s"] + g["p"] * a * scale], None

    def f(x):
        once, again = both((x, x * x), 2.0), both([x, 1.0 + x], 1.0)
        return np.sum(once["p"] * again["s"] + once["s"] * again["p"])

    g = lambda x: anp.sum(2 * x**3 * (x + 1.0 + x) + (x + x * x) * x * (1.0 + x))  # noqa: E731
    close(og.grad(f)(X), autograd.grad(g)(X))
    close(
        og.grad(lambda x: np.sum(og.grad(f)(x) ** 2))(X), autograd.grad(lambda x: anp.sum(autograd.grad(g)(x) ** 2))(X)
    )


def test_custom_vjp_says_what_is_wrong():
    @og.custom_vjp
    def f(x, y):
        return x * y

    with pytest.raises(BadInput, match="no derivative yet"):
        f(X, X)
    f.defvjp(lambda arguments, result, g: (g,))
    with pytest.raises(BadInput, match="1 cotangents for 2 arguments"):
        og.grad(lambda x: np.sum(f(x, X)))(X)
    f.defvjp(lambda arguments, result, g: (np.sum(g), None))
    with pytest.raises(BadInput, match=r"a cotangent of \(\) for an array of \(3, 4\)"):
        og.grad(lambda x: np.sum(f(x, X)))(X)
    with pytest.raises(BadInput, match="reads a variable that is not among its arguments"):
        og.grad(lambda x: np.sum(og.checkpoint(lambda y: x * y)(x)))(X)


def test_checkpoint_calls_again_and_keeps_nothing():
    calls = []

    def f(x):
        calls.append(1)
        for _ in range(20):
            x = np.tanh(x)
        return x

    g = lambda x: np.sum(og.checkpoint(f)(x) ** 2)  # noqa: E731
    close(og.grad(g)(X), og.grad(lambda x: np.sum(f(x) ** 2))(X))
    assert len(calls) == 3  # once forward, once for the backward pass; once without a checkpoint


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: og.grad(np.tanh)(X), r"shape \(3, 4\).*elementwise_grad, jacobian"),
        (lambda: og.grad(np.sum)(onp.arange(3)), "argument 0 of sum is int64; only floats"),
        (lambda: og.grad(np.sum)(3), "write 3.0 for 3"),
        (lambda: og.grad(lambda t: t["a"][0])({"a": [1]}), r"argument 0 of <lambda>\['a'\]\[0\] is int64"),
        (lambda: og.grad(np.sum)({1, 2}), "a set is neither an array nor a container"),
        (lambda: og.grad(np.sum, 2)(X), "`argnums` names argument 2, and sum was given 1"),
        (lambda: og.grad(lambda x: (x, x))(1.0), "returned a tuple; a gradient is that of one number"),
        (lambda: og.grad(lambda x: x, has_aux=True)(1.0), "returns a pair"),
        (lambda: og.grad(lambda x: np.sum(x > 0))(X), "returned int64, which has no derivative"),
        (lambda: og.grad(3.0), "takes a function, not a float"),
        (lambda: og.jacobian(np.sum, mode="up")(X), "mode is"),
        (lambda: og.vjp(np.tanh, X)[1](X[0]), r"a cotangent of shape \(4,\) for an array of shape \(3, 4\)"),
        (lambda: og.jvp(np.tanh, X, (X, X)), "2 arrays of tangents for 1 arrays"),
        (lambda: og.grad(lambda x: np.sum(np.fft.rfft(x)))(X), "returned complex128.*real\\(z\\)"),
        (lambda: og.grad(lambda x: np.sum(np.linalg.svd(x).Vh))(X), "Vh of svd.*full_matrices=False"),
        (lambda: og.grad(lambda x: np.sum(np.unique_values(x)))(X), "unique_values has no derivative.*use sort"),
        (lambda: og.grad(lambda x: np.linalg.matrix_norm(x, ord=3))(X), "a norm of matrices is 'fro', 'nuc'.*not 3"),
        (lambda: og.grad(lambda x: onp.asarray(x).sum())(X), "functions of onnxgrad.eager.numpy"),
        (lambda: og.grad(lambda x: np.astype(x, np.complex128)[0, 0])(X), "returned complex128"),
        (lambda: og.op.Cov(X), "ONNX has no operator 'Cov'"),
        (lambda: og.op.apply("Cos", X, wrong=1), "wrong"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(make, words):
    with pytest.raises((BadInput, NotDifferentiable, AttributeError)) as caught:
        make()
    assert re.search(words, str(caught.value), flags=re.S), str(caught.value)


# --- what a strict reader would try ------------------------------------------------------------------


def test_the_function_may_return_its_argument():
    assert float(og.grad(lambda x: x)(2.0)) == 1.0
    close(og.jacobian(lambda x: (x, x, 2.0 * x))(X[0])[1], onp.eye(4))
    out, pullback = og.vjp(lambda x: (x, x), X)
    close(pullback((X, 2 * X)), 3 * X)
    close(og.jvp(lambda x: (x, 1.0), X, 2 * X)[1][0], 2 * X)
    assert out[0]._node is None


@pytest.mark.parametrize("shape", [(0,), (0, 0), (3, 0), (0, 3)], ids=str)
def test_the_sum_of_nothing(shape):
    for f in (np.sum, lambda x: np.sum(x * 2.0), lambda x: np.sum(np.sin(x)) + np.prod(x)):
        assert og.grad(f)(onp.zeros(shape)).shape == shape


def test_memory_that_the_caller_writes_into_later():
    """A buffer that is used again in a loop, and an argument that changes before the pullback."""

    def f(x):
        buffer, total = onp.zeros(4), 0.0
        for i in range(3):
            buffer[:] = i + 1.0
            total = total + np.sum(buffer * x)
        return total

    close(og.grad(f)(X[0]), 6 * onp.ones(4))
    x = X.copy()
    y, pullback = og.vjp(lambda x: x * x, x)
    x += 100
    close(pullback(onp.ones((3, 4))), 2 * X)
    view = onp.asarray(y)
    view += 1
    close(y, X * X)


def test_kinks_are_where_the_rules_have_them():
    """Conventions of docs/conventions.md, which are those of models."""
    x = onp.array([-1.0, 0.0, 1.0])
    close(og.elementwise_grad(np.abs)(x), [-1, 0, 1])
    close(og.elementwise_grad(lambda x: np.clip(x, -1.0, 1.0))(x), [1, 1, 1])
    close(og.elementwise_grad(lambda x: np.clip(x, min=0.5))(x), [0, 0, 1])
    close(og.grad(np.linalg.norm)(onp.zeros(3)), onp.zeros(3))
    close(og.grad(lambda x: np.max(x) + np.sum(np.sort(x)))(onp.zeros(4)), 1.25 * onp.ones(4))


def test_dataclasses_keep_what_is_no_field_and_aux_may_be_anything():
    @dataclass
    class Model:
        w: Any

        def __post_init__(self):
            self.size = 4

    assert og.grad(lambda m: np.sum(m.w) * m.size)(Model(X)).w.tolist() == (4 * onp.ones((3, 4))).tolist()
    thing = object()
    _, aux = og.grad(lambda x: (np.sum(x), {"t": thing, "s": {1, 2}, "x": [x]}), has_aux=True)(X)
    assert aux["t"] is thing
    assert aux["x"][0]._node is None


def test_a_very_long_program():
    def f(x):
        for _ in range(2000):
            x = x * 1.0001
        return np.sum(x)

    close(og.grad(f)(X), onp.full((3, 4), 1.0001**2000), 1e-9)


def test_attributes_take_ints_for_floats():
    close(og.op.LeakyRelu(X, alpha=1), X)
    close(og.grad(lambda x: np.sum(og.op.LeakyRelu(x, alpha=0)))(X), (X > 0) * 1.0)


def test_operators_that_are_newer_than_the_rest():
    q = rng.standard_normal((1, 2, 3, 4)).astype(onp.float32)
    g = og.grad(lambda q: np.sum(np.tanh(og.op.Attention(q, q, q)) ** 2))(q)
    scores = lambda q: anp.einsum("bhik,bhjk->bhij", q, q) / 2.0  # noqa: E731
    soft = lambda s: anp.exp(s) / anp.sum(anp.exp(s), axis=-1, keepdims=True)  # noqa: E731
    expected = autograd.grad(lambda q: anp.sum(anp.tanh(soft(scores(q)) @ q) ** 2))(q.astype(onp.float64))
    close(g, expected, 1e-4)
    close(og.op.Swish(X), X / (1 + onp.exp(-X)))
    check_grads(lambda x: og.op.DFT(x, None, 1), rng.standard_normal((2, 8, 1)))


def test_an_hvp_costs_at_most_four_gradients():
    from onnxgrad.eager.core.plans import plans

    def f(x):
        for _ in range(20):
            x = np.tanh(x @ x * 0.1) + x
        return np.sum(x**2)

    counts = []
    for call in (lambda: og.grad(f)(A), lambda: og.hvp(f)(A, A)):
        plans.clear()
        call()
        counts.append(len(next(reversed(plans._held.values())).run.model.graph))
    assert counts[1] <= 4 * counts[0]


@dataclass
class Dense:
    w: Any

    def __call__(self, x):
        return np.tanh(x @ self.w)


class Scale(NamedTuple):
    w: Any

    def __call__(self, x):
        return x * self.w


def test_containers_that_can_be_called():
    y = onp.tanh(X @ A)
    g = og.grad(lambda m: np.sum(m(X)))(Dense(A))
    close(g.w, X.T @ (1 - y * y))
    close(og.jit(lambda m: m(X))(Scale(2.0)), 2 * X)
    assert float(og.grad(lambda m: np.sum(m(X)))(Scale(2.0)).w) == pytest.approx(X.sum())


def test_a_string_is_no_array():
    f = og.jit(lambda t: t[1] * 2.0 if isinstance(t[0], str) else t[0] * 1.0)
    assert (float(f((1.0, "leaf"))), float(f(("leaf", 1.0)))) == (1.0, 2.0)

"""Random programs against HIPS autograd, in float64: values, gradients, Hessian-vector products, Jacobians."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as onp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxgrad.eager as og
import onnxgrad.eager.numpy as xnp

#: Each takes the namespace, the values so far, and two numbers that choose.
STEPS = {
    "tanh": lambda np, a, b, k: np.tanh(a),
    "exp": lambda np, a, b, k: np.exp(-a * a),
    "sin": lambda np, a, b, k: np.sin(a) * 2.0,
    "sqrt": lambda np, a, b, k: np.sqrt(1.0 + a**2),
    "log": lambda np, a, b, k: np.log(2.0 + np.cos(a)),
    "power": lambda np, a, b, k: a ** (k % 4),
    "abs": lambda np, a, b, k: np.abs(a),
    "add": lambda np, a, b, k: a + b,
    "sub": lambda np, a, b, k: 1.5 - a - b,
    "mul": lambda np, a, b, k: a * b,
    "div": lambda np, a, b, k: a / (1.0 + b * b),
    "max": lambda np, a, b, k: np.maximum(a, b * 1.1 + 0.01),
    "where": lambda np, a, b, k: np.where(a > 0.1, a * b, a - b),
    "sum": lambda np, a, b, k: np.sum(a, axis=k % 2, keepdims=True) + 0.0 * a,
    "mean": lambda np, a, b, k: a - np.mean(a, axis=k % 2, keepdims=True),
    "reduce": lambda np, a, b, k: a * np.sum(b, axis=k % 2, keepdims=True),
    "matmul": lambda np, a, b, k: a @ b.T @ a * 0.1,
    "dot": lambda np, a, b, k: np.tensordot(a, b, axes=((0,), (0,)))[0, 0] * a,
    "rows": lambda np, a, b, k: a + b[k % 3],
    "column": lambda np, a, b, k: a + b[:, k % 4 : k % 4 + 1],
    "flip": lambda np, a, b, k: a[::-1] * b[:, ::-1],
    "gather": lambda np, a, b, k: a[onp.array([2, 0, k % 3])] + b,
    "points": lambda np, a, b, k: a * np.sum(b[onp.array([0, k % 3]), onp.array([k % 4, 1])]),
    "reshape": lambda np, a, b, k: np.reshape(np.transpose(np.reshape(a, (2, 6))), (3, 4)) * b,
    "concat": lambda np, a, b, k: np.concatenate([a[:1], b[1:]], axis=0),
    "stack": lambda np, a, b, k: np.sum(np.stack([a, b, a * b]), axis=0),
    "newaxis": lambda np, a, b, k: np.mean(a[:, None, :] * b[None, :, :], axis=k % 2),
    "einsum": lambda np, a, b, k: np.einsum("ij,kj,kl->il", a, b, a) * 0.1,
    "std": lambda np, a, b, k: a * np.std(b),
    "max of": lambda np, a, b, k: a * np.max(b, axis=1, keepdims=True),
    "branch": lambda np, a, b, k: a * 2.0 if float(xp_value(a)) > 0 else b - a,
}  # fmt: skip


def xp_value(a):
    """A number to branch on, of either library."""
    a = getattr(a, "_value", a)
    while hasattr(a, "_value"):
        a = a._value
    return onp.sum(getattr(a, "_data", a)) - 0.3


def run(np, steps, x, y):
    values = [x, y]
    for name, i, j, k in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        values.append(STEPS[name](np, a, b, k) + 0.0 * x)  # of one shape, so that every step fits
    return values[-1]


programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 11)),
    min_size=1,
    max_size=7,
)


def close(a, b):
    a, b = onp.asarray(a), onp.asarray(b)
    scale = 1 + onp.max(onp.abs(b), initial=0)
    onp.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * scale)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs, st.integers(0, 10**6))
def test_random_programs(steps, seed):
    rng = onp.random.default_rng(seed)
    x, y, v = (rng.standard_normal((3, 4)) for _ in range(3))
    ours, theirs = (lambda np: lambda x, y: np.sum(np.sin(run(np, steps, x, y))))(xnp), None
    theirs = lambda x, y: anp.sum(anp.sin(run(anp, steps, x, y)))  # noqa: E731
    value, gradients = og.value_and_grad(ours, (0, 1))(x, y)
    close(value, theirs(x, y))
    for mine, yours in zip(gradients, autograd.grad(theirs, (0, 1))(x, y)):
        close(mine, yours)
    yours = autograd.grad(lambda x: anp.sum(autograd.grad(theirs)(x, y) * v))(x)
    close(og.grad(lambda x: xnp.sum(og.grad(ours)(x, y) * v))(x), yours)
    close(og.hvp(lambda x: ours(x, y))(x, v), yours)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_with_its_jacobian(name):
    rng = onp.random.default_rng(3)
    x, y = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    ours = lambda x: STEPS[name](xnp, x, x * y, 5)  # noqa: E731
    yours = autograd.jacobian(lambda x: STEPS[name](anp, x, x * y, 5))(x)
    for mode in ("forward", "reverse"):
        close(og.jacobian(ours, mode=mode)(x), yours)


def test_arrays_inside_of_another_librarys_containers():
    """A container that applies numpy's functions to what it holds, as xarray's do."""

    class Labelled:
        def __init__(self, data):
            self.data = data

        def __array_ufunc__(self, ufunc, method, *operands, **how):
            held = [x.data if isinstance(x, Labelled) else x for x in operands]
            return Labelled(getattr(ufunc, method)(*held, **how))

    def f(x):
        return xnp.sum(xnp.maximum(xnp.exp(Labelled(x)), xnp.abs(Labelled(x * 3.0))).data)

    onp.testing.assert_allclose(onp.asarray(og.grad(f)(onp.array([0.1, 1.0]))), [onp.exp(0.1), 3.0])

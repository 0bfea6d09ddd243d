"""An .onnx model as a JAX function: jit, vmap, gradients of gradients, and forward mode."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from onnxgrad.interop.jax import function  # noqa: E402


def model(body, inputs="float[N] x", outputs="float[N] y"):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}')


CUBE = model("s = Mul(x, x)\n t = Sin(x)\n y = Mul(s, t)")
X = np.linspace(-1, 2, 5, dtype=np.float32)


def same(x):
    return x * x * jnp.sin(x)


def test_values_under_jit_and_vmap():
    f = function(CUBE)
    np.testing.assert_allclose(f(X), same(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: 2 * f(x + 1))(X), 2 * same(X + 1), rtol=1e-5)
    rows = np.stack([X, X + 1, X * 2])
    np.testing.assert_allclose(jax.vmap(f)(rows), same(rows), rtol=1e-6)


def test_gradients_of_gradients_under_jit():
    f = function(CUBE)

    def of(h, order):
        g = lambda x: h(x).sum()  # noqa: E731
        for _ in range(order):
            g = (lambda k: lambda x: jax.grad(k)(x).sum())(g)
        return g

    for order in (1, 2, 3):
        ours, theirs = (jax.jit(jax.grad(of(h, order - 1)))(X) for h in (f, same))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jacrev(f)(X), jax.jacrev(same)(X), rtol=1e-5, atol=1e-6)


def test_forward_mode():
    f = function(CUBE, mode="forward")
    ours, theirs = (jax.jvp(h, (X,), (np.ones_like(X),)) for h in (f, same))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    second = [jax.jvp(lambda x: jax.jvp(h, (x,), (X,))[1], (X,), (X,))[1] for h in (f, same)]  # noqa: B023
    np.testing.assert_allclose(*second, rtol=1e-4, atol=1e-5)


def test_several_outputs_and_integers():
    f = function(model("y = Mul(x, x)\n z = Gather(x, i)", "float[N] x, int32[M] i", "float[N] y, float[M] z"))

    def total(x):
        y, z = f(x, np.array([1, 1], np.int32))
        return y.sum() + z.sum()

    np.testing.assert_allclose(jax.grad(total)(X), 2 * X + 2 * np.eye(5)[1], rtol=1e-6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(BadInput, match="takes 1 arguments"):
        function(CUBE)(X, X)
    if not jax.config.jax_enable_x64:
        with pytest.raises(BadInput, match="jax_enable_x64"):
            function(model("y = Sin(x)", "double[N] x", "double[N] y"))

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


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_bfloat16_has_derivatives(mode):
    f = function(model("z = Mul(x, x)\n y = Mul(z, x)", "bfloat16[N] x", "bfloat16[N] y"), mode=mode)
    x = jnp.arange(5, dtype=jnp.bfloat16)
    ours = jax.vjp(f, x)[1](x)[0] if mode == "reverse" else jax.jvp(f, (x,), (x,))[1]
    np.testing.assert_array_equal(ours.astype(np.float32), 3 * np.arange(5.0) ** 3)


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


@pytest.fixture
def without_x64():
    """JAX as users have it; other tests of the process may have turned 64 bits on."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("without_x64")
def test_integers_of_64_bits_without_x64():
    """Ids are int64 in ONNX, and int32 in JAX by default."""
    f = function(
        model("g = Gather(x, i)\n y = Mul(g, g)\n n = Add(i, i)", "float[N] x, int64[M] i", "float[M] y, int64[M] n")
    )
    ids = jnp.array([1, 1, 3])
    assert ids.dtype == jnp.int32
    y, n = f(X, ids)
    np.testing.assert_allclose(y, X[[1, 1, 3]] ** 2, rtol=1e-6)
    np.testing.assert_array_equal(n, [2, 2, 6])
    found = jax.grad(lambda x: f(x, ids)[0].sum())(X)
    np.testing.assert_allclose(found, [0, 4 * X[1], 0, 2 * X[3], 0], rtol=1e-6)


@pytest.mark.usefixtures("without_x64")
def test_integers_that_jax_does_not_hold_are_refused():
    f = function(model("big = Constant<value_int = 2147483647>()\n y = Add(i, big)", "int64[M] i", "int64[M] y"))
    np.testing.assert_array_equal(f(jnp.array([0])), [2147483647])
    with pytest.raises(Exception, match="numbers beyond int32"):
        f(jnp.array([1])).block_until_ready()


@pytest.mark.usefixtures("without_x64")
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.array([1 << 40]), "'i' holds numbers beyond int32"),
        ([-(1 << 33)], "'i' holds numbers beyond int32"),
        (np.array([1.5]), "'i' takes int32, not float64"),
        (jnp.array([1.0]), "'i' takes int32, not float32"),
    ],
)
def test_ids_that_a_conversion_would_change_are_refused(ids, says):
    f = function(model("y = Gather(x, i)", "float[N] x, int64[M] i", "float[M] y"))
    np.testing.assert_array_equal(f(X, [1]), X[[1]])
    np.testing.assert_array_equal(f(X, np.array([1], np.uint8)), X[[1]])
    with pytest.raises(BadInput, match=says):
        f(X, ids)

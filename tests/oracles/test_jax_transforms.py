"""Transforms and their compositions against JAX, in float64, on random programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from onnxgrad import Function, grad, hessian, hvp, jacobian, jvp, linearize, signature, split_vjp, vjp, vmap
from tests.models import assert_no_traps
from tests.transforms.numbers import session
from tests.transforms.programs import SHAPES, WEIGHTS, programs

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy

SMALL = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
                 phases=[Phase.generate])  # fmt: skip
rng = np.random.default_rng(4)
X, V = rng.standard_normal(SHAPES["x"]), rng.standard_normal(SHAPES["v"])
FEEDS = {"x": X, "v": V}


def close(a, b):
    b = np.asarray(b)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def functions(program, *names):
    """The program as a function of the values `names`, and where to take its derivatives."""
    known = FEEDS | WEIGHTS

    def f(*args):
        return program.call(jnp, {k: jnp.asarray(a) for k, a in (known | dict(zip(names, args))).items()})["y"]

    return f, [jnp.asarray(known[n]) for n in names]


@given(
    programs(), st.sampled_from([("x",), ("v", "x"), ("w", "x"), ("c", "v")]), st.sampled_from(["reverse", "forward"])
)
@SMALL
def test_jacobian(program, wrt, mode):
    f, at = functions(program, *wrt)
    derive = jax.jacrev if mode == "reverse" else jax.jacfwd
    want = derive(f, argnums=tuple(range(len(wrt))))(*at)
    derived = jacobian(program.model, wrt=wrt, mode=mode)
    assert_no_traps(derived, program.model)
    got = session(derived)(FEEDS)
    for name, j in zip(wrt, want):
        close(got[signature(derived).jacobians["y"][name]], j)


@given(programs(), st.sampled_from([("x",), ("v", "w"), ("c", "x")]))
@SMALL
def test_hessian_and_its_products(program, wrt):
    f, at = functions(program, *wrt)

    def total(*args):
        return f(*args).sum()

    blocks = jax.hessian(total, argnums=tuple(range(len(wrt))))(*at)
    derived = hessian(program.model, wrt=wrt)
    got, names = session(derived)(FEEDS), signature(derived).hessians
    for i, a in enumerate(wrt):
        for j, b in enumerate(wrt):
            close(got[names[a][b]], blocks[i][j])
    tangents = [rng.standard_normal(np.shape(x)) for x in at]
    argnums = tuple(range(len(wrt)))
    _, want = jax.jvp(lambda *args: jax.grad(total, argnums=argnums)(*args), at, [jnp.asarray(t) for t in tangents])
    product = hvp(program.model, wrt=wrt)
    got = session(product)(FEEDS | {f"{n}_tangent": t for n, t in zip(wrt, tangents)})
    for name, w in zip(wrt, want):
        close(got[signature(product).products[name]], w)


@given(programs(), st.sampled_from([("x",), ("x", "w"), ("v", "c")]))
@SMALL
def test_jvp_vjp_and_both_as_models_of_their_own(program, wrt):
    f, at = functions(program, *wrt)
    tangents = [rng.standard_normal(np.shape(x)) for x in at]
    y, pushed = jax.jvp(f, at, [jnp.asarray(t) for t in tangents])
    feeds = {f"{n}_tangent": t for n, t in zip(wrt, tangents)}
    got = session(jvp(program.model, wrt=wrt))(FEEDS | feeds)
    close(got["y"], y)
    close(got["y_tangent"], pushed)
    first, linear = linearize(program.model, wrt=wrt)
    residuals = session(first)(FEEDS)
    close(residuals["y"], jax.linearize(f, *at)[0])
    close(
        session(linear)(FEEDS | residuals | feeds)["y_tangent"], jax.linearize(f, *at)[1](*map(jnp.asarray, tangents))
    )

    cotangent = rng.standard_normal(y.shape)
    want = jax.vjp(f, *at)[1](jnp.asarray(cotangent))
    forward, back = split_vjp(program.model, wrt=wrt)
    residuals = session(forward)(FEEDS)
    for found in (session(vjp(program.model, wrt=wrt))(FEEDS | {"y_cotangent": cotangent}),
                  session(back)(FEEDS | residuals | {"y_cotangent": cotangent})):  # fmt: skip
        for name, w in zip(wrt, want):
            close(found[f"{name}_grad"], w)


@given(programs())
@SMALL
def test_compositions(program):
    f, (x,) = functions(program, "x")

    def total(x):
        return f(x).sum()

    gradient = jax.grad(total)
    found = grad(grad(program.model, wrt="x"), wrt="x")
    close(session(found)(FEEDS)[signature(found).gradients["x"]], jax.grad(lambda x: gradient(x).sum())(x))

    u, t, s = rng.standard_normal(f(x).shape), rng.standard_normal(x.shape), rng.standard_normal(x.shape)
    both = jvp(vjp(program.model, wrt="x"), wrt=["x", "y_cotangent"], of="x_grad")
    got = session(both)(FEEDS | {"y_cotangent": u, "x_tangent": t, "y_cotangent_tangent": 2 * u})["x_grad_tangent"]
    pull = lambda x, u: jax.vjp(f, x)[1](u)[0]  # noqa: E731
    close(got, jax.jvp(pull, (x, jnp.asarray(u)), (jnp.asarray(t), jnp.asarray(2 * u)))[1])

    found = jacobian(grad(program.model, wrt="x"), wrt=["x", "v"], mode="forward")
    got = session(found)(FEEDS)
    close(got["x_grad_x_jacobian"], jax.hessian(total)(x))

    inner = jvp(program.model, wrt="x")
    product = hvp(inner, wrt="x", of="y_tangent")
    names = signature(product)
    got = session(product)(FEEDS | {"x_tangent": t, names.input_tangents["x"]: s})[names.products["x"]]
    pushed = lambda x: jax.jvp(f, (x,), (jnp.asarray(t),))[1].sum()  # noqa: E731
    close(got, jax.jvp(jax.grad(pushed), (x,), (jnp.asarray(s),))[1])


@given(programs(), st.booleans())
@SMALL
def test_with_respect_to_an_intermediate_value(program, symbolic):
    known = {k: jnp.asarray(a) for k, a in (FEEDS | WEIGHTS).items()}
    held = program.call(jnp, known)[program.inner]

    def f(d):
        return program.call(jnp, known | {f"{program.inner}+": d})["y"]

    call = Function(program.model)
    close(call.jacobian(wrt=program.inner)(X, V), jax.jacrev(f)(jnp.zeros(held.shape)))
    close(call.grad(wrt=program.inner)(X, V), jax.grad(lambda d: f(d).sum())(jnp.zeros(held.shape)))
    bent = jax.grad(lambda d: jax.grad(lambda e: f(e).sum())(d).sum())(jnp.zeros(held.shape))
    close(call.grad(wrt=program.inner).grad(wrt=program.inner)(X, V), bent)
    close(Function(program.model, outputs=program.inner)(X, V), held)


@given(programs(symbolic=False), st.sampled_from([(0, None), (1, 0), (None, 1), (-1, -1)]))
@SMALL
def test_vmap(program, axes):
    """Of a program and of its gradient."""
    f, _ = functions(program, "x", "v")
    at = [rng.standard_normal(np.insert(np.array(SHAPES[n]), axis % (len(SHAPES[n]) + 1), 4)) if axis is not None else a
          for n, axis, a in zip("xv", axes, (X, V))]  # fmt: skip
    in_axes = dict(zip("xv", axes))
    feeds = dict(zip("xv", at))
    close(session(vmap(program.model, in_axes))(feeds)["y"], jax.vmap(f, axes)(*at))
    derived = vmap(grad(program.model, wrt=["x", "v"]), in_axes)
    want = jax.vmap(jax.grad(lambda x, v: f(x, v).sum(), argnums=(0, 1)), axes)(*at)
    got = session(derived)(feeds)
    for name, w in zip("xv", want):
        close(got[f"{name}_grad"], w)

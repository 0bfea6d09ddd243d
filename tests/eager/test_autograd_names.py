"""HIPS autograd's interface: its names against its own results, where it is installed, and closed forms."""

from __future__ import annotations

import collections
import subprocess
import sys

import numpy as onp
import pytest

import onnxgrad.eager.autograd as oa
from onnxgrad.eager.autograd import numpy as np
from onnxgrad.eager.autograd.extend import defjvp, defvjp, defvjp_argnum, notrace_primitive, primitive, vspace
from onnxgrad.eager.autograd.misc import adam, fixed_point, flatten, flatten_func, rmsprop, sgd
from onnxgrad.eager.autograd.test_util import check_equivalent, check_grads, combo_check

pytest.importorskip("autograd", reason="compared with HIPS autograd")
import autograd.misc.optimizers
import autograd.numpy as anp

rng = onp.random.default_rng(0)
X, V = rng.standard_normal(4), rng.standard_normal(4)
A = rng.standard_normal((3, 4))


def close(found, expected):
    onp.testing.assert_allclose(onp.asarray(found), onp.asarray(expected), rtol=1e-10, atol=1e-12)


def scalar(np, x, y=1.0):
    return np.sum(np.sin(x * y) ** 3) * y


def vector(np, x):
    return np.tanh(np.dot(A, x))


#: Each is called with the module and its numpy.
CALLS = {
    "grad": lambda a, np: a.grad(lambda x, y: scalar(np, x, y), 1)(X, 0.5),
    "elementwise_grad": lambda a, np: a.elementwise_grad(np.sin)(X),
    "deriv": lambda a, np: a.deriv(np.sin)(0.3),
    "jacobian": lambda a, np: a.jacobian(lambda x: vector(np, x))(X),
    "hessian": lambda a, np: a.hessian(lambda x: scalar(np, x))(X),
    "hessian of a vector": lambda a, np: a.hessian(lambda x: vector(np, x))(X),
    "holomorphic_grad": lambda a, np: a.holomorphic_grad(lambda z: np.sin(z) ** 2)(0.3 + 0.2j),
    "grad_named": lambda a, np: a.grad_named(lambda x, y: scalar(np, x, y), "y")(X, 0.5),
    "make_vjp": lambda a, np: a.make_vjp(lambda x: vector(np, x))(X)[0](V[:3]),
    "make_jvp": lambda a, np: a.make_jvp(lambda x: vector(np, x))(X)(V)[1],
    "make_hvp": lambda a, np: a.make_hvp(lambda x: scalar(np, x))(X)[0](V),
    "hessian_vector_product": lambda a, np: a.hessian_vector_product(lambda x: scalar(np, x))(X, V),
    "vector_jacobian_product": lambda a, np: a.vector_jacobian_product(lambda x: vector(np, x))(X, V[:3]),
    "make_ggnvp": lambda a, np: a.make_ggnvp(lambda x: vector(np, x))(X)(V),
    "grad_and_aux": lambda a, np: a.grad_and_aux(lambda x: (scalar(np, x), x))(X)[0],
    "checkpoint": lambda a, np: a.grad(lambda x: np.sum(a.checkpoint(lambda x: vector(np, x))(x)))(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_those_of_autograd(name):
    close(CALLS[name](oa, np), CALLS[name](autograd, anp))


def test_several_arguments_and_containers():
    f = lambda np: lambda d, y: np.sum(d["a"] * y) + d["b"][0]  # noqa: E731
    args = {"a": X, "b": [2.0, (3.0,)]}, 0.7
    found, expected = (m.grad(f(n), argnum=[0, 1])(*args) for m, n in ((oa, np), (autograd, anp)))
    close(found[0]["a"], expected[0]["a"])
    close(found[0]["b"][0], expected[0]["b"][0])
    close(found[1], expected[1])
    value, gradient = oa.value_and_grad(f(np), (1,))(*args)
    close(value, f(onp)(*args))
    assert isinstance(gradient, tuple)
    assert oa.grad(f(np), 1).__name__ == "grad_of_<lambda>_wrt_argnum_1"
    assert oa.grad(lambda x: 1.0)([]) == []
    close(oa.grad(lambda x: x**2)(3), 6.0)
    both = oa.multigrad_dict(lambda x, y=2.0: x * y**2)(3.0)
    close([both["x"], both["y"]], [4.0, 12.0])
    for wrong in (lambda x: x * 1j, lambda x: x > 0, lambda x: True):
        with pytest.raises(TypeError, match="one real number"):
            oa.grad(wrong)(1.0)


def test_primitives():
    seen = []

    @primitive
    def logsumexp(x, scale=1.0):
        seen.append(type(x))
        return onp.log(onp.sum(onp.exp(x))) * scale

    with pytest.raises(NotImplementedError, match="argument 0"):
        oa.grad(logsumexp)(X)
    defvjp(logsumexp, lambda ans, x, scale=1.0: lambda g: g * scale * np.exp(x - ans / scale))
    check_grads(logsumexp)(X)
    check_grads(lambda x: logsumexp(x, scale=2.0))(X)
    assert set(seen) == {onp.ndarray}

    @primitive
    def product(x, y):
        return x * y

    defjvp(product, lambda g, ans, x, y: g * y, lambda g, ans, x, y: x * g)  # both modes follow
    check_grads(product, (0, 1))(X, V)

    @primitive
    def double(x, times):
        return x * times

    defvjp_argnum(double, lambda argnum, ans, args, kwargs: lambda g: g * args[1])
    check_grads(lambda x: double(x, 3))(X)
    assert notrace_primitive(lambda x: onp.floor(x))(1.5) == 1.0

    @primitive
    def wrong(x):
        return x * 2.0

    defvjp(wrong, lambda ans, x: lambda g: g * 2.001)
    with pytest.raises(AssertionError, match=r"\(VJP\) check of wrong failed"):
        check_grads(wrong, modes=["rev"])(1.0)


def test_flatten():
    value = {"b": (1.0, X), "a": [A, {"z": 2.0}]}
    flat, back = flatten(value)
    theirs, _ = autograd.misc.flatten(value)
    close(flat, theirs)
    check_equivalent(back(flat * 2.0), {"a": [A * 2, {"z": 4.0}], "b": (2.0, X * 2)})
    assert flatten([])[0].shape == (0,)
    close(oa.grad(lambda v: np.sum(flatten(v)[0] ** 2))(value)["b"][1], 2 * X)
    g, _, at = flatten_func(lambda v: {"b": v["b"][1] * 2.0}, value)
    close(g(at), 2 * X)
    check_grads(lambda x: back(x)["a"][0])(onp.asarray(flat))


@pytest.mark.parametrize("optimizer", [sgd, rmsprop, adam])
def test_optimizers_take_the_steps_of_autograd(optimizer):
    theirs = getattr(autograd.misc.optimizers, optimizer.__name__)
    seen = collections.Counter()
    start = {"w": X, "b": [0.5]}
    gradient = lambda p, i: {"w": p["w"] * 2.0, "b": [p["b"][0] - 1.0]}  # noqa: E731
    watch = lambda p, i, g: seen.update(p.keys())  # noqa: E731
    found = optimizer(gradient, start, watch, num_iters=7, step_size=0.1)
    close(found["w"], theirs(gradient, start, num_iters=7, step_size=0.1)["w"])
    assert seen["w"] == 7


def test_fixed_points():
    newton = lambda a: lambda x: 0.5 * (x + a / x)  # noqa: E731
    root = lambda a: fixed_point(newton, a, 1.0, lambda x, y: abs(x - y), 1e-12)  # noqa: E731
    close(root(2.0), onp.sqrt(2.0))
    close(oa.grad(root)(2.0), 0.5 / onp.sqrt(2.0))
    close(oa.grad(oa.grad(root))(2.0), -0.25 * 2**-1.5)


def test_vector_spaces():
    space = vspace({"x": X, "z": onp.ones((2, 1)) * 1j})
    assert space.size == 8
    assert len(list(space.standard_basis())) == 8
    total = space.zeros()
    for unit in space.standard_basis():
        total = space.add(total, unit)
    check_equivalent(total, space.ones())
    x, y = space.randn(), space.randn()
    close(space.inner_prod(x, space.scalar_mul(y, 2.0)), 2 * space.inner_prod(y, x))
    assert space == vspace(space.covector(x))
    assert space != vspace(X)
    assert vspace(X).shape == (4,)


def test_combinations():
    seen = []
    f = lambda x, axis: seen.append(axis) or np.sum(x**2, axis=axis)  # noqa: E731
    combo_check(f, [0], order=1)([A, A.T], axis=[None, 0])
    assert set(seen) == {None, 0}


PROGRAM = """
import onnxgrad.eager.as_autograd
import autograd, autograd.numpy as np, autograd.numpy.random as npr, autograd.scipy.stats as stats
import autograd.scipy.special, autograd.numpy.linalg as la
import autograd.scipy.stats.norm as norm
from autograd.scipy.stats.gamma import logpdf
assert norm.logpdf is not None and norm is stats.norm and logpdf is not None
from autograd import grad, make_vjp
from autograd.misc import flatten
from autograd.misc.optimizers import adam
from autograd.misc.fixed_points import fixed_point
from autograd.extend import primitive, defvjp
from autograd.core import make_jvp
from autograd.builtins import isinstance, tuple
from autograd.test_util import check_grads
from autograd.util import quick_grad_check
f = lambda x: np.sum(stats.norm.logpdf(x, 0.0, 2.0)) + la.norm(x) + autograd.scipy.special.gammaln(np.sum(x ** 2))
check_grads(f)(npr.rand(3))
quick_grad_check(lambda x, y: x ** 2 + y, 1.0, (2.0,))
assert isinstance(np.zeros(1), np.ndarray)
assert flatten((1.0, np.ones(2)))[0].shape == (3,)
print(autograd.__name__)
"""


def test_one_line_runs_programs_of_autograd():
    pytest.importorskip("scipy", reason="the program uses autograd.scipy")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "onnxgrad.eager.autograd", done.stderr
    late = "import autograd; import onnxgrad.eager.as_autograd"
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, timeout=300)
    assert "import onnxgrad.eager.as_autograd before" in done.stderr

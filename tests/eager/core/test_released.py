"""Large values that no derivative reads are released, and only those: derivatives have the same bits."""

from __future__ import annotations

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad.eager.core import released
from onnxgrad.eager.core.released import ReleasedOp, value_of
from onnxgrad.eager.core.tracing import Traced

X = onp.random.default_rng(0).standard_normal((200, 200))


def polynomial(x):
    y = x
    for _ in range(4):
        y = y * x * 0.5 + x * 0.1 - y
    return np.sum(y)


@og.custom_vjp
def halved(x):
    return x * 0.5


@halved.defvjp
def _(arguments, result, cotangent):
    return cotangent * 0.5 + 0.0 * arguments[0]


def used_again(x):
    a = x * 2.0
    b = a + 1.0
    c = -(b * 3.0)
    view = (x - 0.5).reshape(-1)
    return np.sum(c * c + np.exp(-x * x)) + np.sum(a * b) + np.sum(view[1:] * view[:-1])


def opaque(x):
    return np.sum(np.tanh(halved(x * 3.0 + 1.0) * 2.0 - x) ** 2)


def counted(x):
    signs = (x > 0) * 2 - 1
    return np.sum(((signs + 3) * 2 - signs) * x * 2.0 + 1.0)


FUNCTIONS = {"polynomial": polynomial, "of integers": counted, "used again": used_again, "opaque": opaque}


def released_nodes(f):
    return [n for n in Traced(f, (X,), {}, 0).program.nodes if type(n.op) is ReleasedOp]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_have_the_same_bits(name, monkeypatch):
    f = FUNCTIONS[name]
    transforms = (og.grad(f), lambda x: og.hvp(f)(x, X), lambda x: og.jvp(f, (x,), (X,))[1])
    pulled = og.vjp(f, X)[1]
    found = [onp.asarray(t(X)) for t in transforms] + [onp.asarray(pulled(c)) for c in (1.0, 1.0)]
    assert released_nodes(f)
    monkeypatch.setattr(released, "_BLIND", frozenset())
    expected = [onp.asarray(t(X)) for t in transforms]
    assert not released_nodes(f)
    for y, z in zip(found, [*expected, expected[0], expected[0]], strict=True):
        assert y.tobytes() == z.tobytes()


def test_what_is_referred_to_is_kept():
    kept = []

    def f(x):
        a = x * 2.0
        kept.append(a)
        b = a + 1.0
        return np.sum(np.tanh(np.tanh(b)))

    nodes = released_nodes(f)
    assert all(n is not kept[0]._node for n in nodes)
    assert onp.array_equal(kept[0]._data, X * 2.0)


@pytest.mark.parametrize(
    "operation", [lambda x: x * 2.0, lambda x: x - 0.5, lambda x: 0.5 - x, lambda x: x + 0.5, lambda x: -x]
)
def test_a_released_value_is_computed_again(operation):
    (first, *_) = released_nodes(lambda x: np.sum(np.tanh(np.tanh(-operation(x) + 1.0))))
    assert onp.isnan(first.value).all()
    assert first.value.shape == X.shape
    assert onp.array_equal(value_of(first), operation(X))

"""Helpers for containers of arrays and for optimization, as `autograd.misc` has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array, plain
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.transforms import vjp

Function = Callable[..., Any]


def flatten(value: Any) -> tuple[Array, Function]:
    """The elements of all arrays of a container as one vector, and the function that undoes it.

    Both are differentiable. Numbers and arrays come in the order of the containers; keys of dicts are sorted.
    """
    ordered = _sort_keys(value)
    parts = [as_array(x) for _, x in trees.leaves(ordered)]
    shapes = [x.shape for x in parts]
    flat = np.concatenate([np.ravel(x) for x in parts]) if parts else np.zeros(0)
    ends = numpy.cumsum([x.size for x in parts], dtype=int).tolist()

    def unflatten(vector: Any) -> Any:
        vector = as_array(vector)
        pieces = [vector[end - int(numpy.prod(s, dtype=int)) : end].reshape(s) for end, s in zip(ends, shapes)]
        return trees.derivative(ordered, pieces)

    return flat, unflatten


def _sort_keys(tree: Any) -> Any:
    """`tree` with the keys of its dicts in order."""
    if isinstance(tree, dict):
        return {k: _sort_keys(tree[k]) for k in sorted(tree)}
    return type(tree)(map(_sort_keys, tree)) if type(tree) in (list, tuple) else tree


def flatten_func(func: Function, example: Any) -> tuple[Function, Function, Array]:
    """`func` of a container as a function of its flat vector, with the way back and the flat `example`."""
    flat, unflatten = flatten(example)
    return lambda x, *args: flatten(func(unflatten(x), *args))[0], unflatten, flat


def const_graph(fun: Function, *args: Any, **kwargs: Any) -> Function:
    """`fun` with these arguments fixed. Graphs of derivatives are kept here in any case, so nothing else is saved."""
    return functools.partial(fun, *args, **kwargs)


# --- optimizers ------------------------------------------------------------------------------------


def unflatten_optimizer(optimize: Function) -> Function:
    """An optimizer of vectors as one of containers of arrays."""

    @functools.wraps(optimize)
    def of_containers(grad: Function, x0: Any, callback: Function | None = None, *how: Any, **options: Any) -> Any:
        flat, unflatten = flatten(x0)

        def watch(x: Any, i: int, g: Any) -> None:
            if callback is not None:
                callback(unflatten(x), i, unflatten(g))

        found = optimize(lambda x, i: flatten(grad(unflatten(x), i))[0], flat, watch, *how, **options)
        return unflatten(found)

    return of_containers


@unflatten_optimizer
def sgd(
    grad: Function, x: Any, callback: Function, num_iters: int = 200, step_size: float = 0.1, mass: float = 0.9
) -> Any:
    """Gradient descent with momentum: v ← mass·v − (1 − mass)·g, x ← x + step_size·v; `grad` is of ``(x, step)``."""
    v = np.zeros_like(x)
    for i in range(num_iters):
        g = grad(x, i)
        callback(x, i, g)
        v = mass * v - (1.0 - mass) * g
        x = x + step_size * v
    return x


@unflatten_optimizer
def rmsprop(
    grad: Function,
    x: Any,
    callback: Function,
    num_iters: int = 100,
    step_size: float = 0.1,
    gamma: float = 0.9,
    eps: float = 1e-8,
) -> Any:
    """RMSProp: steps divided by the root of a running mean of squared gradients, which begins at one."""
    s = np.ones_like(x)
    for i in range(num_iters):
        g = grad(x, i)
        callback(x, i, g)
        s = gamma * s + (1.0 - gamma) * g**2
        x = x - step_size * g / (np.sqrt(s) + eps)
    return x


@unflatten_optimizer
def adam(
    grad: Function,
    x: Any,
    callback: Function,
    num_iters: int = 100,
    step_size: float = 0.001,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Any:
    """Adam (Kingma and Ba 2015), with bias correction."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for i in range(num_iters):
        g = grad(x, i)
        callback(x, i, g)
        m = b1 * m + (1.0 - b1) * g
        v = b2 * v + (1.0 - b2) * g**2
        x = x - step_size * (m / (1.0 - b1 ** (i + 1))) / (np.sqrt(v / (1.0 - b2 ** (i + 1))) + eps)
    return x


# --- fixed points ----------------------------------------------------------------------------------


def fixed_point(f: Function, a: Any, x0: Any, distance: Function, tol: float) -> Any:
    """The fixed point of ``f(a)``, iterated from `x0` until `distance` of two iterates is at most `tol`.

    Its derivative with respect to `a` is that of the fixed point, by the implicit function theorem: the cotangent is
    itself a fixed point, iterated in the same way.
    """

    def iterated(a: Any) -> Any:
        step = f(a)
        x, before = step(x0), x0
        while distance(plain(x), plain(before)) > tol:
            x, before = step(x), x
        return x

    def backward(arguments: Any, x: Any, g: Any) -> Any:
        (a,) = arguments

        def adjoint_step(state: Any) -> Function:
            a, x, g = state
            return lambda w: vjp(f(a), x)[1](w) + g

        w = fixed_point(adjoint_step, (a, x, g), np.zeros_like(x), distance, tol)
        return (vjp(lambda a: f(a)(x), a)[1](w),)

    return opaque_call(iterated, (a,), backward)

"""Derivatives of Python functions, with the names of HIPS autograd.

A transform traces the function and runs a plan, a graph built once for the structure of the tape. Enclosing transforms
record that run as one operation, so derivatives nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.core.tape import carries_derivative
from onnxgrad.eager.core.tracing import Argnums, Function, Traced
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.errors import BadInput


def _transform(make: Callable[..., Function]) -> Callable[..., Function]:
    """Name the function that `make` returns after the one it transforms."""

    @functools.wraps(make)
    def transform(f: Function, *how: Any, **options: Any) -> Function:
        if not callable(f):
            raise BadInput(f"{make.__name__} takes a function, not a {type(f).__name__}; it returns one")
        made = make(f, *how, **options)
        made.__name__ = f"{make.__name__}({getattr(f, '__name__', 'function')})"
        made.__dict__["__wrapped__"] = f  # its signature
        return made

    return transform


@_transform
def value_and_grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """A function that returns the value of `f` and its gradient.

    Args:
        f: a function of arrays, or of containers of arrays, that returns one number.
        argnums: the argument, or tuple of arguments, to differentiate with respect to.
        has_aux: whether `f` returns a pair: the number, and auxiliary output that is passed through.

    Returns:
        A function of the same arguments that gives ``(value, gradient)``; with `has_aux`, ``((value, aux), gradient)``.
        The gradient has the containers, shapes and dtypes of the argument.

    Raises:
        BadInput: `f` does not return one number, or an argument is not of floats.
        NotDifferentiable: an operation of `f` has no derivative.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums, has_aux)
        y = t.scalar()
        gradient = t.gradient()
        return t.detached((y, t.aux) if has_aux else y), gradient

    return wrapped


@_transform
def grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """A function that returns the gradient of `f`; with `has_aux`, the pair of it and the auxiliary output.

    Arguments and errors are those of `value_and_grad`.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums, has_aux)
        t.scalar()
        gradient = t.gradient()
        return (gradient, t.detached(t.aux)) if has_aux else gradient

    return wrapped


@_transform
def elementwise_grad(f: Function, argnums: Argnums = 0) -> Function:
    """A function that returns the derivative of `f` at each element: the gradient of the sum of its result."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums)
        for y in t.ends:
            t.real(y)
        return t.gradient()

    return wrapped


def vjp(f: Function, *primals: Any) -> tuple[Any, Function]:
    """The value of `f`, and its pullback, which maps a cotangent of the result to one of each argument.

    `f` is called once, however often the pullback is. The pullback returns a tuple, or for one argument that argument's
    cotangent.
    """
    t = Traced(f, primals, {}, tuple(range(len(primals))))
    ends = t.ends

    def pullback(cotangent: Any) -> Any:
        seeds = _seeds(cotangent, t.output, ends, "cotangent")
        cotangents = trees.derivative(t.chosen, t.pull_back(seeds))
        return cotangents[0] if len(primals) == 1 else cotangents

    return t.detached(t.output), pullback


def jvp(f: Function, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The value of `f`, and its tangent for tangents of the arguments (forward mode).

    Args:
        f: a function of arrays, or of containers of arrays.
        primals: the tuple of its arguments; a single argument may stand alone.
        tangents: a tangent for each, in the same containers.
    """
    if not isinstance(primals, tuple):
        primals, tangents = (primals,), (tangents,)
    t = Traced(f, primals, {}, tuple(range(len(primals))))
    seeds = _seeds(tangents, primals, t.variables, "tangent")
    pushed = t.push_forward(seeds)
    return t.detached(t.output), trees.derivative(t.output, pushed)


def _seeds(given: Any, like: Any, arrays: Sequence[Array], what: str) -> list[Array]:
    """The leaves of `given` in the dtypes of `arrays`; their shapes must be equal."""
    parts = [x for _, x in trees.leaves(given)]
    if len(parts) != len(arrays):
        raise BadInput(f"{len(parts)} arrays of {what}s for {len(arrays)} arrays")
    seeds = []
    for x, y in zip(parts, arrays):
        s = cast(as_array(x), y.dtype if carries_derivative(y._data) else np.float64)
        if s.shape != y.shape:
            raise BadInput(f"a {what} of shape {s.shape} for an array of shape {y.shape}")
        seeds.append(s)
    return seeds


@_transform
def holomorphic_grad(f: Function, argnums: Argnums = 0) -> Function:
    """A function that returns the complex derivative f′ of `f`, a holomorphic function of complex numbers.

    It is the gradient of the real part, ∂u/∂x − i·∂u/∂y. That `f` is holomorphic is not checked.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums)
        if any(x.dtype.kind != "c" for x in t.variables):
            raise BadInput("holomorphic_grad is with respect to complex numbers\n  hint: write 1 + 0j for 1; or grad")
        return t.gradient()

    return wrapped


@_transform
def jacobian(f: Function, argnums: Argnums = 0, mode: str = "auto") -> Function:
    """A function that returns the Jacobian of `f`.

    Args:
        f: a function of arrays, or of containers of arrays.
        argnums: the argument, or tuple of arguments, to differentiate with respect to.
        mode: "reverse" takes one batched VJP with a unit cotangent for each element of the result, "forward" one
            batched JVP with a unit tangent for each element of the argument; "auto" takes whichever are fewer, and
            reverse mode if the argument is complex.

    Returns:
        A function of the same arguments. For one array of one array: an array of shape ``y.shape + x.shape``. In
        general, the containers of the result, and in place of each array the containers of the argument.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise BadInput(f"mode is 'auto', 'reverse' or 'forward', not {mode!r}")

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums)
        rows, columns = (sum(x.size for x in xs) for xs in (map(t.real, t.ends), t.variables))
        of_complex = any(x.dtype.kind == "c" for x in t.variables)
        blocks = _rows(t) if mode == "reverse" or of_complex or (mode == "auto" and rows <= columns) else _columns(t)
        return trees.derivative(t.output, [trees.derivative(t.chosen, row) for row in blocks])

    return wrapped


def _rows(t: Traced) -> list[list[Array]]:
    """For each end, its Jacobian with respect to each variable, in reverse mode."""
    blocks = []
    for i, y in enumerate(t.ends):
        unit = Array(np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape))
        row = t.pull_back_one(i, unit) if y.size else [Array(np.zeros((0, *x.shape), x.dtype)) for x in t.variables]
        blocks.append([g.reshape(y.shape + x.shape) for g, x in zip(row, t.variables)])
    return blocks


def _columns(t: Traced) -> list[list[Array]]:
    """For each end, its Jacobian with respect to each variable, in forward mode."""
    count = sum(x.size for x in t.variables)
    if not count:
        return [[Array(np.zeros(y.shape + x.shape, y.dtype)) for x in t.variables] for y in t.ends]
    units = np.split(np.eye(count), np.cumsum([x.size for x in t.variables])[:-1], axis=1)
    seeds = [Array(u.reshape(count, *x.shape).astype(x.dtype)) for u, x in zip(units, t.variables)]
    pushed = t.push_forward(seeds, directions=True)
    blocks = []
    for y, stack in zip(t.ends, pushed):
        row, at = [], 0
        for x in t.variables:
            piece = stack[at : at + x.size].reshape(x.size, y.size).T
            row.append(piece.reshape(y.shape + x.shape))
            at += x.size
        blocks.append(row)
    return blocks


@_transform
def hessian(f: Function, argnums: Argnums = 0) -> Function:
    """A function that returns the Hessian of `f`, which returns one number: of shape ``x.shape + x.shape``.

    For a container of arrays: the container, with the container again in place of each array.
    """
    return jacobian(grad(f, argnums), argnums, mode="forward")


@_transform
def hvp(f: Function, argnums: Argnums = 0) -> Function:
    """A function of the arguments of `f` and a vector like argument `argnums`: the Hessian-vector product."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        *primals, vector = args
        gradient = grad(f, argnums)
        t = Traced(lambda *a: gradient(*a, **kwargs), primals, {}, argnums)
        pushed = t.push_forward(_seeds(vector, t.chosen, t.variables, "vector"))
        return trees.derivative(t.output, pushed)

    return wrapped


def checkpoint(f: Function) -> Function:
    """Rematerialize `f`: the backward pass calls it again instead of keeping its intermediate values.

    This trades time for memory. `f` must be deterministic and reach variables through its arguments only.
    """

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        def backward(arguments: tuple, result: Any, cotangent: Any) -> Any:
            pulled = vjp(functools.partial(f, **kwargs), *arguments)[1](cotangent)
            return (pulled,) if len(arguments) == 1 else pulled

        return opaque_call(f, args, backward, kwargs)

    return wrapped

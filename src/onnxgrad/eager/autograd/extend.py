"""Primitives with derivatives of a user's own, as `autograd.extend` has them.

``defvjp(f, maker, …)`` gives for each argument a function ``maker(ans, *args, **kwargs)`` that returns the pullback,
and ``defjvp(f, push, …)`` a function ``push(g, ans, *args, **kwargs)``. One of them suffices for both modes: each is
the transpose of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad.eager import numpy as np
from onnxgrad.eager.autograd.vspaces import VSpace, vspace
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, plain, tracked, wrapped
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.transforms import vjp

Function = Callable[..., Any]


class primitive:  # noqa: N801  (a decorator)
    """A function that runs on numpy's arrays, and whose derivatives are defined by `defvjp` or `defjvp`."""

    def __init__(self, f: Function) -> None:
        functools.update_wrapper(self, f)
        self.f = f
        #: for each argument, its pullback: ``maker(ans, args, kwargs)``; None for zero
        self.pullbacks: dict[int, Function | None] = {}
        #: for each argument, its pushforward: ``push(g, ans, args, kwargs)``; None for zero
        self.pushforwards: dict[int, Function | None] = {}
        #: defines the pullbacks of all arguments: ``makers(argnums, ans, args, kwargs)``
        self.all_pullbacks: Function | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        places = [i for i, a in enumerate(args) if trees.is_tree(a) and any(tracked(x) for _, x in trees.leaves(a))]
        if not places:
            return wrapped(self.f(*map(plain, args), **kwargs))

        def filled(values: Sequence[Any]) -> tuple[Any, ...]:
            whole = list(args)
            for i, value in zip(places, values):
                whole[i] = value
            return tuple(whole)

        def run(*values: Any) -> Any:
            return wrapped(self.f(*(_plain_tree(a) for a in filled(values)), **kwargs))

        def backward(arguments: tuple[Any, ...], result: Any, cotangent: Any) -> Any:
            return self._pulled(places, result, filled(arguments), kwargs, cotangent)

        run.__name__ = getattr(self.f, "__name__", "primitive")
        return opaque_call(run, [args[i] for i in places], backward, custom=True)

    # --- the names of old programs ---------------------------------------------------------------

    def defgrad(self, maker: Function, argnum: int = 0) -> None:
        """Define the derivative with respect to one argument, like `defvjp`."""
        defvjp(self, maker, argnums=(argnum,))

    def defvjp(self, pull: Function, argnum: int = 0) -> None:
        """Define a pullback as ``pull(g, ans, vs, gvs, *args, **kwargs)``, where vs and gvs are spaces."""

        def maker(ans: Any, *args: Any, **kwargs: Any) -> Function:
            return lambda g: pull(g, ans, vspace(args[argnum]), vspace(ans), *args, **kwargs)

        defvjp(self, maker, argnums=(argnum,))

    def defvjp_is_zero(self, argnums: Sequence[int] = (0,)) -> None:
        """Define the derivative with respect to these arguments as zero."""
        defvjp(self, *[None] * len(argnums), argnums=argnums)

    # ---------------------------------------------------------------------------------------------

    def _pulled(self, places: Sequence[int], ans: Any, args: tuple[Any, ...], kwargs: Any, g: Any) -> tuple[Any, ...]:
        if self.all_pullbacks is not None:
            return tuple(self.all_pullbacks(tuple(places), ans, args, kwargs)(g))
        return tuple(self._pulled_one(i, ans, args, kwargs, g) for i in places)

    def _pulled_one(self, i: int, ans: Any, args: tuple[Any, ...], kwargs: Any, g: Any) -> Any:
        if i in self.pullbacks:
            maker = self.pullbacks[i]
            return None if maker is None else maker(ans, args, kwargs)(g)
        if i in self.pushforwards:
            push = self.pushforwards[i]
            return None if push is None else vjp(lambda t: push(t, ans, args, kwargs), np.zeros_like(args[i]))[1](g)
        name = getattr(self.f, "__name__", "the function")
        raise NotImplementedError(f"{name} has no derivative with respect to argument {i}: define it with defvjp")


def _plain_tree(a: Any) -> Any:
    return trees.mapped(plain, a) if trees.is_tree(a) else a


def notrace_primitive(f: Function) -> Function:
    """`f` on the values of its arguments: its result is constant."""

    @functools.wraps(f)
    def constant(*args: Any, **kwargs: Any) -> Any:
        return wrapped(f(*(_plain_tree(a) for a in args), **{k: _plain_tree(v) for k, v in kwargs.items()}))

    return constant


def _argnums(makers: Sequence[Any], options: dict[str, Any]) -> Sequence[int]:
    return options.get("argnums") or range(len(makers))


def _of_call(function: Function | None) -> Function | None:
    """A maker of ``(ans, *args, **kwargs)`` as one of ``(ans, args, kwargs)``."""
    return None if function is None else lambda ans, args, kwargs: function(ans, *args, **kwargs)


def defvjp(fun: primitive, *makers: Function | None, **options: Any) -> None:
    """Define the pullback for each argument (or those of `argnums`): ``maker(ans, *args, **kwargs)``; None for zero."""
    for i, maker in zip(_argnums(makers, options), makers):
        fun.pullbacks[i] = _of_call(maker)


def defvjp_argnum(fun: primitive, maker: Function) -> None:
    """Define all pullbacks by ``maker(argnum, ans, args, kwargs)``."""
    fun.all_pullbacks = lambda argnums, ans, args, kwargs: lambda g: [maker(i, ans, args, kwargs)(g) for i in argnums]


def defvjp_argnums(fun: primitive, maker: Function) -> None:
    """Define all pullbacks by ``maker(argnums, ans, args, kwargs)``, which returns a cotangent per argnum."""
    fun.all_pullbacks = maker


def defjvp(fun: primitive, *pushes: Any, **options: Any) -> None:
    """Define the pushforward of each argument: ``push(g, ans, *args, **kwargs)``, "same" for a linear one, or None."""
    for i, push in zip(_argnums(pushes, options), pushes):
        fun.pushforwards[i] = _push_of_call(fun, i, push)


def _push_of_call(fun: primitive, i: int, push: Any) -> Function | None:
    if push == "same":
        return lambda g, ans, args, kwargs: fun(*args[:i], g, *args[i + 1 :], **kwargs)
    return None if push is None else lambda g, ans, args, kwargs: push(g, ans, *args, **kwargs)


def deflinear(fun: primitive) -> None:
    """Define `fun` as linear in each of its arguments."""
    for i in range(8):
        fun.pushforwards[i] = _push_of_call(fun, i, "same")


Box = Array
__all__ = [
    "Box", "VSpace", "defjvp", "deflinear", "defvjp", "defvjp_argnum", "defvjp_argnums", "notrace_primitive",
    "primitive", "vspace",
]  # fmt: skip

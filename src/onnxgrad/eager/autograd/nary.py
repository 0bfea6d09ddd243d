"""Transforms of functions of one argument, applied to argument `argnum` of functions of several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees

Function = Callable[..., Any]


def unary_to_nary(transform: Function) -> Function:
    """`transform` of ``(fun, x)`` as one of ``(fun, argnum=0)`` that returns a function of the arguments of `fun`.

    With several `argnum`, x is the tuple of them. Integers become floats: they are numbers to differentiate by.
    """

    @functools.wraps(transform)
    def nary(fun: Function, argnum: Any = 0, *how: Any, **options: Any) -> Function:
        several = not isinstance(argnum, int)

        def at(*args: Any, **kwargs: Any) -> Any:
            def of_one(x: Any) -> Any:
                whole = list(args)
                for i, value in zip(argnum, x) if several else [(argnum, x)]:
                    whole[i] = value
                return fun(*whole, **kwargs)

            of_one.__name__ = name_of(fun)
            x = tuple(args[i] for i in argnum) if several else args[argnum]
            return transform(of_one, trees.mapped_leaves(_floats, x), *how, **options)

        at.__name__ = f"{transform.__name__}_of_{name_of(fun)}_wrt_argnum_{argnum}"
        at.__doc__ = f"    {transform.__name__} of function {name_of(fun)} with respect to argument number {argnum}."
        return at

    return nary


def name_of(fun: Any) -> str:
    """The name of a function."""
    return getattr(fun, "__name__", "[unknown name]")


def _floats(x: Any) -> Any:
    if isinstance(x, (int, float, complex)):
        return float(x) if isinstance(x, int) else x
    return x.astype(np.float64) if x.dtype.kind in "biu" else x

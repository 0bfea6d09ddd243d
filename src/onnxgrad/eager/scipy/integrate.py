"""Ordinary differential equations, differentiated by the adjoint method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import scipy.integrate as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array, plain
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.transforms import vjp
from onnxgrad.eager.xp.ufuncs import module_fallback


def odeint(func: Callable[..., Any], y0: Any, t: Any, args: tuple[Any, ...] = (), **options: Any) -> Array:
    """The solution of dy/dt = func(y, t, *args) with y = `y0` at t[0], at the times `t`: of shape (times, unknowns).

    It is differentiable with respect to `y0`, `t` and `args`, by the adjoint equation, which is solved backwards
    between times (Chen et al. 2018, "Neural ordinary differential equations", appendix B). Other variables that `func`
    reads are refused. `options` are SciPy's (``rtol``, ``atol``, …).
    """
    args = tuple(args)

    def run(y0: Any, t: Any, args: Any) -> Array:
        def slope(y: numpy.ndarray, at: float) -> numpy.ndarray:
            return as_array(func(Array(y), Array(numpy.asarray(at)), *args))._data

        found = _scipy.odeint(slope, plain(as_array(y0)), plain(as_array(t)), **options)
        return Array(numpy.asarray(found))

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        return _solve_adjoint(func, arguments, y, g, options)

    run.__name__ = "odeint"
    return opaque_call(run, (y0, t, args), backward)


def _solve_adjoint(func: Any, arguments: Any, y: Any, g: Any, options: Any) -> tuple[Any, Any, Any]:
    """With the adjoint λ = ∂L/∂y(t): dλ/dt = −(∂f/∂y)ᵀ·λ, λ jumps by g at each time, ∂L/∂args = ∫ (∂f/∂args)ᵀ·λ dt,
    and ∂L/∂tᵢ = g(tᵢ)·f(tᵢ), minus the whole of what follows at the first time."""
    _, t, args = arguments
    parts = [as_array(x) for _, x in trees.leaves(args)]
    sizes = [x.size for x in parts]
    count = y.shape[1]

    def unpacked(flat: Any) -> Any:
        ends = numpy.cumsum(sizes)
        return trees.rebuilt(args, [flat[e - n : e].reshape(x.shape) for e, n, x in zip(ends, sizes, parts)])

    def augmented(state: Any, at: Any, flat: Any) -> Any:
        """The slopes of y, λ and the gradient by `args`."""
        here, adjoint = state[:count], state[count : 2 * count]
        slope, pull = vjp(lambda y, flat: as_array(func(y, at, *unpacked(flat))), here, flat)
        at_y, at_flat = pull(-adjoint)
        return np.concatenate([slope, at_y, at_flat])

    flat = np.concatenate([np.ravel(x) for x in parts]) if parts else np.zeros(0)
    adjoint, by_args = g[-1], np.zeros_like(flat)
    by_time: list[Any] = []
    for i in range(t.shape[0] - 1, 0, -1):
        by_time.append(np.sum(as_array(func(y[i], t[i], *args)) * g[i]))
        start = np.concatenate([y[i], adjoint, by_args])
        ended = odeint(augmented, start, np.stack([t[i], t[i - 1]]), (flat,), **options)[1]
        adjoint, by_args = ended[count : 2 * count] + g[i - 1], ended[2 * count :]
    first = np.sum(as_array(func(y[0], t[0], *args)) * (g[0] - adjoint))
    return adjoint, np.stack([first, *by_time[::-1]]), unpacked(by_args)


__getattr__ = module_fallback(_scipy, "scipy.integrate")

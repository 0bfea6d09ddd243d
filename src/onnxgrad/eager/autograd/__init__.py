"""The interface of HIPS/autograd on `onnxgrad.eager`: its names, its `argnum`, its conventions.

Write ``from onnxgrad.eager.autograd import grad, numpy as np``, or begin an unchanged program with ``import
onnxgrad.eager.as_autograd``. docs/from-autograd.md lists the differences.
"""

from __future__ import annotations

import functools
import inspect
from builtins import dict, isinstance, list, tuple, type  # noqa: UP029  (names of this module)
from collections.abc import Callable
from typing import Any

from onnxgrad.eager import numpy
from onnxgrad.eager import numpy as np
from onnxgrad.eager import transforms as t
from onnxgrad.eager.autograd.extend import primitive
from onnxgrad.eager.autograd.nary import unary_to_nary
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import as_array
from onnxgrad.eager.transforms import checkpoint

__all__ = [
    "checkpoint", "deriv", "dict", "elementwise_grad", "grad", "grad_and_aux", "grad_named", "hessian",
    "hessian_tensor_product", "hessian_vector_product", "holomorphic_grad", "isinstance", "jacobian", "list",
    "make_ggnvp", "make_hvp", "make_jvp", "make_vjp", "multigrad_dict", "numpy", "primitive",
    "tensor_jacobian_product", "tuple", "type", "value_and_grad", "vector_jacobian_product",
]  # fmt: skip

Function = Callable[..., Any]


def _number(y: Any) -> Any:
    """`y`, the result of a function whose gradient is asked for."""
    kinds = [str(as_array(x).dtype) for _, x in trees.leaves(y)] or [type(y).__name__]
    for kind in kinds:
        if kind[:4] not in ("floa", "bflo"):
            raise TypeError(f"a gradient is that of one real number, not of {kind}: try holomorphic_grad")
    return y


@unary_to_nary
def value_and_grad(fun: Function, x: Any) -> Any:
    """The value of `fun` and its gradient with respect to argument `argnum`, a number or a sequence of them."""
    return t.value_and_grad(lambda x: _number(fun(x)))(x)


@unary_to_nary
def grad(fun: Function, x: Any) -> Any:
    """Returns a function which computes the gradient of `fun` with respect to argument `argnum`."""
    if not any(True for _ in trees.leaves(x)):  # a container of nothing: so is its gradient
        fun(x)
        return x
    return t.grad(lambda x: _number(fun(x)))(x)


@unary_to_nary
def elementwise_grad(fun: Function, x: Any) -> Any:
    """The gradient of the sum of the results: for an elementwise `fun`, its derivative at each element."""
    return t.elementwise_grad(lambda x: _number(fun(x)))(x)


@unary_to_nary
def deriv(fun: Function, x: Any) -> Any:
    """The derivative along a direction of ones, in forward mode."""
    return t.jvp(fun, (x,), (trees.mapped_leaves(np.ones_like, x),))[1]


@unary_to_nary
def jacobian(fun: Function, x: Any) -> Any:
    """The Jacobian, of shape ``fun(x).shape + x.shape``."""
    return t.jacobian(fun, mode="reverse")(x)


@unary_to_nary
def holomorphic_grad(fun: Function, x: Any) -> Any:
    """The complex derivative of a holomorphic `fun` of complex numbers."""
    return t.grad(lambda x: np.real(fun(x)))(x)


def grad_named(fun: Function, argname: str) -> Function:
    """The gradient with respect to the positional argument called `argname`."""
    return grad(fun, list(inspect.signature(fun).parameters).index(argname))


@unary_to_nary
def hessian(fun: Function, x: Any) -> Any:
    """The Hessian, of shape ``x.shape + x.shape``, after the shape of the result if it has one."""
    return t.jacobian(t.jacobian(fun, mode="reverse"))(x)


@unary_to_nary
def make_vjp(fun: Function, x: Any) -> Any:
    """The pullback of `fun` at a point, and its value."""
    value, pullback = t.vjp(fun, x)
    return pullback, value


@unary_to_nary
def make_jvp(fun: Function, x: Any) -> Function:
    """The pushforward of `fun` at a point: it maps a tangent to the value and the tangent of the result."""
    return lambda v: t.jvp(fun, (x,), (v,))


@unary_to_nary
def make_hvp(fun: Function, x: Any) -> Any:
    """The Hessian-vector product of `fun` at a point, and the gradient."""
    gradient, pullback = t.vjp(t.grad(fun), x)
    return pullback, gradient


def hessian_tensor_product(fun: Function, argnum: int = 0) -> Function:
    """A function of the arguments of `fun` and a tensor like argument `argnum`: the Hessian times the tensor."""

    def product(*args: Any, **kwargs: Any) -> Any:
        *primals, tensor = args
        return t.hvp(functools.partial(fun, **kwargs), argnum)(*primals, tensor)

    return product


def tensor_jacobian_product(fun: Function, argnum: int = 0) -> Function:
    """A function of the arguments of `fun` and a tensor: the tensor, contracted over all its axes with the Jacobian."""

    def contracted(*args: Any, **kwargs: Any) -> Any:
        *primals, tensor = args
        return np.tensordot(tensor, fun(*primals, **kwargs), axes=np.ndim(tensor))

    return jacobian(contracted, argnum)


hessian_vector_product, vector_jacobian_product = hessian_tensor_product, tensor_jacobian_product


def make_ggnvp(f: Function, g: Function = lambda x: np.sum(x**2, axis=-1) / 2, f_argnum: int = 0) -> Function:
    """The generalized Gauss–Newton product of ``g(f(x))`` at a point: Jᵀ·H·J·v, with J of `f` and H of `g`."""

    @unary_to_nary
    def at(f: Function, x: Any) -> Function:
        y, pullback = t.vjp(f, x)
        return lambda v: pullback(t.hvp(g)(y, t.jvp(f, (x,), (v,))[1]))

    return at(f, f_argnum)


@unary_to_nary
def grad_and_aux(fun: Function, x: Any) -> Any:
    """The gradient of the first result of `fun`, and the second."""
    return t.grad(lambda x: tuple(fun(x)), has_aux=True)(x)


def multigrad_dict(fun: Function) -> Function:
    """The gradients with respect to all arguments, as a dict by their names."""
    signature = inspect.signature(fun)

    def gradients(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def of_dict(held: dict[str, Any]) -> Any:
            again = inspect.BoundArguments(signature, held)
            return fun(*again.args, **again.kwargs)

        return grad(of_dict)(dict(bound.arguments))

    return gradients

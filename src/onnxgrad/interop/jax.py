"""An ``.onnx`` model as a JAX function, with support for ``jit``, ``vmap`` and higher derivatives.

The model runs outside of XLA, by ``jax.pure_callback``. Its derivative is a rule: the pullback (``custom_vjp``, for
``grad``, ``vjp`` and ``jacrev`` to any order) or the pushforward (``custom_jvp``, for ``jvp`` and ``jacfwd``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.interop.calls import Call
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options


def function(
    model: AnyModel, *, mode: Literal["reverse", "forward"] = "reverse", options: Options | None = None
) -> Callable[..., Any]:
    """`model` as a function of arrays, in the order of its inputs.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. Its weights are constants of the function.
        mode: which derivatives JAX can take of it: in reverse (``grad``), or forward (``jvp``). JAX cannot have both
            of a function that runs outside of it.
        options: how ONNX Runtime runs it.

    Returns:
        A function that gives an array, or a tuple where the model has several outputs. Arguments are converted to the
        dtypes of the inputs where JAX calls that a promotion of the same kind.

    Raises:
        BadInput: another number of arguments.
    """
    return _wrapped(Call.of(model, options), mode)


def _wrapped(call: Call, mode: str) -> Callable[..., Any]:
    for name in (*call.inputs, *call.outputs):
        if _dtype(call, name).itemsize < call.dtype(name).itemsize and call.dtype(name).kind not in "iu":
            raise BadInput(
                f"{name!r} is {call.dtype(name)}, which JAX does not have by default\n"
                "  hint: jax.config.update('jax_enable_x64', True)"
            )
    raw = _reverse(call) if mode == "reverse" else _forward(call)

    def called(*arguments: Any) -> Any:
        if len(arguments) != len(call.inputs):
            raise BadInput(
                f"the model takes {len(call.inputs)} arguments ({', '.join(call.inputs)}), not {len(arguments)}"
            )
        found = raw(*(_argument(a, _dtype(call, n), n) for a, n in zip(arguments, call.inputs)))
        return found[0] if len(found) == 1 else found

    return called


def _run(call: Call, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = call.shapes([a.shape for a in arguments])
    wanted = tuple(jax.ShapeDtypeStruct(s, _dtype(call, n)) for s, n in zip(shapes, call.outputs))

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        found = call([np.asarray(a, call.dtype(n)) for a, n in zip(arrays, call.inputs)])
        return tuple(_narrow_integers(y, w.dtype, n) for y, w, n in zip(found, wanted, call.outputs))

    return jax.pure_callback(run, wanted, *arguments, vmap_method="sequential")


def _dtype(call: Call, name: str) -> np.dtype:
    """The dtype of an argument or result in JAX, which has integers of 32 bits by default."""
    return np.dtype(jax.dtypes.canonicalize_dtype(call.dtype(name)))


def _argument(value: Any, dtype: np.dtype, name: str) -> jax.Array:
    """`value` in the dtype of the input `name`.

    Raises:
        BadInput: that would be a conversion of another kind, as of fractions to integers, or change integers.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    given, wanted = (np.dtype(int) if d.kind in "iu" else d for d in (array.dtype, dtype))
    if {given.kind, wanted.kind} <= {*"bifc"} and not np.can_cast(given, wanted, "same_kind"):
        raise BadInput(f"{name!r} takes {dtype}, not {array.dtype}\n  hint: convert it: x.astype({str(dtype)!r})")
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and dtype.kind in "iu":
        array = _narrow_integers(array, dtype, name)
    return jax.numpy.asarray(array, dtype)


def _narrow_integers(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Integers in the dtype that JAX uses. Raises BadInput for numbers that do not fit."""
    found = array.astype(dtype, copy=False)
    if dtype.kind in "iu" and dtype != array.dtype and not np.array_equal(found, array):
        raise BadInput(f"{name!r} holds numbers beyond {dtype}\n  hint: jax.config.update('jax_enable_x64', True)")
    return found


def _reverse(call: Call) -> Callable[..., tuple[Any, ...]]:
    """`call` with its pullback as the rule, which has its own in turn."""

    @jax.custom_vjp
    def primal(*arguments: Any) -> tuple[Any, ...]:
        return _run(call, arguments)

    def forward(*arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return primal(*arguments), arguments

    def backward(arguments: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        given = [g for g, n in zip(cotangents, call.outputs) if call.is_float(n)]
        gradients = iter(_reverse(call.pullback)(*arguments, *given))
        return tuple(
            next(gradients) if call.is_float(n) else np.zeros(a.shape, jax.dtypes.float0)
            for n, a in zip(call.inputs, arguments)
        )

    primal.defvjp(forward, backward)
    return primal


def _forward(call: Call) -> Callable[..., tuple[Any, ...]]:
    """`call` with its pushforward as the rule, which has its own in turn."""

    @jax.custom_jvp
    def primal(*arguments: Any) -> tuple[Any, ...]:
        return _run(call, arguments)

    @primal.defjvp
    def pushforward(arguments: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        given = [t for t, n in zip(tangents, call.inputs) if call.is_float(n)]
        moved = iter(_forward(call.pushforward)(*arguments, *given))
        found = primal(*arguments)
        return found, tuple(
            next(moved) if call.is_float(n) else np.zeros(y.shape, jax.dtypes.float0)
            for n, y in zip(call.outputs, found)
        )

    return primal

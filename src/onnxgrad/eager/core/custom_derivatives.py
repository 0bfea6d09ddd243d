"""Custom derivatives: functions whose VJP is a Python function.

On the tape, a call is an opaque node. The backward pass calls the Python function there and continues with its result.
The operations of that function are recorded on the tapes of the enclosing transforms, so derivatives nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array, tracked
from onnxgrad.eager.core.bodies import TracedBody, trace
from onnxgrad.eager.core.primitives import Output, Primitive
from onnxgrad.eager.core.recording import cotangent_of_pairs, of_pairs, pairs_of_cotangent, real_form
from onnxgrad.eager.core.tape import Node, compiling, exporting, is_differentiated
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none

Function = Callable[..., Any]


class OpaqueCall(Primitive):
    """A call of a Python function with a custom derivative.

    Attributes:
        backward: maps its outputs and their cotangents to the cotangents of its operands.
        kinds: dtype and shape of each output.
        body: its operations, if it was called while a program was recorded.
    """

    __slots__ = ("backward", "body", "kinds")
    opaque = custom = True

    def __init__(
        self,
        backward: Callable[[list[Array], list[Array]], Sequence[Array | None]],
        kinds: Sequence[tuple],
        body: TracedBody | None = None,
    ) -> None:
        super().__init__("Opaque", id(self))
        self.backward = backward
        self.kinds = kinds
        self.body = body

    @property
    def writable(self) -> bool:  # type: ignore[override]
        """True if its operations were recorded."""
        return self.body is not None

    def write(self, b: Builder, operands: Sequence[Var]) -> tuple[Var, ...]:
        """Emit the operations."""
        return tuple(not_none(self.body).write(b, operands))

    def pull_back(self, node: Node, cotangents: Sequence[Array | None]) -> Sequence[Array | None]:
        """The cotangents of the operands of `node`."""
        whole = [Array(np.zeros(s, d)) if g is None else g for g, (d, s) in zip(cotangents, self.kinds)]
        return self.backward(_outputs(node), whole)


class _OpaqueOutput(Output):
    """One output of an opaque node, whose cotangent is combined with those of the others."""

    __slots__ = ()
    opaque = True

    def pull_back(self, node: Node, cotangent: Array) -> Sequence[Any]:
        """The contribution to the cotangents of all outputs: None for the other outputs."""
        _, i, count = self.key
        return [[cotangent if k == i else None for k in range(count)]]  # type: ignore[call-overload]


def _outputs(node: Node) -> list[Array]:
    """The outputs of an opaque node, as arrays on the tape."""
    count = len(node.value)
    return [Array(v, Node(_OpaqueOutput("Output", i, count), (node,), v)) for i, v in enumerate(node.value)]


def opaque_call(
    f: Function,
    args: Sequence[Any],
    backward: Callable[..., Any],
    kwargs: dict[str, Any] | None = None,
    custom: bool = False,
) -> Any:
    """``f(*args)`` as one node; `backward` maps ``(arguments, result, cotangent)`` to a cotangent for each argument.

    Anything else that `f` reads is a constant. While a program is recorded, its operations are, with the derivatives
    that they have; if `backward` is a `custom` one, also as one node.
    """
    name = getattr(f, "__name__", "the function").lstrip("_")
    is_one = custom and (compiling.get() or any(is_differentiated(x._node) for x in _arrays_of(args)))
    if exporting.get() and not is_one:
        result = f(*args, **(kwargs or {}))
        inside = [x for a in args for _, x in trees.leaves(a)]
        if tracked(inside, floats=False) and not all(tracked(y, floats=False) for _, y in trees.leaves(result)):
            raise BadInput(f"{name} cannot be recorded as ONNX: its values are not computed by operations")
        return result
    arrays = [as_array(x) for i, a in enumerate(args) for _, x in trees.leaves(a, f"argument {i}")]
    body, captured = None, []
    if exporting.get() and any(x._node is not None for x in arrays):
        f = functools.wraps(f)(functools.partial(f, **(kwargs or {})))
        body = trace(f, tuple(args), [x._data for x in arrays], once=True)
        if any(y._node is None for y in body.results):
            raise BadInput(f"{name} cannot be recorded as ONNX: its values are not computed by operations")
        result, captured = body.output, body.captured
    else:
        result = f(*trees.rebuilt(tuple(args), [Array(x._data) for x in arrays]), **(kwargs or {}))
    if all(x._node is None for x in arrays):
        return result
    ends = [as_array(y) for _, y in trees.leaves(result)]
    if any(is_differentiated(y._node) for y in (ends if body is None else captured)):
        raise BadInput(f"{name} reads a variable that is not among its arguments\n  hint: pass it as an argument")
    inputs = trees.rebuilt(tuple(args), arrays)
    dtypes = [y.dtype for y in ends]

    def rebuild(outputs: Sequence[Array]) -> Any:
        return trees.rebuilt(result, [of_pairs(y) if d.kind == "c" else y for y, d in zip(outputs, dtypes)])

    def pull_back(outputs: list[Array], cotangents: list[Array]) -> list[Array | None]:
        seeds = [cotangent_of_pairs(g, d) for g, d in zip(cotangents, dtypes)]
        pulled = _match_cotangents(backward(inputs, rebuild(outputs), trees.rebuilt(result, seeds)), args, arrays, name)
        return [None if g is None else pairs_of_cotangent(g, x.dtype) for g, x in zip(pulled, arrays)]

    operands = [*(real_form(x) for x in arrays), *captured]
    values = tuple(real_form(y)._data for y in ends)
    op = OpaqueCall(pull_back, [(v.dtype, v.shape) for v in values], body)
    return rebuild(_outputs(Node(op, tuple(x._data if x._node is None else x._node for x in operands), values)))


def _arrays_of(args: Sequence[Any]) -> list[Array]:
    return [x for a in args for _, x in trees.leaves(a) if isinstance(x, Array)]


def elementwise(name: str, kernel: Function, slopes: Sequence[Function | None], *operands: Array) -> Array:
    """``kernel(*operands)``, an elementwise function of numpy's arrays, by its partial derivatives.

    Args:
        name: the name of the function.
        kernel: the function.
        slopes: for each operand, its partial derivative as a function of the operands and the result; None for zero.
            Of complex operands it is the complex derivative, as of a holomorphic function.
        operands: the operands.
    """

    def run(*xs: Array) -> Array:
        return Array(np.asarray(kernel(*(x._data for x in xs))))

    def backward(arguments: tuple[Array, ...], y: Array, g: Array) -> tuple[Array | None, ...]:
        return tuple(None if slope is None else g * slope(*arguments, y) for slope in slopes)

    run.__name__ = name
    if not any(tracked(x) for x in operands):
        return run(*operands)
    return opaque_call(run, Array._xp.broadcast_arrays(*operands) if len(operands) > 1 else operands, backward)


def _match_cotangents(found: Any, args: Sequence[Any], arrays: Sequence[Array], name: str) -> list[Array | None]:
    """A cotangent for each array of the arguments; an argument whose cotangent is None has none."""
    parts = list(found) if isinstance(found, (tuple, list)) and len(args) != 1 else [found]
    if len(args) == 1 and isinstance(found, tuple) and len(found) == 1:
        parts = [found[0]]
    if len(parts) != len(args):
        raise BadInput(f"the backward function of {name} gave {len(parts)} cotangents for {len(args)} arguments")
    flat: list[Array | None] = []
    for part, a in zip(parts, args):
        count = sum(1 for _ in trees.leaves(a))
        flat += [None] * count if part is None else [as_array(g) for _, g in trees.leaves(part)]
    for g, x in zip(flat, arrays):
        if g is not None and g.shape != x.shape:
            raise BadInput(f"the backward function of {name} gave a cotangent of {g.shape} for an array of {x.shape}")
    return flat


class custom_vjp:  # noqa: N801  (a decorator)
    """A function with a custom VJP.

    ::

        @custom_vjp
        def f(x, y): ...

        @f.defvjp
        def _(arguments, result, cotangent):
            x, y = arguments
            return cotangent * …, cotangent * …  # one for each argument; None where there is none

    The VJP may use the whole namespace and is itself differentiated for higher orders. Forward mode transposes it. An
    export records the function's own operations instead. Keyword arguments carry no derivative.
    """

    def __init__(self, f: Function) -> None:
        functools.update_wrapper(self, f)
        self.f = f
        self.backward: Function | None = None

    def defvjp(self, backward: Function) -> Function:
        """Define the VJP: ``(arguments, result, cotangent)`` to one cotangent (or None) for each argument."""
        self.backward = backward
        return backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        name = getattr(self.f, "__name__", "the function")
        if self.backward is None:
            raise BadInput(f"{name} has no derivative yet\n  hint: give it one with @{name}.defvjp")
        return opaque_call(self.f, args, self.backward, kwargs, custom=True)

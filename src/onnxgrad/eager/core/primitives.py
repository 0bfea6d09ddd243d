"""What a node of the tape does: an operator of ONNX with its attributes, or a small expression of operators.

An operator is a value: equal ones are interchangeable, so that two recordings of the same program are equal. What
decides the structure of a graph (axes, shapes, the bounds of a slice) is part of the operator; what flows is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from onnxgrad.ir import Builder, Var

#: The opset of what is recorded, where nothing in it is of another.
OPSET = 21

#: Operands that are part of an operator: a vector of ints, one int, a number of the dtype beside it, or nothing.
Static = tuple[int, ...] | int | float | None


class Primitive:
    """Writes itself into a graph; compares and hashes by `key`."""

    __slots__ = ("_hash", "key")

    #: whether what it does cannot be written into a graph: its derivative is a Python function (see `custom`)
    opaque = False
    #: the opsets (by domain) whose definitions it means, and the operators it means them of; None if that is no matter
    versions: tuple[dict[str, int], frozenset[tuple[str, str]]] | None = None

    def __init__(self, *key: Hashable) -> None:
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and other.key == self.key)

    def __repr__(self) -> str:
        return f"{self.key[0]}"

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit it on `operands`; its output, or a tuple of them."""
        raise NotImplementedError


class StandardOp(Primitive):
    """One operator of ONNX: its type, attributes, static operands by position, domain and number of outputs."""

    __slots__ = ()

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit the node."""
        op_type, attributes, statics, domain, outputs, *_ = self.key
        rest = iter(operands)
        held = dict(statics)  # type: ignore[call-overload]
        inputs = [_operand(held[i]) if i in held else next(rest) for i in range(len(operands) + len(held))]
        return b.emit(op_type, *inputs, domain=domain, outputs=outputs, **dict(attributes))  # type: ignore[arg-type, call-overload]


class VersionedOp(StandardOp):
    """An operator that the user asked for by its name, as a certain opset defines it."""

    __slots__ = ()

    @property
    def versions(self) -> tuple[dict[str, int], frozenset[tuple[str, str]]]:  # type: ignore[override]
        """The opset that is meant."""
        op_type, _, _, domain, _, opset = self.key
        return {domain: opset}, frozenset({(domain, op_type)})  # type: ignore[dict-item, arg-type]


def _operand(static: Static) -> Any:
    if isinstance(static, tuple):
        return list(static)
    return np.array(static, np.int64) if isinstance(static, int) else static


class Macro(Primitive):
    """A small expression of operators that is one node of the tape: ``writer(b, *operands, *parameters)``."""

    __slots__ = ()

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit the expression."""
        _, writer, parameters = self.key
        return writer(b, *operands, *parameters)  # type: ignore[operator, misc]


class Output(Primitive):
    """One output of a node that has several."""

    __slots__ = ()

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Pick the output."""
        return operands[0][self.key[1]]  # type: ignore[index]


@functools.lru_cache(4096)
def standard(
    op_type: str,
    statics: tuple[tuple[int, Static], ...] = (),
    domain: str = "",
    outputs: int = 1,
    **attributes: Any,
) -> StandardOp:
    """The operator `op_type`; each of `statics` is the position and the value of an operand that is part of it."""
    return StandardOp(op_type, tuple(sorted(attributes.items())), statics, domain, outputs)


@functools.lru_cache(4096)
def macro(writer: Callable[..., Var], *parameters: Hashable) -> Macro:
    """The expression that `writer` writes."""
    return Macro(writer.__name__, writer, parameters)


@functools.lru_cache(64)
def output(i: int) -> Output:
    """Output `i`."""
    return Output("Part", i)


#: What a variable of a transform is to the transforms around it.
LEAF = standard("Identity")

#: Hands a value on, and no derivative back.
STOP = Macro("Stop", lambda b, x: b.Identity(x), ())

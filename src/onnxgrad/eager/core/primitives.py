"""Primitives, the operations that a tape records: an ONNX operator with its attributes, or a small expression of them.

Primitives compare by value, so two recordings of the same program are equal. What determines the structure of the graph
(axes, shapes, the bounds of a slice) belongs to the primitive; arrays are operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.ir import Builder, Var

#: The opset of a recording that asks for no other.
OPSET = 21

#: An operand that belongs to the primitive: a vector of ints, an int, a number in the dtype of its neighbour, or None.
Static = tuple[int, ...] | int | float | None


class Primitive:
    """An operation that can write itself into a graph; it compares and hashes by `key`."""

    __slots__ = ("_hash", "key")

    #: whether its derivative is a Python function, which no graph has (see `custom_derivatives`)
    opaque = False
    #: whether it can be written into a graph, of an opaque one without its derivative
    writable = True
    #: whether a derivative that is a Python function is lost where the graph of the operation is differentiated
    custom = False
    #: whether shapes of its results may depend on more than the shapes of its operands
    open = False
    #: the opset of each domain it relies on, and the operators it uses from them; None if any opset will do
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
        """Emit the primitive on `operands` and return its output, or a tuple of outputs."""
        raise NotImplementedError


class StandardOp(Primitive):
    """One ONNX operator: its type, attributes, static operands by position, domain and number of outputs."""

    __slots__ = ()

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit the node."""
        op_type, attributes, statics, domain, outputs, *_ = self.key
        rest = iter(operands)
        named = dict(statics)  # type: ignore[call-overload]
        inputs = [_operand(named[i]) if i in named else next(rest) for i in range(len(operands) + len(named))]
        return b.emit(op_type, *inputs, domain=domain, outputs=outputs, **dict(attributes))  # type: ignore[arg-type, call-overload]


class VersionedOp(StandardOp):
    """An ONNX operator as a given opset defines it."""

    __slots__ = ()
    open = True

    @property
    def versions(self) -> tuple[dict[str, int], frozenset[tuple[str, str]]]:  # type: ignore[override]
        """The opset imports of this operator."""
        op_type, _, _, domain, _, opset = self.key
        return {domain: opset}, frozenset({(domain, op_type)})  # type: ignore[dict-item, arg-type]


def _operand(static: Static) -> Any:
    if isinstance(static, tuple):
        return list(static)
    return np.array(static, np.int64) if isinstance(static, int) else static


class Macro(Primitive):
    """A small expression of ONNX operators recorded as one node: ``writer(b, *operands, *parameters)``."""

    __slots__ = ()

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit the expression."""
        _, writer, parameters = self.key
        return writer(b, *operands, *parameters)  # type: ignore[operator, misc]


class Output(Primitive):
    """One output of a node with several."""

    __slots__ = ()
    open = True

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Select the output; nothing is emitted."""
        return operands[0][self.key[1]]  # type: ignore[index]


@functools.lru_cache(4096)
def standard(
    op_type: str,
    statics: tuple[tuple[int, Static], ...] = (),
    domain: str = "",
    outputs: int = 1,
    **attributes: Any,
) -> StandardOp:
    """The ONNX operator `op_type`; `statics` are the positions and values of its static operands."""
    return StandardOp(op_type, tuple(sorted(attributes.items())), statics, domain, outputs)


@functools.lru_cache(4096)
def macro(writer: Callable[..., Var], *parameters: Hashable) -> Macro:
    """The expression that `writer` writes."""
    return Macro(writer.__name__, writer, parameters)


@functools.lru_cache(64)
def output(i: int) -> Output:
    """Output `i`."""
    return Output("Part", i)


#: A variable of a transform, as the transforms around it see it.
LEAF = standard("Identity")

#: An input of a function that is compiled or exported.
PARAMETER = StandardOp(*LEAF.key)


def _stop(b: Builder, x: Var) -> Var:
    """An Identity whose metadata say that no derivative passes."""
    node = ir.Node("", "Identity", [x.value])
    node.metadata_props[CONSTANT] = "it is given to stop_gradient"
    return b.append(node)[0]


#: The identity, through which no derivative flows.
STOP = Macro("Stop", _stop, ())

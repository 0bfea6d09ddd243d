"""Recognition of parts of a graph: operators, producers and readers of values, constants, patterns of nodes.

Typed attributes are read with the methods of ``onnx_ir``: ``node.attributes.get_int("axis", 0)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

import numpy as np
import onnx_ir as ir

#: The size of an axis: a number or a symbol.
Dim = int | ir.SymbolicDim
#: Tensor element types that can carry a derivative.
FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})
#: Floats of 16 bits.
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
#: Types of indices, sizes and conditions.
WHOLE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})

_STANDARD = ("", "ai.onnx")


class _InDomain(Protocol):
    @property
    def domain(self) -> str: ...


class _Operator(_InDomain, Protocol):
    @property
    def op_type(self) -> str: ...


N = TypeVar("N", bound=_Operator)
T = TypeVar("T")


def not_none(value: T | None) -> T:
    """`value`, which is there by the specification of an operator, or by what a caller has checked."""
    assert value is not None
    return value


def is_standard(named: _InDomain) -> bool:
    """True if a node, an import or a function is in the domain of the standard operators."""
    return named.domain in _STANDARD


def normal_domain(domain: str) -> str:
    """The one name of a domain that has two: that of the standard operators is empty."""
    return "" if domain == "ai.onnx" else domain


def is_op(node: N | None, op_types: str | Collection[str]) -> TypeGuard[N]:
    """True if `node` is the standard operator `op_types`, or one of several."""
    if node is None or node.domain not in _STANDARD:
        return False
    return node.op_type == op_types if isinstance(op_types, str) else node.op_type in op_types


def producer(value: ir.Value | None, op_types: str | Collection[str]) -> ir.Node | None:
    """The standard operator `op_types`, or one of several, that makes `value`; None if no such node does."""
    node = None if value is None else value.producer()
    return node if is_op(node, op_types) else None


def only_reader(value: ir.Value, op_types: str | Collection[str]) -> ir.Node | None:
    """The only consumer of `value`, if it is one of these standard operators and reads the value once; else None."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = next(iter(uses)).node
    return node if is_op(node, op_types) else None


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of `value` if it is a constant, or an initializer that is no input; else None.

    `ir.convenience.get_const_tensor` gives the tensor of a Constant the name of the value, also in the message that
    the model was read from, which is the caller's.
    """
    if value is None or value.is_graph_input():
        return None
    node = None if value.const_value is not None else producer(value, "Constant")
    attribute = None if node is None else node.attributes.get("value")
    if attribute is not None and not attribute.is_ref():
        return attribute.value if attribute.type == ir.AttributeType.TENSOR else attribute.as_tensor()
    return ir.convenience.get_const_tensor(value)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The elements of `constant_tensor`."""
    tensor = constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """True if the elements of `value` are known before a run; the elements are not read."""
    return constant_tensor(value) is not None


def single_constant(value: ir.Value | None) -> np.ndarray | None:
    """The elements of `constant_tensor` if it has one; elements of a larger one are not read."""
    tensor = constant_tensor(value)
    return None if tensor is None or tensor.size != 1 else tensor.numpy()


def is_number(value: ir.Value | None, number: float) -> bool:
    """True if `value` is a constant of one element, which is `number`."""
    array = single_constant(value)
    return array is not None and array.dtype.kind not in "OSU" and bool(array.flat[0] == number)


def is_zero(value: ir.Value | None) -> bool:
    """True if a tensor provably has only zeros: a constant, also reshaped or expanded, or a ConstantOfShape."""
    while (node := producer(value, ("Expand", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast"))) is not None:
        value = node.inputs[0]
    if (node := producer(value, "ConstantOfShape")) is not None:
        filled = node.attributes.get("value")
        return filled is None or not filled.as_tensor().numpy().any()
    array = constant(value)
    return array is not None and array.size > 0 and not array.any()


def holds_floats(value: ir.Value) -> bool:
    """True if `value` is known to hold floats, of any width."""
    return value.dtype is not None and value.dtype.is_floating_point()


def permutation(transpose: ir.Node) -> tuple[int, ...] | None:
    """The order of axes of a Transpose; None if the default is meant and the rank is unknown."""
    axes = transpose.attributes.get_ints("perm")
    if axes is not None:
        return tuple(axes)
    count = rank(transpose.inputs[0])
    return None if count is None else tuple(range(count))[::-1]


def exchanged(value: ir.Value | None) -> ir.Value | None:
    """The operand whose last two axes a Transpose exchanges to compute `value`; None for other producers."""
    node = producer(value, "Transpose")
    x = None if node is None else node.inputs[0]
    if node is None or x is None or x.shape is None or len(x.shape) < 2:
        return None
    axes = tuple(range(len(x.shape)))
    return x if permutation(node) == (*axes[:-2], axes[-1], axes[-2]) else None


def rank(value: ir.Value | None) -> int | None:
    """The number of axes of `value`; None if it is unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of `value` if every size is a number; else None."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape.numpy())


def is_single(value: ir.Value | None) -> bool:
    """True if `value` is known to have one element."""
    return value is not None and value.shape is not None and all(d == 1 for d in value.shape)


Found = dict[str, ir.Value]


@dataclass(frozen=True)
class Pattern:
    """A standard operator whose operands are patterns, names or numbers.

    Attributes:
        op_type: the operator.
        operands: for each operand, another pattern; a name, which stands for one value wherever it occurs; or a number,
            for a constant of one such element.
        name: the name of the result.
        in_any_order: the two operands may be exchanged.
    """

    op_type: str
    operands: tuple[Pattern | str | float, ...]
    name: str = ""
    in_any_order: bool = False

    def match(self, value: ir.Value | None) -> Found | None:
        """The values of the names where `value` is of this form; else None."""
        return next(self.matches(value), None)

    def matches(self, value: ir.Value | None, found: Found | None = None) -> Iterator[Found]:
        """The values of the names, for each order of operands in which `value` is of this form; `found` are given."""
        node = producer(value, self.op_type)
        if node is None or value is None or len(node.inputs) < len(self.operands):
            return
        operands = node.inputs[: len(self.operands)]
        for inputs in (operands, operands[::-1])[: 2 if self.in_any_order else 1]:
            for bound in _bind(self.name, value, found or {}):
                yield from _match_all(self.operands, inputs, bound)


def pattern(op_type: str, *operands: Pattern | str | float, name: str = "", in_any_order: bool = False) -> Pattern:
    """A `Pattern`, with its operands as arguments."""
    return Pattern(op_type, operands, name, in_any_order)


def _match_all(
    operands: Collection[Pattern | str | float], inputs: Collection[ir.Value | None], found: Found
) -> Iterator[Found]:
    if not operands:
        yield found
        return
    (operand, *others), (value, *rest) = operands, inputs
    if isinstance(operand, Pattern):
        partial = operand.matches(value, found)
    elif isinstance(operand, str):
        partial = iter(()) if value is None else _bind(operand, value, found)
    else:
        partial = iter((found,) if is_number(value, operand) else ())
    for bound in partial:
        yield from _match_all(others, rest, bound)


def _bind(name: str, value: ir.Value, found: Found) -> Iterator[Found]:
    if not name:
        yield found
    elif found.get(name, value) is value:
        yield {**found, name: value}

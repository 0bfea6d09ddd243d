"""Traits of operators: properties of their computation that are true for all nodes.

An operator is registered once. The decorators of `onnxgrad.rules` declare its traits with its derivative, most of them
through the class of the rule. Operators whose traits are read without the rules (here, in `remat` and in `runtime`) are
declared at the end of this file: those that move elements, products, and those that are folded or costly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Generic, TypedDict, TypeVar, Unpack

import onnx_ir as ir

from onnxgrad.ir.match import normal_domain


class Kind(Enum):
    """The way in which elements of the result depend on the axes of the operands."""

    #: each element on one element of each operand; the operands broadcast
    ELEMENTWISE = "elementwise"
    #: along the axes that operand 1 lists, by default all of them; with `keepdims` and `noop_with_empty_axes`
    REDUCTION = "reduction"
    #: along the axis that the attribute `axis` gives, of the first operand
    ALONG_AXIS = "along axis"
    #: row by row along the first axis of the first operand
    ROWS = "rows"
    #: sums of products of elements of two operands
    PRODUCT = "product"


class Moves(IntEnum):
    """Ways to move elements without computing anything; each includes those before it."""

    #: the same elements in the same order, in another shape
    VIEW = 1
    #: every element once, in another place, over all results together
    PERMUTATION = 2
    #: elements of the first operand, any number of times
    SELECTION = 3
    #: elements of several operands, or constants
    PLACEMENT = 4


class Trait(TypedDict, total=False):
    """The traits of an operator, as keywords; see `Traits`."""

    kind: Kind | None
    moves: Moves | None
    total: bool
    exact: bool
    slow: bool
    interval: tuple[float, float] | None
    sized_by: tuple[int, ...]
    grows: bool
    discards: tuple[int, ...]


@dataclass(frozen=True)
class Traits:
    """Properties of an operator. The defaults are safe for an operator that is not known.

    Attributes:
        kind: how its result depends on the axes of its operands.
        moves: how it moves elements, if it computes nothing.
        total: it cannot fail, and its result and derivative are finite for finite operands of any size.
        exact: every runtime computes the same bits, so that it may be folded.
        slow: it computes a transcendental function, or passes over its operand several times.
        interval: the smallest and largest number that it can give.
        sized_by: the operands whose elements determine the number of elements of the result.
        grows: it can make a large tensor of few elements.
        discards: the operands of which it may leave out any element, so that a rule before it must be safe there.
    """

    kind: Kind | None = None
    moves: Moves | None = None
    total: bool = False
    exact: bool = False
    slow: bool = False
    interval: tuple[float, float] | None = None
    sized_by: tuple[int, ...] = ()
    grows: bool = False
    discards: tuple[int, ...] = ()

    @property
    def is_elementwise(self) -> bool:
        """True if each element depends on one element of each operand."""
        return self.kind is Kind.ELEMENTWISE

    @property
    def is_product(self) -> bool:
        """True for matrix products and convolutions."""
        return self.kind is Kind.PRODUCT

    def moves_at_most(self, most: Moves) -> bool:
        """True if it only moves elements, and in a way that `most` includes."""
        return self.moves is not None and self.moves <= most


_UNKNOWN = Traits()
_TRAITS: dict[tuple[str, str], Traits] = {}


def traits_of(node: ir.Node) -> Traits:
    """The traits of the operator of `node`."""
    return _TRAITS.get((normal_domain(node.domain), node.op_type), _UNKNOWN)


def declare(*names: str, domain: str = "", **traits: Unpack[Trait]) -> None:
    """Declare traits of operators; traits that are not passed stay unchanged."""
    for name in names:
        _TRAITS[domain, name] = replace(_TRAITS.get((domain, name), _UNKNOWN), **traits)


T = TypeVar("T")


class ByOperator(Generic[T]):
    """One function for each operator: that of its kind, unless one is registered for the operator itself.

    ::

        batching = ByOperator({Kind.ELEMENTWISE: broadcast})

        @batching("Concat")
        def concat(node): ...

    Args:
        kinds: the functions of operators of a kind.
    """

    def __init__(self, kinds: Mapping[Kind, T] | None = None) -> None:
        self._kinds = dict(kinds or {})
        self._overrides: dict[tuple[str, str], T] = {}

    def __call__(self, *names: str, domain: str = "") -> Callable[[T], T]:
        """Register the decorated function for operators that their kind does not describe."""

        def register(function: T) -> T:
            self._overrides.update(dict.fromkeys(((domain, name) for name in names), function))
            return function

        return register

    def override(self, node: ir.Node) -> T | None:
        """The function that is registered for the operator of `node` itself, or None."""
        return self._overrides.get((normal_domain(node.domain), node.op_type))

    def of(self, node: ir.Node) -> T | None:
        """The function for `node`, or None."""
        function, kind = self.override(node), traits_of(node).kind
        return function if function is not None or kind is None else self._kinds.get(kind)


# --- traits that are read below the rules ----------------------------------------------------------

declare("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze", moves=Moves.VIEW, exact=True, total=True)
declare("Transpose", "DepthToSpace", "SpaceToDepth", "Split", moves=Moves.PERMUTATION, exact=True, total=True)
declare("ReverseSequence", moves=Moves.PERMUTATION)
declare("Expand", "Slice", "Tile", moves=Moves.SELECTION, exact=True, total=True)
declare("Compress", "Gather", "GatherElements", "GatherND", moves=Moves.SELECTION, exact=True)  # an index may be wrong
declare("Concat", "Trilu", moves=Moves.PLACEMENT, exact=True, total=True)
declare("Pad", moves=Moves.PLACEMENT, total=True)

declare("Conv", "ConvTranspose", "Gemm", "MatMul", kind=Kind.PRODUCT, total=True)
declare("Einsum", kind=Kind.PRODUCT)

declare("Abs", "Add", "Ceil", "Div", "Floor", "Max", "Min", "Mul", "Neg", "Sub", "ConstantOfShape", "Where", exact=True)
declare(
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor", exact=True
)
declare("Erf", "Exp", "Gelu", "LayerNormalization", "LogSoftmax", "Pow", "Sigmoid", "Softmax", "Tanh", slow=True)

declare("NonZero", "Unique", sized_by=(0,))
declare("ConstantOfShape", sized_by=(0,), grows=True)
declare("AffineGrid", "Compress", "Reshape", "Split", "TopK", sized_by=(1,))
declare("CenterCropPad", "Expand", "OneHot", "Pad", "Tile", sized_by=(1,), grows=True)
declare("MaxUnpool", sized_by=(2,))
declare("Range", sized_by=(0, 1, 2), grows=True)
declare("Resize", sized_by=(1, 2, 3))
declare("Slice", sized_by=(1, 2, 3, 4))
declare("NonMaxSuppression", sized_by=(0, 1, 2, 3, 4))

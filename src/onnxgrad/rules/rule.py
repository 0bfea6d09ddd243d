"""The classes of rules: each interprets one function in reverse and in forward mode.

A rule is a function ``f(op, g, *inputs, *outputs)`` that returns the cotangent of each input given the
cotangent `g` of the output. It names as many formal inputs and outputs as it uses; an optional one
that the node leaves out is ``None``. `g` is a tuple where several outputs can carry a cotangent
(``None`` for those that do not). An input without derivative returns ``None``.

The classes differ in what follows from the function:

==============  ============================================  =====================================
class           the function gives                            forward mode
==============  ============================================  =====================================
`Elementwise`   g·∂y/∂xᵢ, in the shape of the output: the     the same products with tangents, summed
                engine sums to the shape of xᵢ
`Symmetric`     g·J, and J = Jᵀ                               the same function
`Linear`        the transpose                                 the operator itself, on tangents
`General`       the VJP                                       given, or the transpose of the VJP
`Zero`          nothing: the derivative is zero               zero
`Undefined`     nothing: there is no derivative               refused
==============  ============================================  =====================================
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import onnx_ir as ir

from onnxgrad.errors import NoDerivative, RuleError
from onnxgrad.ir import Builder, Var, containers, expand_to, sum_to
from onnxgrad.ir.match import not_none
from onnxgrad.ir.shapes import same_dim
from onnxgrad.rules.op import Op

#: Key of a rule that a node brings along, which takes precedence over that of its operator.
OWN = "onnxgrad.own_rule"


@dataclass(frozen=True)
class Symbolic:
    """A cotangent that is not nodes yet. An iteration may compute its sum over all steps at once, from stacks."""

    @abstractmethod
    def write(self) -> Var:
        """Emit the nodes."""

    @property
    def operands(self) -> list[Var]:
        """The variables that the nodes read."""
        return [v for v in vars(self).values() if isinstance(v, Var)]

    def map_operands(self, function: Callable[[Var], Var]) -> Self:
        """The same cotangent of other operands."""
        return replace(self, **{name: function(v) for name, v in vars(self).items() if isinstance(v, Var)})


@dataclass(frozen=True)
class RowSum(Symbolic):
    """The sum of all rows of `x`: the cotangent of the vector `like`, which was added to each of them."""

    x: Var
    like: Var

    def write(self) -> Var:
        """Emit the sum."""
        return sum_to(self.x, self.like)


#: a cotangent, written or not
Term = Var | Symbolic
Cotangents = Sequence[Var | None]
Parts = list[Var | None]
#: the cotangents that a rule returns, by the number of the input or by value
Pulled = Sequence[Term | None] | dict[ir.Value, Any]
#: the argument of a JVP function: a tangent for each input, None for a constant one
Tangents = Sequence[Any]
#: the result of a rule's function: the part of each input, or the parts by value
Result = Term | Pulled | None
Function = Callable[..., Result]
Rewrite = Callable[[Builder, ir.Node, Sequence[ir.Value]], list[ir.Node] | None]


@functools.cache
def arity(function: Function) -> int | None:
    """The number of formal inputs and outputs that `function` names; None if it accepts any number."""
    named = inspect.signature(function).parameters.values()
    return None if any(p.kind is p.VAR_POSITIONAL for p in named) else len(named) - 2


def as_list(result: Any) -> list[Any]:
    """The result of a rule, as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def write(term: Term) -> Var:
    """`term` as nodes."""
    return term.write() if isinstance(term, Symbolic) else term


def add(terms: Sequence[Term]) -> Var:
    """The sum of `terms`, as a chain of Adds (Sum runs on one thread in ONNX Runtime); of sequences, by element."""
    total, *more = map(write, terms)
    for term in more:
        total = total + term if containers.is_tensor(total) else containers.total(total.builder, total, term)
    return total


class Rule:
    """One operator's derivative."""

    #: the word for the class in tables and reports
    kind: ClassVar[str]
    #: the inputs that have a derivative; None: every float input
    wrt: tuple[int, ...] | None = None
    #: why no derivative passes, where none does
    reason: str = ""
    #: True if the operator is linear in the operands `wrt` together, piece by piece
    piecewise_linear: bool = False
    #: True if forward mode follows from the class or was given; else it is derived from the VJP
    has_jvp: bool = True
    #: True for the rules of users, which no test of the library has seen
    is_custom: ClassVar[bool] = False
    #: asked before reverse mode from values `of`: ``f(builder, node, of)`` may put other nodes, of the same value, in
    #: the place of `node`, and returns them, or None; outputs that nothing reads, not even `of`, may be left out
    rewrite: Rewrite | None = None
    _derive_jvp = False

    @property
    def doc(self) -> str:
        """The mathematical form, or the reason for having no derivative."""
        return self.reason

    def carries(self, i: int) -> bool:
        """True if input `i` can have a derivative."""
        return self.wrt is None or i in self.wrt

    @abstractmethod
    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """Cotangents of the inputs (a list, or a dict from value to cotangent) given those of the outputs."""

    def jvp(self, op: Op, tangents: Cotangents) -> Parts | None:
        """Tangents of the outputs given those of the inputs; None: to be derived from the VJP."""
        return None if self._derive_jvp else self._jvp(op, tangents)

    @abstractmethod
    def _jvp(self, op: Op, tangents: Cotangents) -> Parts | None:
        """The tangents by the rule's own form of `jvp`, unless the derived form is requested."""

    @contextmanager
    def without_jvp(self) -> Iterator[None]:
        """Derive forward mode from the VJP within the block, to check the class's own form."""
        self._derive_jvp = True
        try:
            yield
        finally:
            self._derive_jvp = False


class Zero(Rule):
    """A derivative that is zero wherever it exists: nothing passes."""

    kind = "zero"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def carries(self, i: int) -> bool:
        """No input."""
        return False

    def vjp(self, op: Op, cotangents: Cotangents) -> Parts:
        """Return nothing: the derivative is zero."""
        return []

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts:
        return [None] * len(op.node.outputs)


class Undefined(Rule):
    """No derivative: a path through the operator is refused with the `reason`."""

    kind = "undefined"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def vjp(self, op: Op, cotangents: Cotangents) -> Parts:
        """Raises NoDerivative."""
        raise NoDerivative(self.reason)

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts:
        raise NoDerivative(self.reason)


class FunctionRule(Rule):
    """A rule given by a function; subclasses differ in how they interpret its result."""

    #: the number of operands that the function gets, of a sub-graph; None: all
    count: int | None = None

    def __init__(
        self, function: Function, wrt: tuple[int, ...] | None = None, *, piecewise_linear: bool = False
    ) -> None:
        self.function = function
        self.wrt = wrt
        self.piecewise_linear = piecewise_linear

    @property
    def doc(self) -> str:
        """The mathematical form, from the docstring of the function."""
        return inspect.getdoc(self.function) or ""

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """The results of the function, a part for each input."""
        only = next((g for g in cotangents if g is not None), None)  # not always the first: of labels and scores
        result = self.apply(self.function, op, only if op.single else tuple(cotangents))
        if isinstance(result, dict):
            return result
        parts = as_list(result)
        if any(op.needs[len(parts) :]):
            raise RuleError(f"a rule returns a value for each input, None for no derivative; it returned {len(parts)}")
        return parts

    def apply(self, function: Function, op: Op, g: Any) -> Any:
        """Call `function` with as many formal inputs and outputs as it names."""
        count = arity(function)
        operands = op.inputs[: self.count]
        if count is None:
            return function(op, g, *operands, *op.outputs)
        if len(operands) < count:
            operands = [*operands, *op.outputs, *[None] * count]
        return function(op, g, *operands[:count])


class Elementwise(FunctionRule):
    """The function returns g·∂y/∂xᵢ in the shape of y, which is also the product with a tangent."""

    kind = "elementwise"

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """Each product, summed to the shape of its input."""
        parts = super().vjp(op, cotangents)
        assert isinstance(parts, list)
        return [
            sum_rows(part, x) if isinstance(part, Var) and x is not None and need else None
            for part, x, need in zip(parts, op.inputs, op.needs)
        ]

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts:
        terms = []
        for i, tangent in enumerate(tangents):
            if tangent is not None and self.carries(i):
                terms.append(as_list(self.apply(self.function, op, tangent))[i])
        terms = [t for t in terms if t is not None]
        y = op.outputs[0]
        return [expand_to(add(terms), y) if terms and y is not None else None]


def sum_rows(part: Var, x: Var) -> Term:
    """`sum_to`; symbolic where `x` is a vector that was added to each row."""
    is_row = x.shape is not None and x.rank == 1 and part.shape is not None and part.rank > 1
    return RowSum(part, x) if is_row and same_dim(part.dims[-1], x.dims[0]) else sum_to(part, x)


class Symmetric(FunctionRule):
    """The function returns g·J for an operator of one operand whose Jacobian equals its transpose."""

    kind = "symmetric"

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts:
        return as_list(self.apply(self.function, op, tangents[0]))[:1]


class Linear(FunctionRule):
    """The function returns the transpose; the operator itself maps tangents.

    Linear in each operand of `wrt` with the others fixed (MatMul), or, if `joint`, in all of them together (Concat).
    `bias` is one of them that is added to the rest.
    """

    kind = "linear"

    def __init__(
        self,
        function: Function,
        wrt: tuple[int, ...] | None = None,
        *,
        joint: bool = False,
        bias: int | None = None,
    ) -> None:
        super().__init__(function, wrt if bias is None else (*(wrt or ()), bias))
        self.joint = joint
        self.bias = bias

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts:
        calls = self._joint_calls(op, tangents) if self.joint else self._calls(op, tangents)
        results = [as_list(op.replay(*operands)) for operands in calls]
        return [add([r[k] for r in results]) for k in range(len(op.node.outputs))] if results else []

    def _factors(self, op: Op) -> list[int]:
        return [i for i in range(len(op.inputs)) if self.carries(i) and i != self.bias]

    def _joint_calls(self, op: Op, tangents: Cotangents) -> list[Parts]:
        """One call with every tangent as operand, and zeros for operands without a tangent."""
        operands = list(op.inputs)
        for i in self._factors(op):
            x = op.inputs[i]
            if x is not None:
                operands[i] = tangents[i] if tangents[i] is not None else op.zeros_like(x)
        return [operands]

    def _calls(self, op: Op, tangents: Cotangents) -> list[Parts]:
        """A call for each operand with a tangent, which replaces the operand."""
        factors = self._factors(op)
        moved = None if self.bias is None else tangents[self.bias]
        calls: list[Parts] = []
        for i in factors:
            if tangents[i] is not None:
                operands = list(op.inputs)
                operands[i] = tangents[i]
                if self.bias is not None:  # the bias enters once, beside the first factor that moves
                    operands[self.bias] = None if calls else moved
                calls.append(operands)
        if not calls and self.bias is not None and moved is not None:
            operands = list(op.inputs)
            first = not_none(op.inputs[factors[0]])
            operands[factors[0]], operands[self.bias] = op.zeros_like(first), moved
            calls.append(operands)
        return calls


class General(FunctionRule):
    """The function returns the VJP; forward mode is `jvp_function`, ``f(op, tangents, *xs, *ys)``, else derived."""

    kind = "rule"

    def __init__(
        self,
        function: Function,
        wrt: tuple[int, ...] | None = None,
        *,
        jvp: Function | None = None,
        rewrite: Rewrite | None = None,
        piecewise_linear: bool = False,
    ) -> None:
        super().__init__(function, wrt, piecewise_linear=piecewise_linear)
        self.jvp_function = jvp
        self.rewrite = rewrite
        self.has_jvp = jvp is not None

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts | None:
        return (
            None
            if self.jvp_function is None
            else as_list(self.apply(self.jvp_function, op, tuple(tangents[: self.count])))
        )

"""The table of rules, keyed by (domain, operator, since_version), and the decorators that fill it.

A decorator registers an operator with its derivative and its traits: one call is all that batching, Taylor mode,
sparsity patterns and loops need to know of an operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TypeVar, Unpack

from onnxgrad.context import ScopedSetting
from onnxgrad.errors import RuleError, UnknownName
from onnxgrad.ir.lowerings import LOWERINGS, WITHOUT
from onnxgrad.ir.match import normal_domain
from onnxgrad.ir.operators import Kind, Trait, declare
from onnxgrad.rules.rule import (
    Elementwise,
    Function,
    FunctionRule,
    General,
    Linear,
    Rewrite,
    Rule,
    Symmetric,
    Undefined,
    Zero,
)

_Table = dict[tuple[str, str], list[tuple[int, Rule]]]
_F = TypeVar("_F", bound=Function)

#: The user's own rules, by domain and operator (`custom_rules`).
CUSTOM: ScopedSetting[Mapping[tuple[str, str], Rule]] = ScopedSetting("custom_rules", MappingProxyType({}))
_STRAIGHT_THROUGH: ScopedSetting[frozenset[str]] = ScopedSetting("straight_through", frozenset())


class Registry:
    """Rules by (domain, operator); the one with the highest since_version ≤ the node's opset applies.

    Besides derivatives it has estimators, which replace the zero derivative of some operators while `straight_through`
    names them.
    """

    def __init__(self) -> None:
        self._rules: _Table = {}
        self._estimators: _Table = {}
        #: the rule of calls of local functions that stay functions
        self.of_calls: Rule | None = None

    def set(self, op_type: str, rule: Rule, domain: str = "", since: int = 1, *, estimator: bool = False) -> None:
        """Register `rule`, in place of an earlier one for the same domain, operator and version."""
        table = self._estimators if estimator else self._rules
        versions = [v for v in table.get((domain, op_type), []) if v[0] != since]
        table[domain, op_type] = sorted([*versions, (since, rule)], key=lambda v: v[0])

    def get(self, domain: str, op_type: str, opset: int) -> Rule | None:
        """The rule for an operator at `opset`, or None."""
        key = normal_domain(domain), op_type
        if key in CUSTOM.value:
            return CUSTOM.value[key]
        estimated = op_type in _STRAIGHT_THROUGH.value and key in self._estimators
        for since, rule in reversed((self._estimators if estimated else self._rules).get(key, ())):
            if since <= opset:
                return rule
        return None

    def has(self, domain: str, op_type: str, rule: Rule) -> bool:
        """True if `rule` is registered for an operator, as neither a user's rule nor an estimator."""
        return any(rule is r for _, r in self._rules.get((domain, op_type), ()))

    def estimates(self, domain: str, op_type: str) -> bool:
        """True if an estimator replaces the derivative of an operator now."""
        return op_type in _STRAIGHT_THROUGH.value and (domain, op_type) in self._estimators

    def custom(self, domain: str, op_type: str) -> Rule | None:
        """The rule that a user has put before all others now, or None."""
        return CUSTOM.value.get((domain, op_type))

    @property
    def estimating(self) -> bool:
        """True if `straight_through` names any operator now."""
        return bool(_STRAIGHT_THROUGH.value)

    @contextmanager
    def straight_through(self, *operators: str) -> Iterator[None]:
        """Use the estimators of `operators` as their derivatives within the ``with`` block."""
        known = sorted(name for _, name in self._estimators)
        for name in operators:
            if name not in known:
                raise UnknownName(name, known, "operator with a straight-through estimator")
        with _STRAIGHT_THROUGH.changed(_STRAIGHT_THROUGH.value | set(operators)):
            yield

    def items(self) -> list[tuple[str, str, int, Rule]]:
        """Every rule as (domain, operator, since_version, rule), sorted."""
        return sorted(
            ((d, o, s, r) for (d, o), versions in self._rules.items() for s, r in versions),
            key=lambda t: t[:3],
        )


#: The table that the engine reads.
registry = Registry()


def straight_through(*operators: str) -> AbstractContextManager[None]:
    """Differentiate as if `operators` did not round, within a ``with`` block.

    ::

        with straight_through("QuantizeLinear"):
            model = grad(model, wrt="w")

    Operators that round have derivative zero, and so has everything before them. A straight-through estimator (Bengio,
    Léonard & Courville 2013, arXiv:1308.3432) replaces their derivative by that of their operand, within the range that
    they do not clip. It is not the derivative; quantization-aware training uses it instead. docs/conventions.md lists
    the operators and their estimators.

    Raises:
        UnknownName: an operator without an estimator.
    """
    return registry.straight_through(*operators)


@contextmanager
def without_lowerings(*names: str) -> Iterator[None]:
    """Within the ``with`` block, derivatives are written without the lowerings called `names`.

    ::

        with without_lowerings("interleaved_weight"):
            slower = grad(model, wrt="w")

    Gradients differ by rounding only. docs/internals/runtime.md lists the names, and the gain of each.

    Raises:
        UnknownName: there is no lowering of that name.
    """
    for name in names:
        if name not in LOWERINGS:
            raise UnknownName(name, LOWERINGS, "lowering")
    with WITHOUT.changed(WITHOUT.value | set(names)):
        yield


def _decorator(
    names: Sequence[str],
    domain: str,
    since: int,
    make: Callable[[Function], FunctionRule],
    traits: Trait,
    estimates: bool = False,
) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        if not inspect.getdoc(function):
            raise RuleError(f"the rule for {', '.join(names)} has no docstring with its mathematical form")
        for name in names:
            registry.set(name, make(function), domain, since, estimator=estimates)
        if not estimates:
            declare(*names, domain=domain, **traits)
        return function

    return register


def elementwise(
    *names: str,
    wrt: tuple[int, ...] | None = None,
    domain: str = "",
    since: int = 1,
    piecewise_linear: bool = False,
    estimates: bool = False,
    **traits: Unpack[Trait],
) -> Callable[[_F], _F]:
    """Register ``f(op, g, *xs, y)`` → g·∂y/∂xᵢ for every i, in the shape of y; the engine undoes broadcasting.

    Args:
        names: operators with this rule.
        wrt: operands that have a derivative; None: all of a float type.
        domain: of the operators.
        since: the first version of the operators to which the rule applies.
        piecewise_linear: the operators are linear in all operands of `wrt` together, piece by piece.
        estimates: the function gives what `straight_through` takes for the derivative.
        traits: traits of the operators, see `onnxgrad.ir.operators`; they are elementwise unless `kind` is given.
    """
    known: Trait = {"kind": Kind.ELEMENTWISE, **traits}
    return _decorator(
        names, domain, since, lambda f: Elementwise(f, wrt, piecewise_linear=piecewise_linear), known, estimates
    )


def symmetric(*names: str, domain: str = "", since: int = 1, **traits: Unpack[Trait]) -> Callable[[_F], _F]:
    """``f(op, g, x, y)`` → g·J of an operator of one operand whose Jacobian equals its transpose."""
    return _decorator(names, domain, since, lambda f: Symmetric(f, (0,)), traits)


def linear(
    *names: str,
    wrt: tuple[int, ...] | None = (0,),
    joint: bool = False,
    bias: int | None = None,
    domain: str = "",
    since: int = 1,
    **traits: Unpack[Trait],
) -> Callable[[_F], _F]:
    """``f(op, g, *xs)`` → the transpose, for each of `wrt`.

    Linear in each operand of `wrt` with the others fixed (MatMul), or, if `joint`, in all of them
    together (Concat). `bias` is an operand that is added to the rest.
    """
    return _decorator(names, domain, since, lambda f: Linear(f, wrt, joint=joint, bias=bias), traits)


def rule(
    *names: str,
    wrt: tuple[int, ...] | None = None,
    jvp: Function | None = None,
    rewrite: Rewrite | None = None,
    domain: str = "",
    since: int = 1,
    piecewise_linear: bool = False,
    estimates: bool = False,
    **traits: Unpack[Trait],
) -> Callable[[_F], _F]:
    """``f(op, g, *xs, *ys)`` → the VJP; `jvp` is ``f(op, tangents, *xs, *ys)`` → tangents of the outputs."""

    def make(f: Function) -> General:
        return General(f, wrt, jvp=jvp, rewrite=rewrite, piecewise_linear=piecewise_linear)

    return _decorator(names, domain, since, make, traits, estimates)


def zero(
    *names: str,
    domain: str = "",
    since: int = 1,
    reason: str = "the output is piecewise constant",
    **traits: Unpack[Trait],
) -> None:
    """Operators whose derivative is zero wherever it exists."""
    for name in names:
        registry.set(name, Zero(reason), domain, since)
    declare(*names, domain=domain, **traits)


def undefined(*names: str, reason: str, domain: str = "") -> None:
    """Operators that have no derivative; a path through them is refused with `reason`."""
    for name in names:
        registry.set(name, Undefined(reason), domain)

"""The table of rules, keyed by (domain, operator, since_version), and the decorators that fill it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from onnxgrad.context import changed, current
from onnxgrad.errors import RuleError, UnknownName
from onnxgrad.ir.lowerings import LOWERINGS
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


class Registry:
    """Rules by (domain, operator); the one with the highest since_version ≤ the node's opset applies.

    Beside the derivatives stand estimators: what some operators, whose derivative is zero, are taken to have
    for one while `straight_through` names them.
    """

    def __init__(self) -> None:
        self._rules: _Table = {}
        self._estimators: _Table = {}

    def set(self, op_type: str, rule: Rule, domain: str = "", since: int = 1, *, estimator: bool = False) -> None:
        """Register `rule`, in place of an earlier one for the same domain, operator and version."""
        table = self._estimators if estimator else self._rules
        versions = [v for v in table.get((domain, op_type), []) if v[0] != since]
        table[domain, op_type] = sorted([*versions, (since, rule)], key=lambda v: v[0])

    def get(self, domain: str, op_type: str, opset: int) -> Rule | None:
        """The rule for an operator at `opset`, or None."""
        key = ("" if domain == "ai.onnx" else domain), op_type
        asked = current()
        if key in asked.rules:
            return asked.rules[key]
        estimated = op_type in asked.straight_through and key in self._estimators
        for since, rule in reversed((self._estimators if estimated else self._rules).get(key, ())):
            if since <= opset:
                return rule
        return None

    def estimates(self, domain: str, op_type: str) -> bool:
        """Whether an estimator stands for the derivative of an operator now."""
        return op_type in current().straight_through and (domain, op_type) in self._estimators

    def custom(self, domain: str, op_type: str) -> Rule | None:
        """The rule that a user has put before all others now, or None."""
        return current().rules.get((domain, op_type))

    @property
    def estimating(self) -> bool:
        """Whether any operator is named by `straight_through` now."""
        return bool(current().straight_through)

    @contextmanager
    def straight_through(self, *operators: str) -> Iterator[None]:
        """Within the ``with`` block, take the estimators of `operators` for their derivatives."""
        known = sorted(name for _, name in self._estimators)
        for name in operators:
            if name not in known:
                raise UnknownName(name, known, "operator with a straight-through estimator")
        with changed(straight_through=current().straight_through | set(operators)):
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

    Operators that round have derivative zero, and so has everything before them. A straight-through
    estimator (Bengio, Léonard & Courville 2013, arXiv:1308.3432) takes their derivative for that of what they
    round, within the range that they do not clip. It is not the derivative; it is what quantization-aware
    training uses for one. docs/conventions.md lists the operators and what each is taken to have.

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

    Gradients are the same but for rounding. docs/runtime.md lists the names, and what each of them gains.

    Raises:
        UnknownName: there is no lowering of that name.
    """
    for name in names:
        if name not in LOWERINGS:
            raise UnknownName(name, LOWERINGS, "lowering")
    with changed(without=current().without | set(names)):
        yield


def _decorator(
    names: Sequence[str], domain: str, since: int, make: Callable[[Function], FunctionRule], estimates: bool = False
) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        if not inspect.getdoc(function):
            raise RuleError(f"the rule for {', '.join(names)} has no docstring with its mathematical form")
        for name in names:
            registry.set(name, make(function), domain, since, estimator=estimates)
        return function

    return register


def elementwise(
    *names: str, wrt: tuple[int, ...] | None = None, domain: str = "", since: int = 1, estimates: bool = False
) -> Callable[[_F], _F]:
    """``f(op, g, *xs, y)`` → g·∂y/∂xᵢ for every i, in the shape of y. Broadcasting is undone elsewhere.

    With `estimates`, here and in `rule`: what `straight_through` takes for the derivative.
    """
    return _decorator(names, domain, since, lambda f: Elementwise(f, wrt), estimates)


def symmetric(*names: str, domain: str = "", since: int = 1) -> Callable[[_F], _F]:
    """``f(op, g, x, y)`` → g·J of an operator of one operand whose Jacobian equals its transpose."""
    return _decorator(names, domain, since, lambda f: Symmetric(f, (0,)))


def linear(
    *names: str,
    wrt: tuple[int, ...] | None = (0,),
    joint: bool = False,
    bias: int | None = None,
    domain: str = "",
    since: int = 1,
) -> Callable[[_F], _F]:
    """``f(op, g, *xs)`` → the transpose, for each of `wrt`.

    Linear in each operand of `wrt` with the others fixed (MatMul), or, if `joint`, in all of them
    together (Concat). `bias` is an operand that is added to the rest.
    """
    return _decorator(names, domain, since, lambda f: Linear(f, wrt, joint=joint, bias=bias))


def rule(
    *names: str,
    wrt: tuple[int, ...] | None = None,
    jvp: Function | None = None,
    rewrite: Rewrite | None = None,
    domain: str = "",
    since: int = 1,
    estimates: bool = False,
) -> Callable[[_F], _F]:
    """``f(op, g, *xs, *ys)`` → the VJP; `jvp` is ``f(op, tangents, *xs, *ys)`` → tangents of the outputs."""
    return _decorator(names, domain, since, lambda f: General(f, wrt, jvp=jvp, rewrite=rewrite), estimates)


def zero(*names: str, domain: str = "", since: int = 1, reason: str = "the output is piecewise constant") -> None:
    """Operators whose derivative is zero wherever it exists."""
    for name in names:
        registry.set(name, Zero(reason), domain, since)


def undefined(*names: str, reason: str, domain: str = "", since: int = 1) -> None:
    """Operators that have no derivative; a path through them is refused with `reason`."""
    for name in names:
        registry.set(name, Undefined(reason), domain, since)

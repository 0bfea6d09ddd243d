"""The classes of rules and the table that holds them, keyed by (domain, operator, since_version).

A rule is a function ``f(op, g, *inputs, *outputs)`` that returns the cotangent of each input given the
cotangent `g` of the output. It names as many formal inputs and outputs as it uses; an optional one
that the node leaves out is ``None``. `g` is a tuple where several outputs can carry a cotangent
(``None`` for those that do not). An input without derivative returns ``None``.

The classes differ in what follows from the function:

============  ==============================================  =====================================
class         the function gives                              forward mode
============  ==============================================  =====================================
elementwise   g·∂y/∂xᵢ, in the shape of the output: the       the same products with tangents, summed
              engine sums to the shape of xᵢ
symmetric     g·J, and J = Jᵀ                                 the same function
linear        the transpose                                   the operator itself, on tangents
rule          the VJP                                         given, or the transpose of the VJP
zero          nothing: the derivative is zero                 zero
undefined     nothing: there is no derivative                 refused
============  ==============================================  =====================================
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from onnxgrad.errors import NoDerivative, RuleError, UnknownName
from onnxgrad.ir import Var, containers, expand_to, sum_to
from onnxgrad.rules.op import Op

Cotangents = Sequence[Var | None]
Function = Callable[..., Any]


@functools.cache
def _parameters(function: Function) -> int:
    return len(inspect.signature(function).parameters)


@dataclass
class Rule:
    """One operator's derivative. `wrt` holds the inputs that have one (None: every float input).

    `rewrite` is ``f(builder, node, of)``, asked before reverse mode from values `of`: it may put other nodes, of the
    same value, in the place of `node`, and returns them, or None. Outputs that nothing reads, and that are not among
    `of`, may be left out.
    """

    kind: str
    function: Function | None = None
    wrt: tuple[int, ...] | None = None
    jvp_function: Function | None = None
    joint: bool = False
    bias: int | None = None
    reason: str = ""
    derive_jvp: bool = False
    rewrite: Callable[..., Any] | None = None

    @contextmanager
    def without_jvp(self) -> Iterator[None]:
        """Have forward mode derived from the VJP, to check what the class gives against it."""
        self.derive_jvp = True
        try:
            yield
        finally:
            self.derive_jvp = False

    @property
    def doc(self) -> str:
        """The mathematical form, from the docstring of the function."""
        return inspect.getdoc(self.function) or "" if self.function else self.reason

    def carries(self, i: int) -> bool:
        """Whether input `i` can have a derivative."""
        return self.kind not in ("zero",) and (self.wrt is None or i in self.wrt)

    def vjp(self, op: Op, cotangents: Cotangents) -> Any:
        """Cotangents of the inputs (a list, or a dict from value to cotangent) given those of the outputs."""
        if self.kind == "zero":
            return []
        if self.kind == "undefined" or self.function is None:
            raise NoDerivative(self.reason)
        only = next((g for g in cotangents if g is not None), None)  # not always the first: of labels and scores
        result = self._apply(self.function, op, only if op.single else tuple(cotangents))
        if isinstance(result, dict):
            return result
        parts = _listed(result)
        if any(op.needs[len(parts) :]):
            raise RuleError(f"a value for each input is due, None where there is none, but {len(parts)} came")
        if self.kind != "elementwise":
            return parts
        return [
            sum_to(part, x) if part is not None and x is not None and need else None
            for part, x, need in zip(parts, op.inputs, op.needs)
        ]

    @staticmethod
    def _apply(function: Function, op: Op, g: Any) -> Any:
        """Call `function` with as many formal inputs and outputs as it names."""
        arity = _parameters(function) - 2
        return function(op, g, *[*op.inputs, *op.outputs, *[None] * arity][:arity])

    def jvp(self, op: Op, tangents: Cotangents) -> list[Var | None] | None:
        """Tangents of the outputs given those of the inputs; None: to be derived from the VJP."""
        if self.derive_jvp:
            return None
        if self.kind == "zero":
            return [None] * len(op.node.outputs)
        if self.kind == "undefined":
            raise NoDerivative(self.reason)
        if self.kind == "elementwise":
            return [self._elementwise_jvp(op, tangents)]
        if self.kind == "symmetric":
            assert self.function is not None
            return _listed(self._apply(self.function, op, tangents[0]))[:1]
        if self.kind == "linear":
            return self._linear_jvp(op, tangents)
        if self.jvp_function is not None:
            return _listed(self._apply(self.jvp_function, op, tuple(tangents)))
        return None

    def _elementwise_jvp(self, op: Op, tangents: Cotangents) -> Var | None:
        assert self.function is not None
        terms = []
        for i, tangent in enumerate(tangents):
            if tangent is not None and self.carries(i):
                terms.append(_listed(self._apply(self.function, op, tangent))[i])
        terms = [t for t in terms if t is not None]
        y = op.outputs[0]
        return expand_to(add(terms), y) if terms and y is not None else None

    def _linear_jvp(self, op: Op, tangents: Cotangents) -> list[Var | None]:
        wrt = tuple(i for i in range(len(op.inputs)) if self.carries(i) and i != self.bias)
        given = [t if self.carries(i) else None for i, t in enumerate(tangents)]
        calls: list[list[Var | None]] = []
        if self.joint:
            calls.append(
                [
                    (t if t is not None else op.zeros_like(x)) if i in wrt and x is not None else x
                    for i, (x, t) in enumerate(zip(op.inputs, given))
                ]
            )
        else:
            for i in wrt:
                if given[i] is not None:
                    operands = list(op.inputs)
                    operands[i] = given[i]
                    if self.bias is not None:  # the bias enters once, beside the first factor that moves
                        operands[self.bias] = None if calls else given[self.bias]
                    calls.append(operands)
            if not calls and self.bias is not None and given[self.bias] is not None:
                operands = list(op.inputs)
                first = op.inputs[wrt[0]]
                assert first is not None
                operands[wrt[0]], operands[self.bias] = op.zeros_like(first), given[self.bias]
                calls.append(operands)
        results = [_listed(op.replay(*operands)) for operands in calls]
        return [add([r[k] for r in results]) for k in range(len(op.node.outputs))] if results else []


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def add(terms: Sequence[Var]) -> Var:
    """The sum of `terms`, as a chain of Adds (Sum runs on one thread in ONNX Runtime); of sequences, by element."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term if containers.is_tensor(total) else containers.total(total.builder, total, term)
    return total


_Table = dict[tuple[str, str], list[tuple[int, "Rule"]]]


class Registry:
    """Rules by (domain, operator); the one with the highest since_version ≤ the node's opset applies.

    Beside the derivatives stand estimators: what some operators, whose derivative is zero, are taken to have
    for one while `straight_through` names them.
    """

    def __init__(self) -> None:
        self._rules: _Table = {}
        self._estimators: _Table = {}
        self._chosen: ContextVar[frozenset[str]] = ContextVar("chosen", default=frozenset())
        self._custom: ContextVar[Mapping[tuple[str, str], Rule]] = ContextVar("custom", default={})  # noqa: B039

    def set(self, op_type: str, rule: Rule, domain: str = "", since: int = 1, *, estimator: bool = False) -> None:
        """Register `rule`, in place of an earlier one for the same domain, operator and version."""
        table = self._estimators if estimator else self._rules
        versions = [v for v in table.get((domain, op_type), []) if v[0] != since]
        table[domain, op_type] = sorted([*versions, (since, rule)], key=lambda v: v[0])

    def get(self, domain: str, op_type: str, opset: int) -> Rule | None:
        """The rule for an operator at `opset`, or None."""
        domain = "" if domain == "ai.onnx" else domain
        custom = self.custom(domain, op_type)
        if custom is not None:
            return custom
        table = self._estimators if self.estimates(domain, op_type) else self._rules
        found = None
        for since, rule in table.get((domain, op_type), ()):
            if since <= opset:
                found = rule
        return found

    def estimates(self, domain: str, op_type: str) -> bool:
        """Whether an estimator stands for the derivative of an operator now."""
        return op_type in self._chosen.get() and (domain, op_type) in self._estimators

    def custom(self, domain: str, op_type: str) -> Rule | None:
        """The rule that a user has put before all others now, or None."""
        return self._custom.get().get((domain, op_type))

    @contextmanager
    def using(self, rules: Mapping[tuple[str, str], Rule]) -> Iterator[None]:
        """Within the ``with`` block, put `rules` before all others."""
        token = self._custom.set({**self._custom.get(), **rules})
        try:
            yield
        finally:
            self._custom.reset(token)

    @property
    def estimating(self) -> bool:
        """Whether any operator is named by `straight_through` now."""
        return bool(self._chosen.get())

    @contextmanager
    def straight_through(self, *operators: str) -> Iterator[None]:
        """Within the ``with`` block, take the estimators of `operators` for their derivatives."""
        known = sorted(name for _, name in self._estimators)
        for name in operators:
            if name not in known:
                raise UnknownName(name, known, "operator with a straight-through estimator")
        token = self._chosen.set(self._chosen.get() | set(operators))
        try:
            yield
        finally:
            self._chosen.reset(token)

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


def estimator(
    *names: str,
    kind: str = "rule",
    wrt: tuple[int, ...] | None = (0,),
    jvp: Function | None = None,
    domain: str = "",
    since: int = 1,
):
    """``f(op, g, *xs, *ys)`` of the class `kind` → what `straight_through` takes for the VJP."""
    return _decorator(names, domain, since, estimator=True, kind=kind, wrt=wrt, jvp_function=jvp)


def _decorator(
    names: Sequence[str], domain: str, since: int, estimator: bool = False, **options: Any
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        if not inspect.getdoc(function):
            raise RuleError(f"the rule for {', '.join(names)} has no docstring with its mathematical form")
        for name in names:
            registry.set(name, Rule(function=function, **options), domain, since, estimator=estimator)
        return function

    return register


def elementwise(*names: str, wrt: tuple[int, ...] | None = None, domain: str = "", since: int = 1):
    """``f(op, g, *xs, y)`` → g·∂y/∂xᵢ for every i, in the shape of y. Broadcasting is undone elsewhere."""
    return _decorator(names, domain, since, kind="elementwise", wrt=wrt)


def symmetric(*names: str, domain: str = "", since: int = 1):
    """``f(op, g, x, y)`` → g·J of an operator of one operand whose Jacobian equals its transpose."""
    return _decorator(names, domain, since, kind="symmetric", wrt=(0,))


def linear(
    *names: str,
    wrt: tuple[int, ...] | None = (0,),
    joint: bool = False,
    bias: int | None = None,
    domain: str = "",
    since: int = 1,
):
    """``f(op, g, *xs)`` → the transpose, for each of `wrt`.

    Linear in each operand of `wrt` with the others fixed (MatMul), or, if `joint`, in all of them
    together (Concat). `bias` is an operand that is added to the rest.
    """
    if bias is not None:
        return _decorator(names, domain, since, kind="linear", wrt=(*(wrt or ()), bias), bias=bias, joint=joint)
    return _decorator(names, domain, since, kind="linear", wrt=wrt, joint=joint)


def rule(
    *names: str,
    wrt: tuple[int, ...] | None = None,
    jvp: Function | None = None,
    rewrite: Callable[..., Any] | None = None,
    domain: str = "",
    since: int = 1,
):
    """``f(op, g, *xs, *ys)`` → the VJP; `jvp` is ``f(op, tangents, *xs, *ys)`` → tangents of the outputs."""
    return _decorator(names, domain, since, kind="rule", wrt=wrt, jvp_function=jvp, rewrite=rewrite)


def zero(*names: str, domain: str = "", since: int = 1, reason: str = "the output is piecewise constant") -> None:
    """Operators whose derivative is zero wherever it exists."""
    for name in names:
        registry.set(name, Rule(kind="zero", reason=reason), domain, since)


def undefined(*names: str, reason: str, domain: str = "", since: int = 1) -> None:
    """Operators that have no derivative; a path through them is refused with `reason`."""
    for name in names:
        registry.set(name, Rule(kind="undefined", reason=reason), domain, since)

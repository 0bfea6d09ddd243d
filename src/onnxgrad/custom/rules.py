"""User-defined rules, and the scope in which they apply.

A rule is Python code that writes nodes, or an ONNX graph, which can be stored in a file. It applies where it is passed
as ``rules=``, and to every derivation within ``with custom_rules(…):``. docs/custom-rules.md has worked examples.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.custom.graph_rules import Graph, model_of, written
from onnxgrad.engine import reverse
from onnxgrad.errors import BadInput, NotDifferentiable, RuleError
from onnxgrad.ir import Var
from onnxgrad.ir.match import normal_domain, not_none
from onnxgrad.model_io import load_model, open_model, save_model
from onnxgrad.model_io.match_subgraphs import CUT_DOMAIN, TARGETS, Cut, RuleTargets
from onnxgrad.model_io.save import to_proto
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import CUSTOM
from onnxgrad.rules.rule import Cotangents, Function, General, Parts, Pulled, Rule, Symbolic, add, as_list

#: Metadata of a rule that is kept in a file.
RULE = "onnxgrad.rule"


@dataclass(frozen=True)
class CustomRule:
    """A rule of a user's own; `custom_vjp` and `custom_jvp` make one.

    Attributes:
        operator: domain and name of the operator or local function that it is for, or
        cut: the sub-graph that it is for.
        graph: where the rule is an ONNX graph, that.
        mode: ``"vjp"`` or ``"jvp"``.
    """

    operator: tuple[str, str] | None
    cut: Cut | None
    rule: Rule = field(repr=False, compare=False)
    mode: str = "vjp"
    graph: Graph | None = field(default=None, repr=False, compare=False)

    def save(self, path: str | os.PathLike) -> None:
        """Write a rule that is an ONNX graph to a file, for `load_rule` and ``onnxgrad grad --rule``.

        Raises:
            BadInput: the rule is a Python function.
        """
        if self.graph is None:
            raise BadInput(
                "a rule that is a Python function cannot be kept in a file\n  hint: give it as an ONNX graph"
            )
        model = to_proto(open_model(model_of(self.graph)).model)
        record: dict[str, Any] = {"mode": self.mode, "wrt": self.rule.wrt}
        if self.cut is None:
            record["operator"] = "::".join(self.operator or ())
        else:
            record |= {"inputs": self.cut.inputs, "outputs": self.cut.outputs}
        onnx.helper.set_model_props(model, {RULE: json.dumps(record)})
        save_model(model, path)


def load_rule(path: str | os.PathLike) -> CustomRule:
    """The rule that `CustomRule.save` wrote.

    Raises:
        BadInput: the file is no such rule.
    """
    model = load_model(path)
    try:
        record = json.loads(model.metadata_props.pop(RULE))
        make = {"vjp": custom_vjp, "jvp": custom_jvp}[record["mode"]]
        for name in ("wrt", "inputs", "outputs"):
            record[name] = None if record.get(name) is None else tuple(record[name])
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{os.fspath(path)} is no rule that onnxgrad wrote") from e
    return make(
        record.get("operator"), to_proto(model), wrt=record["wrt"], inputs=record["inputs"], outputs=record["outputs"]
    )


def custom_vjp(
    operator: str | None = None,
    rule: Function | Graph | None = None,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    jvp: Function | None = None,
    wrt: Sequence[int] | None = None,
) -> Any:
    """A derivative of a user's own, given as a pullback.

    Args:
        operator: what it is for: ``"domain::Name"`` of an operator or local function (``"Name"`` for a standard one).
            Or, for a sub-graph of a model:
        inputs: the names of the values that it starts from, and
        outputs: the names of those that it computes. What else it reads counts as constant.
        rule: ``f(op, g, *inputs, *outputs)``: the cotangent of each input, ``None`` for none, given the cotangent `g`
            of the output (a tuple, with ``None`` where there is none, if there are several). It may name fewer formals.
            As in docs/add-an-operator.md, ``op.Mul(a, b)`` writes a node and variables have operators. Or an ONNX
            model or function: cotangents of all outputs in, then the inputs, then the outputs, the last of which it
            may leave out; cotangents of the float inputs (those of `wrt`) out. Left out: a decorator comes back.
        jvp: ``f(op, tangents, *inputs, *outputs)``: the tangent of each output. Default: the transpose of the pullback.
        wrt: the places of the inputs that have a derivative. Default: every float input.

    Returns:
        A `CustomRule`, to be passed as ``rules=``.

    Raises:
        BadInput: it is not said, or said twice, what the rule is for.
    """
    return _build_rule("vjp", operator, rule, inputs, outputs, wrt, jvp)


def custom_jvp(
    operator: str | None = None,
    rule: Function | Graph | None = None,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    wrt: Sequence[int] | None = None,
) -> Any:
    """A derivative of a user's own, given as a pushforward: ``f(op, tangents, *inputs, *outputs)``.

    As `custom_vjp`; `tangents` has one per input, ``None`` for one that does not move, and what comes back is the
    tangent of each output (``None``: it does not move). As an ONNX graph: tangents of the float inputs (those of
    `wrt`) in, then the inputs, then the outputs; tangents of the outputs out. It must be linear in the tangents:
    reverse mode is its transpose.
    """
    return _build_rule("jvp", operator, rule, inputs, outputs, wrt, None)


def _build_rule(
    mode: str,
    operator: str | None,
    rule: Function | Graph | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    wrt: Sequence[int] | None,
    jvp: Function | None,
) -> Any:
    of_cut = inputs is not None or outputs is not None
    if (operator is None) != of_cut or (of_cut and not (inputs and outputs)):
        hint = 'custom_vjp("domain::Name"), or custom_vjp(inputs=[…], outputs=[…])'
        raise BadInput(f"a rule is for one operator or function, or for one sub-graph\n  hint: {hint}")
    if isinstance(inputs, str) or isinstance(outputs, str):
        raise BadInput("`inputs` and `outputs` are lists of names")
    if rule is None:
        return functools.partial(_build_rule, mode, operator, inputs=inputs, outputs=outputs, wrt=wrt, jvp=jvp)
    cut = Cut(tuple(inputs or ()), tuple(outputs or ())) if of_cut else None
    named = None if operator is None else _operator(operator)
    graph = None if callable(rule) else rule
    function = rule if callable(rule) else written(rule, mode)
    places = None if wrt is None else tuple(wrt)
    if cut is not None and places is None:
        places = tuple(range(len(cut.inputs)))
    count = None if cut is None else len(cut.inputs)
    own = _Custom(*((function, jvp) if mode == "vjp" else (None, function)), wrt=places, count=count)
    return CustomRule(named, cut, own, mode, graph)


def _operator(text: str) -> tuple[str, str]:
    domain, _, name = text.rpartition("::")
    if not name:
        raise BadInput(f'an operator is named as "domain::Name", not {text!r}')
    return normal_domain(domain), name


@contextmanager
def custom_rules(*rules: CustomRule | str | os.PathLike) -> Iterator[None]:
    """Have `rules`, or files with rules, take precedence over all others within the ``with`` block.

    They apply to every derivation inside the block (`grad`, `hessian`, `compile_step`, …). Every model opened there
    must contain the sub-graphs of the rules, except models that are derivatives themselves.
    """
    table: dict[tuple[str, str], Rule] = {}
    cuts: list[Cut] = []
    for rule in rules:
        custom = load_rule(rule) if isinstance(rule, (str, os.PathLike)) else rule
        if not isinstance(custom, CustomRule):
            raise BadInput(f"a rule is a result of custom_vjp or custom_jvp, or a file, not a {type(custom).__name__}")
        if custom.cut is not None:
            table[CUT_DOMAIN, custom.cut.name] = custom.rule
            cuts.append(custom.cut)
        else:
            table[not_none(custom.operator)] = custom.rule
    targets = TARGETS.value
    targets = RuleTargets(targets.operators | set(table), (*targets.cuts, *cuts))
    with CUSTOM.changed({**CUSTOM.value, **table}), TARGETS.changed(targets):
        yield


class _Custom(General):
    """A user's rule: either mode follows from the other by transposition.

    `count`, of a sub-graph: how many operands are its inputs; the others count as constant.
    """

    is_custom = True

    def __init__(
        self, function: Function | None, jvp: Function | None, *, wrt: tuple[int, ...] | None, count: int | None
    ) -> None:
        super().__init__(function or jvp, wrt, jvp=jvp)  # type: ignore[arg-type]
        self.is_pushforward, self.count = function is None, count

    def _refuse_hidden(self, op: Op, moved: Callable[[ir.Value], bool]) -> None:
        for v in op.node.inputs[self.count :] if self.count is not None else ():
            if v is not None and moved(v):
                raise NotDifferentiable(
                    f"the sub-graph that a rule is for also reads {v.name!r}, which depends on `wrt`\n"
                    "  hint: list it among the `inputs` of the rule"
                )

    def carries(self, i: int) -> bool:
        """True if input `i` can have a derivative; captured values are examined later."""
        return super().carries(i) or (self.count is not None and i >= self.count)

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """The pullback as given, or the transpose of the pushforward."""
        self._refuse_hidden(op, lambda v: v in op.active)
        if self.is_pushforward:
            return self._transposed(op, cotangents)
        pulled = super().vjp(op, cotangents)
        for part in pulled.values() if isinstance(pulled, dict) else pulled:
            if part is not None and not isinstance(part, (Var, Symbolic)):
                raise RuleError(f"a rule returns values that `op` wrote, such as op.zeros_like(g), not {part!r}")
        return pulled

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts | None:
        self._refuse_hidden(op, lambda v: v in op.tangents)
        return super()._jvp(op, tangents)

    def _transposed(self, op: Op, cotangents: Cotangents) -> list[Var | None]:
        """Jᵀg as the derivative of t ↦ ⟨J·t, g⟩."""
        b = op.builder
        probes: list[Var | None] = [None] * len(op.inputs)
        with b.record() as emitted:
            for i, x in enumerate(op.inputs[: self.count]):
                if x is not None and op.needs[i]:
                    probes[i] = b.copy(b.full_like(x, 1).value)
            tangents = as_list(self.apply(not_none(self.jvp_function), op, tuple(probes[: self.count])))
        seeds: dict[ir.Value, Var] = {}
        for t, g in zip(tangents, cotangents):
            if t is not None and g is not None:
                seeds[t.value] = add([seeds[t.value], g]) if t.value in seeds else g
        transposed = reverse(b, emitted, seeds, [p.value for p in probes if p is not None])
        return [None if p is None else transposed.get(p.value) for p in probes]

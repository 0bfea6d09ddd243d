"""Reports of differentiability: the operators between `wrt` and `of` in a model, and all operators."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad import control_flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.engine.activity import describe_path, obstacle, on_path
from onnxgrad.engine.resolve import rule_of
from onnxgrad.errors import BadInput, NotDifferentiable, ZeroDerivative
from onnxgrad.ir import Builder
from onnxgrad.ir.graph import named_values, reads, subgraphs
from onnxgrad.ir.match import is_standard
from onnxgrad.keywords import check_keywords
from onnxgrad.lower import expand
from onnxgrad.lower.contrib import formals
from onnxgrad.lower.function_bodies import body_of
from onnxgrad.lower.registry import lowering_for
from onnxgrad.model_io import AnyModel, Opened
from onnxgrad.model_io.validity import blamed
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Rule, Undefined, Zero
from onnxgrad.transforms.first_order import vjp
from onnxgrad.transforms.gradient_lowering import open_lowered
from onnxgrad.transforms.select_values import Names, default_of, float_values, is_float, of_values
from onnxgrad.transforms.zero_derivatives import constant_sums

BODY, LOWERING, REFUSED, NO_RULE = "function body", "lowering", "refused", "no rule"


@dataclass
class Row:
    """An operator of a model, with the way in which it is differentiated."""

    domain: str
    op_type: str
    status: str
    count: int = 0
    detail: str = ""
    path: str = ""


@dataclass
class Report:
    """The result of `check`.

    Attributes:
        wrt, of: the names that were looked at.
        rows: an entry per operator on the way; `status` is the class of its rule,
            "lowering" (it is written out), "function body" or "refused".
        problem: what differentiating the model runs into; empty if nothing.
        zero: those of `wrt` by which the derivative is zero everywhere.
        constant_sums: those of `of` whose sum is constant, for `grad`, and the operators that make it so.
    """

    wrt: list[str]
    of: list[str]
    rows: list[Row] = field(default_factory=list)
    problem: str = ""
    zero: list[str] = field(default_factory=list)
    constant_sums: dict[str, str] = field(default_factory=dict)

    @property
    def differentiable(self) -> bool:
        """True if the gradient can be built."""
        return not self.problem


@check_keywords
def check(model: AnyModel, *, wrt: Names | None = None, of: Names | None = None) -> Report:
    """Look at every operator between `wrt` (default: all float inputs and weights) and `of`.

    Raises:
        BadInput: the model cannot be read, or a name in it is wrong.
    """
    with blamed(model):
        try:
            return _check_opened(open_lowered(model), wrt, of)
        except NotDifferentiable as e:  # the target of a Gradient node
            named = [[names] if isinstance(names, str) else list(names or ()) for names in (wrt, of)]
            return Report(named[0], named[1], problem=str(e))


def _check_opened(opened: Opened, wrt: Names | None, of: Names | None) -> Report:
    graph = opened.model.graph
    values = named_values(graph)
    if wrt is None:
        leaves = {n: v for n, v in values.items() if v.producer() is None and n not in opened.constants}
        sources = {n: v for n, v in leaves.items() if is_float(v, containers=True)}
        if not sources:
            raise BadInput("the model has no float input and no float weight\n  hint: name a value with `wrt`")
    else:
        sources = float_values(wrt, values, "wrt", containers=True)
    targets = default_of(graph, True) if of is None else of_values(of, values, Builder(graph), containers=True)
    report = Report(list(sources), list(targets), constant_sums=constant_sums(targets))
    private = ir.Model(graph.clone(), ir_version=opened.model.ir_version)
    _tabulate(report, graph, list(sources.values()), list(targets.values()))
    if not any(r.status == REFUSED for r in report.rows):  # a rule may still refuse an attribute, or an inner graph
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ZeroDerivative)
                vjp(private, wrt=report.wrt, of=report.of)
            report.zero = [w.message.name for w in caught if isinstance(w.message, ZeroDerivative)]
        except NotDifferentiable as e:
            report.problem = str(e)
    return report


def _tabulate(report: Report, graph: ir.Graph, wrt: list[ir.Value], of: list[ir.Value]) -> None:
    builder, nodes = Builder(graph), list(graph)
    rows: dict[tuple[str, str, str], Row] = {}
    inside: dict[ir.Node, str] = {}

    def note(node: ir.Node, status: str, detail: str = "", path: str = "") -> None:
        row = rows.setdefault((node.domain, node.op_type, status), Row(node.domain, node.op_type, status))
        row.count += 1
        row.detail = row.detail or detail
        row.path = row.path or path

    while True:
        wrt, of = [builder.now(v) for v in wrt], [builder.now(v) for v in of]
        path = on_path(nodes, wrt, of, builder)
        bodies: dict[ir.Node, list[ir.Node]] = {}
        for node, rule in path.items():
            if rule is None and (body := expand(builder, node)):
                bodies[node] = body
                inside.update(dict.fromkeys(body, inside.get(node) or node.op_type))
                if node not in inside:
                    status = LOWERING if lowering_for(node.op_type, node.domain) else BODY
                    note(node, status)
                    kinds = ", ".join(dict.fromkeys(n.op_type for n in body))
                    rows[node.domain, node.op_type, status].detail = f"by {kinds}"
        if not bodies:
            break
        nodes = [n for node in nodes for n in bodies.get(node, [node])]
    for node in nodes:
        rule = rule_of(node, builder)
        if node in path and (why := obstacle(node, builder)):
            within = f" (in the body of {inside[node]})" if node in inside else ""
            note(node, REFUSED, why + within, describe_path(node, path, wrt, of))
        elif node in inside:
            continue
        elif node in path:
            note(node, rule.kind if rule else "?", first_line(rule))
            for inner in (n for graph in subgraphs(node) for g in (graph, *graph.subgraphs()) for n in g):
                note(inner, *_inner_status(inner, node, builder))
        elif isinstance(rule, Zero) and any(v in path.active for v in reads(node)):
            note(node, "zero", rule.reason)
    report.rows = sorted(rows.values(), key=lambda r: (r.status != REFUSED, r.domain, r.op_type, r.status))
    refused = [r for r in report.rows if r.status == REFUSED]
    if refused:
        report.problem = "no derivative for " + ", ".join(f"{r.op_type} ({r.detail})" for r in refused)


def _inner_status(inner: ir.Node, outer: ir.Node, builder: Builder) -> tuple[str, str]:
    """The status of a node in a graph inside `outer`; only the derivation decides if a derivative passes through it."""
    rule = rule_of(inner, builder)
    if rule is not None:
        return rule.kind, first_line(rule) or rule.reason
    if lowering_for(inner.op_type, inner.domain):
        return LOWERING, f"in {outer.op_type}"
    opset = builder.infer.context.get_opset_version(inner.domain)
    return (BODY, f"in {outer.op_type}") if body_of(inner, opset, builder.opset) else (NO_RULE, f"in {outer.op_type}")


def first_line(rule: Rule | None) -> str:
    """The mathematical form of a rule, on one line."""
    return rule.doc.splitlines()[0] if rule is not None and rule.doc else ""


# --- all operators ---------------------------------------------------------------------------------


@dataclass
class Operator:
    """An operator of the specification, or one with a rule."""

    domain: str
    op_type: str
    since: int
    status: str
    inputs: list[str]
    formula: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def operators() -> list[Operator]:
    """List every operator with a rule, then those without: lowered, differentiated by their bodies, or refused."""
    table = [_describe_operator(*entry) for entry in registry.items()]
    known = {(o.domain, o.op_type) for o in table}
    for schema in sorted(onnx.defs.get_all_schemas(), key=lambda s: s.name):
        if schema.deprecated or (schema.domain, schema.name) in known:
            continue
        lowering = lowering_for(schema.name, schema.domain)
        if not is_standard(schema) and lowering is None:
            continue
        if lowering is not None:
            formula = (inspect.getdoc(lowering) or "").partition("\n")[0]
            names = [p.name for p in schema.inputs if may_be_float(p.types)]
            table.append(Operator(schema.domain, schema.name, 1, LOWERING, names, formula))
        else:
            status = BODY if _closed(schema.name) else NO_RULE
            table.append(Operator("", schema.name, schema.since_version, status, [], ""))
    for (domain, name), inputs in sorted(formals.items()):  # no package specifies these
        formula = (inspect.getdoc(lowering_for(name, domain)) or "").partition("\n")[0]
        table.append(Operator(domain, name, 1, LOWERING, [i for i, may in inputs if may], formula))
    return table


def _describe_operator(domain: str, op_type: str, since: int, rule: Rule) -> Operator:
    try:
        schema = onnx.defs.get_schema(op_type, domain)
    except onnx.defs.SchemaError:
        names = [str(i) for i in rule.wrt or ()]
    else:
        names = [
            p.name
            for i, p in enumerate(schema.inputs)
            if not isinstance(rule, (Zero, Undefined)) and rule.carries(i) and may_be_float(p.types)
        ]
    return Operator(domain, op_type, since, rule.kind, names, first_line(rule))


def may_be_float(types: Iterable[str]) -> bool:
    """True if a type in `types` carries a derivative; floats of eight bits or fewer do not."""
    return any(re.search(r"\((float|double|float16|bfloat16)\)", t) for t in types)


@functools.cache
def _closed(op_type: str) -> bool:
    """True if every operator in the function body has a rule or a body that is closed itself.

    If a body depends on the types of its operands, the types of the call decide later.
    """
    schema = onnx.defs.get_schema(op_type)
    if any(a.type == onnx.defs.OpSchema.AttrType.GRAPH for a in schema.attributes.values()):
        return False
    if not schema.has_function:  # type: ignore[attr-defined]
        return bool(schema.has_context_dependent_function)  # type: ignore[attr-defined]
    for node in schema.function_body.node:
        rule = registry.get(node.domain, node.op_type, onnx.defs.onnx_opset_version())
        if rule is None and not lowering_for(node.op_type, node.domain) and not _closed(node.op_type):
            return False
        if isinstance(rule, Undefined):
            return False
    return True

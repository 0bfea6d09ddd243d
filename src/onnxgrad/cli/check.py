"""``onnxgrad check`` and ``onnxgrad ops``: what can be differentiated."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onnxgrad.check import REFUSED, operators
from onnxgrad.check import check as check_model
from onnxgrad.cli import panels
from onnxgrad.cli.check_web import print_web_report
from onnxgrad.cli.console import cell, console
from onnxgrad.cli.grad import StraightThrough
from onnxgrad.errors import BadInput, printable
from onnxgrad.model_io import load_model, training_info
from onnxgrad.rules.registry import registry
from onnxgrad.training import lower_gradients
from onnxgrad.training.measure.readiness import ADVICE, FACT, readiness
from onnxgrad.training.measure.readiness import REFUSED as REFUSES
from onnxgrad.training.spec.validation import Problem, validate
from onnxgrad.transforms.gradient_node import DOMAIN
from onnxgrad.wording import count_text, operator_text

NOT_DIFFERENTIABLE = 1


def check(
    model: panels.Model,
    wrt: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: every float input and weight.")
    ] = None,
    of: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: every float output.")] = None,
    straight_through: StraightThrough = None,
    train: Annotated[
        bool, typer.Option("--train", help="Say instead how well it trains: what is mended, what to export otherwise.")
    ] = False,
    loss: Annotated[str | None, typer.Option(help="With --train: the loss. Default: cross_entropy, else mse.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --train: print JSON.")] = False,
    target: Annotated[
        str | None, typer.Option(help="web: instead, say what does not run in browsers, and what to do about it.")
    ] = None,
) -> None:
    """Say of every operator between `wrt` and `of` how it is differentiated, or why it cannot be.

    With --train, report whether the model trains as exported, what onnxgrad repairs automatically, and what a better
    export would improve.

    If the model carries training information, every rule of the specification that it violates is listed as well.
    The exit code is 0 if the model is differentiable and its training information valid, 1 if not, 2 if it
    cannot be read. With `--target web` it is 1 if onnxruntime-web fails on the model with WebGPU.
    """
    if train:
        if wrt or straight_through or target or len(of or ()) > 1:
            raise BadInput("--train takes one --of, the prediction, and neither --wrt, --straight-through nor --target")
        _readiness(model, loss, of[0] if of else None, as_json)
        return
    if loss is not None or as_json:
        raise BadInput(f"{'--loss' if loss is not None else '--json'} goes with --train")
    opened = load_model(model)
    out = console()
    if target is not None:
        if target != "web":
            raise BadInput(f"target must be 'web', not {target!r}")
        if not print_web_report(out, opened, model):
            raise typer.Exit(NOT_DIFFERENTIABLE)
        return
    problems = validate(opened)
    own = any(n.domain == DOMAIN for g in opened.graphs() for n in g) and not problems
    try:
        with registry.straight_through(*straight_through or ()):
            differentiable = _differentiability(out, lower_gradients(opened) if own else opened, wrt, of)
    except BadInput:
        if not problems:  # their messages are better
            raise
        differentiable = False
    finally:
        _training(out, opened, problems)
    if problems or not differentiable:
        raise typer.Exit(NOT_DIFFERENTIABLE)


def _readiness(model: Path, loss: str | None, output: str | None, as_json: bool) -> None:
    """Print the readiness of `model` for training."""
    found = readiness(load_model(model), loss, output=output)
    refused = all(f.kind != FACT for f in found)
    if as_json:
        print(json.dumps([asdict(f) for f in found], ensure_ascii=False))
    else:
        out = console()
        for finding in found:
            style = {REFUSES: "bold red", ADVICE: "yellow"}.get(finding.kind, "")
            out.print(cell(f"{finding.kind:<8} {finding.text}", style), soft_wrap=True)
    if refused:
        raise typer.Exit(NOT_DIFFERENTIABLE)


def _training(out: Console, model: ir.Model, problems: list[Problem]) -> None:
    """The violated rules as a table; nothing for a model that has nothing to do with training."""
    infos = training_info(model)
    if problems:
        where, rule = Column("where", no_wrap=True), Column("rule", no_wrap=True)
        table = Table(where, rule, "what is wrong", box=None, pad_edge=False)
        for p in problems:
            table.add_row(cell(p.where), cell(p.rule, "bold red"), cell(p.message))
        out.print(table)
        out.print(Text(f"not valid for training: {count_text(len(problems), 'problem')}"))
    elif infos:
        out.print(Text(f"training information: {count_text(len(infos), 'entry')}, valid"))


def _differentiability(out: Console, model: ir.Model, wrt: list[str] | None, of: list[str] | None) -> bool:
    """Print the report of `check`. Returns True if the model is differentiable."""
    report = check_model(model, wrt=wrt or None, of=of or None)
    table = Table(*_columns("count"), "how, or why not", box=None, pad_edge=False)
    for row in report.rows:
        detail = row.detail + (f"\non the path {printable(row.path)}" if row.path else "")
        style = "bold red" if row.status == REFUSED else ""
        label = cell(operator_text(row.domain, row.op_type))
        table.add_row(label, str(row.count), Text(row.status, style), Text(detail))
    out.print(table)
    wrts = f"{len(report.wrt)} values" if len(report.wrt) > 4 else ", ".join(report.wrt)
    if report.differentiable:
        out.print(cell(f"differentiable: {', '.join(report.of)} with respect to {wrts}"))
        if report.zero:
            out.print(cell(f"but zero everywhere with respect to {', '.join(report.zero)}: no derivative leads there"))
        for name, operator in report.constant_sums.items():
            out.print(cell(f"but the gradient of the sum of {name} is zero: rows of a {operator} sum to 1"))
        return True
    if not any(r.status == REFUSED for r in report.rows):
        out.print(Text(report.problem))
    out.print(cell(f"not differentiable: {', '.join(report.of)} with respect to {wrts}"))
    return False


def _columns(number: str) -> list[Column]:
    """The columns that reports of operators begin with."""
    return [Column("operator", no_wrap=True), Column(number, justify="right"), Column("class", no_wrap=True)]


def ops(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the operators and how each is differentiated."""
    found = operators()
    if as_json:
        print(json.dumps([o.as_dict() for o in found], indent=1, ensure_ascii=False))
        return
    table = Table(*_columns("since"), "with respect to", "formula", box=None, pad_edge=False)
    for o in found:
        name = Text(operator_text(o.domain, o.op_type))
        table.add_row(name, str(o.since), o.status, ", ".join(o.inputs), Text(o.formula))
    out = console()
    out.print(table)
    counts = Counter(o.status for o in found)
    out.print(Text(", ".join(f"{n} {status}" for status, n in sorted(counts.items()))))

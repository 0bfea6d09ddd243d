"""``onnxgrad check`` and ``onnxgrad ops``: what can be differentiated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from onnxgrad.check import REFUSED, operators
from onnxgrad.check import check as check_model
from onnxgrad.cli.console import console
from onnxgrad.door import load_model

NOT_DIFFERENTIABLE = 1


def check(
    model: Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")],
    wrt: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: every float input and weight.")
    ] = None,
    of: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: every float output.")] = None,
) -> None:
    """Say of every operator between `wrt` and `of` how it is differentiated, or why it cannot be.

    The exit code is 0 if the model is differentiable, 1 if not, 2 if it cannot be read.
    """
    report = check_model(load_model(model), wrt=wrt or None, of=of or None)
    out = console()
    table = Table(box=None, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("class", no_wrap=True)
    table.add_column("how, or why not")
    for row in report.rows:
        name = f"{row.domain}::{row.op_type}" if row.domain else row.op_type
        detail = row.detail + (f"\non the path {row.path}" if row.path else "")
        style = "bold red" if row.status == REFUSED else ""
        table.add_row(Text(name), str(row.count), Text(row.status, style), Text(detail))
    out.print(table)
    wrts = f"{len(report.wrt)} values" if len(report.wrt) > 4 else ", ".join(report.wrt)
    if report.differentiable:
        out.print(Text(f"differentiable: {', '.join(report.of)} with respect to {wrts}"))
        return
    if not any(r.status == REFUSED for r in report.rows):
        out.print(Text(report.problem))
    out.print(Text(f"not differentiable: {', '.join(report.of)} with respect to {wrts}"))
    raise typer.Exit(NOT_DIFFERENTIABLE)


def ops(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the operators and how each is differentiated."""
    found = operators()
    if as_json:
        print(json.dumps([o.as_dict() for o in found], indent=1, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column("since", justify="right")
    table.add_column("class", no_wrap=True)
    table.add_column("with respect to")
    table.add_column("formula")
    for o in found:
        name = f"{o.domain}::{o.op_type}" if o.domain else o.op_type
        table.add_row(Text(name), str(o.since), o.status, ", ".join(o.inputs), Text(o.formula))
    out = console()
    out.print(table)
    counts: dict[str, int] = {}
    for o in found:
        counts[o.status] = counts.get(o.status, 0) + 1
    out.print(Text(", ".join(f"{n} {status}" for status, n in sorted(counts.items()))))

"""``onnxgrad passes``: the optimizations of a graph before a session, and why others do not apply."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any

import onnx_ir as ir
import typer
from rich.table import Column, Table
from rich.text import Text

from onnxgrad.cli import panels
from onnxgrad.cli.console import cell, console
from onnxgrad.errors import BadInput, json_text
from onnxgrad.ir.passes import NO_SITE, PassReport, warn_of
from onnxgrad.model_io import load_model, training_info
from onnxgrad.model_io.validity import complaint
from onnxgrad.runtime import Options
from onnxgrad.runtime.passes import Memory
from onnxgrad.runtime.session import keeps_packed, passes_of
from onnxgrad.training import compile_step


def passes(
    model: panels.Model,
    target: Annotated[str, typer.Option(help="What may run: auto, portable or native.")] = "auto",
    without: Annotated[list[str] | None, typer.Option(help="A pass to leave out; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the optimizations of the graph that a session of MODEL runs, and why others do not apply.

    Of a model with training information, that is the graph of a training step.
    """
    options = Options(target=target, without=tuple(without or ()))
    options.native()
    options = options.resolve_target()
    source = load_model(model)
    is_training = bool(training_info(source))
    reports = _of_step(source, options) if is_training else _of_session(source, options, None)
    graph = "training step" if is_training else "model"
    if as_json:
        print(json_text({"graph": graph, "target": options.target, "passes": [_plain(r) for r in reports]}))
        return
    out = console()
    out.print(cell(f"graph: {graph}; target: {options.target}"))
    columns = [Column(text, no_wrap=True) for text in ("phase", "pass", "places", "nodes")]
    columns[2].justify = "right"
    table = Table(*columns, "what is written, or why nothing is", box=None, pad_edge=False)
    for phase, group in groupby(reports, key=lambda r: r.phase):
        for i, r in enumerate(group):
            nodes = "" if r.nodes is None else f"{r.nodes[0]} → {r.nodes[1]}"
            why = f"none found: {r.where}" if r.reason == NO_SITE else r.reason
            text = Text(r.what) if r.places else Text(why, "dim")
            table.add_row("" if i else phase, r.name, str(r.places) if r.places else "–", nodes, text)
    out.print(table)


def _of_step(source: ir.Model, options: Options) -> list[PassReport]:
    """The passes over a training step, while it is compiled and before it runs."""
    step = compile_step(source, without=options.without)
    renewed = {t.input: t.output for t in step.state.values()}
    packs = keeps_packed(step.model, options, has_state=True)
    memory = Memory(renewed, overwrites=True, shares=True, packs=packs)
    return [*step.passes, *_of_session(step.model, options, memory)]


def _of_session(model: ir.Model, options: Options, memory: Memory | None) -> list[PassReport]:
    passed = passes_of(model, options, memory, counted=True)
    if passed.failed and (why := complaint(model)):
        raise BadInput(f"the model is not valid: {why}")
    warn_of(passed.failed)
    return passed.reports


def _plain(report: PassReport) -> dict[str, Any]:
    before, after = report.nodes or (None, None)
    kept = {k: v for k, v in vars(report).items() if k != "nodes"}
    return {**kept, "nodes_before": before, "nodes_after": after}

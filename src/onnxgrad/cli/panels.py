"""The headings under which the help lists flags: ``panels.run("--ema", help="…")`` is a flag under "Run"."""

from __future__ import annotations

from functools import partial

import typer

data, loss, model, optimizer, output, run = (
    partial(typer.Option, rich_help_panel=title) for title in ("Data", "Loss", "Model", "Optimizer", "Output", "Run")
)

"""A report of a run: one HTML file that needs nothing else, with its settings, its numbers, its curves and pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxgrad.errors import printable
from onnxgrad.figures import drawing
from onnxgrad.files import replacing
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.progress import curves, number

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } img, svg { max-width: 100%; height: auto }
.scroll { max-height: 24rem; overflow: auto }
"""


@dataclass(frozen=True)
class Picture:
    """A picture for the report.

    Attributes:
        title: above it.
        png: the file's bytes.
    """

    title: str
    png: bytes


def write_report(history: History, path: Path, title: str = "Training run", pictures: Sequence[Picture] = ()) -> None:
    """Write the report of a run, all or nothing.

    Args:
        history: of the run.
        path: of the HTML file.
        title: of the page.
        pictures: shown at the end.

    Raises:
        BadInput: the place cannot be written, or matplotlib is missing.
    """
    apart = ("settings", "provenance", "before", "after", "best", "samples")
    about = {k: v for k, v in history.about.items() if k not in apart}
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _measurements_text(history.about),
        "<h2>Curves</h2>",
        _svg(history),
        "<h2>Epochs</h2>",
        f'<div class="scroll">{_table(history.epochs)}</div>',
        "<h2>Settings</h2>",
        _pairs({**history.about.get("settings", {}), **about}),
        "<h2>Made with</h2>",
        _pairs(history.about.get("provenance", {})),
        *(f'<h2>{html.escape(p.title)}</h2><img alt="{html.escape(p.title)}" src="{_data(p.png)}">' for p in pictures),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    with replacing(path) as file:
        file.write_text(printable(page, keep="\n"), encoding="utf-8")


def _measurements_text(about: Mapping[str, Any]) -> str:
    """The numbers before and after the run, and of the best epoch, if they are known."""
    rows = {when: about[when] for when in ("before", "after", "best") if when in about}
    return _table(list(rows.values()), list(rows)) if rows else ""


def _table(records: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> str:
    columns = list(dict.fromkeys(k for r in records for k in r))
    head = "".join(f"<th>{html.escape(c.replace('_', ' '))}</th>" for c in columns)
    lines = []
    for i, record in enumerate(records):
        cells = "".join(f"<td>{_text(record.get(c, ''))}</td>" for c in columns)
        lines.append(f"<tr>{'' if names is None else f'<td>{html.escape(names[i])}</td>'}{cells}</tr>")
    return f"<table><tr>{'' if names is None else '<th></th>'}{head}</tr>{''.join(lines)}</table>"


def _pairs(values: Mapping[str, Any]) -> str:
    named = [(html.escape(k.replace("_", " ")), _text(v)) for k, v in values.items()]
    return "<table>" + "".join(f"<tr><td>{k}</td><td>{v}</td></tr>" for k, v in named) + "</table>"


def _text(value: Any) -> str:
    return html.escape(number(value) if isinstance(value, float) else str(value))


def _svg(history: History) -> str:
    target = io.StringIO()
    figure = curves(history)
    with drawing():
        figure.savefig(target, format="svg")
    text = target.getvalue()
    return text[text.index("<svg") :]


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()

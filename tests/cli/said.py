"""``onnxgrad …`` in the process of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from onnxgrad.cli.app import build


def ran(place: Path, line: str, code: int = 0) -> Any:
    """The finished command, which must exit with `code`; PLACE in its line is the folder."""
    found = CliRunner().invoke(build(), line.replace("PLACE", str(place)).split())
    assert found.exit_code == code, found.output
    return found


def said(place: Path, line: str, code: int = 0) -> str:
    """The output of the command."""
    return ran(place, line, code).output

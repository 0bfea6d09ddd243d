"""Messages on the page of troubleshooting are those of the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"


def text_of(node: ast.AST) -> str:
    """The text of a literal, with … for each value that is formatted into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""


def literals(source: Path) -> list[str]:
    return [text for node in ast.walk(ast.parse(source.read_text())) if len(text := text_of(node)) > 5]


def messages(page: str) -> list[str]:
    """The code in the first cell of each row."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", page, flags=re.M)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def is_written(message: str, source: str) -> bool:
    """True if the source has the parts of the message between …, apart from short ones."""
    return all(part in source for part in re.split("…|; ", message) if len(part.strip(" ;:,.'")) > 3)


def test_an_unknown_message_is_found():
    assert messages("| `no such …` | a | b |\n| warning `W` | a | b |") == ["no such …", "W"]
    assert not is_written("no such … here", "no such thing")


def test_every_message_is_in_the_source():
    source = (
        "\n".join(text for path in (ROOT / "src").rglob("*.py") for text in literals(path))
        + "ZeroDerivative PassWarning"
    )
    found = messages(PAGE.read_text())
    assert len(found) > 25
    assert [m for m in found if not is_written(m, source)] == []

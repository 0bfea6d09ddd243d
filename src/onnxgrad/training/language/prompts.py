"""Prompts in files: lines of text, or rows with a field ``prompt``, ``messages``, ``text`` or ``input_ids``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrad.errors import BadInput
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.language.documents import read_rows

_FIELDS = ("prompt", "source", "messages", "text", "input_ids")


def open_prompts(source: Any) -> list[Any]:
    """The prompts of `source`: texts, conversations (lists of messages), or rows of tokens.

    Args:
        source: a path, a sequence of texts or of dicts, or a mapping of columns.

    Raises:
        BadInput: it cannot be read, or a row has no prompt.
    """
    rows, where = read_rows(source, "lines")[0], source_name(source)
    if not rows:
        raise BadInput(f"{where} has no prompts")
    return [_prompt(row, number, where) for number, row in enumerate(rows)]


def open_answers(source: Any) -> list[str]:
    """The reference answers of `source`: ``completion``, ``target``, ``chosen``, or the assistant's last turn.

    Raises:
        BadInput: a row has none.
    """
    rows, where = read_rows(source, "lines")[0], source_name(source)
    found = []
    for number, row in enumerate(rows):
        fields = row if isinstance(row, Mapping) else {}
        answer = next((fields[n] for n in ("completion", "target", "chosen", "messages") if fields.get(n)), None)
        if isinstance(answer, (list, tuple)):
            last = answer[-1]
            answer = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else None
        if not isinstance(answer, str):
            raise BadInput(f"row {number} of {where} has no answer to compare with: the field completion, for example")
        found.append(answer)
    return found


def _prompt(row: Any, number: int, where: str) -> Any:
    """The prompt in `row`; of a conversation all but the answer at its end."""
    if not isinstance(row, Mapping):
        return row
    name = next((n for n in _FIELDS if row.get(n) is not None), None)
    if name is None:
        has = ", ".join(map(repr, row)) or "nothing"
        raise BadInput(f"row {number} of {where} has no prompt, messages or text; it has {has}")
    found = row[name]
    if name == "messages" and found and found[-1].get("role") == "assistant":
        return found[:-1]
    return found

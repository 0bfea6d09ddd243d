"""Documents: texts, conversations, and prompts with their completions, as a source of data has them.

A ``.txt`` file has paragraphs. A row of a ``.jsonl`` file, of a table or of a sequence of dicts has one of these:

| fields | document |
|---|---|
| ``text`` | a text, all of which is learned |
| ``messages``: a list of ``role`` and ``content`` | a conversation, of which the assistant's turns are learned |
| ``prompt`` and ``completion`` (``source`` and ``target``) | a text whose end is learned; also of conversations |
| ``prompt``, ``chosen`` and ``rejected`` | a pair of answers, each as a completion |
| ``input_ids``, and perhaps ``labels`` | tokens, and the token at each of their places that is learned (-100: none) |
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, reason_of
from onnxgrad.files import read_text
from onnxgrad.training.data import open_data
from onnxgrad.training.data.columns import Column, Columns
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.items import as_array, as_table, is_table
from onnxgrad.training.data.sources import source_name

#: The name of the column of documents.
DOCUMENTS = "documents"
#: Fields that make a document; others of a row feed the inputs of their names.
FIELDS = (
    *("text", "messages", "tools", "prompt", "completion", "source", "target", "input_ids", "labels"),
    *("chosen", "rejected"),
)
#: Separators of the documents of a text.
_BREAKS = {"paragraphs": r"\n[ \t]*\n\s*", "lines": r"\n"}
#: Bytes of a file of text, and documents of a stream that are prepared at a time.
LARGEST, _AT_A_TIME = 1 << 32, 256


class Documents(Column):
    """Rows with fields of `FIELDS`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.items = rows

    def __len__(self) -> int:
        return len(self.items)


def open_documents(source: Any, split: str, inputs: Mapping[str, str] | None = None) -> Columns:
    """The documents of `source`, and columns for other inputs of a model.

    Args:
        source: a path, a sequence of texts or of dicts, a mapping of columns, or what `open_data` reads.
        split: of a ``.txt`` file: "paragraphs" or "file".
        inputs: names the column of the text, as in ``{"input_ids": "review"}``.

    Raises:
        BadInput: it cannot be read, or has no documents.
    """
    if isinstance(source, Columns):
        return source
    named = next(iter((inputs or {}).values()), None)
    rows, others = read_rows(source, split, named)
    where = source_name(source)
    documents = [_document(row, k, named, where) for k, row in enumerate(rows)]
    if not documents:
        raise BadInput(f"{where} has no documents")
    return Columns({DOCUMENTS: Documents(documents), **others}, where, is_joined=True)


def streamed_documents(
    items: Iterable[Any], fields: Sequence[Field], name: str, *, inputs: Mapping[str, str] | None = None
) -> Iterator[tuple[Columns, bool]]:
    """The documents of a stream, a few at a time. Its items are texts, rows, tables, or columns of documents."""
    rows: list[Any] = []
    for number, item in enumerate(items):
        if is_table(item):
            rows += as_table(item).to_pylist()
        elif isinstance(item, Mapping) and _is_batch(item):
            own = {n: as_array(v) for n, v in item.items()}
            rows += [dict(zip(own, row)) for row in zip(*own.values())]
        elif isinstance(item, (str, Mapping)):
            rows.append(item)
        else:
            raise BadInput(f"item {number} of {name} is {type(item).__name__}, not a text or an object with fields")
        while len(rows) >= _AT_A_TIME:
            yield open_documents(rows[:_AT_A_TIME], "", inputs), False
            del rows[:_AT_A_TIME]
    if rows:
        yield open_documents(rows, "", inputs), False


def _is_batch(item: Mapping[str, Any]) -> bool:
    """True for columns of several documents: a list of texts, of conversations or of rows of tokens."""
    for name in FIELDS:
        value = as_array(item.get(name))
        if value is not None and not isinstance(value, str):
            first: Any = value[0] if len(value) else None
            return not isinstance(first, Mapping) and (name != "input_ids" or np.ndim(first) == 1)
    return any(not isinstance(v, str) and np.ndim(as_array(v)) for v in item.values())


def read_rows(source: Any, split: str, named: str | None = None) -> tuple[Sequence[Any], dict[str, Column]]:
    """Rows of `source`, texts or mappings of fields, and its columns for other inputs of a model.

    Args:
        source, split: see `open_documents`.
        named: the column of the text.
    """
    suffix = Path(source).suffix.lower() if isinstance(source, (str, os.PathLike)) else ""
    if suffix in (".txt", ".text", ".md"):
        return _texts(Path(source), split), {}
    if suffix in (".jsonl", ".ndjson"):
        return _lines(Path(source)), {}
    if suffix or not _is_sequence(source):
        return _columns(source, named)
    rows = [source[i] for i in range(len(source))]
    rest = rows[0].keys() - {*FIELDS, named} if rows and isinstance(rows[0], Mapping) else set()
    return rows, {name: column for name, column in open_data(rows).items() if name in rest} if rest else {}


def _is_sequence(source: Any) -> bool:
    return not isinstance(source, Mapping) and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _texts(path: Path, split: str) -> list[str]:
    text = read_text(path, LARGEST).replace("\r\n", "\n")
    parts = [text] if split == "file" else re.split(_BREAKS[split], text)
    return [part for p in parts if (part := p.strip("\n")).strip()]


def _lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(read_text(path, LARGEST).split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise BadInput(f"line {number} of {str(path)!r} is no JSON: {reason_of(error)}") from error
    return rows


def _columns(source: Any, named: str | None) -> tuple[list[Mapping[str, Any]], dict[str, Column]]:
    """Rows of the columns of a table or a mapping that make documents, and its other columns."""
    if isinstance(source, Mapping):
        own = {str(n): list(v) for n, v in source.items() if n in (*FIELDS, named)}
        rest = {n: v for n, v in source.items() if str(n) not in own}
        others: dict[str, Column] = dict(open_data(rest)) if rest else {}
    else:
        columns = open_data(source)
        wanted = [n for n in columns if n in (*FIELDS, named) and not columns[n].problem]
        plain = Field(named or "text", np.dtype(object), ())
        own = {n: list(columns[n].take(np.arange(len(columns[n])), plain)) for n in wanted}
        others = {n: c for n, c in columns.items() if n not in own}
    if len({len(values) for values in own.values()}) > 1:
        sizes = ", ".join(f"{n!r} has {len(values)}" for n, values in own.items())
        raise BadInput(f"{source_name(source)} has columns of different numbers of rows: {sizes}")
    return [dict(zip(own, row)) for row in zip(*own.values())], others


def _document(row: Any, number: int, named: str | None, where: str) -> Mapping[str, Any]:
    """`row` as a document. Raises BadInput for one without a text."""
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise BadInput(f"row {number} of {where} is {type(row).__name__}, not a text or an object with fields")
    found = {name: row[name] for name in FIELDS if row.get(name) is not None}
    if named is not None and named not in FIELDS and row.get(named) is not None:
        found = {"text": row[named]}
    if "source" in found or "target" in found:
        found.setdefault("prompt", found.pop("source", None))
        found.setdefault("completion", found.pop("target", None))
    if "input_ids" in found:
        return found
    if "chosen" in found or "rejected" in found:
        missing = next((n for n in ("chosen", "rejected") if n not in found), None)
        if missing is not None:
            raise BadInput(f"row {number} of {where} has no field {missing!r}, the other answer of the pair")
        answers = [{"prompt": found.get("prompt"), "completion": found[n]} for n in ("chosen", "rejected")]
        return {"pair": [_document(answer, number, None, where) for answer in answers]}
    if "messages" in found:
        return {**found, "messages": _conversation(found["messages"], number, where)}
    if "completion" in found:
        prompt = found.get("prompt")
        if isinstance(found["completion"], str) and isinstance(prompt, (str, type(None))):
            return found
        turns = [_conversation(part, number, where) for part in (prompt or [], found["completion"])]
        return {**found, "messages": [*turns[0], *turns[1]], "learned_from": len(turns[0])}
    if isinstance(found.get("text"), str):
        return found
    has = ", ".join(map(repr, row)) or "nothing"
    raise BadInput(
        f"row {number} of {where} has no text, messages, or prompt and completion; it has {has}\n"
        "  hint: --inputs input_ids=review (in Python inputs=) names the column of text"
    )


def _conversation(turns: Any, number: int, where: str) -> list[Mapping[str, Any]]:
    """Messages as plain dicts. Raises BadInput for others."""
    is_list = isinstance(turns, (list, tuple, np.ndarray))
    if not is_list or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in turns):
        raise BadInput(f"row {number} of {where} has messages that are no list of objects with role and content")
    return [dict(m) for m in turns]


def have_no_labels(rows: Iterable[Mapping[str, Any]]) -> bool:
    """True if no document brings labels of its own."""
    return not any("labels" in row for row in rows)

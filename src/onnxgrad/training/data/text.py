"""Text as tokens: a column of strings becomes the named inputs of a language model.

The tokenizer is the file ``tokenizer.json`` that models of this kind come with (package tokenizers). An integer input
whose name contains ``mask`` gets ones where there are tokens, one with ``type`` or ``segment`` the number of the
segment, and the remaining one the tokens. Text is cut to the given length, that of the model, or that of the tokenizer;
a batch is padded to its longest row, or to the fixed length of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, needs_package
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import LABELS, Field
from onnxgrad.training.data.tokenizer_file import encode, open_tokenizer


class Tokens(Column):
    """Rows of whole numbers, padded behind.

    Args:
        rows: one array each.
        pad: what they are padded with.
    """

    def __init__(self, rows: Sequence[np.ndarray], pad: int) -> None:
        self.items, self.pad = rows, pad
        self.lengths = np.array([len(row) for row in rows], np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """These rows, as long as `field` wants them or as the longest of them."""
        width = field.shape[0] or max(len(self.items[i]) for i in rows)
        found = np.full((len(rows), width), self.pad, np.int64)
        for target, i in zip(found, rows):
            target[: len(self.items[i])] = self.items[i]
        return found


class Text:
    """Conversion of text to tokens.

    Args:
        tokenizer: the path of a ``tokenizer.json``, or a ``tokenizers.Tokenizer``.
        max_length: the most tokens of a row; default: what the model fixes, or else what the tokenizer says.

    Raises:
        BadInput: the package is missing, or the file cannot be read.
    """

    #: varies a batch in training, where the task does (see `onnxgrad.training.language`)
    masking: Callable[..., dict[str, np.ndarray]] | None = None
    #: lines about the rows that a task of language models made
    notes: Sequence[str] = ()

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise BadInput(f"max_length must be at least 1, not {max_length}")
        self.tokenizer, self.max_length = _opened(tokenizer), max_length

    @classmethod
    def of(cls, tokenizer: Any, max_length: int | None) -> Text | None:
        """The conversion that these arguments ask for. Raises BadInput for a length without a tokenizer."""
        if tokenizer is None and max_length is not None:
            raise BadInput("max_length is for text, which needs a tokenizer\n  hint: --tokenizer tokenizer.json")
        return None if tokenizer is None else cls(tokenizer, max_length)

    @property
    def described(self) -> str:
        """The JSON of the tokenizer; empty without one."""
        return "" if self.tokenizer is None else str(self.tokenizer.to_str())

    @property
    def record(self) -> Mapping[str, Any]:
        """The task of a language model that makes rows of the text, as plain values; empty without one."""
        return {}

    def tokenized(self, columns: Mapping[str, Column], fields: Sequence[Field], source: str) -> dict[str, Column]:
        """`columns` with the text replaced by tokens for `fields`.

        Raises:
            BadInput: no input takes tokens, no column is text or several are, or a row has no tokens.
        """
        towers = _towers(columns, fields)
        if len(towers) > 1:
            joined = dict(columns)
            for name, inputs in towers.items():
                others = {n: c for n, c in joined.items() if n not in towers}
                joined |= self.tokenized({**others, name: columns[name]}, inputs, source)
                if name not in {f.name for f in inputs}:
                    del joined[name]
            return joined
        roles = _roles(fields, columns)
        name = self._text(columns, roles["ids"], fields, source)
        found = columns[name].take(np.arange(len(columns[name])), roles["ids"])
        texts = [str(t) for t in found]
        size = roles["ids"].shape[0] if len(roles["ids"].shape) == 1 else None
        if size is not None and self.max_length is not None and self.max_length > size:
            raise BadInput(f"max_length is {self.max_length}, and {roles['ids'].name!r} takes {size} tokens")
        own = (self.tokenizer.truncation or {}).get("max_length")
        longest = self.max_length or size or own
        pad, pad_type = self._padding()
        try:
            rows = list(encode(self.tokenizer, texts, longest))
        except BadInput as error:
            raise BadInput(f"the tokenizer fails on {name!r} of {source}: {error}") from error
        empty = next((i for i, (ids, *_) in enumerate(rows) if not len(ids)), None)
        if empty is not None:
            raise BadInput(f"row {empty} of {name!r} of {source} has no tokens: {texts[empty][:40]!r}")
        ids, mask, types, _ = zip(*rows) if rows else ((), (), (), ())
        made = {"ids": Tokens(ids, pad), "mask": Tokens(mask, 0), "types": Tokens(types, pad_type)}
        left = {n: c for n, c in columns.items() if n != name}
        return left | {field.name: made[role] for role, field in roles.items()}

    def _padding(self) -> tuple[int, int]:
        """The token and the segment that pad."""
        given = self.tokenizer.padding or {}
        known = (self.tokenizer.token_to_id(t) for t in ("[PAD]", "<pad>", "<|pad|>"))
        first = next((i for i in known if i is not None), 0)
        return int(given.get("pad_id", first)), int(given.get("pad_type_id", 0))

    def _text(self, columns: Mapping[str, Column], ids: Field, fields: Sequence[Field], source: str) -> str:
        """The name of the column of text."""
        if ids.name in columns and _is_text(columns[ids.name], ids):
            return ids.name
        fed = {f.name for f in fields}
        found = [n for n, c in columns.items() if n not in fed and n.lower() not in LABELS and _is_text(c, ids)]
        if len(found) != 1:
            held = ", ".join(map(repr, found or columns))
            what = f"{len(found)} columns of text: {held}" if found else f"no column of text; it holds {held}"
            hint = f"\n  hint: --input {ids.name}={found[0]} says which (in Python inputs=)" if found else ""
            raise BadInput(f"{source} has {what}{hint}")
        return found[0]


def check_tokens(columns: Mapping[str, Column], fields: Sequence[Field], source: str) -> None:
    """Raise BadInput if an input needs tokens, but `columns` have text."""
    held = {n: c for n, c in columns.items() if c.array is not None}
    for field in fields:
        if field.label or field.dtype.kind not in "iu" or len(field.shape) != 1:
            continue
        own = field.name in held and _is_text(held[field.name], field)
        missing = field.name not in columns and any(part in field.name.lower() for part in ("ids", "token"))
        others = [n for n, c in held.items() if n.lower() not in LABELS and _is_text(c, field)] if missing else []
        if own or others:
            text = field.name if own else others[0]
            raise BadInput(
                f"{text!r} of {source} is text, and the input {field.name!r} takes tokens\n"
                "  hint: --tokenizer tokenizer.json (in Python tokenizer=) makes one of the other"
            )


def has_text_for_tokens(columns: Mapping[str, Column], fields: Sequence[Field]) -> bool:
    """True if an input needs tokens, but `columns` have text."""
    try:
        ids = _roles(fields, columns)["ids"]
    except BadInput:
        return False
    if ids.name in columns:
        return _is_text(columns[ids.name], ids)
    return any(n.lower() not in LABELS and _is_text(c, ids) for n, c in columns.items())


def _is_text(column: Column, field: Field) -> bool:
    if column.problem or not len(column):
        return False
    if column.array is not None:
        rows = column.array
        return rows.ndim == 1 and (rows.dtype.kind == "U" or (rows.dtype.kind == "O" and isinstance(rows[0], str)))
    first = np.asarray(column.take(np.arange(1), field)[0])
    return first.ndim == 0 and first.dtype.kind == "U"


def _towers(columns: Mapping[str, Column], fields: Sequence[Field]) -> dict[str, list[Field]]:
    """The fields that each column of text feeds, by its name, for an encoder that reads several texts of a row."""
    found: dict[str, list[Field]] = {}
    for field in fields:
        role = field.name.partition(".")[0]
        if not field.label and role in columns and _is_text(columns[role], field):
            found.setdefault(role, []).append(field)
    return found


def _roles(fields: Sequence[Field], columns: Mapping[str, Column]) -> dict[str, Field]:
    """The fields for the tokens, the mask and the segments."""
    roles: dict[str, Field] = {}
    for field in fields:
        if field.label or field.dtype.kind not in "iufb" or len(field.shape) != 1:
            continue
        name = field.name.lower()
        role = "mask" if "mask" in name else "types" if "type" in name or "segment" in name else "ids"
        if role == "ids" and (field.dtype.kind not in "iu" or "position" in name):
            continue
        if role in roles and not (role == "ids" and "ids" in name and "ids" not in roles["ids"].name.lower()):
            continue
        roles[role] = field
    if "ids" not in roles:
        raise no_tokens(fields)
    return roles


def no_tokens(fields: Sequence[Field]) -> BadInput:
    """The error of a model without an input of tokens."""
    held = ", ".join(f"{f.name!r} ({f.wanted})" for f in fields if not f.label)
    return BadInput(f"no input takes tokens, whole numbers [N, T]; the model takes {held}")


def _opened(tokenizer: Any) -> Any:
    with needs_package("to turn text into tokens, install tokenizers", "train"):
        from tokenizers import Tokenizer
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if not isinstance(tokenizer, (str, os.PathLike)):
        kind = type(tokenizer).__name__
        raise BadInput(f"a tokenizer is the path of a tokenizer.json, or a tokenizers.Tokenizer, not a {kind}")
    return open_tokenizer(Path(tokenizer))

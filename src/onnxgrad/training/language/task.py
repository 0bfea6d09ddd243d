"""Tasks of language models: documents become the tokens, labels, masks and caches that a model asks for.

Labels of ``causal_lm`` are shifted here: that of a token is the next token. Padding, prompts and the turns of others
have the label that the loss ignores. Texts that are longer than a row are cut into pieces; conversations, prompts and
sentences are truncated, with a warning.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, warn_caller
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.data.text import Text, Tokens, no_tokens
from onnxgrad.training.data.tokenizer_file import encode, parse_tokenizer
from onnxgrad.training.language.chat import Manners
from onnxgrad.training.language.documents import (
    DOCUMENTS,
    Documents,
    have_no_labels,
    open_documents,
    streamed_documents,
)
from onnxgrad.training.language.inputs import inputs_beside, masks_apart, parts_of, tokens_of
from onnxgrad.training.language.limits import Limits
from onnxgrad.training.language.masking import Masking
from onnxgrad.training.language.preferences import ADVANTAGE, REFERENCE, check_answers, paired, sides_of
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.language.rows import TokenRow, join_rows, number_tokens

#: The label that the loss ignores, and tokens of a row that need no setting.
IGNORED, MOST = -100, 8192


class Language(Text):
    """Conversion of documents to the inputs of a language model.

    Args:
        task: with a name.
        tokenizer: see `Text`; None where all documents are tokens.
        max_length: the most tokens of a row.
        manners: what the files beside the tokenizer say.
        limits: of the model.

    Attributes:
        index: the document of each row, once the data are tokenized.
        model: the reference of preferences.
        notes: lines about the rows.

    Raises:
        BadInput: as `Text`, or the tokenizer has more tokens than the model.
    """

    def __init__(
        self, task: TaskRecipe, tokenizer: Any, max_length: int | None, manners: Manners, limits: Limits
    ) -> None:
        self.tokenizer, self.max_length = None, max_length
        if tokenizer is not None:
            super().__init__(tokenizer, max_length)
            size = self.tokenizer.get_vocab_size()
            if limits.vocabulary is not None and size > limits.vocabulary:
                raise BadInput(
                    f"the tokenizer has {size} tokens, and the model scores {limits.vocabulary}: they do not belong "
                    "together\n  hint: give the tokenizer.json of this model"
                )
        self.task, self.manners, self.limits = task, manners, limits
        self.index = np.empty(0, np.int64)
        self.notes: list[str] = []
        self.model: ir.Model | None = None

    @classmethod
    def for_task(
        cls, task: TaskRecipe, preparation: PreparationRecipe, trained: Preprocessing, model: ir.Model | None
    ) -> Language | None:
        """The task that is asked for, or that the model was `trained` for; None without one. Raises BadInput."""
        stored = trained.task
        task.check_text()
        if not task.name and not stored:
            return None
        if not task.name:
            task = replace(task, task=stored["name"], documents=stored["documents"])
        tokenizer, manners = preparation.tokenizer, Manners.of(stored)
        if isinstance(tokenizer, (str, os.PathLike)):
            manners = Manners.beside(Path(tokenizer))
        elif tokenizer is None and trained.tokenizer:
            tokenizer = parse_tokenizer(trained.tokenizer.encode(), "the model's tokenizer")
        longest = preparation.max_length or trained.max_length
        found = cls(task, tokenizer, longest, manners, Limits() if model is None else Limits.of(model))
        found.model = model
        return found

    @property
    def record(self) -> Mapping[str, Any]:
        """Plain values that `for_task` reads again."""
        name = "causal_lm" if self.task.is_preference else self.task.name  # as the model is used
        return {"name": name, "documents": self.task.documents, **self.manners.to_json()}

    def tokenized(self, columns: Mapping[str, Column], fields: Sequence[Field], source: str) -> dict[str, Column]:
        """Columns for `fields`, made of the documents of `columns`.

        Raises:
            BadInput: the model has no input for tokens; documents are too long, or nothing in them is learned.
        """
        found, self.notes = columns[DOCUMENTS], []
        assert isinstance(found, Documents)
        field = self._field(fields)
        if self.task.is_preference:
            sides = [self._rows(side, field, source) for side in sides_of(found.items, source)]
            rows = [row for pair in zip(*sides) for row in pair]
            check_answers([row.labels for row in rows], IGNORED, source)
        else:
            rows = self._learned(self._rows(found.items, field, source), source)
        if self.task.is_causal:
            for row in rows:
                row.labels = np.append(row.labels[1:], IGNORED)
        rows = self._packed(rows, fields, self._longest(field))
        self.index = np.array([row.document for row in rows])
        made: dict[str, Column] = {}
        pad = self._padding()[0] if self.tokenizer is not None else 0
        parts = parts_of(fields)
        if self.task.name == "seq2seq":
            decoder = parts[True] if tokens_of(fields, True) is not None else parts[False]
            made |= self._decoder(rows, decoder, field, pad)
            if decoder is parts[True] and (ids := tokens_of(fields)) is not None and ids.name not in columns:
                sources = [row.source for row in rows if row.source is not None]
                if len(sources) < len(rows):
                    raise BadInput(f"{source} has documents without a prompt, which the encoder reads")
                made[ids.name] = Tokens(sources, pad)
                made |= inputs_beside(parts[False], *number_tokens(sources), False)
        else:
            made[field.name] = Tokens([row.tokens for row in rows], pad)
            made |= inputs_beside(fields, [r.numbers for r in rows], [r.positions for r in rows], self.task.is_causal)
        for label in [f for f in fields if f.label and not f.name.endswith((REFERENCE, ADVANTAGE))]:
            made[label.name] = Tokens([row.labels for row in rows], IGNORED)
            if self.task.name == "masked_lm":
                self.masking = self._mask(field.name, label.name)
        others = {n: c.select(self.index) for n, c in columns.items() if n != DOCUMENTS and n not in made}
        made = {**others, **made}
        if self.task.is_preference:
            self.index = self.index[::2]
            labels = Tokens([row.labels for row in rows], IGNORED)
            return paired(made, fields, labels, self.model, self.batch_size(8, labels))
        return made

    def batch_size(self, asked: int, rows: Any) -> int:
        """The number of rows `asked` for, or fewer if their scores would need more than 128 MiB."""
        longest = int(max(rows.lengths, default=1)) if rows.lengths is not None else 1
        return max(1, min(asked, (1 << 25) // (longest * (self.limits.vocabulary or 1))))

    def _field(self, fields: Sequence[Field]) -> Field:
        """The input for the tokens that are learned."""
        of_decoder = self.task.name == "seq2seq" and tokens_of(fields, True) is not None
        found = tokens_of(fields, of_decoder)
        if found is None:
            raise no_tokens(fields)
        if found.shape == (1,):
            raise BadInput(
                f"the input {found.name!r} takes one token at a time, of which no next one can be learned\n"
                "  hint: export the model with a dynamic length of the sequence"
            )
        return found

    def _longest(self, field: Field) -> int | None:
        """The most tokens of a row: the setting, the length that the model fixes, or the tokenizer's."""
        own = None if self.tokenizer is None else (self.tokenizer.truncation or {}).get("max_length")
        return self.max_length or field.shape[0] or own

    def _rows(self, documents: Sequence[Mapping[str, Any]], field: Field, source: str) -> list[TokenRow]:
        longest = self._longest(field)
        if field.shape[0] is not None and self.max_length is not None and self.max_length > field.shape[0]:
            raise BadInput(f"max_length is {self.max_length}, and {field.name!r} takes {field.shape[0]} tokens")
        rows: list[TokenRow] = []
        truncated = cut = 0
        for number, (tokens, labels, ahead) in enumerate(self._encoded(documents, longest, source)):
            is_text = "text" in documents[number] and self.task.is_causal
            self._check_length(max(len(tokens), 0 if ahead is None else len(ahead)), longest, number, source)
            if longest is not None and max(len(tokens), 0 if ahead is None else len(ahead)) > longest:
                truncated, cut = truncated + (not is_text), cut + is_text
            starts = range(0, len(tokens), longest) if longest is not None and is_text else range(1)
            for start in starts:
                part = slice(start, None if longest is None else start + longest)
                rows.append(
                    TokenRow(tokens[part], labels[part], number, source=None if ahead is None else ahead[:longest])
                )
        if truncated:
            warn_caller(f"{truncated} of {len(documents)} rows of {source} are truncated to {longest} tokens")
        if cut:
            self.notes.append(f"{source}: {cut} of {len(documents)} texts are cut into pieces of {longest} tokens")
        return rows

    def _check_length(self, size: int, longest: int | None, number: int, source: str) -> None:
        known = [n for n in (self.limits.positions, self.manners.positions) if n is not None]
        most = min(known, default=MOST)
        if min(size, longest or size) > most and not (longest and not known):
            what = f"the model has {most} positions" if known else "no setting says how many the model takes"
            raise BadInput(
                f"row {number} of {source} has {size} tokens, and {what}\n"
                f"  hint: --max-length {most} (in Python max_length=) cuts what is longer"
            )

    def _encoded(
        self, documents: Sequence[Mapping[str, Any]], longest: int | None, source: str
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """For each document: its tokens, those that are learned, and the tokens of the encoder."""
        texts: dict[int, tuple[str, list[list[int]] | None]] = {}
        chats = [k for k, d in enumerate(documents) if "messages" in d and "input_ids" not in d]
        ahead: dict[int, str] = {}
        found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
        for k, document in enumerate(documents):
            if "input_ids" in document:
                found[k] = (*self._read_document(document, k, source), None)
            elif k in chats:
                continue
            elif "completion" in document and self.task.name == "seq2seq":
                ahead[k], texts[k] = document.get("prompt") or "", (document["completion"], None)
            elif "completion" in document:
                prompt = document.get("prompt") or ""
                whole = prompt + document["completion"]
                texts[k] = whole, [[len(prompt), len(whole)]]
            else:
                if "pair" in document:
                    raise BadInput(f"row {k} of {source} is a pair of answers\n  hint: --task dpo, or orpo")
                texts[k] = document["text"], None
        if (chats or texts) and self.tokenizer is None:
            raise BadInput(f"{source} has text, which needs a tokenizer\n  hint: --tokenizer tokenizer.json")
        chatted = dict(zip(chats, self.manners.render([documents[k] for k in chats], source))) if chats else {}
        sources = dict(zip(ahead, self._encode(list(ahead.values()), True, source, longest)))
        short = longest if self.task.name == "masked_lm" else None
        for group, special in ((chatted, False), (texts, True)):
            rows = self._encode([text for text, _ in group.values()], special, source, short)
            for (k, (_, spans)), (ids, starts) in zip(group.items(), rows):
                tokens, labels = self._ended(ids, starts, spans, special)
                found[k] = tokens, labels, sources[k][0] if k in sources else None
        return [found[k] for k in range(len(documents))]

    def _encode(
        self, texts: list[str], special: bool, source: str, longest: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and their first characters. A sentence encoder's row is truncated with its end."""
        if not texts:
            return []
        try:
            rows = list(encode(self.tokenizer, texts, None, special))
            long = [k for k, (ids, *_) in enumerate(rows) if longest is not None and len(ids) > longest]
            if long:
                warn_caller(f"{len(long)} of {len(texts)} rows of {source} are truncated to {longest} tokens")
                for k, row in zip(long, encode(self.tokenizer, [texts[k] for k in long], longest, special)):
                    rows[k] = row
        except BadInput as error:
            raise BadInput(f"the tokenizer fails on {source}: {error}") from error
        return [(ids, np.maximum.accumulate(starts) if len(starts) else starts) for ids, _, _, starts in rows]

    def _ended(
        self, ids: np.ndarray, starts: np.ndarray, spans: list[list[int]] | None, special: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with the end of a text, and those that are learned: in `spans` of characters, or all."""
        if self.task.name == "masked_lm":
            hidden = [i for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special]
            return ids, np.where(np.isin(ids, hidden), IGNORED, ids)
        end = self.manners.end(self.tokenizer)
        if special and end is not None and (not len(ids) or ids[-1] != end):
            ids, starts = np.append(ids, end), np.append(starts, starts[-1] if len(starts) else 0)
        learned = np.ones(len(ids), bool) if spans is None else np.zeros(len(ids), bool)
        for begin, stop in spans or ():
            learned |= (starts >= begin) & (starts < stop)
        return ids, np.where(learned, ids, IGNORED)

    def _read_document(self, document: Mapping[str, Any], number: int, source: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a document of tokens, and those that are learned."""
        tokens = np.asarray(document["input_ids"])
        labels = np.asarray(document.get("labels", tokens))
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or labels.shape != tokens.shape:
            raise BadInput(f"row {number} of {source}: input_ids are a list of whole numbers, and labels as many")
        most = self.limits.vocabulary
        if len(tokens) and (tokens.min() < 0 or (most is not None and tokens.max() >= most)):
            bad = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise BadInput(f"row {number} of {source} has the token {bad}; the model has {most}, from 0")
        return tokens.astype(np.int64), labels.astype(np.int64)

    def _learned(self, rows: list[TokenRow], source: str) -> list[TokenRow]:
        """The rows in which something is learned. Raises BadInput if there are none, or one token is all of it."""
        first = 1 if self.task.is_causal else 0  # nothing comes before the first token
        kept = [row for row in rows if (row.labels[first:] != IGNORED).any()]
        if not kept:
            raise BadInput(
                f"{source} has nothing to learn: no row has a label that counts\n"
                "  hint: conversations need turns of the role assistant, and texts two tokens"
            )
        counted = np.concatenate([row.labels[first:] for row in kept])
        counted = counted[counted != IGNORED]
        if len(counted) > 1 and (counted == counted[0]).all():
            raise BadInput(f"{source} has one label only: every label that counts is the token {counted[0]}")
        if len(kept) < len(rows):
            self.notes.append(f"{source}: {len(rows) - len(kept)} of {len(rows)} rows have nothing to learn")
        return kept

    def _packed(self, rows: list[TokenRow], fields: Sequence[Field], longest: int | None) -> list[TokenRow]:
        """Rows of several documents, where masks keep them apart."""
        if self.task.name != "causal_lm" or not self.task.pack or len(rows) < 2:
            return rows
        longest = longest or self.limits.positions
        if not masks_apart(fields):
            self.notes.append("documents are not packed: no mask of the model keeps those of a row apart")
            return rows
        packed: list[list[TokenRow]] = []
        size = 0
        for row in rows:
            if not packed or longest is None or size + len(row.tokens) > longest:
                packed.append([])
                size = 0
            packed[-1].append(row)
            size += len(row.tokens)
        self.notes.append(f"{len(rows)} documents are packed into {len(packed)} rows")
        return [join_rows(part) for part in packed]

    def _decoder(self, rows: list[TokenRow], fields: Sequence[Field], field: Field, pad: int) -> dict[str, Column]:
        """Inputs of a decoder: its labels, shifted by one behind the token that begins them."""
        start = self.manners.first(self.tokenizer)
        first = pad if start is None else start
        given = [np.append(first, np.where(r.tokens == IGNORED, pad, r.tokens)[:-1]) for r in rows]
        return {field.name: Tokens(given, pad), **inputs_beside(fields, *number_tokens(given), True)}

    def _mask(self, tokens: str, labels: str) -> Masking:
        mask = self.manners.token(self.tokenizer, "mask_token", ("[MASK]", "<mask>")) if self.tokenizer else None
        if mask is None:
            raise BadInput(
                "masked-lm needs the token that hides others, and the tokenizer has no [MASK] or <mask>\n"
                "  hint: tokenizer_config.json beside it names another one, mask_token"
            )
        return Masking(tokens, labels, mask, self.limits.vocabulary or self.tokenizer.get_vocab_size(), IGNORED)


def prepared(
    data: Any,
    task: TaskRecipe,
    preparation: PreparationRecipe,
    trained: Preprocessing,
    model: ir.Model | None,
) -> tuple[Any, dict[str, Any]]:
    """`data` and the arguments of `Data` for it: with the task of a language model, if there is one.

    Args:
        data: see `open_documents`.
        task: the one that is asked for, if any.
        preparation: how the data become arrays.
        trained: as the model was trained, which may be for a task.
        model: the model that runs over the data.

    Raises:
        BadInput: a setting does not fit, or the data cannot be read.
    """
    language = Language.for_task(task, preparation, trained, model)
    if language is None:
        return data, preparation.arguments(trained)
    columns = open_documents(data, language.task.documents, preparation.inputs)
    if not task.name:
        documents = columns.get(DOCUMENTS)
        if not isinstance(documents, Documents) or not have_no_labels(documents.items):
            return data, preparation.arguments(trained)
    return columns, {"inputs": preparation.inputs, "text": language, "trained": trained}


def prepared_stream(
    task: TaskRecipe, preparation: PreparationRecipe, trained: Preprocessing, model: ir.Model | None
) -> dict[str, Any]:
    """The arguments of `Stream` for a stream of rows, or of documents where a task is asked for (see `prepared`).

    Raises:
        BadInput: a setting does not fit, or the task needs all rows.
    """
    language = Language.for_task(task, preparation, trained, model) if task.name else None
    if language is None:
        return preparation.arguments(trained)
    if task.is_preference:
        raise BadInput(f"the task {task.task} compares pairs of all rows; it does not learn from a stream")
    if task.documents == "file":
        raise BadInput("a stream of text has paragraphs; documents='file' reads a file as one")
    cut = functools.partial(streamed_documents, inputs=preparation.inputs)
    return {"inputs": preparation.inputs, "text": language, "trained": trained, "cut": cut}

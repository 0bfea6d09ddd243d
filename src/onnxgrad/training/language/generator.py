"""Text that a language model generates: prompts in, completions out.

Prompts of the same number of tokens run together, so no prompt is padded: a completion does not depend on the other
prompts, for models without a mask or positions, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, reason_of
from onnxgrad.runtime import Options
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.text import Text
from onnxgrad.training.data.tokenizer_file import encode
from onnxgrad.training.language.chat import Manners
from onnxgrad.training.language.decoder import Decoder, choice
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.limits import Limits

#: The most prompts that run together.
MOST = 32


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        prompt: its text; None for a prompt of tokens without a tokenizer.
        text: the text behind it; None without a tokenizer.
        prompt_tokens, tokens: the numbers of both.
        finish: why it ends: "end" at a token that ends a text, "stop" at a text of `stop`, "length" after
            `max_new_tokens`, or "positions" where the model reads no more tokens.
    """

    prompt: str | None
    text: str | None
    prompt_tokens: list[int]
    tokens: list[int]
    finish: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


class Generator:
    """A language model with its tokenizer.

    Args:
        model: see `onnxgrad.generate`.
        recipe: settings.
        tokenizer: see `onnxgrad.generate`.
        options: how ONNX Runtime runs the model.
        encoder: see `onnxgrad.generate`.
    """

    def __init__(
        self,
        model: ir.Model,
        recipe: GenerationRecipe,
        tokenizer: Any = None,
        options: Options | None = None,
        encoder: ir.Model | None = None,
    ) -> None:
        trained = Preprocessing.of(model)
        self.recipe, self.manners = recipe, Manners.of(trained.task)
        text = trained.own_text() if tokenizer is None and trained.tokenizer else Text.of(tokenizer, None)
        self.tokenizer: Any = None if text is None else text.tokenizer
        if isinstance(tokenizer, (str, os.PathLike)):
            self.manners = Manners.beside(Path(tokenizer))
        if recipe.stop and self.tokenizer is None:
            raise BadInput("stop is text, which needs a tokenizer\n  hint: --tokenizer tokenizer.json")
        self.end = self._end()
        self.limits = Limits.of(model)
        self.decoder = Decoder(model, options, recipe.cache, self.limits.positions, encoder)
        self.encoder, self.begin = self.decoder.encoder, np.empty(0, np.int64)
        self.longest = self.decoder.longest  # of a prompt
        if self.encoder is not None:
            self.begin = self._begin()
            self.longest = None if encoder is None else Limits.of(encoder).positions

    def __call__(self, prompts: Any) -> list[Completion]:
        """The completions of `prompts`."""
        texts, rows = self._rows(prompts)
        found: dict[int, Completion] = {}
        groups: dict[int, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault(len(row), []).append(at)
        size = self.decoder.rows or MOST
        for group in groups.values():
            for start in range(0, len(group), size):
                part = group[start : start + size]
                found |= zip(part, self._completed([rows[i] for i in part], [texts[i] for i in part], part))
        return [found[i] for i in range(len(rows))]

    def _rows(self, prompts: Any) -> tuple[list[str | None], list[np.ndarray]]:
        """The texts of the prompts, where they have some, and their tokens."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer, Mapping))):
            prompts = [prompts]
        prompts = list(prompts)
        if not prompts:
            raise BadInput("there is no prompt")
        texts: list[str | None] = [p if isinstance(p, str) else None for p in prompts]
        rows: dict[int, np.ndarray] = {}
        plain = [k for k, p in enumerate(prompts) if isinstance(p, str)]
        chats = [k for k, p in enumerate(prompts) if not isinstance(p, str) and len(p) and isinstance(p[0], Mapping)]
        if (plain or chats) and self.tokenizer is None:
            raise BadInput("prompts of text need a tokenizer\n  hint: --tokenizer tokenizer.json")
        if chats:
            asked = [{"messages": prompts[k], "learned_from": len(prompts[k]), "is_prompt": True} for k in chats]
            for k, (text, _) in zip(chats, self.manners.render(asked, "the list of prompts")):
                texts[k] = text
        for group, special in ((plain, True), (chats, False)):  # a template writes special tokens itself
            rows |= zip(group, self._encode([texts[k] or "" for k in group], special))
        for k, prompt in enumerate(prompts):
            if k not in rows and self.encoder is not None and self.encoder.features is not None:
                rows[k] = np.asarray(prompt, np.float32)
                continue
            if k not in rows:
                rows[k] = np.asarray(prompt)
                self._check(rows[k], "a prompt")
                texts[k] = None if self.tokenizer is None else self._text(rows[k].tolist(), False)
            self._check(rows[k], f"the prompt {(texts[k] or '')[:40]!r}")
        return texts, [r if r.dtype.kind == "f" else r.astype(np.int64) for _, r in sorted(rows.items())]

    def _encode(self, texts: list[str], special: bool) -> list[np.ndarray]:
        """The tokens of `texts`; those that go on are without the token that ends a text, which some tokenizers add."""
        if not texts:
            return []
        try:
            rows = [ids for ids, *_ in encode(self.tokenizer, texts, None, special)]
        except BadInput as error:
            raise BadInput(f"the tokenizer fails on a prompt: {error}") from error
        if not special or self.end is None or self.encoder is not None:
            return rows
        return [row[:-1] if len(row) > 1 and row[-1] == self.end else row for row in rows]

    def _check(self, row: np.ndarray, what: str) -> None:
        """Raise BadInput unless `row` has tokens that the model knows, and not too many."""
        most, longest = self.limits.vocabulary, self.longest
        if row.ndim != 1 or not row.size:
            raise BadInput(f"{what} has no tokens")
        if row.dtype.kind not in "iu":
            raise BadInput(f"{what} is neither text nor a list of tokens")
        if row.min() < 0 or (most is not None and row.max() >= most):
            bad = int(row.min() if row.min() < 0 else row.max())
            raise BadInput(
                f"{what} has the token {bad}, and the model has {most} tokens: the tokenizer is that of another model"
            )
        if longest is not None and len(row) > longest:
            raise BadInput(f"{what} has {len(row)} tokens, and the model reads {longest}")

    def _completed(self, rows: list[np.ndarray], texts: list[str | None], numbers: list[int]) -> list[Completion]:
        """The completions of `rows` of one length."""
        count = len(rows)
        fixed = self.decoder.rows or count
        filled = [rows[min(i, count - 1)] for i in range(fixed)]
        states = None if self.encoder is None else self.encoder.states(filled)
        ids = np.stack(filled) if self.encoder is None else np.tile(self.begin, (fixed, 1))
        begin = ids.shape[1]
        choose = choice(self.recipe, np.array([*numbers, *[numbers[-1]] * (fixed - count)]))
        found: list[Completion | None] = [None] * count

        def ended(ids: np.ndarray) -> bool:
            for k in range(count):
                found[k] = found[k] or self._finished(texts[k], rows[k], ids[k, begin:])
            return all(found)

        steps, longest = self.recipe.max_new_tokens, self.decoder.longest
        room = steps if longest is None else min(steps, longest - begin + 1)  # the last token is not read
        ids = self.decoder.extend(ids, room, choose, ended, states)
        why = "length" if room == steps else "positions"
        for k in range(count):
            found[k] = found[k] or self._completion(texts[k], rows[k], ids[k, begin:], why)
        return [c for c in found if c is not None]

    def _finished(self, text: str | None, prompt: np.ndarray, new: np.ndarray) -> Completion | None:
        """The completion, if its last token ends it."""
        if self.end is not None and new[-1] == self.end:
            return self._completion(text, prompt, new, "end")
        if not self.recipe.stop:
            return None
        made = self._completion(text, prompt, new, "stop")
        written = made.text or ""
        places = [at for stop in self.recipe.stop if (at := written.find(stop)) >= 0]
        return replace(made, text=written[: min(places)]) if places else None

    def _completion(self, text: str | None, prompt: np.ndarray, new: np.ndarray, finish: str) -> Completion:
        before, after = [] if prompt.dtype.kind == "f" else prompt.tolist(), new.tolist()
        made = None if self.tokenizer is None else self._text(after)
        if (
            self.tokenizer is not None and self.encoder is None
        ):  # of all tokens, as a tokenizer may write the first word without its space
            whole, first = self._text([*before, *after]), self._text(before)
            made = whole[len(first) :] if whole.startswith(first) else made
        return Completion(text, made, before, after, finish)

    def _text(self, tokens: Sequence[int], skips: bool = True) -> str:
        """The text of `tokens`; without the special ones, if it `skips` them."""
        try:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skips))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise BadInput(f"the tokenizer cannot decode tokens: {reason_of(error)}") from error

    def _begin(self) -> np.ndarray:
        """The tokens that a decoder behind an encoder begins with."""
        given = self.recipe.decoder_start
        if isinstance(given, str):
            if self.tokenizer is None:
                raise BadInput("decoder_start is text, which needs a tokenizer\n  hint: --tokenizer tokenizer.json")
            found = self._encode([given], False)[0]
        elif given is not None:
            found = np.asarray(given)
        else:
            first = self.manners.first(self.tokenizer)
            if first is None:
                raise BadInput(
                    "no file says which token the decoder begins with\n"
                    "  hint: --decoder-start '<pad>', or config.json beside the tokenizer"
                )
            found = np.array([first])
        self._check(found, "decoder_start")
        return found.astype(np.int64)

    def _end(self) -> int | None:
        """The token that ends a text; None if there is none."""
        given = self.recipe.end_token
        if given is None:
            return None if self.tokenizer is None else self.manners.end(self.tokenizer)
        if isinstance(given, str) and given.lower() == "none":
            return None
        if isinstance(given, int):
            return given
        found = None if self.tokenizer is None else self.tokenizer.token_to_id(given)
        if found is None and given.isdecimal():
            return int(given)
        if found is None:
            raise BadInput(f"end_token {given!r} is no token of the tokenizer")
        return int(found)

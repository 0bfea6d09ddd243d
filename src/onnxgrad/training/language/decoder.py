"""A language model that continues token rows: scores of the next token, with or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from onnxgrad.training.graph.decoder_inputs import DecoderInputs
from onnxgrad.training.language.encoder import Encoder
from onnxgrad.training.language.generation_recipe import GenerationRecipe

#: A function that picks the next token of each row from the scores [N, V].
Choice = Callable[[np.ndarray], np.ndarray]


class Decoder:
    """A session of a language model.

    Args:
        model: with an input of tokens and an output of scores.
        options: of the runtime.
        cache: use the cache that the model takes.
        positions: the most tokens that the model reads, if it has a limit.
        encoder: the file of the encoder, whose states it reads.

    Attributes:
        encoder: the encoder, in its own file or in that of the decoder; None without one.
        longest: the most tokens that it reads; None without a limit.

    Raises:
        BadInput: it is no language model, or an input does not follow from tokens.
    """

    def __init__(
        self,
        model: ir.Model,
        options: Options | None = None,
        cache: bool = True,
        positions: int | None = None,
        encoder: ir.Model | None = None,
    ) -> None:
        self.inputs = DecoderInputs.of(model)
        self.encoder = Encoder.of(self.inputs, encoder, options)
        self.session = Session(model, options)
        self.states: Mapping[str, np.ndarray] = {}
        self.logits = self.inputs.logits.name or ""
        self.cached = cache and bool(self.inputs.pasts)
        shape = self.inputs.ids.shape
        assert shape is not None  # [N, T], as its role is by that
        self.rows, self.width = (d if isinstance(d, int) else None for d in shape)
        most = [n for n in (positions, None if self.cached else self.width) if n is not None]
        self.longest = min(most, default=None)

    def extend(
        self,
        ids: np.ndarray,
        steps: int,
        choose: Choice,
        ended: Callable[[np.ndarray], bool],
        states: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Rows of tokens [N, T] of one length, with up to `steps` more tokens.

        Args:
            ids: tokens of the prompts.
            steps: the most tokens to add.
            choose: the next tokens of the rows.
            ended: called with all tokens after every step: True ends the loop.
            states: of the encoder (see `Encoder.states`).
        """
        self.states = states or {}
        cache: dict[str, np.ndarray] | None = None
        fed = 0  # tokens whose keys and values are in the cache
        for _ in range(steps):
            if self.cached:
                scores, cache = self._with_cache(ids[:, fed:], cache, fed)
                fed = ids.shape[1]
            else:
                scores = self._of_all(ids)
            ids = np.concatenate([ids, choose(scores)[:, None]], 1)
            if ended(ids):
                break
        return ids

    def _with_cache(
        self, ids: np.ndarray, cache: dict[str, np.ndarray] | None, before: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Scores of the token after `ids`, and the cache with them; a model of a fixed width reads them in parts."""
        width = self.width or ids.shape[1]
        if ids.shape[1] % width:
            raise BadInput(
                f"the model reads {width} tokens at a time, and the prompt has {before + ids.shape[1]}\n"
                "  hint: cache=False (--no-cache) pads it"
            )
        outputs = [self.logits, *(p.output for p in self.inputs.pasts if p.output)]
        for start in range(0, ids.shape[1], width):
            part = ids[:, start : start + width]
            feeds = self.inputs.feeds(part, cache=cache, before=before + start) | dict(self.states)
            found = self.session.run(feeds, outputs)
            cache = self.inputs.next_cache(found, cache)
        return found[self.logits][:, -1], cache or {}

    def _of_all(self, ids: np.ndarray) -> np.ndarray:
        """Scores of the token after `ids`, which are padded behind for a model of a fixed width."""
        size = ids.shape[1]
        width = self.width or size
        mask = np.zeros((len(ids), width), np.int64)
        mask[:, :size] = 1
        padded = np.pad(ids, ((0, 0), (0, width - size)))
        found = self.session.run(self.inputs.feeds(padded, mask) | dict(self.states), [self.logits])[self.logits]
        return found[:, min(size, found.shape[1]) - 1]


def choice(recipe: GenerationRecipe, rows: np.ndarray) -> Choice:
    """The choice of tokens that `recipe` asks for; every row draws by its own number of `rows`."""
    if not recipe.heat:
        return lambda scores: scores.argmax(1)
    draws = [np.random.default_rng([recipe.seed, int(row)]) for row in rows]

    def choose(scores: np.ndarray) -> np.ndarray:
        return np.array([_drawn(s.astype(np.float64), recipe, rng) for s, rng in zip(scores, draws)])

    return choose


def shares(scores: np.ndarray, recipe: GenerationRecipe) -> np.ndarray:
    """The probabilities [V] by which a token is drawn: scores ÷ temperature, then `top_k`, then `top_p`."""
    scores = scores / recipe.heat
    order = np.argsort(-scores, kind="stable")
    kept = np.ones(len(order), bool)
    if recipe.top_k is not None:
        kept[recipe.top_k :] = False
    ranked = np.where(kept, np.exp(scores[order] - scores[order[0]]), 0)
    ranked /= ranked.sum()
    if recipe.top_p is not None:
        ranked[ranked.cumsum() - ranked >= recipe.top_p] = 0
        ranked /= ranked.sum()
    found = np.empty_like(ranked)
    found[order] = ranked
    return found


def _drawn(scores: np.ndarray, recipe: GenerationRecipe, rng: np.random.Generator) -> Any:
    return rng.choice(len(scores), p=shares(scores, recipe))

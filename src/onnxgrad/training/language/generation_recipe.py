"""The recipe of generation: how many tokens, how each of them is chosen, and where a text ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind, check_whole
from onnxgrad.settings import setting


@dataclass(frozen=True)
class GenerationRecipe:
    """The choice of tokens, and the end of a text."""

    panel: ClassVar[str] = "Generation"

    max_new_tokens: int = setting(64, "The most tokens that are added to a prompt.", least=1)
    temperature: float | None = setting(
        None,
        "Scores are divided by it before a token is drawn; 0: always the likeliest token. Default: 0, or 1 with "
        "`top_k` or `top_p`.",
        least=0,
    )
    top_k: int | None = setting(None, "Draw from the so many likeliest tokens.", least=1)
    top_p: float | None = setting(None, "Draw from the likeliest tokens that have this probability together.")
    seed: int = setting(0, "Decides which tokens are drawn.")
    stop: Sequence[str] = setting((), "Text that ends a completion, and is cut off.", command=None, many=True)
    end_token: str | int | None = setting(
        None,
        "The token that ends a completion: its text or its number; none: no token does. Default: the tokenizer's own.",
        kind=str,
    )
    decoder_start: str | Sequence[int] | None = setting(
        None,
        "Text (in Python also tokens) that a decoder behind an encoder begins with. Default: the token that "
        "config.json names, or that of padding.",
        kind=str,
    )
    cache: bool = setting(True, "Keep keys and values of earlier tokens, where the model takes them.", off="--no-cache")

    def __post_init__(self) -> None:
        check_whole(1, max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        check_whole(0, seed=self.seed)
        for name in ("temperature", "top_p"):
            check_kind(name, getattr(self, name), (int, float), "a number")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise BadInput(f"temperature is a number from 0, not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is a probability above 0, at most 1, not {self.top_p}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise BadInput("top_k and top_p draw tokens, and temperature 0 takes the likeliest one: drop either")
        texts = self.stop if isinstance(self.stop, (list, tuple)) else (None,)
        if not all(isinstance(text, str) and text for text in texts):
            raise BadInput(f"stop is a list of texts, as ['\\n'], not {self.stop!r}")

    @property
    def heat(self) -> float:
        """The temperature; 0 for greedy choice."""
        draws = self.top_k is not None or self.top_p is not None
        return float(draws) if self.temperature is None else float(self.temperature)

"""Types of keywords, for editors; written from the recipes by ``python -m tools.settings``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class GenerationKeywords(TypedDict, total=False):
    """Keywords of `generate`."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    stop: Sequence[str]
    end_token: str | int | None
    decoder_start: str | Sequence[int] | None
    cache: bool

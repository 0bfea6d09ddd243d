"""Types of keywords, for editors; written from the recipes by ``python -m tools.settings``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from onnxgrad.training.data import Images


class PreparationKeywords(TypedDict, total=False):
    """Keywords of the preparation of data."""

    inputs: Mapping[str, str] | None
    images: Images | None
    image_mean: float | tuple[float, ...] | None
    image_std: float | tuple[float, ...] | None
    tokenizer: Any
    max_length: int | None


class MeasuringKeywords(PreparationKeywords, total=False):
    """Keywords of `predict`."""

    task: str | None
    documents: str
    pack: bool


class EvaluationKeywords(MeasuringKeywords, total=False):
    """Keywords of `evaluate`."""

    missing: str | None
    class_axis: int | None

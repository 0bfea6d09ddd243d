"""Metrics of texts beside reference texts, by the packages sacrebleu and rouge-score."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.metrics.running import Mean, Running, Whole


def same_texts(texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """1 for each text that equals its reference, but for space at both ends."""
    return np.array([text.strip() == reference.strip() for text, reference in zip(texts, references)])


def of_corpus(name: str) -> Callable[[], Running]:
    """A metric of sacrebleu over all texts: ``corpus_bleu`` or ``corpus_chrf``, from 0 to 100."""

    def score(texts: np.ndarray, references: np.ndarray) -> float:
        measure = getattr(_imported("sacrebleu", "sacrebleu"), name)
        return float(measure(texts.tolist(), [references.tolist()]).score)

    return lambda: Whole(score)


def rouge(kind: str) -> Callable[[], Running]:
    """The F-measure of ROUGE, from 0 to 1: a mean over texts."""

    def scores(texts: Sequence[str], references: Sequence[str]) -> np.ndarray:
        scorer = _imported("rouge_score.rouge_scorer", "rouge-score").RougeScorer([kind], use_stemmer=False)
        return np.array([scorer.score(r, t)[kind].fmeasure for t, r in zip(texts, references)])

    return lambda: Mean(scores)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"this metric needs {package}\n  hint: pip install 'onnxgrad[text-metrics]'") from error

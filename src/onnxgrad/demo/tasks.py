"""The demonstrations: each is a model, data, and a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxgrad.demo import handwriting, reviews
from onnxgrad.demo.digits import MODEL, digits, shifted
from onnxgrad.training import with_head
from onnxgrad.training.loop.html_report import Picture

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One demonstration.

    Attributes:
        model: the model before: a path, or a model.
        data: training and test arrays.
        recipe: arguments of `attach`.
        epochs: how often every row is seen.
        batch_size: rows per step.
        schedule: of the learning rate.
        pictures: what a person would look at: files before and after, test arrays.
        adapted: arguments of `LoRA`, and what of the recipe is otherwise with adapters; None: there is nothing
            pretrained to adapt.
        compare: another way to do the same, in words, and what it reaches (its accuracy).
    """

    model: Callable[[], Any]
    data: Callable[[], tuple[Arrays, Arrays]]
    recipe: Mapping[str, Any]
    epochs: int
    batch_size: int
    schedule: str = "cosine"
    pictures: Callable[[Path, Path, Arrays], list[Picture]] | None = None
    adapted: Mapping[str, Any] | None = None
    compare: tuple[str, Callable[[Arrays, Arrays], float]] | None = field(default=None)


def _digits() -> tuple[Arrays, Arrays]:
    training, test = digits()
    return shifted(training), test


TASKS = {
    "digits": Task(
        model=lambda: MODEL,
        data=_digits,
        recipe={"loss": "cross_entropy", "optimizer": "adamw", "learning_rate": 3e-3, "weight_decay": 0.5},
        epochs=8,
        batch_size=64,
    ),
    "handwriting": Task(
        model=handwriting.MODEL.path,
        data=handwriting.strips,
        recipe={"loss": "ctc", "optimizer": "adam", "learning_rate": 1e-3},
        epochs=2,
        batch_size=16,
        pictures=handwriting.pictures,
    ),
    "reviews": Task(
        model=lambda: with_head(reviews.MODEL.path(), 2, of=reviews.POOLED),
        data=reviews.reviews,
        recipe={"loss": "cross_entropy", "optimizer": "adamw", "learning_rate": 1e-4},
        epochs=2,
        batch_size=32,
        schedule="cosine:warmup=50",
        pictures=reviews.pictures,
        adapted={"learning_rate": 2e-3, "targets": ["type:MatMul", "!logits_*"], "train_also": ["logits_*"]},
        compare=("logistic regression on what the model gives as it is", reviews.frozen),
    ),
}

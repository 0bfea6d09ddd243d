"""Types of keywords, for editors; written from the recipes by ``python -m tools.settings``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.distributed import Collective
from onnxgrad.runtime import Options
from onnxgrad.training.build.keywords import AlgorithmKeywords
from onnxgrad.training.data import Augment
from onnxgrad.training.data.keywords import PreparationKeywords
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.loop_recipe import File
from onnxgrad.training.optim.schedules import RateSchedule
from onnxgrad.training.parallel.ranks import Ranks


class StepKeywords(AlgorithmKeywords, total=False):
    """Keywords of a step."""

    task: str | None
    documents: str
    pack: bool
    classes: Sequence[str] | str | None
    image_size: int | None
    box_loss: str | None
    place_offset: float | None
    unfold_bn: bool
    accumulate: int
    memory: int | str | None
    peak: int | str | None
    precision: str | None
    attention_rows: int | None
    dims: Mapping[str, int] | None
    entry: int | None
    evaluation: Evaluation | None
    options: Options | None
    threads: int | None
    target: str | None
    provider: Sequence[str] | None
    sync_every: int
    outer_rate: float | None
    outer_momentum: float | None
    compress: str | None
    shard_optimizer: bool
    sync_batch_norm: bool
    distributed: Ranks | Collective | str | None


class TrainerKeywords(StepKeywords, total=False):
    """Keywords of `Trainer`."""

    output: str | None
    history: Any
    metrics: Sequence[str]
    schedule: Any


class DataKeywords(PreparationKeywords, total=False):
    """Keywords of the data that a model is trained on."""

    validation: Any
    validation_split: float | None
    stream: bool
    shuffle_buffer: int | None
    classes: Sequence[str] | str | None
    missing: str | None
    categories: str | None
    standardize: bool
    augment: Augment | str | None


class FitKeywords(DataKeywords, total=False):
    """Keywords of `Trainer.fit`."""

    epochs: int
    batch_size: int
    steps_per_epoch: int | None
    seed: int
    shuffle: bool
    sample: str
    schedule: RateSchedule | str | None
    evaluate_every: int | None
    checkpoint: File | None
    checkpoint_seconds: float
    resume: bool
    accept_changes: bool
    metrics: Sequence[str] | str | None
    monitor: str
    patience: int | None
    keep_best: bool
    keep: int | None
    history: File | None
    plot: File | None
    report: File | None
    log: File | None
    tensorboard: File | None
    mlflow: str | None
    wandb: str | None
    sample_prompts: Sequence[str]
    callbacks: Sequence[Callback]
    progress: bool | None


class TrainKeywords(StepKeywords, FitKeywords, total=False):
    """Keywords of `train`."""

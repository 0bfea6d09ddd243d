"""Types of keywords, for editors; written from the recipes by ``python -m tools.settings``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from onnxgrad.training.adapters.config import Adapter
from onnxgrad.training.optim.config import Group, Optimizer


class AlgorithmKeywords(TypedDict, total=False):
    """Keywords of all that `attach` reads."""

    loss: Any
    prediction: str | None
    labels: str | None
    pairs: str | Sequence[str] | None
    optimizer: Optimizer | str | None
    learning_rate: float | None
    weight_decay: float | None
    momentum: float | None
    convention: str | None
    groups: Sequence[Group | str] | None
    clip_norm: float | None
    clip_value: float | None
    ema: float | None
    swa: int | None
    swa_every: int
    trainable: Sequence[str] | None
    freeze: Sequence[str]
    untie: bool
    freeze_bn: bool | Sequence[str]
    train_mode: bool
    dropout: Mapping[str, float] | None
    update: str | None
    integers: str
    prune: Sequence[str]
    adapter: Adapter | None
    lora: int | None
    dora: bool
    rslora: bool
    lora_init: str | None
    vera: int | None
    loha: int | None
    lokr: int | None
    ia3: bool
    ia3_feedforward: Sequence[str]
    lora_alpha: float | None
    lora_targets: str | Sequence[str] | None
    lora_dropout: float | None
    alpha: Any
    eps: Any
    centered: Any
    betas: Any
    momentum_decay: Any
    beta2_decay: Any
    least: Any
    clip: Any
    nesterov: Any
    adjust: Any
    damping: Any
    iterations: Any
    tolerance: Any
    rate: Any
    lr: Any
    decay: Any


class AttachKeywords(AlgorithmKeywords, total=False):
    """Keywords of `attach`."""

    output: str | None
    history: Any

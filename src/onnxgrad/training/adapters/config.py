"""How weights are adapted, as a value: `LoRA`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnxgrad.errors import BadInput
from onnxgrad.keywords import checked_fields

ATTENTION = "attention"


@checked_fields
@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation (Hu et al. 2021): W + s·A·B, of which A and B are trained and W is a constant.

    It is written beside each node that reads W, as y + s·(x·A)·B, which costs and keeps little. B begins with zeros
    (beside embeddings: A), so that the adapted model is the model as it was. The other factor is drawn as PEFT
    draws it: uniformly within ±1/√fan_in, normally beside embeddings.

    Args:
        rank: columns of A and rows of B. Beside a convolution with groups: for each group.
        alpha: s is alpha/rank; default: twice the rank.
        targets: which weights, one pattern or several: ``attention`` (the projections around products of activations),
            a name of a weight or of the module that it belongs to, the end of such a name (``q_proj``), a glob,
            ``type:MatMul,Gemm,Conv,Gather``, ``all``; what begins with ``!`` is left out.
        dropout: the share of x that is dropped before A, in training.
        rslora: s is alpha/√rank (Kalajdzievski 2023).
        train_also: weights that train as a whole beside the adapters, as `attach` takes them: ``*.bias``, ``head.*``.
        seed: decides the first factors.

    Raises:
        BadInput: a number out of its range.
    """

    rank: int = 8
    alpha: float | None = None
    targets: str | Sequence[str] = ATTENTION
    dropout: float = 0.0
    rslora: bool = False
    train_also: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise BadInput(f"the rank of an adapter is a whole number from 1 on, not {self.rank!r}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise BadInput(f"the alpha of an adapter must be positive, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"the dropout of an adapter must be in [0, 1), not {self.dropout}")
        if not self.patterns:
            raise BadInput("`targets` is empty: there is nothing to adapt")
        if isinstance(self.train_also, str):
            object.__setattr__(self, "train_also", (self.train_also,))

    @property
    def patterns(self) -> list[str]:
        """The `targets`, one by one."""
        return [self.targets] if isinstance(self.targets, str) else list(self.targets)

    @property
    def strength(self) -> float:
        """The `alpha`, given or not."""
        return 2.0 * self.rank if self.alpha is None else float(self.alpha)

    @property
    def scale(self) -> float:
        """The factor s of A·B."""
        return self.strength / (math.sqrt(self.rank) if self.rslora else self.rank)

"""Settings of the exchanges between processes: frequency, bits, and the owner of the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.keywords import check_kind, check_whole
from onnxgrad.settings import setting

COMPRESSIONS = ("fp16",)
#: Of the outer step; the best values of Douillard et al.
RATE, MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Exchanges:
    """Settings for the exchange of gradients, weights and state between processes.

    A single process exchanges nothing.

    Raises:
        BadInput: a number is out of its range, or two settings exclude each other.
    """

    panel: ClassVar[str] = "Run"

    sync_every: int = setting(
        1, "Processes that train together take so many steps on their own, and then an outer one together (DiLoCo)."
    )
    outer_rate: float | None = setting(None, f"Learning rate of the outer step of `sync_every`. Default: {RATE}.")
    outer_momentum: float | None = setting(
        None, f"Nesterov momentum of the outer step of `sync_every`. Default: {MOMENTUM}."
    )
    compress: str | None = setting(None, "Send gradients between processes in fewer bytes, with error feedback: fp16.")
    shard_optimizer: bool = setting(
        False,
        "Processes that train together each keep their part of the optimizer's state (ZeRO-1), which takes that much "
        "less memory.",
        python="All of them then call what reads the state: save, state, training_model.",
    )
    sync_batch_norm: bool = setting(
        False,
        "BatchNormalization takes the statistics of the rows of all processes that train together, not of each.",
    )

    def __post_init__(self) -> None:
        check_whole(1, sync_every=self.sync_every)
        for name in ("outer_rate", "outer_momentum"):
            check_kind(name, getattr(self, name), (int, float), "a number")
        for name in ("shard_optimizer", "sync_batch_norm"):
            check_kind(name, getattr(self, name), bool, "true or false")
        if self.compress is not None and self.compress not in COMPRESSIONS:
            raise UnknownName(self.compress, COMPRESSIONS, "compression")
        if not 0 < self.rate < float("inf"):
            raise BadInput(f"outer_rate must be positive, not {self.rate}")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"outer_momentum must be in [0, 1), not {self.momentum}")
        if self.shard_optimizer and self.sync_every > 1:
            raise BadInput(
                "shard_optimizer does not go with sync_every: a rank that steps on its own needs all of the state"
            )
        if self.shard_optimizer and self.compress is not None:
            raise BadInput("shard_optimizer does not go with compress: the rounding losses are as large as the state")
        if self.sync_batch_norm and self.sync_every > 1:
            raise BadInput(
                "sync_batch_norm does not go with sync_every: ranks that step on their own share no statistics"
            )

    @property
    def rate(self) -> float:
        """The learning rate of the outer step."""
        return RATE if self.outer_rate is None else self.outer_rate

    @property
    def momentum(self) -> float:
        """The momentum of the outer step."""
        return MOMENTUM if self.outer_momentum is None else self.outer_momentum

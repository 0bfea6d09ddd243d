"""How ranks are asked to exchange what they have: how often, in how many bits, and whether each keeps all state."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgrad.errors import BadInput, UnknownName

COMPRESSIONS = ("fp16",)
#: Of the outer step; those that Douillard et al. found best.
RATE, MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Exchanges:
    """How ranks exchange what they have. One rank has nothing to exchange: then it is of no matter.

    Attributes:
        sync_every: steps between two exchanges, 1 or more (see `LocalSteps`).
        outer_rate, outer_momentum: of the outer step after them; default: those of `rate` and `momentum`.
        compress: "fp16" sends 16-bit numbers (see `HalfSums`).
        shard_optimizer: each rank keeps its part of the state of the optimizer alone (see `Sharded`).
        sync_batch_norm: BatchNormalization takes the statistics of the rows of all ranks (see `synchronize`).

    Raises:
        BadInput: a number is out of its range, or two of them exclude each other.
    """

    sync_every: int = 1
    outer_rate: float | None = None
    outer_momentum: float | None = None
    compress: str | None = None
    shard_optimizer: bool = False
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise BadInput(f"sync_every must be at least 1, not {self.sync_every}")
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
            raise BadInput("shard_optimizer does not go with compress: what rounding loses is as large as the state")
        if self.sync_batch_norm and self.sync_every > 1:
            raise BadInput(
                "sync_batch_norm does not go with sync_every: ranks that step on their own share no statistics"
            )

    @property
    def rate(self) -> float:
        """That of the outer step."""
        return RATE if self.outer_rate is None else self.outer_rate

    @property
    def momentum(self) -> float:
        """That of the outer step."""
        return MOMENTUM if self.outer_momentum is None else self.outer_momentum

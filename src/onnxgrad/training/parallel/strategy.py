"""Strategies: the distribution of rows, gradients and optimizer state over the processes of a run.

A trainer chooses one before its step is compiled. The loop calls the same methods of every strategy, that of a single
process included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.on_device import OnDevice
from onnxgrad.training.parallel.compared_rows import ComparedRows, ComparedRowsSharded
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.local_steps import LocalSteps
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.ranks import Ranks, SingleRank
from onnxgrad.training.parallel.sharded import Sharded
from onnxgrad.training.parallel.shares import Shares, arrangement
from onnxgrad.training.step.accumulate import Accumulating, SplitStep
from onnxgrad.training.step.cached_gradients import CachedGradients, CachedStep

AnyMachine = StepRunner | OnDevice | Accumulating
R = TypeVar("R")


class Strategy:
    """The strategy of a single process; the base class of those of several.

    Args:
        ranks: the processes that train together.
        exchange: settings of the exchange of gradients, weights and state.

    Attributes:
        machine: the step with the state that this process has of it (see `use`).
        shares_state: each rank has a part of the optimizer's state, so that all ranks read, write and save it together.
    """

    shares_state = False
    machine: AnyMachine

    def __init__(self, ranks: Ranks | None = None, exchange: Exchanges | None = None) -> None:
        self.ranks, self.exchange = ranks or SingleRank(), exchange or Exchanges()
        self._is_asked_to_stop = False

    # --- building ------------------------------------------------------------------------------

    def arrangement(self) -> Callable[[SplitStep], Sequence[str]] | None:
        """Order of the gradients in the flat bucket (see `split_step`). None: any order."""
        return None

    def machine_of(self, split: SplitStep, parts: int, options: Options) -> Accumulating:
        """Build the machine of a step in two halves, for a rank that cuts its rows into `parts`."""
        if isinstance(split, CachedStep):
            return CachedGradients(split, parts, options=options)
        return Accumulating(split, parts, options=options)

    def use(self, machine: AnyMachine) -> None:
        """Train with `machine` from now on."""
        self.machine = machine

    # --- processes -----------------------------------------------------------------------------

    @property
    def has_several(self) -> bool:
        """True if other processes take part."""
        return self.ranks.size > 1

    @property
    def shared_ranks(self) -> Ranks | None:
        """The processes, if there are several."""
        return self.ranks if self.has_several else None

    @property
    def part(self) -> tuple[int, int]:
        """Number of this rank and of all ranks: each batch is divided among them."""
        return self.ranks.rank, self.ranks.size

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the exchange that decide the numbers of a run, by their names in messages."""
        return {}

    def on_writer(self, action: Callable[[], R]) -> R | None:
        """Result of `action` on the process that writes files; None on the others.

        Where the state is shared out, `action` reads the parts of all ranks and runs on all of them.
        """
        found = action() if self.ranks.is_first or self.shares_state else None
        return found if self.ranks.is_first else None

    # --- steps ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy the state of the first rank to all ranks before the first step."""

    def end(self) -> None:
        """Copy the state of the first rank, where a callback may have replaced it, to all ranks after the last step."""

    def ask_to_stop(self) -> None:
        """Ask the run to stop; the other ranks learn of it with the next step."""
        self._is_asked_to_stop = True

    def forget_stop(self) -> None:
        """Forget the requests that ended a run before."""
        self._is_asked_to_stop = False

    @property
    def is_stopping(self) -> bool:
        """True if a process was asked to stop, and all ranks know."""
        return self._is_asked_to_stop

    def announce_save(self, is_due: bool) -> None:
        """Announce a due checkpoint to the other ranks with the next step."""

    def can_save(self, is_due: bool) -> bool:
        """True if a checkpoint can be written after this step, and is due."""
        return is_due

    def settle(self, total: float) -> float:
        """Make the state equal on all ranks; returns `total`, a sum of losses, as that of all ranks."""
        return total

    # --- state ---------------------------------------------------------------------------------

    def common_state(self) -> Mapping[str, np.ndarray]:
        """The state that is the same on all ranks, not copied: valid until the next step."""
        return self.machine.now

    def inference_state(self) -> Mapping[str, np.ndarray]:
        """The state that the inference model needs, not copied (see `Sharded.inference_state`)."""
        return self.machine.now

    def whole_state(self, copy: bool = True) -> Mapping[str, np.ndarray]:
        """The complete state. If it is sharded, all ranks call this, and always receive copies."""
        return self.machine.state() if copy else self.machine.now

    def load_state(self, state: Iterable[tuple[str, np.ndarray]]) -> None:
        """Replace all state by whole tensors, by name."""
        self.machine.load_state(dict(state))

    def places(self) -> dict[str, tuple[int, int]]:
        """Begin and end of the part of this rank in each flat tensor of state that is shared out."""
        return {}

    def optimizer_bytes(self, whole: int) -> int:
        """Bytes of the optimizer's state on this rank, where all of it has `gather`."""
        return whole

    def extras(self) -> dict[str, np.ndarray]:
        """State of the exchange, which checkpoints store in addition to that of the step."""
        return {}

    def load_extras(self, extras: Mapping[str, np.ndarray]) -> None:
        """Replace the state of the exchange."""


class Replicated(Strategy):
    """Several processes with the same weights and the same state: gradients or weights are averaged."""

    machine: DataParallel

    def machine_of(self, split: SplitStep, parts: int, options: Options) -> Accumulating:
        """Build the machine of a rank: `LocalSteps` for several steps between exchanges."""
        if self.exchange.sync_every > 1:
            return LocalSteps(split, parts, self.ranks.collective, self.exchange, options=options)
        if isinstance(split, CachedStep):
            return ComparedRows(split, parts, self.ranks.collective, options=options)
        return DataParallel(split, parts, self.ranks.collective, compress=self.exchange.compress, options=options)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the exchange."""
        return self.machine.settings

    def begin(self) -> None:
        """Copy the state of the first rank."""
        self.load_state(self.ranks.broadcast_each(self.machine.state()))

    def end(self) -> None:
        """Copy the state of the first rank."""
        self.load_state(self.ranks.broadcast_each(self.machine.state()))

    def ask_to_stop(self) -> None:
        """Send the request with the next exchange."""
        self.machine.asked = True

    def forget_stop(self) -> None:
        """Forget those of this rank and of the others."""
        self.machine.asked = self.machine.stopping = False

    @property
    def is_stopping(self) -> bool:
        """True if a rank had been asked to stop before the last exchange."""
        return self.machine.stopping

    def can_save(self, is_due: bool) -> bool:
        """True if all ranks are equal after this step."""
        return is_due and self.machine.is_settled

    def settle(self, total: float) -> float:
        """Exchange the rest that the last steps left on single ranks."""
        return self.machine.settle(total)

    def extras(self) -> dict[str, np.ndarray]:
        """Errors of compression, and the momentum of the outer step."""
        return self.machine.extras()

    def load_extras(self, extras: Mapping[str, np.ndarray]) -> None:
        """Replace them."""
        self.machine.load_extras(extras)


class ShardedState(Replicated):
    """Several processes with the same weights, each with a part of the optimizer's state (ZeRO-1)."""

    shares_state = True
    machine: Sharded

    def arrangement(self) -> Callable[[SplitStep], Sequence[str]]:
        """Order of the gradients in which the part of each rank is one block."""
        return partial(arrangement, self.ranks.size)

    def machine_of(self, split: SplitStep, parts: int, options: Options) -> Accumulating:
        """Build the machine of a rank."""
        shares = Shares(split, self.ranks.size)
        if isinstance(split, CachedStep):
            return ComparedRowsSharded(split, parts, self.ranks.collective, shares, options=options)
        return Sharded(split, parts, self.ranks.collective, shares, options=options)

    def begin(self) -> None:
        """Copy the first state of the first rank, unless a run before has moved it."""
        if self.machine.is_new:
            self.load_state(self.ranks.broadcast_each({name: t.numpy() for name, t in self.machine.first.items()}))

    def end(self) -> None:
        """Do nothing: a callback that replaces weights does so on all ranks."""

    def announce_save(self, is_due: bool) -> None:
        """Send it with the next step: each rank writes a part of the same checkpoint."""
        self.machine.due = is_due

    def can_save(self, is_due: bool) -> bool:
        """True if a rank had announced it before the last step."""
        return self.machine.is_due

    def common_state(self) -> Mapping[str, np.ndarray]:
        """The state that is not shared out."""
        return self.machine.common_state()

    def inference_state(self) -> Mapping[str, np.ndarray]:
        """Weights, statistics and averages; see `Sharded.inference_state` for the ranks that call this."""
        return self.machine.inference_state()

    def whole_state(self, copy: bool = True) -> Mapping[str, np.ndarray]:
        """All tensors of state, put together from the parts of all ranks."""
        return self.machine.gather()

    def load_state(self, state: Iterable[tuple[str, np.ndarray]]) -> None:
        """Keep the part of this rank of whole tensors."""
        self.machine.load_whole(state)

    def places(self) -> dict[str, tuple[int, int]]:
        """Begin and end of the part of this rank; equal where it has none."""
        return {name: self.machine.shares.part(name, self.ranks.rank) for name in self.machine.shares.kept}

    def optimizer_bytes(self, whole: int) -> int:
        """Bytes of the part of this rank."""
        return self.machine.optimizer_bytes


def choose_strategy(ranks: Ranks, exchange: Exchanges) -> Strategy:
    """The strategy of these processes."""
    if ranks.size == 1:
        return Strategy(ranks)
    return ShardedState(ranks, exchange) if exchange.shard_optimizer else Replicated(ranks, exchange)

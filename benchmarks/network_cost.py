"""The time of a data-parallel step on N machines: a model on paper, with two numbers of the network in it.

A message of n bytes takes α + nβ seconds, whoever sends it and to whom. The costs of collectives in these terms are
those of Thakur, Rabenseifner and Gropp (2005), Optimization of Collective Communication Operations in MPICH,
International Journal of High Performance Computing Applications 19(1), with the time of the additions counted in β.
What it leaves out: congestion, topology, failures, and reading data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from onnxgrad.errors import BadInput, UnknownName

ALGORITHMS = ("ring", "tree", "halving")


def _terms(algorithm: str, ranks: int, size: float) -> tuple[int, float, float]:
    """Of an all-reduce: messages one after the other, bytes in them, and bytes that the busiest rank sends."""
    up, down = math.ceil(math.log2(ranks)), math.floor(math.log2(ranks))
    if algorithm == "ring":  # N - 1 steps of reduce-scatter and N - 1 of all-gather, of size / N each
        through = 2 * (ranks - 1) / ranks * size
        return 2 * (ranks - 1), through, through
    if algorithm == "tree":  # a binomial tree to the root, which sends as often in the one back
        return 2 * up, 2 * up * size, up * size
    if algorithm == "halving":  # Rabenseifner's
        through, beyond = 2 * (2**down - 1) / 2**down * size, ranks > 2**down
        # ranks beyond a power of two hand theirs to a neighbour before, and get the sum from it after
        return 2 * down + 2 * beyond, through + 2 * beyond * size, through + beyond * size
    raise UnknownName(algorithm, ALGORITHMS, "algorithm of an all-reduce")


@dataclass(frozen=True)
class Network:
    """The network between the ranks.

    Attributes:
        latency: α, seconds that a message takes however small it is.
        seconds_per_byte: β, one over the bandwidth of one rank; adding up what came is a part of it.
        lanes: how many ranks can send at a time, if not all: the cores of one machine that all of them share.
    """

    latency: float
    seconds_per_byte: float
    lanes: int | None = None

    def __post_init__(self) -> None:
        if min(self.latency, self.seconds_per_byte) < 0 or (self.lanes is not None and self.lanes < 1):
            raise BadInput("latency and seconds per byte are at least 0, and there is at least 1 lane")

    def all_reduce(self, ranks: int, size: float, algorithm: str = "ring") -> float:
        """Seconds for an all-reduce of `size` bytes: by "ring", "tree" or "halving" (recursive halving and doubling).

        >>> f"{Network(latency=1e-6, seconds_per_byte=1e-9).all_reduce(4, 8e6):.6f}"
        '0.012006'
        """
        if ranks < 1:
            raise BadInput(f"there is at least 1 rank, not {ranks}")
        if ranks == 1:
            return 0.0
        messages, through, _ = _terms(algorithm, ranks, size)
        turns = 1.0 if self.lanes is None else max(1.0, ranks / self.lanes)
        return turns * (messages * self.latency + through * self.seconds_per_byte)

    def half(self, ranks: int, size: float) -> float:
        """Seconds for a reduce-scatter or an all-gather of `size` bytes, by a ring."""
        return self.all_reduce(ranks, size) / 2

    @classmethod
    def fitted(cls, measured: Iterable[tuple[int, float, float]], lanes: int | None = None) -> Network:
        """The network that all-reduces by rings took the least relative error on.

        Args:
            measured: ranks (2 or more), bytes and seconds of each.
            lanes: as of the network.
        """
        found = list(measured)
        if len({(n, size) for n, size, _ in found}) < 2 or any(n < 2 or t <= 0 for n, _, t in found):
            raise BadInput("two all-reduces of different sizes or ranks, of 2 or more ranks and more than 0 seconds")
        unit = [cls(*ends, lanes) for ends in ((1.0, 0.0), (0.0, 1.0))]
        rows = np.array([[u.all_reduce(n, size) / t for u in unit] for n, size, t in found])
        scale = rows.max(axis=0)  # the columns are ten orders of magnitude apart
        best = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)[0]
        if best.min() < 0:  # noise: one of the two explains all that can be told
            alone = [c @ np.ones(len(rows)) / (c @ c) for c in (rows / scale).T]
            errors = [np.square(a * c - 1).sum() for a, c in zip(alone, (rows / scale).T)]
            best = np.where(np.arange(2) == np.argmin(errors), alone, 0.0)
        return cls(float(best[0] / scale[0]), float(best[1] / scale[1]), lanes)


@dataclass(frozen=True)
class Work:
    """The work of a step on one rank, before anything is sent.

    Attributes:
        forward: seconds of the forward pass, of the batch of one rank.
        backward: seconds of the backward pass.
        update: seconds of the optimizer, for all weights.
        gradient: bytes of all gradients.
        state: bytes that the optimizer keeps.
        jitter: by how much the time of a rank varies from step to step, as a standard deviation over a mean.
    """

    forward: float
    backward: float
    update: float
    gradient: float
    state: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """The method by which ranks get equal weights.

    Attributes:
        algorithm: of the all-reduce.
        buckets: into how many the gradients are cut; one is sent while the backward pass computes the next.
        shard_optimizer: ZeRO-1 (Rajbhandari et al. 2020, arXiv 1910.02054): each rank updates a slice of the weights.
        sync_every: steps between two exchanges (DiLoCo, arXiv 2311.08105).
        compression: bytes of gradients over bytes sent.
    """

    algorithm: str = "ring"
    buckets: int = 1
    shard_optimizer: bool = False
    sync_every: int = 1
    compression: float = 1.0


@dataclass(frozen=True)
class Predicted:
    """Of one step.

    Attributes:
        seconds: for all of it.
        waiting: of these, for the network: what the backward pass does not hide.
        efficiency: throughput over that of N ranks that need not wait for each other.
        sent: bytes that leave the rank that sends most.
        state: bytes of the optimizer on one rank.
    """

    seconds: float
    waiting: float
    efficiency: float
    sent: float
    state: float


def slowest(ranks: int) -> float:
    """By how many standard deviations the slowest of `ranks` lies above the mean (Blom 1958), were they normal."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def predict(ranks: int, work: Work, network: Network, exchange: Exchange | None = None) -> Predicted:
    """A step of `ranks` ranks, each of which has the same share of the global batch."""
    exchange = exchange or Exchange()
    if exchange.buckets < 1 or exchange.sync_every < 1 or exchange.compression <= 0:
        raise BadInput("there is at least one bucket, one step between exchanges, and a compression above 0")
    if exchange.shard_optimizer and (exchange.sync_every > 1 or exchange.buckets > 1):
        raise BadInput("slices of weights are exchanged whole and at every step: leave out sync_every and buckets")
    size = work.gradient / exchange.compression
    alone = work.forward + work.backward + work.update
    update, state = work.update, work.state
    if exchange.shard_optimizer:  # the weights come back whole, not compressed
        waiting = network.half(ranks, size) + network.half(ranks, work.gradient)
        update, state = update / ranks, state / ranks
        sent = (ranks - 1) / ranks * (size + work.gradient)
    else:
        each = network.all_reduce(ranks, size / exchange.buckets, exchange.algorithm)
        waiting = exposed(work.backward, each, exchange.buckets) / exchange.sync_every
        sent = _terms(exchange.algorithm, ranks, size)[2] / exchange.sync_every
    late = work.jitter * (work.forward + work.backward) * slowest(ranks) / math.sqrt(exchange.sync_every)
    seconds = work.forward + work.backward + update + late + waiting
    return Predicted(seconds, waiting, alone / seconds, sent, state)


def exposed(backward: float, each: float, buckets: int) -> float:
    """Seconds after the backward pass until the last of its equal buckets has arrived.

    They are ready one after the other at even intervals; each takes `each` seconds, and waits for the one before.
    """
    done = 0.0
    for k in range(1, buckets + 1):
        done = max(done, backward * k / buckets) + each
    return done - backward

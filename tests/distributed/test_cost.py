"""The cost model, against messages that are really passed on, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.network_cost import Exchange, Network, Work, exposed, predict, slowest

from onnxgrad.errors import BadInput

ALPHA, BETA = 3e-6, 2e-9
NETWORK = Network(ALPHA, BETA)


class Wire:
    """Ranks that pass on arrays in rounds; a round takes as long as its longest message."""

    def __init__(self, ranks: int, numbers: int) -> None:
        self.held = np.random.default_rng(ranks).integers(-9, 9, (ranks, numbers)).astype(float)
        self.expected = self.held.sum(axis=0)
        self.seconds, self.sent = 0.0, np.zeros(ranks)

    def round(self, messages: list[tuple[int, int, slice, bool]]) -> None:
        """Each is (from, to, which part, whether it is added)."""
        parts = [self.held[source, part].copy() for source, _, part, _ in messages]
        for (source, to, part, adds), data in zip(messages, parts):
            self.held[to, part] = self.held[to, part] + data if adds else data
            self.sent[source] += data.nbytes
        self.seconds += max(ALPHA + BETA * data.nbytes for data in parts)


def ring(ranks: int) -> Wire:
    wire = Wire(ranks, 8 * ranks)
    for k in range(2 * (ranks - 1)):
        part = [(r - k) % ranks for r in range(ranks)]
        wire.round([(r, (r + 1) % ranks, slice(8 * p, 8 * p + 8), k < ranks - 1) for r, p in enumerate(part)])
    return wire


def tree(ranks: int) -> Wire:
    wire = Wire(ranks, 16)
    levels = [2**k for k in range(math.ceil(math.log2(ranks)))]
    for step in levels:
        wire.round([(r, r - step, slice(None), True) for r in range(step, ranks, 2 * step)])
    for step in reversed(levels):
        wire.round([(r - step, r, slice(None), False) for r in range(step, ranks, 2 * step)])
    return wire


def halving(ranks: int) -> Wire:
    power = 2 ** int(math.log2(ranks))
    wire, beyond = Wire(ranks, 8 * power), range(power, ranks)
    if beyond:
        wire.round([(r, r - power, slice(None), True) for r in beyond])
    low, size, steps = [0] * power, 8 * power, []
    while size > 8:
        size //= 2
        distance = size // 8
        messages = []
        for r in range(power):
            upper = bool(r & distance)  # keeps the upper half of its part, sends the lower one
            send = low[r] + (0 if upper else size)
            messages.append((r, r ^ distance, slice(send, send + size), True))
            low[r] += size if upper else 0
        wire.round(messages)
        steps.append(distance)
    for distance in reversed(steps):
        size = 8 * distance
        wire.round([(r, r ^ distance, slice(low[r], low[r] + size), False) for r in range(power)])
        low = [a & ~(2 * size - 1) for a in low]
    if beyond:
        wire.round([(r - power, r, slice(None), False) for r in beyond])
    return wire


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("algorithm", [ring, tree, halving])
def test_an_all_reduce_costs_what_its_messages_cost(algorithm, ranks):
    wire = algorithm(ranks)
    np.testing.assert_array_equal(wire.held, np.tile(wire.expected, (ranks, 1)))
    size = wire.held[0].nbytes
    name = algorithm.__name__
    assert NETWORK.all_reduce(ranks, size, name) == pytest.approx(wire.seconds, rel=1e-12)
    work = Work(1.0, 2.0, 0.1, gradient=size)
    assert predict(ranks, work, NETWORK, Exchange(name)).sent == pytest.approx(wire.sent.max(), rel=1e-12)


def test_the_algorithm_that_is_best_depends_on_the_size_and_on_the_ranks():
    def best(ranks, size):
        return min(("ring", "tree", "halving"), key=lambda a: NETWORK.all_reduce(ranks, size, a))

    assert best(1024, 8) == best(1024, 1e9) == best(1000, 8) == "halving"
    assert best(1000, 1e9) == "ring"


@pytest.mark.parametrize("lanes", [None, 2])
def test_the_network_that_was_measured_is_found(lanes):
    true = Network(5e-5, 4e-10, lanes)
    measured = [(n, size, true.all_reduce(n, size)) for n in (2, 4, 8) for size in (1e3, 1e5, 1e7)]
    found = Network.fitted(measured, lanes)
    assert found.latency == pytest.approx(true.latency, rel=1e-9)
    assert found.seconds_per_byte == pytest.approx(true.seconds_per_byte, rel=1e-9)


def test_no_part_of_a_network_that_was_measured_is_negative():
    found = Network.fitted([(2, 1e6, 2e-3), (2, 1e7, 1e-2), (2, 1e8, 9e-2)])  # steeper than a line through 0 at first
    assert found.latency >= 0
    found = Network.fitted([(2, 1e6, 1e-3), (2, 1e7, 3e-2), (2, 1e8, 5e-1)])
    assert (found.latency, found.seconds_per_byte > 0) == (0.0, True)


@pytest.mark.parametrize(("each", "buckets"), [(0.5, 1), (0.1, 4), (0.25, 4), (0.6, 4), (2.0, 8)])
def test_buckets_hide_behind_the_backward_pass(each, buckets):
    backward = 1.0
    hidden = each <= backward / buckets  # the network keeps up: only the last bucket is waited for
    expected = each if hidden else backward / buckets + buckets * each - backward
    assert exposed(backward, each, buckets) == pytest.approx(expected)


def test_the_slowest_of_many():
    rng = np.random.default_rng(0)
    for ranks in (2, 10, 100):
        drawn = rng.standard_normal((20_000, ranks)).max(axis=1).mean()
        assert slowest(ranks) == pytest.approx(drawn, rel=0.05)


def test_one_rank_waits_for_nobody():
    found = predict(1, Work(1, 2, 0.5, gradient=1e9, state=2e9, jitter=0.1), NETWORK)
    assert (found.seconds, found.waiting, found.efficiency, found.sent, found.state) == (3.5, 0, 1, 0, 2e9)


def test_a_sharded_optimizer_updates_and_keeps_a_share():
    work = Work(1, 2, 0.5, gradient=8e6, state=1.6e7)
    found, plain = (predict(8, work, NETWORK, Exchange(shard_optimizer=shard)) for shard in (True, False))
    assert found.sent == pytest.approx(plain.sent)
    assert found.waiting == pytest.approx(plain.waiting)
    assert found.state == work.state / 8
    assert plain.seconds - found.seconds == pytest.approx(0.5 * 7 / 8)


def test_seldom_and_smaller_exchanges_cost_less():
    work = Work(1, 2, 0.5, gradient=8e6)
    plain = predict(8, work, NETWORK)
    seldom = predict(8, work, NETWORK, Exchange(sync_every=100))
    assert (seldom.sent, seldom.waiting) == pytest.approx((plain.sent / 100, plain.waiting / 100))
    assert predict(8, work, NETWORK, Exchange(compression=2)).sent == pytest.approx(plain.sent / 2)


def test_what_makes_no_sense_is_refused():
    work = Work(1, 2, 0.5, gradient=8e6)
    for call in (
        lambda: NETWORK.all_reduce(0, 1),
        lambda: NETWORK.all_reduce(4, 1, "rings"),
        lambda: Network(-1, 0),
        lambda: Network(0, 0, lanes=0),
        lambda: Network.fitted([(2, 8, 1e-3)]),
        lambda: predict(2, work, NETWORK, Exchange(buckets=0)),
        lambda: predict(2, work, NETWORK, Exchange(shard_optimizer=True, sync_every=2)),
    ):
        with pytest.raises(BadInput):
            call()

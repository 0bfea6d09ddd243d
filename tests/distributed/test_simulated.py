"""Ranks in one process: what they exchange is right, counted, and the same every time; deaths are named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from benchmarks.network_cost import Exchange, Network, Work, predict

from onnxgrad.distributed import Alone, Lost, blocks
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner, share
from onnxgrad.training import attach
from onnxgrad.training.step.accumulate import BUCKET, TOTAL, split_step
from tests.distributed.simulated import Killed, World

SIZES = (1, 2, 3, 8, 64)


def own(rank: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(rank).normal(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_sums_are_those_of_numpy(size, dtype):
    def work(collective):
        array = own(collective.rank, (3, 5), dtype)
        collective.all_reduce(array)
        return array

    expected = np.sum([own(r, (3, 5), dtype) for r in range(size)], axis=0, dtype=dtype)
    for array in World(size).run(work):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == dtype


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 5, 1000])
def test_halves_are_a_whole(size, length):
    """A reduce-scatter and an all-gather make an all-reduce, and send as much."""
    bounds = blocks(length, size)

    def halves(collective):
        array = own(collective.rank, (length,))
        collective.reduce_scatter(array, bounds)
        collective.all_gather(array, bounds)
        return array

    def whole(collective):
        array = own(collective.rank, (length,))
        collective.all_reduce(array)
        return array

    one, other = World(size), World(size)
    for a, b in zip(one.run(halves), other.run(whole)):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.sent, other.sent)


def test_uneven_blocks():
    bounds = [0, 0, 7, 8]

    def work(collective):
        low, high = bounds[collective.rank : collective.rank + 2]
        summed, gathered = own(collective.rank, (8,)), np.full(8, -1, np.float16)
        collective.reduce_scatter(summed, bounds)
        gathered[low:high] = collective.rank
        collective.all_gather(gathered, bounds)
        return summed[low:high], gathered

    expected = np.sum([own(r, (8,)) for r in range(3)], axis=0)
    for rank, (summed, gathered) in enumerate(World(3).run(work)):
        np.testing.assert_array_equal(summed, expected[bounds[rank] : bounds[rank + 1]])
        np.testing.assert_array_equal(gathered, [1] * 7 + [2])


@pytest.mark.parametrize("size", SIZES)
def test_everybody_is_given_a_block(size):
    bounds = blocks(100, size)

    def work(collective):
        low, high = bounds[collective.rank : collective.rank + 2]
        received = np.zeros((size, high - low), np.float16)
        collective.all_to_all(np.arange(100).astype(np.float16) + collective.rank, bounds, received)
        return received

    world = World(size)
    for rank, received in enumerate(world.run(work)):
        expected = np.arange(bounds[rank], bounds[rank + 1]) + np.arange(size)[:, None]
        np.testing.assert_array_equal(received, expected)
    np.testing.assert_array_equal(world.sent, 200 - 2 * np.diff(bounds))


def test_all_have_what_the_root_has():
    def work(collective):
        array = np.array([collective.rank], "S5")
        collective.barrier()
        collective.broadcast(array, root=2)
        return bytes(array[0])

    world = World(4)
    assert world.run(work) == [b"2"] * 4
    assert list(world.sent) == [5, 0, 5, 5]  # from 2 to 3 to 0 to 1


@pytest.mark.parametrize("size", [2, 3, 4, 8, 100])
def test_bytes_are_those_of_a_ring(size):
    """2(N - 1)/N of the buffer for an all-reduce, half of it for a half, as the cost model says."""
    numbers = 40_000
    buffer = 4 * numbers
    rings = {
        "all_reduce": lambda c, a: c.all_reduce(a),
        "reduce_scatter": lambda c, a: c.reduce_scatter(a, blocks(numbers, size)),
        "all_gather": lambda c, a: c.all_gather(a, blocks(numbers, size)),
    }
    expected = predict(size, Work(0, 0, 0, buffer), Network(0, 1), Exchange("ring")).sent
    for name, exchange in rings.items():
        world = World(size)
        world.run(lambda collective, exchange=exchange: exchange(collective, np.zeros(numbers, np.float32)))
        np.testing.assert_allclose(world.sent, expected / (1 if name == "all_reduce" else 2), rtol=0.01)
    assert expected == pytest.approx(2 * (size - 1) / size * buffer)


def test_a_rank_that_dies_is_named():
    world = World(5, deaths={3: 2})
    seen: dict[int, int] = {}

    def work(collective):
        for k in range(10):
            collective.all_reduce(np.ones(1, np.float32))
            seen[collective.rank] = k

    with pytest.raises(Lost, match="rank 3 is gone or does not answer") as caught:
        world.run(work)
    assert caught.value.ranks == (3,)
    assert world.survivors == [0, 1, 2, 4]
    assert isinstance(world.errors.pop(3), Killed)
    assert [type(e) for e in world.errors.values()] == [Lost] * 4
    assert [r for r, e in world.errors.items() if e.speaker] == [0]
    assert set(seen.values()) == {1}  # nobody is a step ahead


def test_what_is_wrong_in_one_rank_is_raised():
    """And not that the others, which wait for it, have lost it."""

    def work(collective):
        if collective.rank == 2:
            raise ZeroDivisionError
        collective.barrier()

    world = World(4)
    with pytest.raises(ZeroDivisionError):
        world.run(work)
    assert world.errors[0].ranks == (2,)


def test_a_rank_that_returns_early_is_no_hang():
    def work(collective):
        if collective.rank:
            collective.barrier()

    with pytest.raises(Lost, match="rank 0 is gone"):
        World(3).run(work)


@pytest.mark.parametrize(
    "work",
    [
        lambda c: c.all_reduce(np.zeros(2 + c.rank, np.float32)),
        lambda c: c.all_reduce(np.zeros(2, np.float64 if c.rank else np.float32)),
        lambda c: c.all_gather(np.zeros(2, np.float32), [0, c.rank, 2]),
        lambda c: c.broadcast(np.zeros(2), root=c.rank),
        lambda c: c.barrier() if c.rank else c.broadcast(np.zeros(2)),
    ],
)
def test_ranks_that_disagree_are_told(work):
    with pytest.raises(BadInput, match=r"ranks disagree on what to do: rank 0 .*, rank 1 "):
        World(2).run(work)


def test_why_a_rank_has_left_is_told():
    def work(collective):
        if collective.rank == 1:
            collective.close("its disk is full")
        else:
            collective.barrier()

    with pytest.raises(Lost, match=r"^rank 1 has stopped: its disk is full$"):
        World(3).run(work)


def test_who_has_left_exchanges_nothing():
    def work(collective):
        collective.close()
        collective.close()
        collective.barrier()

    with pytest.raises(BadInput, match="has left"):
        World(1).run(work)


def test_a_world_runs_again_without_its_dead():
    """Four ranks, of which two die; two go on where these stood, then three."""

    def counting(begin):
        def work(collective):
            at = begin
            for _ in range(5):
                array = np.full(1, at + 1, np.int64)
                collective.all_reduce(array)
                at = int(array[0]) // collective.size
                kept[collective.rank] = at
            return at

        return work

    kept: dict[int, int] = {}
    world = World(4, deaths={1: 3, 2: 3})
    with pytest.raises(Lost, match="ranks 1, 2 are gone"):
        world.run(counting(0))
    assert kept == dict.fromkeys(range(4), 3)
    smaller = World(len(world.survivors))
    assert smaller.run(counting(3)) == [8, 8]
    assert World(3).run(counting(8)) == [13] * 3


RANKS, STEPS = 1024, 5


def linear_step():
    """x[N, 3]·w, trained by gradient descent on the mean of squares, in two halves."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        linear (float[N, 3] x) => (float[N, 2] y) { y = MatMul (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 2), np.float32), "w"))
    return split_step(attach(model, loss="mse", labels="labels", optimizer="sgd", learning_rate=0.125, accumulate=True))


def linear_batches(rows: int) -> list[dict[str, np.ndarray]]:
    """Small whole numbers."""
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(-2, 3, (rows, 3)), rng.integers(-4, 5, (rows, 2))) for _ in range(STEPS)]
    return [{"x": x.astype(np.float32), "labels": y.astype(np.float32)} for x, y in drawn]


class Machine:
    """Both halves of a step. Ranks take turns on it, as one at a time runs; state is each rank's own."""

    def __init__(self) -> None:
        split = linear_step()
        self.gradient, self.update = (StepRunner(s, options=Options(threads=1)) for s in (split.gradient, split.update))
        share(self.gradient, self.update)
        self.loss = split.gradient.loss
        self.first = self.update.state()

    def slopes(self, weights: dict[str, np.ndarray], part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The bucket and the sum of the weights of rows, and the sum of losses, float64[1]."""
        if not len(part["x"]):
            return {name: np.zeros_like(a) for name, a in self.gradient.state().items()} | {"loss": np.zeros(1)}
        self.update.load_state(weights)
        loss = float(self.gradient.step(part)[self.loss])
        found = self.gradient.state()
        return found | {"loss": np.array([loss * float(found[TOTAL])])}

    def updated(self, weights: dict[str, np.ndarray], slopes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weights after a step."""
        self.update.load_state(weights)
        self.gradient.load_state({name: slopes[name] for name in (BUCKET, TOTAL)})
        self.update.step({})
        return self.update.state()


def trained(machine, batches, collective) -> tuple[list[float], np.ndarray]:
    """Losses of the global batches, and the weights in the end, of one rank that has its share of every batch."""
    ends = uneven(len(batches[0]["x"]), collective.size)
    low, high = ends[collective.rank : collective.rank + 2]
    weights, losses = machine.first, []
    for batch in batches:
        slopes = machine.slopes(weights, {name: array[low:high] for name, array in batch.items()})
        for array in slopes.values():
            collective.all_reduce(array)
        losses.append(float(slopes["loss"][0] / slopes[TOTAL]))
        weights = machine.updated(weights, slopes)
    return losses, weights["w"]


def uneven(rows: int, size: int) -> np.ndarray:
    """Bounds of shares, of which some are empty."""
    return np.sort(np.r_[0, np.random.default_rng(size).integers(0, rows, size - 1), rows])


def test_a_thousand_ranks_learn_what_one_learns():
    machine, batches = Machine(), linear_batches(3000)
    shares = np.diff(uneven(3000, RANKS))
    assert shares.min() == 0
    assert shares.max() > 10
    losses, weights = trained(machine, batches, Alone())
    assert losses[-1] < losses[0]
    world = World(RANKS)
    found = world.run(lambda collective: trained(machine, batches, collective))
    for own_losses, own_weights in found:
        assert own_losses == found[0][0]
        np.testing.assert_array_equal(own_weights, found[0][1])
    np.testing.assert_allclose(found[0][0], losses, rtol=1e-6)
    np.testing.assert_allclose(found[0][1], weights, rtol=0, atol=1e-7)  # slopes are about 1
    buffer = sum(array.nbytes for array in machine.gradient.state().values()) + 8
    assert world.sent.mean() == pytest.approx(STEPS * 2 * (RANKS - 1) / RANKS * buffer, rel=0.01)

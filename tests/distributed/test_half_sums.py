"""Sums that travel as 16-bit numbers: those of a plain numpy program, equal everywhere, and nothing lost in the end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnxgrad.distributed import blocks
from onnxgrad.distributed.half_sums import HalfSums
from tests.distributed.simulated import World


def drawn(rank: int, step: int, length: int, dtype=np.float32) -> np.ndarray:
    rng = np.random.default_rng([rank, step])
    return (rng.standard_normal(length) * 10.0 ** rng.integers(-6, 4, length)).astype(dtype)


def summed(size: int, steps: int, length: int, dtype=np.float32) -> tuple[World, list[list[np.ndarray]]]:
    """The sums of every step, by rank, and afterwards what was carried."""

    def work(collective):
        sums, found = HalfSums(collective, length, dtype), []
        for step in range(steps):
            array = drawn(collective.rank, step, length, dtype)
            sums(array)
            found.append(array)
        sums.settle()
        return [*found, sums.carried]

    world = World(size)
    return world, world.run(work)


def rounded(block: np.ndarray) -> np.ndarray:
    """To 11 significant bits, or to 2⁻³⁹ of the power of two above the largest, whatever is coarser."""
    if not len(block):
        return block
    unit = 2.0 ** (np.frexp(np.abs(block).max())[1] - 15)
    return (np.float16(block / unit).astype(block.dtype) * unit).astype(block.dtype)


def reference(size: int, steps: int, length: int, dtype=np.float32) -> list[np.ndarray]:
    """The sums, by a program of one process."""
    bounds, found = blocks(length, size), []
    lost, lost_of_sum = [np.zeros(length, dtype) for _ in range(size)], np.zeros(length, dtype)
    for step in range(steps):
        for rank in range(size):
            lost[rank] += drawn(rank, step, length, dtype)
        result = np.zeros(length, dtype)
        for low, high in itertools.pairwise(bounds):
            for rank in range(size):
                sent = rounded(lost[rank][low:high])
                lost[rank][low:high] -= sent
                lost_of_sum[low:high] += sent
            result[low:high] = rounded(lost_of_sum[low:high])
            lost_of_sum[low:high] -= result[low:high]
        found.append(result)
    return found


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("size", "length"), [(1, 5), (2, 7), (3, 1000), (8, 1001), (8, 3), (64, 200)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_are_those_of_a_plain_program_and_equal_everywhere(size, length, dtype):
    _, found = summed(size, 6, length, dtype)
    for step, expected in enumerate(reference(size, 6, length, dtype)):
        for own in found:
            np.testing.assert_array_equal(own[step], expected)
            assert own[step].dtype == dtype


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nothing_is_lost_in_the_end(size):
    steps, length = 40, 300
    _, found = summed(size, steps, length, np.float64)
    exact = sum(drawn(r, k, length, np.float64) for r in range(size) for k in range(steps))
    np.testing.assert_allclose(sum(found[0]), exact, rtol=0, atol=1e-9)  # of 1e4; what was carried is the last of them
    late = np.abs(sum(found[0][:-1]) - exact).max()
    assert 0 < late < 1e4 * 2**-11 * size * 2  # what the last step has lost, and no more


def test_what_is_too_small_to_be_sent_arrives_later():
    """Beside 1, a float16 of a common exponent has no place for 2⁻⁴²; the sum of 2,000 of them is sent."""

    def work(collective):
        sums, total = HalfSums(collective, 2, np.float64), np.zeros(2)
        for _ in range(2000):
            array = np.array([1.0, 2.0**-42])
            sums(array)
            total += array
        return total

    for total in World(1).run(work):
        assert total[0] == 2000
        assert total[1] == pytest.approx(2000 * 2.0**-42, rel=0.01)
    assert not rounded(np.array([1.0, 2.0**-42]))[1]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (3, 1)])
def test_another_number_of_ranks_carries_on(sizes):
    first, second = sizes
    _, before = summed(first, 5, 50, np.float64)

    def work(collective):
        sums = HalfSums(collective, 50, np.float64)
        sums.carried[...] = before[0][-1]
        array = np.zeros(50)
        sums(array)
        sums.settle()
        return array + sums.carried

    for found in World(second).run(work):
        np.testing.assert_allclose(found, before[0][-1], rtol=1e-12, atol=1e-15)


def test_settling_and_going_on_is_the_same_after_a_restart():
    def work(collective, restart):
        sums, found = HalfSums(collective, 30), []
        for step in range(8):
            if step == 4:
                sums.settle()
                if restart:
                    kept = sums.carried.copy()
                    sums = HalfSums(collective, 30)
                    sums.carried[...] = kept
            array = drawn(collective.rank, step, 30)
            sums(array)
            found.append(array)
        return np.stack(found)

    np.testing.assert_array_equal(*(World(3).run(lambda c, r=restart: work(c, r)) for restart in (False, True)))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_bytes_are_half_of_those_of_an_all_reduce(size):
    length = 30_000
    world = World(size)
    world.run(lambda collective: HalfSums(collective, length)(np.ones(length, np.float32)))
    np.testing.assert_allclose(world.sent, (size - 1) / size * 4 * length, rtol=0.01)


def test_huge_numbers_do_not_overflow_and_no_number_stays_none():
    def work(collective):
        array = np.array([3e38, 1e30, 0.0, -3e38], np.float32) / 4
        HalfSums(collective, 4)(array)
        bad = np.array([np.nan, 1.0], np.float32)
        HalfSums(collective, 2)(bad)
        return array, bad

    for array, bad in World(2).run(work):
        np.testing.assert_allclose(array, np.array([1.5e38, 5e29, 0.0, -1.5e38]), rtol=1e-3)
        assert np.isnan(bad[0])

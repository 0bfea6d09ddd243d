"""Sums over ranks that are sent as 16-bit numbers, with error feedback: half the bytes of an all-reduce.

Each rank sends block r of its array to rank r, which adds the blocks in full precision and sends the sum to all. In
both directions a block is sent as float16 times a power of two, so that nothing overflows. Rounding losses are stored
on the rank where they occur and added to its next message, so that no loss accumulates over many steps (Seide et al.
2014; Karimireddy et al. 2019, arXiv 1901.09847). Each direction has its own losses, as in DoubleSqueeze (Tang et al.
2019, arXiv 1905.05957).
"""

from __future__ import annotations

import numpy as np

from onnxgrad.distributed.collective import Collective, blocks


class HalfSums:
    """Sums of arrays of one length and dtype over the ranks of `collective`.

    Args:
        collective: the ranks.
        length: of the arrays.
        dtype: float32 or float64.

    Attributes:
        carried: what was lost on all ranks until the last `settle`, equal on all of them.
    """

    def __init__(self, collective: Collective, length: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        self.collective, self._bounds = collective, blocks(length, collective.size)
        self._lost = np.zeros(length, dtype)  # before sending
        low, high = self._own = self._bounds[collective.rank : collective.rank + 2]
        self._lost_of_sum = np.zeros(high - low, dtype)
        self.carried = np.zeros(length, dtype)
        #: where a block and its exponent begin in a message
        self._places = [low + rank for rank, low in enumerate(self._bounds)]
        self._sent = np.zeros(length + collective.size, np.int16)
        self._received = np.zeros((collective.size, high - low + 1), np.int16)

    def __call__(self, array: np.ndarray) -> None:
        """Replace `array` by its sum over all ranks: equal bits on all of them."""
        rank = self.collective.rank
        self._lost += array
        if rank == 0:
            self._lost += self.carried
        self.carried[...] = 0
        for r, block in enumerate(self._parts(self._lost)):
            _send(block, self._message(r))
        self.collective.all_to_all(self._sent, self._places, self._received)
        for message in self._received:
            self._lost_of_sum += _unpack_message(message, self._lost.dtype)
        _send(self._lost_of_sum, self._message(rank))
        self.collective.all_gather(self._sent, self._places)
        for r, block in enumerate(self._parts(array)):
            block[...] = _unpack_message(self._message(r), array.dtype)

    def settle(self) -> None:
        """Add up the rounding losses of all ranks in full precision; the next sum includes them."""
        if self.collective.rank == 0:
            self._lost += self.carried
        self._lost[self._own[0] : self._own[1]] += self._lost_of_sum
        self.collective.all_reduce(self._lost)
        self.carried[...] = self._lost
        self._lost[...] = 0
        self._lost_of_sum[...] = 0

    def carry(self, lost: np.typing.ArrayLike) -> None:
        """Restart with the losses `carried`, which were read from a checkpoint."""
        self._lost[...] = 0
        self._lost_of_sum[...] = 0
        self.carried[...] = lost

    def _parts(self, array: np.ndarray) -> list[np.ndarray]:
        return [array[low:high] for low, high in zip(self._bounds, self._bounds[1:])]

    def _message(self, rank: int) -> np.ndarray:
        return self._sent[self._places[rank] : self._places[rank + 1]]


def _send(block: np.ndarray, message: np.ndarray) -> None:
    """Write `block` to `message` as an exponent and numbers below 2¹⁵, and leave the rounding loss in `block`.

    Numbers that are not finite leave no rounding loss: the step that reads them is skipped, and later losses count.
    """
    largest = np.abs(block).max(initial=0)
    if not np.isfinite(largest):
        message[0], message[1:].view(np.float16)[...], block[...] = 0, np.nan, 0
        return
    message[0] = shift = int(np.frexp(largest)[1]) - 15
    message[1:].view(np.float16)[...] = np.ldexp(block, -shift)
    block -= _unpack_message(message, block.dtype)


def _unpack_message(message: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ldexp(message[1:].view(np.float16).astype(dtype), int(message[0]))

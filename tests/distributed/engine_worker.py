"""Each rank of `test_engines`: every operation of a collective; then the last rank is killed."""

import hashlib
import os
import signal
import sys

import numpy as np

from onnxgrad.distributed import Lost, blocks, broadcast_document, gathered, join

if "own group" in sys.argv:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
ranks = join()
r, n = ranks.rank, ranks.size
for count in (0, 1, 10, 1000):
    bounds = blocks(count, n)
    own = slice(bounds[r], bounds[r + 1])
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        mine = (np.arange(count) + r).astype(dtype)
        total = (np.arange(count) * n + n * (n - 1) // 2).astype(dtype)
        array = mine.copy()
        ranks.all_reduce(array)
        np.testing.assert_array_equal(array, total)
        array = mine.copy()
        ranks.reduce_scatter(array, bounds)
        np.testing.assert_array_equal(array[own], total[own])
        array = np.zeros(count, dtype)
        array[own] = np.arange(count).astype(dtype)[own]
        ranks.all_gather(array, bounds)
        np.testing.assert_array_equal(array, np.arange(count).astype(dtype))
        array = mine.copy()
        ranks.broadcast(array, n - 1)
        np.testing.assert_array_equal(array, (np.arange(count) + n - 1).astype(dtype))
ends = [0, *range(1, n), n + 4]  # the last rank is given more
given = (np.arange(n + 4) + 100 * r).astype(np.int16)
received = np.zeros((n, ends[r + 1] - ends[r]), np.int16)
ranks.all_to_all(given, ends, received)
np.testing.assert_array_equal(received, 100 * np.arange(n)[:, None] + np.arange(ends[r], ends[r + 1]))
scalar = np.array(r, np.float64)
ranks.all_reduce(scalar)
assert scalar == n * (n - 1) / 2
flags = np.full((2, 3), r == 0)
ranks.broadcast(flags)
assert flags.all()

lopsided = np.arange(7, dtype=np.float32) * (r + 1)
ranks.reduce_scatter(lopsided, [0, *[0] * (n - 2), 2, 7])  # the first ranks have nothing
if r == n - 1:
    np.testing.assert_array_equal(lopsided[2:], np.arange(2, 7) * (n * (n + 1) / 2))

assert gathered(ranks, {"rank": r, "text": "é" * r}) == [{"rank": i, "text": "é" * i} for i in range(n)]
assert broadcast_document(ranks, [r, 0.1]) == [0, 0.1]
noise = np.random.default_rng(r).standard_normal(100_003).astype(np.float32)
ranks.all_reduce(noise)
assert len(set(gathered(ranks, hashlib.sha256(noise.tobytes()).hexdigest()))) == 1
ranks.barrier()
sys.stdout.write(f"rank {r} is done\n")
sys.stdout.flush()
if sys.argv[1:] == ["close"]:
    ranks.close()
    sys.exit()
if "own group" in sys.argv:
    ranks.close()
    torch.distributed.barrier()  # that of the program goes on
    sys.exit()

if r == n - 1:
    if sys.argv[1:] == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.close("its disk is full")
    sys.exit(2)
signal.signal(signal.SIGTERM, lambda *_: None)  # by which the launcher ends the others
try:
    ranks.all_reduce(np.zeros(1000, np.float32))
except Lost as error:
    sys.stdout.write(f"{'speaker' if error.speaker else 'other'} {r}: {error}\n")
    sys.exit(2)

"""The machine of a rank for a loss of all rows of a batch: predictions of all ranks are gathered.

Each rank runs its rows to their predictions, which are small, and receives those of the other ranks and their labels.
Every rank then computes the same loss of all rows, and goes back from the derivatives by its own (see
`onnxgrad.training.step.cached_gradients`). The sum of the gradients over ranks is that of one process.
"""

from __future__ import annotations

import numpy as np

from onnxgrad.distributed import Collective, gathered
from onnxgrad.errors import BadInput
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.sharded import Sharded
from onnxgrad.training.step.cached_gradients import CachedGradients


class ComparedRows(CachedGradients, DataParallel):
    """`CachedGradients` over ranks."""

    def gather_rows(self, rows: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], slice]:
        """The rows of all ranks, in their order."""
        return all_rows(self.collective, rows)


class ComparedRowsSharded(CachedGradients, Sharded):
    """`CachedGradients` over ranks that have a part of the optimizer's state each."""

    def gather_rows(self, rows: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], slice]:
        """The rows of all ranks, in their order."""
        return all_rows(self.collective, rows)


def all_rows(collective: Collective, rows: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], slice]:
    """The `rows` of all ranks in their order, and the place of those of this rank, which may have none."""
    count = min(map(len, rows.values()), default=0)
    if any(len(a) != count for a in rows.values()):
        raise BadInput("a loss of all rows over ranks reads values with one row for each row of the data")
    kinds = {n: [a.dtype.str, list(a.shape[1:])] for n, a in rows.items()} if count else {}
    known = gathered(collective, [count, kinds])
    ends = np.cumsum([0, *(c for c, _ in known)]).tolist()
    found = {}
    for name, (dtype, shape) in next(k for _, k in known if k).items():
        each = int(np.prod(shape))
        flat = np.zeros(ends[-1] * each, np.dtype(dtype))
        low, high = ends[collective.rank] * each, ends[collective.rank + 1] * each
        if count:
            flat[low:high] = rows[name].reshape(-1)
        collective.all_gather(flat, [e * each for e in ends])
        found[name] = flat.reshape(ends[-1], *shape)
    return found, slice(ends[collective.rank], ends[collective.rank + 1])

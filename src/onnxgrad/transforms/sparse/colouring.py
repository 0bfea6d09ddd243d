"""Colourings of sparse matrices: columns and rows that share a product with a vector.

Columns that share no row may be one direction (Curtis, Powell & Reid 1974: a colouring of distance 2). For a symmetric
matrix a star colouring suffices: an entry is read off at its place or at the transposed one (Coleman & Moré 1984;
Gebremedhin, Manne & Pothen 2005, "What color is your Jacobian?"). A few dense rows among sparse ones are pulled back
separately, and do not count for the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: Rows with more entries than this get distinct colours for all their columns.
_MOST_PAIRS = 2**26


@dataclass
class Compression:
    """Directions that find all entries of a matrix.

    Attributes:
        columns: For each column, its direction of forward mode; -1: none.
        rows: For each row, its direction of reverse mode; -1: none.
        forward: How many directions of forward mode there are.
        reverse: How many of reverse mode.
        where: For each entry, in the order of rows, the number of the element that is it, in the results of all
            directions of forward mode, and then of reverse mode.
    """

    columns: np.ndarray
    rows: np.ndarray
    forward: int
    reverse: int
    where: np.ndarray

    @property
    def directions(self) -> int:
        """All of them."""
        return self.forward + self.reverse


def compress(pattern: csr_array) -> Compression:
    """The cheapest way found to compute a matrix of this pattern: by columns, by rows, or the dense ones apart."""
    candidates = [_split(pattern, 0), _transpose_split(_split(pattern.T.tocsr(), 0))]
    dense = _dense_rows(pattern)
    if dense:
        candidates.append(_split(pattern, dense))
    across = pattern.T.tocsr()
    if dense := _dense_rows(across):
        candidates.append(_transpose_split(_split(across, dense)))
    best = min(candidates, key=lambda c: c[0] + c[1])  # the first of equals: forward mode needs no residuals
    return _compress(pattern, best)


def compress_symmetric(pattern: csr_array) -> Compression:
    """The same for a symmetric matrix, in forward mode only; `pattern` must be symmetric."""
    plain, star = _colour_columns(pattern), _star(pattern)
    if plain.max(initial=-1) <= star.max(initial=-1):
        return _compress(pattern, (int(plain.max(initial=-1)) + 1, 0, plain, np.full(pattern.shape[0], -1)))
    m = pattern.shape[0]
    rows, columns = _places(pattern)
    count = int(star.max(initial=-1)) + 1
    alike = np.bincount(rows * count + star[columns], minlength=m * count)
    alone = alike[rows * count + star[columns]] == 1
    there, here = star[columns] * m + rows, star[rows] * m + columns
    assert (alone | (alike[columns * count + star[rows]] == 1)).all()
    return Compression(star, np.full(m, -1), count, 0, np.where(alone, there, here))


def _places(pattern: csr_array) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of every entry."""
    counts = np.diff(pattern.indptr)
    return np.repeat(np.arange(pattern.shape[0], dtype=np.int64), counts), pattern.indices.astype(np.int64)


Split = tuple[int, int, np.ndarray, np.ndarray]


def _split(pattern: csr_array, dense: int) -> Split:
    """Colours of columns, after the `dense` rows with most entries have got colours of their own."""
    m, _ = pattern.shape
    rows = np.full(m, -1)
    if dense:
        counts = np.diff(pattern.indptr)
        apart = np.sort(np.argsort(-counts, kind="stable")[:dense])
        rows[apart] = _colour_columns(pattern[apart].T.tocsr())
        pattern = _without_rows(pattern, rows >= 0)
    columns = _colour_columns(pattern)
    empty = np.bincount(pattern.indices, minlength=pattern.shape[1]) == 0
    columns[empty] = -1
    return int(columns.max(initial=-1)) + 1, int(rows.max(initial=-1)) + 1, columns, rows


def _without_rows(pattern: csr_array, dropped: np.ndarray) -> csr_array:
    """The same pattern with nothing in some rows."""
    from scipy.sparse import coo_array

    rows, columns = _places(pattern)
    kept = ~dropped[rows]
    entries = np.ones(int(kept.sum()), bool)
    return coo_array((entries, (rows[kept], columns[kept])), shape=pattern.shape).tocsr()


def _transpose_split(split: Split) -> Split:
    """Convert a split of the transposed matrix to one of the matrix."""
    forward, reverse, columns, rows = split
    return reverse, forward, rows, columns


def _dense_rows(pattern: csr_array) -> int:
    """The best number of densest rows to set apart, by a bound on the number of colours."""
    counts = np.sort(np.diff(pattern.indptr))[::-1]
    bounds = np.arange(counts.size) + counts
    best = int(bounds.argmin()) if counts.size else 0
    return best if best and bounds[best] < counts[0] else 0


def _compress(pattern: csr_array, split: Split) -> Compression:
    forward, reverse, column_colours, row_colours = split
    m, n = pattern.shape
    rows, columns = _places(pattern)
    pulled = row_colours[rows] >= 0
    where = np.where(pulled, forward * m + row_colours[rows] * n + columns, column_colours[columns] * m + rows)
    return Compression(column_colours, row_colours, forward, reverse, where)


def _colour_columns(pattern: csr_array) -> np.ndarray:
    """A colour for each column, so that no two of one colour share a row: greedily, in two orders; the better one."""
    n = pattern.shape[1]
    counts = np.diff(pattern.indptr).astype(np.float64)
    if (counts**2).sum() > _MOST_PAIRS:
        return np.arange(n)
    numbers = pattern.astype(np.int32)
    meet = (numbers.T @ numbers).tocsr()
    degrees = np.diff(meet.indptr)
    orders = [np.arange(n), np.argsort(-degrees, kind="stable")]
    colourings = [_greedy(meet, order) for order in orders]
    return min(colourings, key=lambda c: c.max(initial=-1))


def _greedy(meet: csr_array, order: np.ndarray) -> np.ndarray:
    """The first colour that no neighbour has, for each in turn."""
    starts, ends = meet.indptr[:-1].tolist(), meet.indptr[1:].tolist()
    neighbours = meet.indices.tolist()
    colours = [-1] * meet.shape[0]
    for v in order.tolist():
        taken = {colours[w] for w in neighbours[starts[v] : ends[v]]}
        colour = 0
        while colour in taken:
            colour += 1
        colours[v] = colour
    return np.array(colours, np.int64)


def _star(pattern: csr_array) -> np.ndarray:
    """A colouring of a symmetric pattern in which every path of four vertices has three colours at least."""
    n = pattern.shape[0]
    counts = np.diff(pattern.indptr).astype(np.float64)
    if (counts**3).sum() > _MOST_PAIRS:
        return np.arange(n)
    near = [
        [w for w in pattern.indices[pattern.indptr[v] : pattern.indptr[v + 1]].tolist() if w != v] for v in range(n)
    ]
    colours = [-1] * n
    for v in np.argsort(-counts, kind="stable").tolist():
        taken = set()
        for w in near[v]:
            if colours[w] >= 0:
                taken.add(colours[w])
            for x in near[w]:
                if x == v or colours[x] < 0 or colours[x] in taken:
                    continue
                if colours[w] < 0 or any(y != w and colours[y] == colours[w] for y in near[x]):
                    taken.add(colours[x])
        colour = 0
        while colour in taken:
            colour += 1
        colours[v] = colour
    return np.array(colours, np.int64)

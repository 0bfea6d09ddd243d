"""Labels that are names: class numbers, and the names that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, Dense


class ClassColumn(Dense):
    """Class indices, and the names that they stand for.

    Args:
        indices: into `names`, one per row.
        names: of the classes, in the order of their numbers.
    """

    def __init__(self, indices: np.ndarray, names: Sequence[str]) -> None:
        super().__init__(indices)
        self.names = tuple(names)

    def select(self, rows: np.ndarray) -> ClassColumn:
        """Only these rows, of the same classes."""
        return ClassColumn(self.rows[rows], self.names)

    def renumbered(self, names: Sequence[str], where: str) -> ClassColumn:
        """The same classes by their numbers in `names`. Raises BadInput for one that is not there."""
        unknown = [n for n in self.names if n not in names]
        if unknown:
            raise BadInput(
                f"{where} has the class {unknown[0]!r}, which is none of those that the model was trained to tell "
                f"apart: {', '.join(map(repr, names[:8]))}{', …' if len(names) > 8 else ''}\n"
                "  hint: leave its rows out, or train a new head (--head) for other classes"
            )
        places = np.array([names.index(n) for n in self.names], np.int64)
        return ClassColumn(places[self.rows], names)


def class_column(column: Column) -> Column:
    """`column`, where it holds text as the numbers of the names that occur in it, sorted."""
    if isinstance(column, ClassColumn) or column.array is None or column.array.dtype.kind not in "UO":
        return column
    names, numbers = np.unique(column.array.astype(str), return_inverse=True)
    return ClassColumn(numbers.reshape(column.array.shape), names.tolist())

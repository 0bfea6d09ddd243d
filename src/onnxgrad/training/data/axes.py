"""Find the inputs with a batch axis; others are fed whole, such as a table or a set of anchors.

ONNX does not mark batch axes. An input that shares its first dimension, a name or a number, with an output of the model
has a batch axis; without such outputs, inputs that share theirs among themselves. Any other input is fed whole if its
array has another number of rows than the data, and fits the input's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field


def fed_whole(fields: Sequence[Field], rows: Mapping[str, int], source: str) -> set[str]:
    """The fields without a batch axis, decided by the lengths of their arrays.

    Raises:
        BadInput: an array has as many rows as its input takes whole, and as the batched ones have: it may be either.
    """
    fields = [f for f in fields if f.name in rows]
    fixed = {f.batch for f in fields if f.batch is not None}
    dims = [_first(f) for f in fields]
    anchors = {_first(f) for f in fields if f.shares} or {d for d in dims if dims.count(d) > 1}
    anchors -= {""}
    batched = [f for f in fields if _first(f) in anchors]
    counts = {rows[f.name] for f in batched}
    if len(counts) != 1 or (len(set(rows.values())) == 1 and not fixed):
        return set()
    (count,) = counts
    found = set()
    for field in fields:
        size = rows[field.name]
        if field in batched or (field.batch is None and (size == count or not field.dim)):
            continue
        if field.batch == size == count and not fixed & anchors and any(not f.label for f in batched):
            raise BadInput(
                f"the input {field.name!r} takes {size} rows, and the other arrays of {source} have {count} as well: "
                "it may have a batch axis or be fed whole\n  hint: leave a row out, or name its first axis in the model"
            )
        if field.batch in (None, size):
            found.add(field.name)
    return found


def check_label_rows(fields: Sequence[Field]) -> None:
    """Check that labels have the rows of the inputs.

    Raises:
        BadInput: the first axis of labels is another axis of an input.
    """
    inputs = [f for f in fields if not f.label]
    rows = {f.dim for f in inputs}
    for label in (f for f in fields if f.label and f.dim and f.dim not in rows):
        for field in (f for f in inputs if f.dim and label.dim in f.dims):
            raise BadInput(
                f"the rows of {field.name!r} lie along its first axis {field.dim!r}, and those of the labels "
                f"{label.name!r} along {label.dim!r}, which is its axis {field.dims.index(label.dim) + 1}\n"
                "  hint: a loss that is told time=0 takes the first axis for time; leave it out where that is the batch"
            )


def check_batch_axes(fields: Sequence[Field], columns: Mapping[str, Column]) -> None:
    """Raise BadInput for a scalar input that rows would feed."""
    for field in fields:
        if field.scalar and not (field.name in columns and columns[field.name].whole):
            raise BadInput(
                f"input {field.name!r} is a scalar; every input that data feed needs a batch axis, its first"
            )


def check_spread(fields: Sequence[Field], batch: Mapping[str, np.ndarray], source: str) -> None:
    """Raise BadInput for labels of size 1 along an axis that is longer in an input: a loss would repeat them."""
    for label in (f for f in fields if f.label and f.name in batch):
        for axis, dim in enumerate(label.dims, 1):
            for field in (f for f in fields if dim in f.dims and not f.label and f.name in batch and dim):
                size = batch[field.name].shape[field.dims.index(dim) + 1]
                if batch[label.name].shape[axis] == 1 != size:
                    raise BadInput(
                        f"the labels {label.name!r} of {source} have size 1 along axis {axis}, {dim!r}, and "
                        f"{field.name!r} has {size}: each would count {size} times"
                    )


def fixed_batch(fields: Sequence[Field]) -> int | None:
    """The batch size that the model fixes, if it does. Raises BadInput if inputs fix several."""
    fixed = {f.name: f.batch for f in fields if f.batch is not None}
    if len(set(fixed.values())) > 1:
        sizes = ", ".join(f"{name!r} of {size}" for name, size in fixed.items())
        raise BadInput(
            f"the inputs take batches of different sizes: {sizes}\n"
            "  hint: an input without a batch axis is fed whole, by an array with all of its rows"
        )
    return next(iter(fixed.values()), None)


def first_dim(value: ir.Value) -> str | int | None:
    """The first dimension of a value, a name or a number; None where it has none."""
    dim = value.shape[0] if value.shape is not None and len(value.shape) else None
    return (dim.value or None) if isinstance(dim, ir.SymbolicDim) else dim


def _first(field: Field) -> str | int:
    """The first dimension, as it is declared."""
    return field.dim if field.batch is None else field.batch

"""Unnamed arrays: name a tuple of inputs and labels, or one array, by the inputs that they feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.fields import Field


def named_by_position(source: Any, fields: Sequence[Field], name: str = "the data") -> Any:
    """`source` with names, if it is a tuple or an array; other sources unchanged.

    Args:
        source: ``(x, y)``: x and y are arrays, or tuples of arrays for several inputs or labels; x may have names.
            Or one array, or a list of its rows, for a step or a model with one input.
        fields: the inputs that data feed. Those that the model reads come before those that the loss compares with.
        name: of the data in messages.

    Raises:
        BadInput: there are more or fewer arrays than inputs.
    """
    is_table = hasattr(source, "__arrow_c_stream__") or isinstance(source, (Mapping, str))
    is_list = isinstance(source, list) and source and isinstance(source[0], (list, int, float, np.ndarray))
    if is_list or (hasattr(source, "__array__") and not is_table):
        source = (source,)
    if not isinstance(source, tuple) or not source or all(isinstance(part, Mapping) for part in source):
        return source
    first, *rest = source
    named = {str(k): v for k, v in first.items()} if isinstance(first, Mapping) else {}
    arrays = [a for part in (rest if named else source) for a in (part if isinstance(part, tuple) else (part,))]
    order = sorted((f for f in fields if f.name not in named), key=lambda f: f.label)
    if named and len(arrays) < len(order):
        order = [f for f in order if f.label]
    if len(arrays) != len(order):
        wanted = ", ".join(f"{f.name} ({f.wanted})" for f in order)
        held = "1 array without a name" if len(arrays) == 1 else f"{len(arrays)} arrays without names"
        raise BadInput(
            f"{name}: {held}, and there are {len(order)} inputs to feed: {wanted}\n"
            "  hint: several inputs are a tuple, ((x1, x2), y); or give names: {'x': …, 'labels': …}"
        )
    return named | {f.name: a for f, a in zip(order, arrays)}


def with_labels(data: Any, y: Any) -> Any:
    """`data`, or the pair of `data` and labels `y` if these are given.

    Raises:
        BadInput: `y` is a number or a name.
    """
    if isinstance(y, str):
        raise BadInput(
            f"the second argument are labels, not {y!r}\n  hint: Trainer(…, labels={y!r}) names their column"
        )
    if isinstance(y, (int, float)):
        raise BadInput(f"the second argument are labels, not {y!r}\n  hint: give settings by name: batch_size={y!r}")
    return data if y is None else (data, y)

"""Data: arrays by name, each meeting the input of the step that it feeds.

An array feeds the input of the same name. Where that leaves exactly one array and one input, they belong
together; where it leaves several, the names that most files agree on decide (``x``, ``images``, ``inputs``, …
for what the model reads, ``y``, ``labels``, ``targets``, … for what the loss compares with), if only one
fits. Anything else is refused, and the message says which array is missing.

Conversions that are made: whatever loses nothing (checked element by element), and a wider float to a
narrower one (float64 to float32), which rounds. No truncation of floats to integers, no wrapping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName

Arrays = Mapping[str, np.ndarray]

#: Names by which an array says that the loss compares with it, and that the model reads it.
LABELS = ("y", "t", "label", "labels", "target", "targets", "class", "classes")
INPUTS = ("x", "input", "inputs", "data", "image", "images", "features", "tokens", "ids", "input_ids")


@dataclass(frozen=True)
class Field:
    """What one batch input of the step wants.

    Attributes:
        name: of the input.
        dtype: of its elements.
        shape: its dimensions behind the batch axis; ``None`` where any size will do.
        batch: its batch size, where the model fixes it.
        label: the loss compares with it; the model does not read it.
        classes: number of classes, where it holds class indices and the number is known.
        ignored: the class index that the loss leaves out.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | None, ...]
    batch: int | None = None
    label: bool = False
    classes: int | None = None
    ignored: int | None = None

    @classmethod
    def of(cls, value: ir.Value, *, label: bool = False) -> Field:
        """The field for a graph input."""
        name = value.name or ""
        if value.dtype is None or value.shape is None:
            raise BadInput(f"input {name!r} declares no dtype or no shape, so data cannot be checked against it")
        dims = [d if isinstance(d, int) else None for d in value.shape]
        if not dims:
            raise BadInput(f"input {name!r} is a scalar; every input that data feed needs a batch axis, its first")
        return cls(name, value.dtype.numpy(), tuple(dims[1:]), dims[0], label)

    @property
    def wanted(self) -> str:
        """In words."""
        sizes = [
            "N" if self.batch is None else str(self.batch),
            *("?" if d is None else str(d) for d in self.shape),
        ]
        return f"{self.dtype}[{', '.join(sizes)}]"


def load_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file; nothing in it is ever executed.

    Raises:
        BadInput: the file is missing, unreadable, truncated, no ``.npz``, or holds Python objects.
    """
    path = Path(path)
    arrays = {}
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise BadInput(f"{str(path)!r} holds one array without a name; use numpy.savez(path, name=array)")
        with file:
            for name in file.files:
                try:
                    arrays[name] = file[name]
                except ValueError as error:
                    if "Object arrays" not in str(error):
                        raise
                    where = f"array {name!r} in {str(path)!r}"
                    raise BadInput(f"{where} holds Python objects; save numbers only") from error
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise BadInput(f"there is no file {str(path)!r}") from error
    except Exception as error:  # zipfile, zlib and numpy fail in a dozen ways on a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        if "pickle" in reason:
            reason = "not a NumPy file"
        raise BadInput(f"cannot read {str(path)!r} as an .npz file: {reason}") from error
    if not arrays:
        raise BadInput(f"{str(path)!r} holds no arrays")
    return arrays


class Data:
    """Rows for the batch inputs of a step, checked and converted once.

    Args:
        arrays: by name.
        fields: what the step wants.
        source: what to call the data in messages.

    Raises:
        BadInput: one line that names the array and says what was expected.
    """

    def __init__(self, arrays: Arrays, fields: Sequence[Field], source: str = "the data") -> None:
        self.fields = list(fields)
        chosen = match(arrays, fields, source)
        self.arrays = {f.name: fitted(chosen[f.name], arrays[chosen[f.name]], f, source) for f in fields}
        rows = {name: len(a) for name, a in self.arrays.items()}
        if len(set(rows.values())) > 1:
            held = ", ".join(f"{chosen[name]!r} has {n}" for name, n in rows.items())
            raise BadInput(f"the arrays of {source} differ in their number of rows: {held}")
        self.rows = next(iter(rows.values()), 0)
        if not self.rows:
            raise BadInput(f"{source} is empty: {next(iter(chosen.values()), 'it')!r} has 0 rows")

    def __len__(self) -> int:
        return self.rows

    @property
    def labels(self) -> dict[str, np.ndarray]:
        """The arrays that only the loss reads."""
        return {f.name: self.arrays[f.name] for f in self.fields if f.label}

    def batches(self, size: int, order: np.ndarray | None = None, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Batches of `size` rows, the last one smaller, in `order`, from the row at position `start` on.

        In an `order` the full batches are handed out in the same arrays again and again.
        """
        stop = self.rows if order is None else len(order)
        buffers: dict[str, np.ndarray] = {}
        for low in range(start, stop, size):
            high = min(low + size, stop)
            if order is None:
                yield {name: a[low:high] for name, a in self.arrays.items()}
                continue
            rows = order[low:high]
            if not buffers or high - low < size:
                buffers = {name: np.empty((high - low, *a.shape[1:]), a.dtype) for name, a in self.arrays.items()}
            for name, array in self.arrays.items():
                np.take(array, rows, axis=0, out=buffers[name], mode="clip")  # the one mode that does not copy twice
            yield buffers


def match(arrays: Arrays, fields: Sequence[Field], source: str) -> dict[str, str]:
    """Which array feeds which field: from the name of the field to that of the array."""
    chosen = {f.name: f.name for f in fields if f.name in arrays}
    for label, words in ((True, LABELS), (False, INPUTS)):
        left = [f for f in fields if f.name not in chosen and f.label == label]
        if len(left) == 1:
            named = [a for a in arrays if a not in chosen.values() and a.lower() in words]
            if len(named) == 1:
                chosen[left[0].name] = named[0]
    left = [f for f in fields if f.name not in chosen]
    spare = [a for a in arrays if a not in chosen.values()]
    if len(left) == len(spare) == 1 and not (left[0].label and spare[0].lower() in INPUTS):
        chosen[left[0].name] = spare[0]
    elif left:
        field = left[0]
        role = "labels" if field.label else "array"
        if not spare:
            held = ", ".join(map(repr, arrays))
            raise BadInput(f"{source} has no {role} for the input {field.name!r} ({field.wanted}); it holds {held}")
        hint = str(UnknownName(field.name, spare, "array")).partition("; ")[2]
        raise BadInput(f"{source} has no {role} named {field.name!r} ({field.wanted}); {hint}")
    return chosen


def fitted(name: str, array: np.ndarray, field: Field, source: str) -> np.ndarray:
    """`array` as `field` wants it. Raises BadInput if it cannot be."""
    where = f"array {name!r} of {source}"
    if not (_is_float(array.dtype) or array.dtype.kind in "biu"):
        raise BadInput(f"{where} holds {array.dtype}, not numbers; expected {field.wanted}")
    shape = array.shape[1:]
    if array.ndim != len(field.shape) + 1 or any(w not in (None, n) for w, n in zip(field.shape, shape)):
        raise BadInput(f"{where} is {array.dtype}{list(array.shape)}; expected {field.wanted}{_hint(array, field)}")
    if _is_float(array.dtype):
        _finite(array, where)
    array = converted(array, field, where)
    if field.classes is not None and np.issubdtype(array.dtype, np.integer) and array.size:
        bad = (array < 0) | (array >= field.classes)
        if field.ignored is not None:
            bad &= array != field.ignored
        if bad.any():
            row = np.argwhere(bad)[0]
            raise BadInput(
                f"{where} has the label {array[tuple(row)]} in row {row[0]}; "
                f"the model tells {field.classes} classes apart, 0 to {field.classes - 1}"
            )
    return np.ascontiguousarray(array)


def converted(array: np.ndarray, field: Field, where: str) -> np.ndarray:
    """`array` with the dtype of `field`, if that loses nothing but the precision of floats."""
    if array.dtype == field.dtype:
        return array
    with np.errstate(all="ignore"):
        result = array.astype(field.dtype)
        if _is_float(array.dtype) and _is_float(field.dtype):
            _finite(result, f"{where}, as {field.dtype},")
        elif not np.array_equal(result.astype(array.dtype), array) or not _same_sign(result, array):
            raise BadInput(f"{where} holds {array.dtype} that {field.dtype} cannot; expected {field.wanted}")
    return result


def _is_float(dtype: np.dtype) -> bool:
    """Also for the types that numpy lacks."""
    try:
        return ir.DataType.from_numpy(dtype).is_floating_point()
    except TypeError:
        return False


def _same_sign(a: np.ndarray, b: np.ndarray) -> bool:
    """False where an integer wrapped around and would wrap back."""
    return bool(np.array_equal(a < 0, b < 0)) if "b" not in (a.dtype.kind, b.dtype.kind) else True


def _finite(array: np.ndarray, where: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        place = np.argwhere(~finite)[0]
        raise BadInput(f"{where} is not finite: {array[tuple(place)]} in row {place[0]}")


def _hint(array: np.ndarray, field: Field) -> str:
    """What is likely wrong with the shape."""
    if field.label and np.issubdtype(field.dtype, np.integer) and array.ndim == len(field.shape) + 2:
        if array.shape[-1] == 1:
            return " (drop its last axis)"
        return " (class indices, not one-hot rows)"
    sizes = [d for d in field.shape if d is not None]
    if len(sizes) == len(field.shape) and array.ndim and array[:1].size == math.prod(sizes):
        return f" (its rows have the right size: reshape it to {[len(array), *field.shape]})"
    return ""

"""Fields: the requirements of a step's inputs, the matching of arrays to them, checks and conversions.

An array feeds the input of the same name. If exactly one array and one input remain, they are matched; if several
remain, conventional names decide (``x``, ``images``, ``inputs``, … for inputs of the model, ``y``, ``labels``,
``targets``, … for labels of the loss), provided that only one fits. Otherwise an error names the missing array.

Allowed conversions: those without loss (checked element by element), and those of a wider float to a
narrower one (float64 to float32), which round. Floats are not truncated to integers; integers do not wrap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.loss.label_inputs import LABELS as LABELS
from onnxgrad.wording import no_number, tensor_text, type_text

#: Names of arrays that feed a model.
INPUTS = ("x", "input", "inputs", "data", "image", "images", "features", "tokens", "ids", "input_ids")


@dataclass(frozen=True)
class Field:
    """The requirements of one batch input of the step.

    Attributes:
        name: of the input.
        dtype: of its elements.
        shape: its dimensions behind the batch axis; ``None`` where any size will do.
        batch: its batch size, where the model fixes it.
        label: the loss compares with it; the model does not read it.
        classes: number of classes, where it holds class indices and the number is known.
        ignored: the class index that the loss leaves out.
        indices: it holds class indices, of however many classes.
        binary: it holds labels between 0 and 1.
        logits: the loss takes the softmax of it.
        dim: the name of its first axis, where the model gives one and no size.
        dims: the names of its other axes; empty for one that has none.
        shares: its first axis is that of an output of the model.
        scalar: it is a single number, which every batch has.
        raw: it takes a column of a table, text or numbers of which some may be missing.
        gaps: the model itself looks for NaN in it.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | None, ...]
    batch: int | None = None
    label: bool = False
    classes: int | None = None
    ignored: int | None = None
    dim: str = ""
    shares: bool = False
    indices: bool = False
    binary: bool = False
    logits: bool = False
    dims: tuple[str, ...] = ()
    scalar: bool = False
    raw: bool = False
    gaps: bool = False

    @classmethod
    def of(cls, value: ir.Value, *, label: bool = False) -> Field:
        """The field for a graph input."""
        name = value.name or ""
        if value.dtype is None or value.dtype == ir.DataType.UNDEFINED or value.shape is None:
            raise BadInput(f"input {name!r} declares no dtype or no shape, so data cannot be checked against it")
        dims = [d if isinstance(d, int) else None for d in value.shape]
        if not dims:
            return cls(name, value.dtype.numpy(), (), label=label, scalar=True)
        first, *others = [d.value or "" if isinstance(d, ir.SymbolicDim) else "" for d in value.shape]
        gaps = any(node.op_type in ("IsNaN", "Imputer") for node in value.consumers())
        return cls(name, value.dtype.numpy(), tuple(dims[1:]), dims[0], label, dim=first, dims=tuple(others), gaps=gaps)

    @property
    def wanted(self) -> str:
        """The expected dtype and shape in words, for messages."""
        if self.scalar:
            return tensor_text(self.dtype, ())
        sizes = [
            "N" if self.batch is None else str(self.batch),
            *("?" if d is None else str(d) for d in self.shape),
        ]
        return tensor_text(self.dtype, sizes)


def match(arrays: Collection[str], fields: Sequence[Field], source: str) -> dict[str, str]:
    """Match arrays to fields: a map from the name of each field to that of its array."""
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
            hint = ""
            same = [f for f in fields if not f.label and (f.dtype, f.shape) == (field.dtype, field.shape)]
            if field.label and same:
                hint = f"\n  hint: labels={same[0].name!r} (--labels {same[0].name}) compares with the input itself"
            elif field.label and [*arrays] == ["images"]:
                hint = "\n  hint: pictures in a folder for each class have labels"
            raise BadInput(
                f"{source} has no {role} for the input {field.name!r} ({field.wanted}); it holds {held}{hint}"
            )
        hint = str(UnknownName(field.name, spare, "array")).partition("; ")[2]
        raise BadInput(f"{source} has no {role} named {field.name!r} ({field.wanted}); {hint}{_wide(field, spare)}")
    return chosen


def _wide(field: Field, spare: Sequence[str]) -> str:
    """A hint to join columns, if there are enough of them for `field`."""
    if field.label or len(field.shape) != 1 or field.shape[0] is None or not 1 < field.shape[0] <= len(spare):
        return ""
    names = f"{spare[0]}..{spare[field.shape[0] - 1]}"
    python = f"inputs={{{field.name!r}: {names!r}}}"
    return f"\n  hint: --inputs {field.name}={names} (in Python {python}) joins columns of one number each"


def fitted(name: str, array: np.ndarray, field: Field, source: str, rows: np.ndarray | None = None) -> np.ndarray:
    """`array` converted to the dtype and shape of `field`.

    Args:
        name: of the array in messages.
        array: rows.
        field: what the input expects.
        source: the data in messages.
        rows: the numbers of the rows in the data. Default: 0, 1, 2, ….

    Raises:
        BadInput: it does not fit.
    """
    where = f"array {name!r} of {source}"
    if field.raw:
        return np.ascontiguousarray(array.astype(field.dtype))
    if not (is_float(array.dtype) or array.dtype.kind in "biu"):
        gone = np.array([v is None for v in array.flat]).reshape(array.shape)
        if gone.any():
            row = np.argwhere(gone)[0][0]
            raise BadInput(
                f"{where} has no value in row {row if rows is None else rows[row]}\n"
                "  hint: fill it in; --missing drop of train and evaluate (in Python missing='drop') leaves the row out"
            )
        kind = _kind(array)
        hint = "\n  hint: numbers have no leading zeros" if re.match(r"text \('0\d+'", kind) else ""
        if re.search(r"\.(png|jpe?g|bmp|gif|webp|tiff?)'", kind, re.IGNORECASE):
            hint = "\n  hint: paths of pictures in a file begin in its folder; a stream reads none"
        raise BadInput(f"{where} holds {kind}, not numbers; expected {field.wanted}{hint}")
    array = _last_axis(array, field)
    shape = array.shape[1:]
    if array.ndim != len(field.shape) + 1 or any(w not in (None, n) for w, n in zip(field.shape, shape)):
        raise BadInput(
            f"{where} is {tensor_text(array.dtype, array.shape)}; expected {field.wanted}{_hint(array, field)}"
        )
    if is_float(array.dtype):
        _finite(array, where, rows, field.gaps)
    array = converted(array, field, where)
    check_labels(array, field, where, rows)
    return np.ascontiguousarray(array)


def check_labels(labels: np.ndarray, field: Field, where: str, rows: np.ndarray | None = None) -> None:
    """Raise BadInput for a label that `field` does not allow.

    Args:
        labels: of the type of the field.
        field: says which labels there are.
        where: the labels in messages.
        rows: the numbers of the rows in the data.
    """
    if not labels.size:
        return
    if np.issubdtype(labels.dtype, np.integer) and (field.indices or field.classes is not None):
        bad = labels < 0
        if field.classes is not None:
            bad |= labels >= field.classes
        if field.ignored is not None:
            bad &= labels != field.ignored
        if bad.any():
            known = "classes are numbered from 0"
            if field.classes is not None:
                known = f"the model tells {field.classes} classes apart, 0 to {field.classes - 1}"
            message = f"{where} has the label {_at(labels, bad, rows)}; {known}"
            raise BadInput(message + _label_hint(labels, bad, field))
    elif field.binary and is_float(labels.dtype):
        bad = (labels < 0) | (labels > 1)
        if bad.any():
            most = float(labels.max())
            hint = f"divide by {most:g}" if labels.min() == 0 and most > 1 else "use 0 and 1"
            raise BadInput(
                f"{where} has the label {_at(labels, bad, rows)}; this loss takes labels from 0 to 1\n  hint: {hint}"
            )
    elif (
        field.logits
        and labels.ndim > 1
        and labels.min() >= 0
        and any(np.allclose(labels.sum(axis, dtype=np.float64), 1, atol=1e-3) for axis in (1, -1))
    ):
        hint = "write targets=probabilities as an option of the loss"
        raise BadInput(f"{where} has probabilities, which sum to 1; this loss takes logits\n  hint: {hint}")


def is_uncounted(labels: np.ndarray, field: Field) -> bool:
    """True if the loss ignores all `labels`."""
    return bool(field.label and field.ignored is not None and labels.size and (labels == field.ignored).all())


def check_counted(labels: np.ndarray, field: Field, where: str) -> None:
    """Raise BadInput if the loss ignores all `labels`: the mean of no losses is not a number."""
    if is_uncounted(labels, field):
        raise BadInput(f"{where} has no label that counts: all are {field.ignored}, which the loss ignores")


def _at(array: np.ndarray, bad: np.ndarray, rows: np.ndarray | None) -> str:
    """The first `bad` element and its row, in words."""
    place = tuple(np.argwhere(bad)[0])
    value = f"{float(array[place]):g}" if is_float(array.dtype) else array[place]
    return f"{value} in row {place[0] if rows is None else rows[place[0]]}"


def _label_hint(labels: np.ndarray, bad: np.ndarray, field: Field) -> str:
    """A hint about labels that are no classes."""
    wrong = np.unique(labels[bad])
    if field.classes == 1:
        return "\n  hint: one score for each row is for the loss bce_with_logits, with labels 0 and 1"
    if wrong.tolist() == [255] and field.classes == 2 and not (labels == 1).any():
        return (
            "\n  hint: masks of 0 and 255 are for a model with one score (binary_dice, bce_with_logits); for two "
            "classes, write 1 in place of 255; ignore_index=255 if 255 marks what does not count"
        )
    if len(wrong) == 1 and (wrong[0] < 0 or wrong[0] == 255):
        return (
            f"\n  hint: if {wrong[0]} marks what does not count, say so: ignore_index={wrong[0]}, and in training "
            f"cross_entropy:ignore_index={wrong[0]}"
        )
    if labels.min() >= 1 and labels.max() == field.classes:
        return "\n  hint: labels start at 0: subtract 1 from them"
    if len(names := np.unique(labels).tolist()) == field.classes:
        listed = ",".join(map(str, names))
        return f"\n  hint: if the numbers are names of classes, say so: --classes {listed} (in Python classes=)"
    return ""


def _kind(array: np.ndarray) -> str:
    """A description of the elements of an array without numbers."""
    texts = [v for v in array.flat if isinstance(v, str)] if array.dtype.kind in "UO" else []
    if texts:
        return f"text ({no_number(texts)[:40]!r})"
    return type_text(array.dtype)


def _last_axis(array: np.ndarray, field: Field) -> np.ndarray:
    """`array` with or without a last axis of size 1, as `field` has it: one number per row is written in both ways."""
    rank = len(field.shape) + 1
    if array.ndim == rank - 1 and array.ndim and field.shape[-1] == 1:
        return array[..., None]
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def converted(array: np.ndarray, field: Field, where: str) -> np.ndarray:
    """`array` with the dtype of `field`, if that loses nothing but the precision of floats."""
    if array.dtype == field.dtype:
        return array
    with np.errstate(all="ignore"):
        result = array.astype(field.dtype)
        if is_float(array.dtype) and is_float(field.dtype):
            _finite(result, f"{where}, as {field.dtype},", gaps=field.gaps)
        elif not np.array_equal(result.astype(array.dtype), array) or not _same_sign(result, array):
            raise BadInput(f"{where} holds {type_text(array.dtype)} that {field.dtype} cannot; expected {field.wanted}")
    return result


def is_float(dtype: np.dtype) -> bool:
    """True for a float type, including the types that numpy lacks."""
    try:
        return ir.DataType.from_numpy(dtype).is_floating_point()
    except TypeError:
        return False


def _same_sign(a: np.ndarray, b: np.ndarray) -> bool:
    """False where an integer wrapped around and would wrap back."""
    return bool(np.array_equal(a < 0, b < 0)) if "b" not in (a.dtype.kind, b.dtype.kind) else True


def _finite(array: np.ndarray, where: str, rows: np.ndarray | None = None, gaps: bool = False) -> None:
    finite = ~np.isinf(array) if gaps else np.isfinite(array)
    if not finite.all():
        raise BadInput(
            f"{where} is not finite: {_at(array, ~finite, rows)}\n  hint: leave the row out, or give it a number"
        )


def _hint(array: np.ndarray, field: Field) -> str:
    """A hint about a wrong shape."""
    if field.label and np.issubdtype(field.dtype, np.integer) and array.ndim == len(field.shape) + 2:
        return " (class indices, not one-hot rows)"
    if field.label and np.issubdtype(field.dtype, np.integer) and array.ndim == len(field.shape) + 1 > 1:
        return "\n  hint: if the classes of the prediction lie along another axis, say so: cross_entropy:axis=-1"
    if array.ndim > 2 and array.ndim == len(field.shape) + 1:
        first, last = (0, array.ndim - 1, *range(1, array.ndim - 1)), (0, *range(2, array.ndim), 1)
        for order, where in ((first, "first"), (last, "last")):
            moved = [array.shape[axis] for axis in order[1:]]
            if all(w in (None, n) for w, n in zip(field.shape, moved)):
                return f"\n  hint: the model takes channels {where}: array.transpose{order}"
    sizes = [d for d in field.shape if d is not None]
    if len(sizes) == len(field.shape) and array.ndim and array[:1].size == math.prod(sizes):
        return f" (its rows have the right size: reshape it to {[len(array), *field.shape]})"
    return ""

"""Feeds of a session: arrays as ONNX Runtime reads them.

The runtime takes the memory of an array for numbers in the byte order of the machine, looks at no mask, and reads
beyond the end of bytes that are no text, all without a word. So arrays are converted here, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.wording import type_text

#: Types that need no check: numbers in the byte order of the machine.
_PLAIN = frozenset(np.dtype(c) for c in "?bhilqBHILQefd")


def bind(inputs: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name: `args` are those of `inputs`, in order, and `kwargs` the others, which may name more.

    Raises:
        BadInput: there are too many, two for one input, or none for one of `inputs`.
    """
    if len(args) > len(inputs):
        raise BadInput(f"{len(args)} arguments for {len(inputs)} inputs: {', '.join(inputs)}")
    arguments = dict(zip(inputs, args))
    for name, argument in kwargs.items():
        if name in arguments:
            raise BadInput(f"input {name!r} is given twice")
        arguments[name] = argument
    missing = [name for name in inputs if name not in arguments]
    if missing:
        raise BadInput(f"no argument for {', '.join(map(repr, missing))}")
    return arguments


def feed(name: str, given: Any) -> np.ndarray:
    """`given` as an array for the input `name`; the array itself if it needs no conversion.

    Raises:
        BadInput: it has masked elements, or elements that no tensor of ONNX holds.
    """
    if type(given) is np.ndarray and given.dtype in _PLAIN:
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise BadInput(f"input {name!r} is a masked array, and a tensor has no mask\n  hint: fill it: x.filled(0)")
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise BadInput(f"input {name!r} is no array: {error}") from error
    kind = array.dtype.kind
    if kind in "OT":
        if not all(isinstance(v, str) for v in array.flat):
            raise BadInput(f"input {name!r} holds Python objects, not numbers or text")
        return array.astype(object)
    if kind == "U":
        return array.astype(object)
    if kind == "S":
        raise BadInput(f"input {name!r} holds bytes, not text\n  hint: np.char.decode(x)")
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    try:
        ir.DataType.from_numpy(native)
    except TypeError as error:
        raise BadInput(f"input {name!r} holds {type_text(array.dtype)}, which no tensor of ONNX does") from error
    return array.astype(native, copy=False)


def as_fed(name: str, argument: Any, held: ir.TypeProtocol | None) -> Any:
    """`argument` as an array; as a list of arrays for a sequence; None for an optional without a value."""
    if isinstance(held, ir.OptionalType):
        return None if argument is None else as_fed(name, argument, held.elem_type)
    if isinstance(held, ir.SequenceType):
        if not isinstance(argument, Sequence) or isinstance(argument, str):
            raise BadInput(f"the argument for {name!r} is a {type(argument).__name__}, and the input takes a list")
        return [as_fed(name, each, held.elem_type) for each in argument]
    return _array(name, argument, None if held is None else held.dtype)


def copy_feeds(fed: Any) -> Any:
    """A copy of a result of `as_fed`."""
    return [copy_feeds(a) for a in fed] if isinstance(fed, list) else None if fed is None else fed.copy()


def _array(name: str, argument: Any, dtype: ir.DataType | None) -> np.ndarray:
    if not isinstance(argument, (np.ndarray, np.generic)) and hasattr(argument, "__dlpack__"):
        try:
            argument = np.from_dlpack(argument)
        except (BufferError, RuntimeError, TypeError) as error:
            raise BadInput(f"the argument for {name!r} cannot be read as an array: {error}") from error
    if isinstance(argument, np.ma.MaskedArray):
        feed(name, argument)
    literal = not isinstance(argument, (np.ndarray, np.generic))
    array = np.asarray(argument)
    if dtype is None:
        return array
    want = dtype.numpy()
    if array.dtype == want:
        return array
    if not (literal and array.size == 0) and not np.can_cast(array.dtype, want, "same_kind"):
        raise BadInput(f"the argument for {name!r} is {type_text(array.dtype)}, and the input takes {type_text(want)}")
    return array.astype(want)

"""Safetensors files: any tensors, or finite floats alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.errors import BadInput, needs_package
from onnxgrad.files import open_ordinary

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
#: Types of numpy by their names in safetensors.
_DTYPES = {
    **_FLOATS,
    **{"BOOL": np.bool_, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
}


def import_safetensors() -> Any:
    """The module ``safetensors``, with its part for numpy. Raises BadInput if it is not installed."""
    with needs_package("safetensors files need the package safetensors", "train"):
        import safetensors.numpy
    return safetensors


def save_tensors(tensors: Mapping[str, np.ndarray], file: Path, header: dict[str, str]) -> None:
    """Write a safetensors file."""
    arrays = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    import_safetensors().numpy.save_file(arrays, file, header)


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, and the metadata in its header.

    Raises:
        BadInput: it cannot be read, is damaged, or has a type that numpy and ml_dtypes lack.
    """
    library = import_safetensors()
    try:
        with open_ordinary(file) as opened:
            entries = library.deserialize(opened.read())
        with library.safe_open(file, "np") as opened_again:
            header = dict(opened_again.metadata() or {})
    except library.SafetensorError as error:
        raise BadInput(f"{str(file)!r} is no safetensors file, or a damaged one: {error}") from error
    return decode(entries, file), header


def decode(entries: Iterable[tuple[str, Mapping[str, Any]]], file: Path) -> dict[str, np.ndarray]:
    """The tensors that ``safetensors.deserialize`` found in `file`; ``safetensors.numpy`` cannot read bfloat16.

    Raises:
        BadInput: one has a type that numpy and ml_dtypes lack.
    """
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise BadInput(f"{str(file)!r}: {name!r} is a tensor of {entry['dtype']}, a type that is not known here")
        tensors[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def load_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file of finite floats, and the metadata in its header.

    Raises:
        BadInput: it cannot be read, holds other things than finite floats, or is damaged.
    """
    tensors, header = read_tensors(file)
    for name, array in tensors.items():
        if array.dtype not in _FLOATS.values():
            raise BadInput(f"{str(file)!r}: {name!r} is a tensor of {array.dtype}; factors are floats")
        if not np.isfinite(array.astype(np.float32)).all():
            raise BadInput(f"{str(file)!r}: {name!r} is not finite")
    return tensors, header

"""Safetensors files: any tensors, or finite floats alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
#: Types of numpy by their names in safetensors.
_DTYPES = {
    **_FLOATS,
    **{"BOOL": np.bool_, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
}


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise BadInput("safetensors files need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


def save_tensors(tensors: Mapping[str, np.ndarray], file: Path, header: dict[str, str]) -> None:
    """Write a safetensors file."""
    arrays = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    _library().numpy.save_file(arrays, file, header)


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, and the metadata in its header.

    Raises:
        BadInput: it cannot be read, is damaged, or has a type that numpy and ml_dtypes lack.
    """
    library = _library()
    try:
        with open_ordinary(file) as opened:
            entries = library.deserialize(opened.read())
        with library.safe_open(file, "np") as opened_again:
            header = dict(opened_again.metadata() or {})
    except library.SafetensorError as error:
        raise BadInput(f"{str(file)!r} is no safetensors file, or a damaged one: {error}") from error
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise BadInput(f"{str(file)!r}: {name!r} is a tensor of {entry['dtype']}, a type that is not known here")
        tensors[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, header


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

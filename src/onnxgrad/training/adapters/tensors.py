"""Safetensors files of floats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise BadInput("adapters need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


def save_tensors(tensors: Mapping[str, np.ndarray], file: Path, header: dict[str, str]) -> None:
    """Write a safetensors file."""
    arrays = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    _library().numpy.save_file(arrays, file, header)


def load_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, and the metadata in its header.

    Raises:
        BadInput: it cannot be read, holds other things than finite floats, or is damaged.
    """
    safetensors = _library()
    try:
        with open_ordinary(file) as opened:
            data = opened.read()
        held = safetensors.deserialize(data)
        with safetensors.safe_open(file, "np") as opened_again:
            header = dict(opened_again.metadata() or {})
    except OSError as error:
        raise BadInput(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise BadInput(f"{str(file)!r} is no safetensors file, or a damaged one: {error}") from error
    found = {}
    for name, about in held:
        if about["dtype"] not in _DTYPES:
            raise BadInput(f"{str(file)!r}: {name!r} is a tensor of {about['dtype']}; factors are floats")
        array = np.frombuffer(about["data"], _DTYPES[about["dtype"]]).reshape(about["shape"])
        if not np.isfinite(array.astype(np.float32)).all():
            raise BadInput(f"{str(file)!r}: {name!r} is not finite")
        found[name] = array
    return found, header

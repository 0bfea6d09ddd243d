"""Inspection of the namespace: capabilities, devices and dtypes, as the standard defines it."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip


def check_device(device: Any) -> None:
    """Raise unless `device` is the CPU."""
    if device not in (None, "cpu"):
        raise ValueError(f"arrays are on the device 'cpu', not on {device!r}")


class NamespaceInfo:
    """The result of ``__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, Any]:
        """Support for boolean indexing and data-dependent shapes, and the largest number of axes."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The default device."""
        return "cpu"

    def devices(self) -> tuple[str, ...]:
        """All devices."""
        return ("cpu",)

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        """The default dtype of each kind."""
        check_device(device)
        kinds = {"real floating": "float64", "complex floating": "complex128", "integral": "int64", "indexing": "int64"}
        return {kind: DTYPES[name] for kind, name in kinds.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype]:
        """The dtypes of a kind (default: all)."""
        check_device(device)
        return {n: d for n, d in DTYPES.items() if kind is None or np.isdtype(d, kind)}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807  (the standard's name)
    """The object to inspect the namespace with."""
    return NamespaceInfo()

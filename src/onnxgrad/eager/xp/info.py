"""What the namespace can do, as the standard has one ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np

#: The versions of the array API standard that the namespace follows.
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")

DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip


def supported(api_version: str | None, namespace: Any) -> Any:
    """`namespace`, if it follows the version of the standard."""
    if api_version is not None and api_version not in VERSIONS:
        raise ValueError(f"the array API of {api_version} is not among those supported: {', '.join(VERSIONS)}")
    return namespace


class Info:
    """The answer of ``__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, Any]:
        """Whether masks index, shapes may depend on values, and how many axes there may be."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The one device."""
        return "cpu"

    def devices(self) -> tuple[str, ...]:
        """All devices."""
        return ("cpu",)

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        """The dtypes that arrays have where none is asked for."""
        _check(device)
        kinds = {"real floating": "float64", "complex floating": "complex128", "integral": "int64", "indexing": "int64"}
        return {kind: DTYPES[name] for kind, name in kinds.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype]:
        """The dtypes of a kind (default: all)."""
        _check(device)
        return {n: d for n, d in DTYPES.items() if kind is None or np.isdtype(d, kind)}


def _check(device: Any) -> None:
    if device not in (None, "cpu"):
        raise ValueError(f"arrays are on the device 'cpu', not on {device!r}")


def __array_namespace_info__() -> Info:  # noqa: N807  (the standard's name)
    """What the namespace can do."""
    return Info()

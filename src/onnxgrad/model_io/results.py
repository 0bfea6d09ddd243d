"""Results of a call: nested dicts with names of outputs, which arrays replace.

A derivative of several values is ``{"x": "x_grad"}``, a Jacobian ``{"y": {"x": "y_x_jacobian"}}`` (see `Signature`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.model_io.signature import Signature

Results = Mapping[str, Any]


def names_in(results: Any) -> list[str]:
    """The names of the outputs, in order."""
    return [n for r in results.values() for n in names_in(r)] if isinstance(results, Mapping) else [results]


def rename(results: Any, names: Mapping[str | None, str | None]) -> Any:
    """The same tree with the new names."""
    if not isinstance(results, Mapping):
        return names[results]
    return {label: rename(r, names) for label, r in results.items()}


def fill(results: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The same tree with arrays in place of names; a dict of one entry is that entry."""
    if not isinstance(results, Mapping):
        return arrays[results]
    filled = {label: fill(r, arrays) for label, r in results.items()}
    return next(iter(filled.values())) if len(filled) == 1 else filled


def jets_of(s: Signature) -> Results:
    """The derivatives of each value by their order."""
    return {of: dict(enumerate(names, start=1)) for of, names in s.jets.items()}

"""Names that a value went by before it was copied, renamed or replaced: notes (`composites`) still use them."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.notes import notes

_KEY = "onnxgrad.aliases"


def known_as(value: ir.Value) -> tuple[str, ...]:
    """All names of `value`, the present one first."""
    own_notes = notes(value)
    before = own_notes.get(_KEY, ()) if own_notes else ()
    return tuple(dict.fromkeys([value.name, *before] if value.name else before))


def follow(new: ir.Value, old: tuple[str, ...]) -> None:
    """Record the names `old` as aliases of `new`."""
    new.meta[_KEY] = tuple(dict.fromkeys((*new.meta.get(_KEY, ()), *old)))

"""Symbolic dimensions: drop those without information, and rename those that are not identifiers.

Dimensions with the same name are equal, and rules rely on that. Some exporters write the same "?" or "None", or a size
of -1, for every dimension that they do not know; those become unknown. Other names must be expressions (``N``, ``N/2``,
``input.1_dim_0``); those that are not (``batch size``) are renamed consistently.
"""

from __future__ import annotations

import functools

import onnx_ir as ir

from onnxgrad.ir.graph import values_in
from onnxgrad.ir.infer.formulas import product
from onnxgrad.ir.infer.limits import distinct_shapes, symbols_in
from onnxgrad.ir.match import Dim
from onnxgrad.ir.names import identifier

#: Names, in lower case, that exporters use for unknown dimensions.
UNKNOWN = frozenset({"", "?", "none", "unknown", "unk", "dynamic", "*"})


def settle_dims(model: ir.Model) -> None:
    """Make every dimension of every declared shape of `model` a size, a usable name or unknown, in place."""
    values = _values(model)
    names = set(symbols_in(distinct_shapes(values)))
    renamed: dict[str, str] = {}
    for value in values:
        if value.shape is not None:
            dims = value.shape.dims
            settled = tuple([_rename_dim(dim, renamed, names) for dim in dims])
            if settled != dims:
                value.shape = ir.Shape(settled)


def named_dims(model: ir.Model) -> set[str]:
    """The names of dimensions in the shapes of `model`."""
    return set(symbols_in(distinct_shapes(_values(model))))


def keep_dims(model: ir.Model, names: set[str]) -> None:
    """Make every dimension with a name that is none of `names` unknown, in place: inference made it up."""
    for value in _values(model):
        dims = list(value.shape or ())
        kept = [d if isinstance(d, int) or d.value in names else None for d in dims]
        if kept != dims:
            value.shape = ir.Shape(kept)


def _values(model: ir.Model) -> list[ir.Value]:
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    return [v for graph in graphs for v in values_in(graph)]


def _rename_dim(dim: Dim, renamed: dict[str, str], names: set[str]) -> Dim | str | None:
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    name = dim.value
    if name is None or name.strip().lower() in UNKNOWN or name.lstrip("-").isdigit():
        return None
    return dim if _is_expression(name) else _rename_symbol(name, renamed, names)


@functools.lru_cache(1024)
def _is_expression(name: str) -> bool:
    if name.isascii() and product([ir.SymbolicDim(name)]) is not None:
        return True  # without sympy
    try:
        ir.SymbolicDim(name).free_symbols()  # reads the name
    except ValueError:
        return False
    return True


def _rename_symbol(name: str, renamed: dict[str, str], names: set[str]) -> str:
    if name not in renamed:
        new = base = identifier(name)
        count = 0
        while new in names:
            count += 1
            new = f"{base}_{count}"
        names.add(new)
        renamed[name] = new
    return renamed[name]

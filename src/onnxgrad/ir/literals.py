"""Constants and attributes in a graph that is being written, each made once for all nodes that need the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.infer.inference import held_by
from onnxgrad.ir.names import Names

#: Types of attributes that are numbers and text, or none.
_PLAIN = frozenset({bool, int, float, str, list, tuple, type(None)})
_Kind = ir.AttributeType
_SCALARS: dict[type, _Kind] = {int: _Kind.INT, float: _Kind.FLOAT, str: _Kind.STRING}
_LISTS: dict[type, _Kind] = {int: _Kind.INTS, float: _Kind.FLOATS, str: _Kind.STRINGS}


class Literals:
    """The constants that were added to `graph`; `names` supplies their names."""

    def __init__(self, graph: ir.Graph, names: Names) -> None:
        self.graph = graph
        self.names = names
        self._arrays: dict[object, ir.Value] = {}
        self._numbers: dict[tuple[ir.DataType | None, str], ir.Value] = {}

    def array(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """`array`, as a tensor of `dtype` if that is given."""
        array = np.asarray(array)
        if dtype is not None:
            array = array.astype(dtype.numpy())
        key = array.dtype, array.shape, array.tobytes()
        value = self._arrays.get(key)
        if value is None or not self._is_there(value):
            name = self.names.fresh("const")
            tensor = ir.Tensor(array, shape=ir.Shape(array.shape), name=name)  # half the time of one without its shape
            value = self._arrays[key] = add_initializer(self.graph, tensor)
        return value

    def number(self, number: int | float, dtype: ir.DataType | None) -> ir.Value:
        """A scalar."""
        key = dtype, repr(number)
        value = self._numbers.get(key)
        if value is None or not self._is_there(value):
            value = self._numbers[key] = self.array(number, dtype)
        return value

    def literal(self, x: Any, beside: ir.DataType | None) -> ir.Value:
        """Convert a Python operand: a number gets the dtype `beside`, a list becomes int64."""
        if isinstance(x, (bool, np.generic)):
            return self.array(x, None if isinstance(x, bool) else beside)
        if isinstance(x, (int, float)):
            return self.number(x, beside)
        return self.array(np.array(x, np.int64) if isinstance(x, (list, tuple)) else x)

    def written(self) -> set[ir.Value]:
        """All of them."""
        return set(self._arrays.values())

    def clear(self) -> None:
        """Drop the notes: nothing else will be asked for."""
        self._arrays.clear()
        self._numbers.clear()

    def _is_there(self, value: ir.Value) -> bool:
        """True if `value` is still in the graph: it may have been pruned."""
        return self.graph.initializers.data.get(value.name or "") is value


class Attributes:
    """Attributes of nodes from Python values, with their hashable form (see `held_by`); plain ones are shared."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[ir.Attr], Sequence[Any] | None]] = {}

    def __call__(self, attributes: dict[str, Any]) -> tuple[list[ir.Attr], Sequence[Any] | None]:
        """Convert `attributes`, without those that are None."""
        if not attributes:
            return [], ()
        plain = _PLAIN.issuperset(map(type, attributes.values()))
        key = repr(attributes) if plain else ""  # 1, 1.0 and True are equal
        converted = self._known.get(key)
        if converted is None:
            attrs = [
                a if type(a) is ir.Attr else _attribute(k, a) for k, a in sorted(attributes.items()) if a is not None
            ]
            converted = attrs, held_by(attrs)
            if plain:
                self._known[key] = converted
        return converted


def attributes_of(values: Mapping[str, Any]) -> list[ir.Attr]:
    """The attributes of Python values, without those that are None."""
    return [_attribute(name, value) for name, value in values.items() if value is not None]


def _attribute(name: str, value: Any) -> ir.Attr:
    """The attribute `name` of a Python value; the library compares most of them with a protocol, which is slow."""
    if (kind := _SCALARS.get(type(value))) is not None:
        return ir.Attr(name, kind, value)
    kinds = {type(v) for v in value} if isinstance(value, (list, tuple)) else set()
    if len(kinds) == 1 and (listed := _LISTS.get(kinds.pop())) is not None:
        return ir.Attr(name, listed, tuple(value))
    return ir.convenience.convert_attribute(name, value)

"""Constants of a graph that is being written: initializers, each shared by all that ask for the same one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.names import Names


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
        found = self._arrays.get(key)
        if found is None or not self._is_there(found):
            name = self.names.fresh("const")
            found = self._arrays[key] = add_initializer(self.graph, ir.Tensor(array, dtype, name=name))
        return found

    def number(self, number: int | float, dtype: ir.DataType | None) -> ir.Value:
        """A scalar."""
        key = dtype, repr(number)
        found = self._numbers.get(key)
        if found is None or not self._is_there(found):
            found = self._numbers[key] = self.array(number, dtype)
        return found

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

"""Vector spaces of containers of arrays, in the interface of `autograd.extend.vspace`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array


class VSpace:
    """The real vector space of containers like a given one.

    Attributes:
        size: its dimension; a complex number counts as two.
        shape, dtype: those of the array, if it is of one array.
        iscomplex: whether an array is of complex numbers.
    """

    def __init__(self, like: Any) -> None:
        arrays = [as_array(x) for _, x in trees.leaves(like)]
        self._zeros = trees.rebuilt(like, [Array(numpy.zeros(x.shape, x.dtype)) for x in arrays])
        self._kinds = [(x.shape, x.dtype) for x in arrays]
        self.iscomplex = any(x.dtype.kind == "c" for x in arrays)
        self.size = sum(x.size * (2 if x.dtype.kind == "c" else 1) for x in arrays)
        alone = trees.is_leaf(like)
        self.shape: tuple[int, ...] | None = self._kinds[0][0] if alone else None
        self.dtype: numpy.dtype | None = self._kinds[0][1] if alone else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VSpace) and self._kinds == other._kinds

    def __repr__(self) -> str:
        return f"VSpace({self._kinds})"

    def _map(self, function: Callable[..., Any], *trees_of: Any) -> Any:
        columns = [[as_array(x) for _, x in trees.leaves(t)] for t in (self._zeros, *trees_of)]
        return trees.rebuilt(self._zeros, [function(*xs[1:]) if trees_of else function(xs[0]) for xs in zip(*columns)])

    def zeros(self) -> Any:
        """The zero."""
        return self._zeros

    def ones(self) -> Any:
        """Ones; of complex numbers, 1 + i: the sum of the basis."""
        return self._map(lambda x: x + (1 + 1j if x.dtype.kind == "c" else 1))

    def randn(self) -> Any:
        """Normally distributed numbers of numpy's global generator."""

        def drawn(x: Array) -> Array:
            real = numpy.random.randn(*x.shape)
            both = real + 1j * numpy.random.randn(*x.shape) if x.dtype.kind == "c" else real
            return Array(numpy.asarray(both, x.dtype))

        return self._map(drawn)

    def standard_basis(self) -> Iterator[Any]:
        """The unit vectors."""
        for i, (shape, dtype) in enumerate(self._kinds):
            for unit in (1, 1j) if dtype.kind == "c" else (1,):
                for at in numpy.ndindex(shape):
                    x = numpy.zeros(shape, dtype)
                    x[at] = unit
                    held = [as_array(z) for _, z in trees.leaves(self._zeros)]
                    yield trees.rebuilt(self._zeros, [*held[:i], Array(x), *held[i + 1 :]])

    def add(self, x: Any, y: Any) -> Any:
        """x + y."""
        return self._map(lambda a, b: a + b, x, y)

    def scalar_mul(self, x: Any, a: Any) -> Any:
        """a·x."""
        return self._map(lambda v: v * a, x)

    def inner_prod(self, x: Any, y: Any) -> Any:
        """The inner product over the real numbers."""
        pairs = zip(trees.leaves(x), trees.leaves(y))
        terms = [np.sum(np.real(np.conj(as_array(a)) * as_array(b))) for (_, a), (_, b) in pairs]
        return sum(terms, Array(numpy.zeros(())))

    def covector(self, x: Any) -> Any:
        """The cotangent that maps y to ``inner_prod(x, y)``: the conjugate."""
        return self._map(np.conj, x)


def vspace(value: Any) -> VSpace:
    """The space of containers like `value`."""
    return VSpace(value)

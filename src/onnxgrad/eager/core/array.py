"""Arrays that record the operations on them.

An `Array` follows the Python array API standard. It is a numpy array and, if it depends on a variable of a transform or
on an input of a program being exported, the node of the tape that produced it. Methods and operators dispatch to the
namespace, which attaches itself here (see `methods`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from onnxgrad.eager.core.tape import Node, differs_between_calls, exporting, varies
from onnxgrad.errors import BadInput, NotDifferentiable

#: The versions of the array API standard that arrays and their namespace follow.
VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")


class Array:
    """An array of the Python array API standard, on the CPU.

    Create arrays with the functions of `onnxgrad.eager.numpy`. Arithmetic, dtype promotion and broadcasting are
    numpy's. ``x[key] = value`` gives `x` new elements; results computed from `x` before do not change.
    """

    __slots__ = ("__weakref__", "_data", "_node")

    #: The namespace that methods dispatch to.
    _xp: ClassVar[Any]

    def __init__(self, data: np.ndarray, node: Node | None = None) -> None:
        self._data = data
        self._node = node

    # --- attributes ------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return self._data.dtype

    @property
    def device(self) -> str:
        """The device: always "cpu"."""
        return "cpu"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._data.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return self._data.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._data.size

    @property
    def real(self) -> Array:
        """The real part."""
        return self._xp.real(self)

    @property
    def imag(self) -> Array:
        """The imaginary part."""
        return self._xp.imag(self)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._data.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._data.nbytes

    @property
    def T(self) -> Array:
        """The transpose; with more than two axes, all axes in reverse order, as in numpy."""
        return self._xp.permute_dims(self, tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        return self._xp.matrix_transpose(self)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """The namespace of functions on arrays.

        Raises:
            ValueError: the namespace does not follow that version of the standard.
        """
        if api_version is not None and api_version not in VERSIONS:
            raise ValueError(f"the array API of {api_version} is not among those supported: {', '.join(VERSIONS)}")
        return self._xp

    def to_device(self, device: str, /, *, stream: Any = None) -> Array:
        """The array itself: there is one device."""
        if device != "cpu" or stream is not None:
            raise ValueError(f"arrays are on the device 'cpu', without streams; not on {device!r}")
        return self

    # --- values --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "Array" + np.array2string(self._data, prefix="Array(", separator=", ").join("()")

    def __str__(self) -> str:
        return str(self._data)

    def __format__(self, how: str) -> str:
        return format(self._data[()] if self.ndim == 0 else self._data, how)

    def _read(self, how: str, instead: str = "use the functions of onnxgrad.eager.numpy on it") -> np.ndarray:
        """The elements; refused if a derivative would be lost, or if they are those of one call only."""
        if self._node is not None and differs_between_calls([self._node]):
            raise NotDifferentiable(
                f"{how}: the function is compiled, and this value differs between calls\n"
                "  hint: choose with eager.cond or numpy.where, repeat with eager.while_loop, fori_loop or scan; "
                "`static_argnums` names arguments that are constants"
            )
        if self._node is not None and varies(self._node):
            raise NotDifferentiable(
                f"{how} of an array on the tape would lose its derivative\n"
                f"  hint: {instead}, or say stop_gradient(x) where its value is meant as a constant"
            )
        return self._data

    def __bool__(self) -> bool:
        return bool(self._read("bool(x)", "compare it (x != 0), which gives what has no derivative"))

    def __int__(self) -> int:
        return int(self._read("int(x)"))

    def __float__(self) -> float:
        return float(self._read("float(x)"))

    def __complex__(self) -> complex:
        return complex(self._read("complex(x)"))

    def __index__(self) -> int:
        return self._read("an index of Python").__index__()

    def __len__(self) -> int:
        return len(self._data)

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self._read("x.item()").item()

    def tolist(self) -> Any:
        """The elements, as nested lists of Python numbers."""
        return self._read("x.tolist()").tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The elements as a numpy array; refused if a derivative would be lost."""
        data = self._read("a numpy array")
        if exporting.get() and self._node is not None and varies(self._node, discrete=True):
            raise NotDifferentiable(
                "a numpy array of an array on the tape would be a constant in the recorded program\n"
                "  hint: use the functions of onnxgrad.eager.numpy on it"
            )
        return np.array(data, dtype=dtype, copy=copy is not False)

    def __copy__(self) -> Array:
        return Array(self._data, self._node)

    def __deepcopy__(self, memo: Any) -> Array:
        return Array(self._data, self._node)  # nothing writes into the elements of an array, and a tape is shared

    def __reduce__(self) -> Any:
        return Array, (self._read("a pickle"),)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        data = self.__array__()
        data = data if data.flags.writeable else data.copy()
        return data.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._data.__dlpack_device__()

    # --- numpy's functions -----------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        """``numpy.sin(x)`` is ``sin(x)`` of the namespace."""
        name = _name_of(ufunc)
        function = getattr(self._xp, ufunc.__name__, None)
        if method == "__call__" and function is not None:
            dtype = kwargs.pop("dtype", None)
            if not kwargs:
                return function(*args) if dtype is None else function(*(as_array(x).astype(dtype) for x in args))
            return self._outside(f"{name} with {' and '.join(map(repr, sorted(kwargs)))}", ufunc, args, kwargs)
        name = name if method == "__call__" else f"{name}.{method}"
        how = getattr(function, method, None)
        if how is not None:
            if not (unknown := kwargs.keys() - {"axis", "dtype", "keepdims", "initial", "where"}):
                return how(*args, **kwargs)
            name = f"{name} with {' and '.join(map(repr, sorted(unknown)))}"
        return self._outside(name, getattr(ufunc, method), args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """``numpy.sum(x)`` is ``sum(x)`` of the namespace."""
        space = self._xp
        if func.__module__ in ("numpy.linalg", "numpy.fft"):
            space = getattr(space, func.__module__.rpartition(".")[2])
        function = getattr(space, func.__name__, None)
        if function is not None:
            return function(*args, **kwargs)
        return self._outside(f"{func.__module__}.{func.__name__}", func, args, kwargs)

    @staticmethod
    def _outside(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Apply a function of numpy that the namespace lacks; refused for arrays with a derivative."""
        refuse_tracked(name, [*args, *kwargs.values()], "")
        return call_plain(function, args, kwargs)

    # --- methods that numpy's arrays have too ----------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C") -> Array:
        """In another shape."""
        whole = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._xp.reshape(self, whole, order)

    def transpose(self, *axes: Any) -> Array:
        """With its axes in another order (default: the reverse)."""
        whole = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return self._xp.permute_dims(self, whole or tuple(range(self.ndim))[::-1])

    def flatten(self, order: str = "C") -> Array:
        """Flattened."""
        return self._xp.ravel(self, order)

    def copy(self) -> Array:
        """The array itself, which needs no copy: an assignment never changes other arrays."""
        return Array(self._data, self._node)

    def sort(self, axis: int = -1) -> None:
        """Sort the elements along `axis`, in place."""
        made = self._xp.sort(self, axis=axis)
        self._data, self._node = made._data, made._node

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("an array without axes cannot be iterated over")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Array:
        return self._xp.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        made = self._xp.setitem(self, key, value)
        self._data, self._node = made._data, made._node

    def __hash__(self) -> int:
        raise TypeError("arrays cannot be hashed")

    if TYPE_CHECKING:

        def __add__(self, other: Any) -> Array: ...
        def __radd__(self, other: Any) -> Array: ...
        def __sub__(self, other: Any) -> Array: ...
        def __rsub__(self, other: Any) -> Array: ...
        def __mul__(self, other: Any) -> Array: ...
        def __rmul__(self, other: Any) -> Array: ...
        def __truediv__(self, other: Any) -> Array: ...
        def __rtruediv__(self, other: Any) -> Array: ...
        def __pow__(self, other: Any) -> Array: ...
        def __matmul__(self, other: Any) -> Array: ...
        def __neg__(self) -> Array: ...
        def astype(self, dtype: Any) -> Array: ...  # noqa: D102
        def max(self, axis: Any = None) -> Array: ...  # noqa: D102
        def mean(self, axis: Any = None) -> Array: ...  # noqa: D102
        def sum(self, axis: Any = None) -> Array: ...  # noqa: D102


def as_array(x: Any, like: np.dtype | None = None) -> Array:
    """`x` as an array; a Python number adapts to the dtype `like`, by numpy's promotion rules."""
    if isinstance(x, Array):
        return x
    if isinstance(x, (bool, int, float, complex)) and like is not None:
        return Array(np.asarray(x, np.result_type(like, x)))
    if isinstance(x, (list, tuple)):
        return Array._xp.asarray(x)
    data = np.array(x)  # a copy: the tape must not see later writes of the caller
    return Array(data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("=")))


def plain(x: Any) -> Any:
    """`x` with numpy arrays for arrays, also inside lists and tuples."""
    if isinstance(x, Array):
        return x._data
    return type(x)(map(plain, x)) if type(x) in (list, tuple) else x


def wrapped(y: Any) -> Any:
    """`y` with arrays for numpy arrays, also inside lists and tuples."""
    if isinstance(y, (np.ndarray, np.generic)):
        return Array(np.asarray(y))
    if isinstance(y, tuple) and hasattr(y, "_fields"):
        return type(y)(*map(wrapped, y))
    return type(y)(map(wrapped, y)) if type(y) in (list, tuple) else y


def call_plain(function: Any, args: Any, kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` on numpy arrays, its results as arrays."""
    return wrapped(function(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()}))


def tracked(x: Any, floats: bool = True) -> bool:
    """True if `x`, or an element of a list, is on the tape; with `floats`, only if it carries a derivative.

    In a program that is compiled or exported, integers and booleans count as well: they differ between its calls.
    """
    if isinstance(x, Array):
        return x._node is not None and (not floats or x._data.dtype.kind not in "biu" or exporting.get())
    return isinstance(x, (list, tuple)) and any(tracked(e, floats) for e in x)


def _name_of(ufunc: np.ufunc) -> str:
    """The name of `ufunc` with that of its library, as far as it is one of numpy or of scipy.special."""
    for library in ("numpy", "scipy.special"):
        if getattr(sys.modules.get(library), ufunc.__name__, None) is ufunc:
            return f"{library}.{ufunc.__name__}"
    return ufunc.__name__


def values_of(name: str, x: Array) -> np.ndarray:
    """The elements of `x`, which decide about places and counts; refused where the function `name` is exported."""
    if exporting.get():
        refuse_tracked(name, [x], "what it does depends on the elements", floats=False)
    return x._data


def refuse_tracked(name: str, operands: Any, instead: str, floats: bool = True) -> None:
    """Raise if one of `operands` is tracked.

    Raises:
        NotDifferentiable: outside of an export.
        BadInput: during an export.
    """
    if any(tracked(x, floats) for x in operands):
        if exporting.get():
            raise BadInput(f"{name} cannot be recorded as ONNX{': ' + instead if instead else ''}")
        hint = f"\n  hint: {instead or 'use stop_gradient(x) if it is meant as a constant'}"
        raise NotDifferentiable(f"{name} has no derivative in onnxgrad.eager{hint}")

"""Types and shapes of tensors as messages write them: ``float32[N, 3]``, ``text[442]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

#: A dimension that onnx-shape-inference named.
_INFERRED = re.compile(r"\b_d\d+\b")
_WORDS = {"U": "text", "S": "bytes", "O": "Python objects", "V": "records", "M": "dates", "m": "durations"}


def type_text(dtype: Any) -> str:
    """The name of a NumPy type or an ``onnx_ir.DataType``; text, objects and dates in words.

    >>> type_text(np.dtype("<U1")), type_text(ir.DataType.FLOAT), type_text(None)
    ('text', 'float32', 'unknown type')
    """
    if dtype is None or dtype == ir.DataType.UNDEFINED:
        return "unknown type"
    if dtype == ir.DataType.STRING:
        return "text"
    dtype = np.dtype(dtype.numpy() if isinstance(dtype, ir.DataType) else dtype)
    if dtype.kind in "iufc" and not dtype.isnative:
        return f"{dtype.newbyteorder('=').name} of the other byte order"
    return dtype.name if dtype.kind == "V" and dtype.names is None else _WORDS.get(dtype.kind, dtype.name)


def is_number(text: str) -> bool:
    """True if `text` is a number as Python writes one."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def count_text(count: int, noun: str) -> str:
    """`count` with `noun`, which is in the plural unless `count` is 1.

    >>> count_text(1, "entry"), count_text(2, "entry"), count_text(2000, "row")
    ('1 entry', '2 entries', '2,000 rows')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"


def name_list(names: Sequence[str], most: int = 8) -> str:
    """The first of `names` in quotes, and a mark if there are more.

    >>> name_list(["a", "b", "c"], most=2)
    "'a', 'b', …"
    """
    return f"{', '.join(map(repr, names[:most]))}{', …' if len(names) > most else ''}"


def no_number(texts: Sequence[str]) -> str:
    """The first of `texts` that shows why they are no numbers: it is none, or a code with a leading zero.

    >>> no_number(["1", "02", "x"]), no_number(["1", "02"])
    ('x', '02')
    """
    first = next((t for t in texts if not is_number(t)), None)
    return first or next((t for t in texts if t.lstrip("+- ").startswith("0")), texts[0])


def shape_text(shape: Iterable[Any] | None) -> str:
    """Dimensions in brackets: numbers, names, and ``?`` for unnamed ones and those that inference named.

    >>> shape_text(ir.Shape(["N", 3, None, "_d0"])), shape_text(None)
    ('[N, 3, ?, ?]', '[…]')
    """
    if shape is None:
        return "[…]"
    dims = (d.value if isinstance(d, ir.SymbolicDim) else d for d in shape)
    return f"[{', '.join('?' if d is None or _INFERRED.search(str(d)) else str(d) for d in dims)}]"


def operator_text(domain: str, op_type: str) -> str:
    """An operator with its domain, unless that is the default.

    >>> operator_text("", "Conv"), operator_text("com.microsoft", "FusedConv")
    ('Conv', 'com.microsoft::FusedConv')
    """
    return f"{domain}::{op_type}" if domain else op_type


def tensor_text(dtype: Any, shape: Iterable[Any] | None) -> str:
    """A type with its shape.

    >>> tensor_text(ir.DataType.INT64, (2, 3))
    'int64[2, 3]'
    """
    return type_text(dtype) + shape_text(shape)

"""A part of a value, named by an expression: ``y[:, 3]``, with numpy's integers, slices and ellipsis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.builder import Builder, Var

_NUMBER = r"\s*([+-]?\d{1,18})?\s*"
_ITEM = re.compile(rf"{_NUMBER}(?:(:){_NUMBER}(?::{_NUMBER})?)?")
_FAR = int(np.iinfo(np.int64).max)

Item = int | slice


def with_parts(builder: Builder, names: Iterable[object], values: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """`values`, and the parts that `names` select by index expressions such as ``y[:, 3]``.

    Raises:
        BadInput: an expression that is not one of integers and slices, or that does not fit the value.
    """
    expanded = dict(values)
    for name in names:
        if isinstance(name, str) and name not in expanded and name.endswith("]") and "[" in name:
            base, _, key = name[:-1].rpartition("[")
            if base not in values:
                raise UnknownName(base, values, "value")
            expanded[name] = _select(builder, builder.var(values[base]), base, key).value
    return expanded


def _select(b: Builder, x: Var, name: str, key: str) -> Var:
    if not isinstance(x.value.type, ir.TensorType) or x.shape is None:
        raise BadInput(f"{name!r} is no tensor of known rank, so {name}[{key}] means nothing")
    shape, where = x.shape, f"{name}[{key}]"
    bounds, dropped = [], []
    for axis, item in enumerate(_items(key, len(shape), where)):
        size = shape[axis]
        if isinstance(item, int):
            if isinstance(size, int) and not -size <= item < size:
                raise BadInput(f"{where}: axis {axis} of {name!r} has {size} elements, none of number {item}")
            dropped.append(axis)
            item = slice(item, item + 1 if item != -1 else None)
        if isinstance(size, int) and not range(*item.indices(size)):
            raise BadInput(f"{where} picks nothing from axis {axis} of {name!r}, which has {size} elements")
        step = 1 if item.step is None else item.step
        first, last = (0, _FAR) if step > 0 else (_FAR, -_FAR)
        start, end = first if item.start is None else item.start, last if item.stop is None else item.stop
        if (start, end, step) != (0, _FAR, 1):
            bounds.append((start, end, axis, step))
    y = b.Slice(x, *map(list, zip(*bounds))) if bounds else b.Identity(x)
    return b.Squeeze(y, dropped) if dropped else y


def _items(key: str, rank: int, where: str) -> list[Item]:
    """One index for each of `rank` axes."""
    texts = [t.strip() for t in key.split(",")]
    if len(texts) > 1 and not texts[-1]:
        texts.pop()
    if texts.count("...") > 1 or len(texts) - texts.count("...") > rank:
        raise BadInput(f"{where}: that is an index of more than the {rank} axes there are")
    if "..." not in texts:
        texts.append("...")
    at = texts.index("...")
    texts[at : at + 1] = [":"] * (rank - len(texts) + 1)
    return [_item(t, where) for t in texts]


def _item(text: str, where: str) -> Item:
    match = _ITEM.fullmatch(text)
    start, colon, stop, step = match.groups() if match else (None, None, None, None)
    if match is None or (start is None and colon is None) or (step is not None and int(step) == 0):
        raise BadInput(
            f"{where}: {text!r} is no index\n"
            "  hint: integers, slices and ... as in numpy, such as y[:, 3] or y[0, 1:-1]"
        )
    if start is not None and colon is None:
        return int(start)
    return slice(*(None if n is None else int(n) for n in (start, stop, step)))

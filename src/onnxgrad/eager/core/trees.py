"""Pytrees: nested dicts, lists, tuples, named tuples and dataclasses, with arrays and numbers for leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.errors import BadInput

#: Constants that a tree may have as leaves besides arrays; their derivative is None.
_FIXED = (str, bytes, bool, type(None))
#: A leaf in a structure; no constant equals it.
_LEAF = object()


def is_leaf(x: Any) -> bool:
    """True if `x` is an array or a number."""
    return isinstance(x, (Array, np.ndarray, np.generic, int, float, complex)) and not isinstance(x, bool)


def _is_fixed(x: Any) -> bool:
    """True if `x` is a constant: a string, a boolean, None, a function; a container that can be called is none."""
    is_container = isinstance(x, (dict, list, tuple)) or (dataclasses.is_dataclass(x) and not isinstance(x, type))
    return isinstance(x, _FIXED) or (callable(x) and not is_container)


def is_tree(x: Any) -> bool:
    """True if `x` is a leaf, or a container of trees."""
    try:
        return is_leaf(x) or all(is_tree(child) for _, child in children(x))
    except BadInput:
        return False


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of `tree`, each with its path."""
    if is_leaf(tree):
        yield path, tree
    else:
        for step, child in children(tree, path):
            yield from leaves(child, path + step)


def structure(tree: Any) -> Any:
    """The containers of `tree` and its constants, as a hashable value; arrays and numbers do not count."""
    if is_leaf(tree):
        return _LEAF
    if _is_fixed(tree):
        return tree
    keys = tuple(tree) if isinstance(tree, dict) else ()
    return type(tree), keys, tuple(structure(child) for _, child in children(tree))


def rebuilt(tree: Any, values: Sequence[Any]) -> Any:
    """The tree of the same structure with the leaves `values`."""
    return _fill_leaves(tree, iter(values), keep_fixed=True)


def derivative(tree: Any, values: Sequence[Any]) -> Any:
    """Rebuild the tree with `values`, like `rebuilt`, and with None for everything that is no leaf."""
    return _fill_leaves(tree, iter(values), keep_fixed=False)


def _fill_leaves(tree: Any, rest: Iterator[Any], keep_fixed: bool) -> Any:
    if is_leaf(tree):
        return next(rest)
    if _is_fixed(tree):
        return tree if keep_fixed else None
    return _assemble_container(tree, [_fill_leaves(child, rest, keep_fixed) for _, child in children(tree)])


def _assemble_container(tree: Any, parts: list[Any]) -> Any:
    """A container like `tree` with other children."""
    if isinstance(tree, dict):
        made = tree.copy()
        made.update(zip(tree, parts))
        return made
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts)
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts)
    made = copy.copy(tree)
    for field, part in zip(dataclasses.fields(tree), parts):
        object.__setattr__(made, field.name, part)
    return made


def children(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The children of a container, each with its step of the path (`path` is that of `tree`); none for a constant."""
    if isinstance(tree, dict):
        return [(f"[{k!r}]", v) for k, v in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", v) for name, v in zip(tree._fields, tree)]
    if isinstance(tree, (list, tuple)):
        return [(f"[{i}]", v) for i, v in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    if _is_fixed(tree):
        return []
    hint = "containers are dicts, lists, tuples, named tuples and dataclasses"
    raise BadInput(
        f"{f'{path}: ' if path else ''}a {type(tree).__name__} is neither an array nor a container\n  hint: {hint}"
    )


def float_leaves(tree: Any, what: str) -> list[Array]:
    """The leaves of `tree` as arrays.

    Raises:
        BadInput: a leaf is of integers, booleans or extended floats.
    """
    found = []
    for path, x in leaves(tree, what):
        array = as_array(x)
        if array.dtype.kind in "biu":
            raise BadInput(
                f"{path} is {array.dtype}; only floats have derivatives\n"
                "  hint: write 3.0 for 3, or x.astype(float64); or leave it out with `argnums`"
            )
        if array.dtype.char in "gG" and array.dtype not in (np.float64, np.complex128):
            raise BadInput(
                f"{path} is {array.dtype}, which ONNX does not have\n  hint: x.astype(float64) or complex128"
            )
        found.append(array)
    return found


def mapped_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to each array and number."""
    return rebuilt(tree, [function(x) for _, x in leaves(tree)])


def mapped(function: Callable[[Array], Any], tree: Any) -> Any:
    """`tree` with `function` applied to each array; other leaves are unchanged."""
    if isinstance(tree, Array):
        return function(tree)
    try:
        parts = [] if is_leaf(tree) else [child for _, child in children(tree)]
    except BadInput:
        return tree
    return _assemble_container(tree, [mapped(function, child) for child in parts]) if parts else tree

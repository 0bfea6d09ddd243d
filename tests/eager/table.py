"""``python -m tests.eager.table``: write docs/array-api*.md, every name of the array API standard with its status.

``standard.txt`` holds the names. Each function is called here on arrays that are on the tape, and what it noted there
is what the page says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as onp

import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, NotDifferentiable
from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.primitives import Macro, Primitive
from onnxgrad.eager.core.recording import COMPLEX, of_pairs
from onnxgrad.eager.core.tape import Node, history, leaf

STANDARD = Path(__file__).parent / "standard.txt"
PAGE = Path(__file__).parents[2] / "docs" / "array-api.md"
REST = PAGE.with_name("array-api-functions.md")
#: The groups of names on the first page.
FIRST = ("creation_functions", "data_type_functions", "elementwise_functions", "array_object")
HEAD = ("| name | here | on the tape |", "|---|---|---|")
INTRODUCTION = """\
# The array API standard, name by name

Use this page to look up what each function of the array API records on the tape. Every name of the
[Python array API standard](https://data-apis.org/array-api/) 2025.12 is in `onnxgrad.eager.numpy` (array objects:
`onnxgrad.eager.Array`). Values are numpy's. This page has creation, elementwise functions and the methods of arrays,
and [another one](array-api-functions.md) the functions of whole arrays. `python -m tests.eager.table` writes both.

The last column shows what a call on an array with a derivative records on the tape:

- operators of ONNX;
- *expression*: a few operators that count as one;
- *own derivative*: a Python function. Of these, only the Fourier transforms can be saved in a model, as `DFT`;
- *pairs*: a complex result, recorded as pairs of real and imaginary parts;
- *constant*: the result is made from no array or carries no derivative;
- *refused*: the call raises an error if a derivative would have to pass, and the error names an alternative.
"""

OTHERS = """\
# The array API standard: functions of whole arrays

Use this page to look up what a function of the array API that indexes, sorts, reduces or multiplies records on the
tape. [The first page](array-api.md) explains the columns.
"""

SQUARE = onp.array([[2.0, 0.3, 0.1], [0.3, 3.0, -0.2], [0.1, -0.2, 4.0]])
POSITIVE = onp.array([0.2, 0.5, 0.7])
INTS = onp.array([1, 2, 3])
BOOLS = onp.array([True, False, True])

#: How to call what is not called as ``f(x)`` or ``f(x, x)`` of positive floats.
CALLS: dict[str, Callable[[Any], Any]] = {
    "acosh": lambda f: f(var(POSITIVE + 1)),
    "astype": lambda f: f(var(POSITIVE), onp.float32),
    "bitwise_invert": lambda f: f(var(INTS)),
    "bitwise_left_shift": lambda f: f(var(INTS.astype(onp.uint8)), var(INTS.astype(onp.uint8))),
    "bitwise_right_shift": lambda f: f(var(INTS.astype(onp.uint8)), var(INTS.astype(onp.uint8))),
    "broadcast_shapes": lambda f: f((2, 1), (3,)),
    "broadcast_to": lambda f: f(var(POSITIVE), (2, 3)),
    "can_cast": lambda f: f(var(POSITIVE), onp.float32),
    "clip": lambda f: f(var(POSITIVE), 0.1, 0.5),
    "concat": lambda f: f([var(POSITIVE), var(POSITIVE)]),
    "empty": lambda f: f((2,)),
    "eye": lambda f: f(3),
    "fftfreq": lambda f: f(3),
    "finfo": lambda f: f(onp.float32),
    "from_dlpack": lambda f: f(onp.ones(2)),
    "full": lambda f: f((2,), var(POSITIVE[0])),
    "full_like": lambda f: f(var(POSITIVE), 1.0),
    "iinfo": lambda f: f(onp.int32),
    "isdtype": lambda f: f(onp.float32, "integral"),
    "linspace": lambda f: f(var(POSITIVE[0]), var(POSITIVE[1]), 4),
    "logical_not": lambda f: f(var(BOOLS)),
    "matrix_power": lambda f: f(var(SQUARE), 3),
    "meshgrid": lambda f: f(var(POSITIVE), var(POSITIVE)),
    "moveaxis": lambda f: f(var(SQUARE), 0, 1),
    "ones": lambda f: f((2,)),
    "permute_dims": lambda f: f(var(SQUARE), (1, 0)),
    "repeat": lambda f: f(var(POSITIVE), 2),
    "reshape": lambda f: f(var(SQUARE), (9,)),
    "result_type": lambda f: f(onp.float32, onp.float64),
    "rfftfreq": lambda f: f(3),
    "roll": lambda f: f(var(POSITIVE), 1),
    "solve": lambda f: f(var(SQUARE), var(POSITIVE)),
    "squeeze": lambda f: f(var(POSITIVE[None]), axis=0),
    "stack": lambda f: f([var(POSITIVE), var(POSITIVE)]),
    "take": lambda f: f(var(POSITIVE), INTS - 1),
    "take_along_axis": lambda f: f(var(POSITIVE), INTS - 1),
    "tile": lambda f: f(var(POSITIVE), (2,)),
    "unstack": lambda f: f(var(POSITIVE)),
    "where": lambda f: f(var(BOOLS), var(POSITIVE), var(POSITIVE)),
    "zeros": lambda f: f((2,)),
    "arange": lambda f: f(3),
}
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    CALLS[_name] = lambda f: f(var(INTS), var(INTS))
for _name in ("logical_and", "logical_or", "logical_xor"):
    CALLS[_name] = lambda f: f(var(BOOLS), var(BOOLS))
MATRICES = (
    "cholesky", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matrix_norm", "matrix_rank", "pinv",
    "qr", "slogdet", "svd", "svdvals", "trace", "matrix_transpose", "tril", "triu", "fftn", "ifftn", "rfftn", "irfftn",
)  # fmt: skip
for _name in MATRICES:
    CALLS[_name] = lambda f: f(var(SQUARE))
for _name in ("conj", "imag", "real"):
    CALLS[_name] = lambda f: f(of_pairs(var(SQUARE[:, :2])))
for _name in ("matmul", "tensordot"):
    CALLS[_name] = lambda f: f(var(SQUARE), var(SQUARE))
BINARY = frozenset("add and eq floordiv ge gt le lshift lt mod mul ne or pow rshift sub truediv xor".split())  # noqa: SIM905
METHODS: dict[str, Callable[[], Any]] = {
    "mT": lambda: var(SQUARE).mT,
    "T": lambda: var(SQUARE).T,
    "__getitem__": lambda: [var(SQUARE)[1:, 0], var(POSITIVE)[INTS - 1], var(SQUARE)[SQUARE > 0]],
    "__setitem__": lambda: assigned(var(POSITIVE)),
    "__matmul__": lambda: var(SQUARE) @ var(SQUARE),
    "__invert__": lambda: ~var(INTS),
}  # fmt: skip


def var(x: Any) -> Array:
    """An array on the tape."""
    x = onp.asarray(x)
    return Array(x, leaf(x))


def assigned(x: Array) -> Array:
    y = x * 1.0
    y[0] = x[1]
    return y


def names_of(op: Primitive) -> str:
    """The page's name of the operations on the tape."""
    if op.opaque:
        return "*own derivative*"
    if op is COMPLEX:
        return "*pairs*"
    if isinstance(op, Macro):
        return "*expression*"
    return f"`{op.key[0]}`"


def noted(result: Any) -> str:
    """The operations in the history of `result`."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    nodes = [x._node for x in parts if isinstance(x, Array) and type(x._node) is Node]
    found = [n for n in history(nodes, [], discrete=True) if n.inputs]
    if not found:
        return "constant"
    return ", ".join(sorted({names_of(n.op) for n in found} - {"`Part`"}))


def status(group: str, name: str) -> tuple[str, str]:
    """True if the name exists, and the operations that it records."""
    if group == "array_object":
        if not hasattr(Array, name):
            return "no", ""
        binary = name.strip("_") in BINARY
        if name in METHODS:
            return "yes", noted(METHODS[name]())
        if binary:
            ints = name.strip("_") in ("and", "or", "xor", "lshift", "rshift")
            x = INTS.astype(onp.uint8) if ints else POSITIVE
            return "yes", noted(getattr(Array, name)(var(x), var(x)))
        if name in ("__abs__", "__neg__", "__pos__"):
            return "yes", noted(getattr(Array, name)(var(POSITIVE)))
        return "yes", ""
    space = getattr(np, group) if group in ("linalg", "fft") else np
    f = getattr(space, name, None)
    if f is None:
        return "no", ""
    try:
        return "yes", noted(_called(name, f))
    except (NotDifferentiable, BadInput) as refusal:
        hint = str(refusal).partition("hint: ")[2]
        return "yes", f"*refused* ({hint})"


def _called(name: str, f: Callable[..., Any]) -> Any:
    if name in CALLS:
        return CALLS[name](f)
    try:
        return f(var(POSITIVE))
    except TypeError:
        return f(var(POSITIVE), var(POSITIVE))


def page(first: bool = True) -> str:
    """The first page, or the other one."""
    lines = [INTRODUCTION if first else OTHERS]
    for line in STANDARD.read_text().splitlines():
        group, _, names = line.partition(": ")
        if (group in FIRST) != first:
            continue
        lines += [f"## {group.replace('_', ' ')}", "", *HEAD]
        lines += [f"| `{name}` | {' | '.join(status(group, name))} |" for name in names.split()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    REST.write_text(page(first=False))

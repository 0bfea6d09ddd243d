"""Jacobians and Hessians: every derivative of every element, for all unit vectors in one graph.

``jacobian[i…, j…] = ∂of[i…] / ∂wrt[j…]``, of shape ``of.shape + wrt.shape``. In reverse mode a unit cotangent for each
element of `of` gives a row; in forward mode a unit tangent for each element of `wrt` gives a column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import onnx_ir as ir

from onnxgrad.batching.directions import Batched, identity, vmapped
from onnxgrad.engine import forward, reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import Dim, not_none
from onnxgrad.ir.shapes import move_axis
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation, check_rank
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names
from onnxgrad.wording import shape_text

Mode = Literal["auto", "reverse", "forward"]
Dims = Sequence[Dim]


@transform
def jacobian(
    model: AnyModel, *, wrt: Names, of: Names | None = None, mode: Mode = "auto", batch: int | None = None
) -> Any:
    """The model with the Jacobian of each `of` with respect to each `wrt`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of graph inputs, initializers or intermediate float values.
        of: names of float values; default: every float output.
        mode: "reverse" takes one pullback for each element of `of`, "forward" one pushforward for each element of
            `wrt`; "auto" takes what is provably fewer, and reverse where that is not known.
        batch: an axis along which the rows of `of` and `wrt` belong together: row n of `of` depends on row n of
            `wrt` only. One direction then serves all rows. (Where rows do depend on each other, row n gets the
            derivative of the sum over the rows of `of`; in forward mode, by the sum over the rows of `wrt`.)

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, and one more output
        ``{of}_{wrt}_jacobian`` for each pair, of shape ``of.shape + wrt.shape``; with `batch`, of shape
        ``[rows] + (of.shape without that axis) + (wrt.shape without that axis)``.
        ``signature(derived).jacobians[of][wrt]`` is its exact name.

    Raises:
        BadInput: an unknown `mode`, a value without an axis `batch` or of unknown rank.
        OnnxGradError: as `vjp`.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise BadInput(f"mode is 'auto', 'reverse' or 'forward', not {mode!r}")
    check_axis(batch)
    d = Derivation(model, wrt, of)
    check_rows(d.wrt | d.of, batch)
    if mode == "auto":
        mode = _cheaper(d, batch)
    if mode == "reverse":
        blocks = {(a, b): j for a in d.of for b, j in _rows(d, a, batch).items()}
    else:
        blocks = {(a, b): j for b in d.wrt for a, j in _columns(d, b, d.of, batch).items()}
    for a, y in d.of.items():
        for b in d.wrt:
            name = d.output(blocks[a, b], f"{a}_{b}_jacobian", y)
            d.signature.jacobians.setdefault(a, {})[b] = name
    return d.close()


@transform
def hessian(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The model with the Hessian of the sum of `of`: forward mode, for all unit vectors, over its gradient.

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, and one more output
        ``{a}_{b}_hessian`` of shape ``a.shape + b.shape`` for each pair of `wrt`;
        ``signature(derived).hessians[a][b]`` is its exact name.

    Raises:
        OnnxGradError: as `vjp`.
    """
    d = Derivation(model, wrt, of)
    check_rows(d.wrt, None)
    gradients = gradients_of(d)
    for a, x in d.wrt.items():
        for b, h in _columns(d, a, gradients, None, first=True).items():
            d.signature.hessians.setdefault(a, {})[b] = d.output(h, f"{a}_{b}_hessian", x)
    return d.close()


def gradients_of(d: Derivation) -> dict[str, ir.Value]:
    """The gradients of the sum of `of`."""
    gradients = reverse(d.builder, d.nodes, d.ones(), list(d.wrt.values()))
    return {name: (gradients.get(v) or d.zeros(v)).value for name, v in d.wrt.items()}


# --- one mode or the other -------------------------------------------------------------------------


def _rows(d: Derivation, name: str, batch: int | None) -> dict[str, Var]:
    """The Jacobians of the value `name`, by pulling back all unit cotangents of it."""
    b = d.builder
    nodes = d.lowered([d.of[name]])
    y = b.var(b.now(d.of[name]))
    wrt = {n: d.builder.var(b.now(v)) for n, v in d.wrt.items()}

    def write(seed: list[Var]) -> list[Var]:
        gradients = reverse(b, nodes, {y.value: _all_rows(seed[0], y, batch)}, list(d.wrt.values()))
        return [_to_front(gradients.get(v) or d.zeros(v), batch) for v in d.wrt.values()]

    at = 0 if batch is None else 1
    likes = [_to_front(x, batch) for x in wrt.values()]  # only for their shapes; they are not computed
    results = vmapped(b, [_units(y, batch)], write, [Batched(x, at) for x in likes])
    return {n: _shape_blocks(j, y, x, batch) for (n, x), j in zip(wrt.items(), results)}


def _columns(
    d: Derivation, name: str, of: dict[str, ir.Value], batch: int | None, first: bool = False
) -> dict[str, Var]:
    """The Jacobians of `of` by the value `name`, by pushing all unit tangents of it.

    With `first` the axes of the value come first: the transposed Jacobian.
    """
    b = d.builder
    nodes = d.lowered(list(of.values()))
    x = b.var(b.now(d.wrt[name]))
    outs = {n: b.var(b.now(v)) for n, v in of.items()}

    def write(seed: list[Var]) -> list[Var]:
        tangents = forward(b, nodes, {d.wrt[name]: _all_rows(seed[0], x, batch)}, list(of.values()))
        return [_to_front(tangents.get(v) or d.zeros(v), batch) for v in of.values()]

    likes = [_to_front(y, batch) for y in outs.values()]
    stacked = [Batched(y, 0 if first else y.rank) for y in likes]
    results = vmapped(b, [_units(x, batch)], write, stacked)
    pairs = [(x, y) if first else (y, x) for y in outs.values()]
    return {n: _shape_blocks(j, *pair, batch) for n, pair, j in zip(outs, pairs, results)}


def _cheaper(d: Derivation, batch: int | None) -> Mode:
    """The mode with fewer directions; reverse if that depends on unknown sizes."""
    of = [_size(v, batch) for v in d.of.values()]
    wrt = [_size(v, batch) for v in d.wrt.values()]
    if all(not symbols for _, symbols in (*of, *wrt)) or len({s for _, s in (*of, *wrt)}) == 1:
        return "forward" if sum(n for n, _ in wrt) < sum(n for n, _ in of) else "reverse"
    return "reverse"


def _size(value: ir.Value, batch: int | None) -> tuple[int, tuple[str, ...]]:
    """The number of elements: a known factor, and the symbols that multiply it."""
    dims = _without(list(value.shape or ()), batch)
    return math.prod(d for d in dims if isinstance(d, int)), tuple(
        sorted(str(d) for d in dims if not isinstance(d, int))
    )


# --- shapes ----------------------------------------------------------------------------------------


def check_axis(batch: int | None) -> None:
    """Refuse values that are no axis number."""
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise BadInput(f"`batch` is the number of an axis, not {batch!r}")


def check_rows(values: dict[str, ir.Value], batch: int | None) -> None:
    """Refuse values of unknown rank, and rows along `batch` that cannot belong together."""
    for name, value in values.items():
        rank = check_rank(value, name)
        if batch is not None and not -rank <= batch < rank:
            raise BadInput(f"{name!r} has no axis {batch} for rows: its shape is {shape_text(value.shape)}")
    if batch is not None:
        _rows_agree(values, batch)


def unit_directions(x: Var, batch: int | None) -> Var:
    """Every unit vector of the space of `x` (of one row of it, the same in all rows), stacked."""
    units = _units(x, batch)
    if batch is None:
        return units
    b, at = x.builder, batch % x.rank
    lead = units.dims[0]
    count = [lead] if isinstance(lead, int) else b.Shape(units, start=0, end=1)
    whole = b.Expand(b.Unsqueeze(units, [at + 1]), b.join(count, b.shape_of(x)))
    whole.value.shape = ir.Shape([lead, *x.dims])
    return whole


def _rows_agree(values: dict[str, ir.Value], batch: int) -> None:
    counts = {name: n for name, v in values.items() if v.shape is not None and isinstance(n := v.shape[batch], int)}
    if len(set(counts.values())) > 1:
        counted = ", ".join(f"{name!r} has {n}" for name, n in counts.items())
        raise BadInput(f"along axis {batch} lie rows that belong together, but {counted}")


def _without(dims: list[Any], batch: int | None) -> list[Any]:
    if batch is not None:
        del dims[batch]
    return dims


def _row_dims(x: Var, batch: int | None) -> Var:
    """The shape of one row of `x`, or of `x` itself."""
    b = x.builder
    if batch is None:
        return b.shape_of(x)
    at = batch % x.rank
    return b.join(b.shape_of(x, 0, at) if at else [], b.shape_of(x, at + 1))


def _units(x: Var, batch: int | None) -> Var:
    """Every unit vector of the space of `x` (of one row of it), in its shape, stacked."""
    b = x.builder
    dims = _without(list(x.shape or ()), batch)
    count: Any = math.prod(dims) if all(isinstance(n, int) for n in dims) else None
    if count is None:
        count = b.Size(x) if batch is None else b.ReduceProd(_row_dims(x, batch), keepdims=0)
    matrix = identity(b, count, not_none(x.dtype))
    if len(dims) == 1:
        units = matrix
    elif isinstance(count, int):
        units = b.reshape(matrix, [count, *dims])
    else:
        units = b.reshape(matrix, b.join(b.Unsqueeze(count, [0]), _row_dims(x, batch)))
    count_dim = count if isinstance(count, int) else (units.shape or (None,))[0]
    units.value.shape = ir.Shape([count_dim, *dims])
    return units


def _all_rows(seed: Var, like: Var, batch: int | None) -> Var:
    """A seed for one row, given to all rows of `like`."""
    if batch is None:
        return seed
    b = seed.builder
    whole = b.Expand(b.Unsqueeze(seed, [batch % like.rank]), b.shape_of(like))
    whole.value.shape = like.value.shape
    return whole


def _to_front(x: Var, batch: int | None) -> Var:
    """`x` with the axis `batch` first."""
    return x if batch is None else move_axis(x, batch, 0)


def _shape_blocks(j: Var, rows: Var, columns: Var, batch: int | None) -> Var:
    """`j` in the shape of `rows` and then that of `columns`; the axis `batch`, which both have, first."""
    b: Builder = j.builder
    dims = [*_without(list(rows.shape or ()), batch), *_without(list(columns.shape or ()), batch)]
    lead: list[Any] = []
    if batch is not None:
        at = batch % rows.rank
        lead = [b.shape_of(rows, at, at + 1)]
        dims.insert(0, (rows.shape or ())[at])
    if j.rank != len(dims):
        j = b.reshape(j, b.join(*lead, _row_dims(rows, batch), _row_dims(columns, batch)))
    value = j.value
    value.shape = ir.Shape(dims)
    return j

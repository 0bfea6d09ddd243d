"""Sparse Jacobians and Hessians as transforms: the values of the entries, in compressed products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.engine import forward, reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.ir.shapes import allows
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.jacobians import gradients_of
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.sparse.colouring import Compression, compress, compress_symmetric
from onnxgrad.transforms.sparse.pattern import pattern_of, shape_of
from onnxgrad.wording import shape_text

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Shapes = Mapping[str, Sequence[int]]


@transform
def sparse_jacobian(model: AnyModel, *, wrt: str, of: str | None = None, shapes: Shapes | None = None) -> Any:
    """The model with the entries of the Jacobian of `of` with respect to `wrt` that can be nonzero.

    The pattern is derived from the graph, for all inputs of the same shapes. Columns that share no row are one
    direction of forward mode, rows that share no column one of reverse mode; the mode with fewer directions is chosen,
    and a few dense rows or columns are computed separately.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: the name of a graph input, an initializer or an intermediate float value.
        of: the name of a float value; default: the only float output.
        shapes: sizes of inputs that the model leaves open, by name. What the model says of the shapes of other values
            is then forgotten.

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, and three more outputs, the
        parts of a matrix of shape (elements of `of`, elements of `wrt`) in compressed sparse rows, both in C order:
        ``{of}_{wrt}_jacobian`` (the values, of the dtype of `of`), and the constants ``{of}_{wrt}_jacobian_indices``
        (the column of each value) and ``{of}_{wrt}_jacobian_indptr`` (where each row begins), int64.
        ``signature(derived)`` has their names in `jacobians` and `patterns`.

    Raises:
        ImportError: SciPy is not installed.
        BadInput: a shape on the way is not known, or the Jacobian is not sparse.
        OnnxGradError: as `vjp`.
    """
    _require_scipy("sparse_jacobian")
    d = Derivation(model, wrt, of, lambda private: _settle(private, shapes))
    (y_name, y), (x_name, x) = _only(d.of, "of"), _only(d.wrt, "wrt")
    nodes = d.lowered([y])
    y, x = d.builder.now(y), d.builder.now(x)
    pattern = pattern_of(d.builder, nodes, y, x)
    plan = compress(pattern)
    parts = [_push_forward(d, nodes, x, y, plan, y), _pull_back(d, nodes, x, y, plan)]
    name = d.output(_entries(d, parts, plan, y), f"{y_name}_{x_name}_jacobian", y)
    d.signature.jacobians = {y_name: {x_name: name}}
    _add_pattern(d, name, pattern)
    return d.close()


@transform
def sparse_hessian(model: AnyModel, *, wrt: str, of: str | None = None, shapes: Shapes | None = None) -> Any:
    """The model with the entries of the Hessian of the sum of `of` that can be nonzero.

    As `sparse_jacobian`, of the gradient, in forward mode; each entry is computed once, at its place or at the
    transposed one, which takes fewer directions.

    Returns:
        A model with the outputs ``{wrt}_{wrt}_hessian``, ``{wrt}_{wrt}_hessian_indices`` and
        ``{wrt}_{wrt}_hessian_indptr``; ``signature(derived)`` has their names in `hessians` and `patterns`.

    Raises:
        OnnxGradError: as `sparse_jacobian`.
    """
    _require_scipy("sparse_hessian")
    d = Derivation(model, wrt, of, lambda private: _settle(private, shapes))
    x_name, x = _only(d.wrt, "wrt")
    (gradient,) = gradients_of(d).values()
    nodes = d.lowered([gradient])
    x, gradient = d.builder.now(x), d.builder.now(gradient)
    pattern = pattern_of(d.builder, nodes, gradient, x)
    pattern = pattern.multiply(pattern.T).tocsr()  # both have all entries
    pattern.sort_indices()
    plan = compress_symmetric(pattern)
    parts = [_push_forward(d, nodes, x, gradient, plan, x)]
    name = d.output(_entries(d, parts, plan, x), f"{x_name}_{x_name}_hessian", x)
    d.signature.hessians = {x_name: {x_name: name}}
    _add_pattern(d, name, pattern)
    return d.close()


def _require_scipy(name: str) -> None:
    try:
        import scipy.sparse  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{name} needs SciPy: pip install 'onnxgrad[scipy]'") from error


def _only(values: dict[str, ir.Value], role: str) -> tuple[str, ir.Value]:
    if len(values) != 1:
        raise BadInput(f"a sparse matrix is of one value by one; name one of {', '.join(values)} with `{role}`")
    return next(iter(values.items()))


def _settle(model: ir.Model, shapes: Shapes | None) -> None:
    """Declare the inputs with these shapes, and drop declarations of values that depend on open sizes."""
    if not shapes:
        return
    inputs = {v.name or "": v for v in model.graph.inputs}
    for name, shape in shapes.items():
        if name not in inputs:
            raise BadInput(f"`shapes` names no input of the model: {name!r}")
        declared = inputs[name].shape
        if not allows(declared, shape):
            raise BadInput(
                f"`shapes` gives {name!r} the shape {shape_text(shape)}, and it is declared as {shape_text(declared)}"
            )
        inputs[name].shape = ir.Shape(shape)
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (v for node in graph for v in node.outputs):
            if value.shape is not None and not all(isinstance(d, int) for d in value.shape):
                value.shape = None


def _seeds(d: Derivation, colours: np.ndarray, count: int, like: ir.Value) -> Var:
    """A direction for each colour: 1 for the elements that have it."""
    assert like.dtype is not None
    shape = shape_of(like)
    rows = np.zeros((count, math.prod(shape)), like.dtype.numpy())
    where = np.flatnonzero(colours >= 0)
    rows[colours[where], where] = 1
    return d.builder.const(rows.reshape(count, *shape), like.dtype)


def _push_forward(
    d: Derivation, nodes: Sequence[ir.Node], x: ir.Value, y: ir.Value, plan: Compression, like: ir.Value
) -> Var | None:
    """The products of forward mode, each flat; None if the plan has none."""
    return _products(d, nodes, forward, x, y, _seeds(d, plan.columns, plan.forward, x), like) if plan.forward else None


def _pull_back(d: Derivation, nodes: Sequence[ir.Node], x: ir.Value, y: ir.Value, plan: Compression) -> Var | None:
    """The products of reverse mode, each flat; None if the plan has none."""
    return _products(d, nodes, reverse, y, x, _seeds(d, plan.rows, plan.reverse, y), x) if plan.reverse else None


def _products(
    d: Derivation, nodes: Sequence[ir.Node], mode: Any, start: ir.Value, end: ir.Value, seeds: Var, like: ir.Value
) -> Var:
    """Apply `mode` to each of `seeds` at `start`; the flat results at `end`."""

    def write(seed: list[Var]) -> list[Var]:
        derivatives = mode(d.builder, nodes, {start: seed[0]}, [end])
        return [derivatives.get(end) or d.zeros(end)]

    (stack,) = vmapped(d.builder, [seeds], write, [Batched(d.builder.var(like))])
    return d.builder.reshape(stack, [-1])


def _entries(d: Derivation, parts: Sequence[Var | None], plan: Compression, like: ir.Value) -> Var:
    """The entries, in the order of rows, out of all products."""
    b = d.builder
    vectors = [b.Cast(p, to=int(like.dtype or 0)) if p.dtype != like.dtype else p for p in parts if p is not None]
    if not vectors:
        return b.const(np.zeros(0), like.dtype)
    every = vectors[0] if len(vectors) == 1 else b.Concat(*vectors, axis=0)
    where = b.const(plan.where.astype(np.int64))
    entries = b.GatherElements(every, where, axis=0)  # several times as fast as Gather in ONNX Runtime
    entries.value.shape = ir.Shape([plan.where.size])
    return entries


def _add_pattern(d: Derivation, name: str, pattern: csr_array) -> None:
    """Add the constants with the indices of the entries."""
    arrays = {"indices": pattern.indices, "indptr": pattern.indptr}
    for part, array in arrays.items():
        var = d.builder.const(array.astype(np.int64))
        d.signature.patterns.setdefault(name, {})[part] = d.output(var, f"{name}_{part}", var.value)

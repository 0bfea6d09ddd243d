"""The derivative files that CasADi looks for beside a model, for exact Jacobians and Hessians.

CasADi 3.8 reads ``f.onnx`` with ``GraphBuilder("f.onnx").create("f")``. For a derivative it opens a model in the same
folder: ``fwd_f.onnx`` (forward), ``adj_f.onnx`` (reverse), or ``fwd_adj_f.onnx`` (forward over reverse, for Hessians).
Each has the inputs and outputs of the differentiated model, then a seed per input or output, and returns a sensitivity
for each of the others.

CasADi reads a tensor as a matrix: a matrix unchanged, any other tensor as one column of its elements. Seeds of several
directions are the columns of one matrix: n seeds of a value of r × c are r × (n·c).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName, ZeroDerivative
from onnxgrad.files import make_folder
from onnxgrad.function import Function
from onnxgrad.ir.builder import Builder
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import holds_floats, not_none
from onnxgrad.model_io import save_model, signature
from onnxgrad.model_io.open import AnyModel
from onnxgrad.transforms.first_order import jvp, vjp


def family(
    model: AnyModel, folder: str | os.PathLike, name: str = "f", dims: Mapping[str, int] | None = None
) -> list[Path]:
    """Write `model` and its derivatives as CasADi looks for them.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. The sizes of its inputs and outputs are fixed.
        folder: for the files; it is created if it is missing.
        name: of the function: ``f`` is written to ``f.onnx``.
        dims: sizes of dimensions that the model leaves open, by name.

    Returns:
        The files: ``f.onnx``, ``fwd_f.onnx``, ``adj_f.onnx``, ``fwd_adj_f.onnx``.

    Raises:
        BadInput: a size that is not fixed, weights too large for one file, or a place that cannot be written.
        NotDifferentiable: an operator has no derivative.
    """
    primal = set_sizes(Function(model).model.clone(), dims or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroDerivative)  # CasADi seeds all inputs, also those without effect
        reverse = adjoint(primal)
        sensitivities = [v.name for v in reverse.graph.outputs if v.name and v.name.startswith("adj_")]
        written = {
            f"{name}.onnx": primal,
            f"fwd_{name}.onnx": forward(primal),
            f"adj_{name}.onnx": reverse,
            f"fwd_adj_{name}.onnx": forward(reverse, of=sensitivities),
        }
    paths = []
    for file, made in written.items():
        path = Path(folder) / file
        make_folder(path.parent)
        save_model(made, path)
        if path.with_name(f"{path.name}.data").exists():
            raise BadInput(f"{path} needs a second file for its weights, which CasADi does not read")
        paths.append(path)
    return paths


def set_sizes(model: ir.Model, dims: Mapping[str, int]) -> ir.Model:
    """Set the sizes of symbolic dimensions of the inputs, in place. Raises UnknownName for an unknown dimension."""
    graph = model.graph
    there = {d.value for v in graph.inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim) and d.value}
    for name in dims:
        if name not in there:
            raise UnknownName(name, sorted(there), "dimension")
    if dims:
        for value in graph.inputs:
            if value.shape is not None:
                value.shape = ir.Shape([d if isinstance(d, int) else dims.get(d.value or "", d) for d in value.shape])
        for value in [v for node in graph for v in node.outputs]:
            value.shape = None
        infer_model(model)
    return model


def adjoint(model: ir.Model) -> ir.Model:
    """`model` with seeds ``adj_{output}`` in and sensitivities ``adj_{input}`` out, for any number ``nadj`` of them."""
    wrt, of = _floats(model.graph.inputs), _floats(model.graph.outputs)
    derived = vjp(model, wrt=list(wrt), of=list(of), directions="nadj")
    names = signature(derived)
    return _pack_directions(derived, "adj", (of, names.cotangents), (wrt, names.gradients))


def forward(model: ir.Model, of: list[str] | None = None) -> ir.Model:
    """`model` with seeds ``fwd_{input}`` in and sensitivities ``fwd_{output}`` out, for any number ``nfwd`` of them."""
    wrt, given = _floats(model.graph.inputs), _floats(model.graph.outputs)
    wanted = {n: v for n, v in given.items() if of is None or n in of}
    derived = jvp(model, wrt=list(wrt), of=list(wanted), directions="nfwd")
    names = signature(derived)
    return _pack_directions(derived, "fwd", (wrt, names.input_tangents), (wanted, names.output_tangents))


def _floats(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    """The float values by name. Raises BadInput for a value without a known rank."""
    found = {v.name or "": v for v in values if holds_floats(v)}
    for name, value in found.items():
        if value.shape is None:
            raise BadInput(f"{name!r} declares no shape, which CasADi needs")
    return found


#: Values of the primal model by name, and how the derivative of each is called.
Derivatives = tuple[Mapping[str, ir.Value], Mapping[str, str]]


def _pack_directions(model: ir.Model, kind: str, given: Derivatives, found: Derivatives) -> ir.Model:
    """`model`, whose inputs and outputs of derivatives [directions, …] become matrices as CasADi packs and calls them.

    Args:
        model: a derived one.
        kind: ``adj`` or ``fwd``.
        given: its seeds.
        found: its sensitivities.
    """
    seeds, sensitivities = ({called[n]: value for n, value in values.items()} for values, called in (given, found))
    graph, directions = model.graph, f"n{kind}"
    b = Builder(graph)
    for value in [v for v in graph.inputs if v.name in seeds]:
        primal = seeds[value.name or ""]
        rows, columns = _matrix(primal)
        shape = ir.Shape([rows, _width(directions, columns)])
        packed = ir.Value(name=f"{kind}_{primal.name}", type=value.type, shape=shape)
        graph.inputs[graph.inputs.index(value)] = packed
        if columns is None:
            apart = b.Reshape(b.Transpose(b.var(packed), perm=[1, 0]), [-1, *_sizes(primal)])
        else:
            apart = b.Transpose(b.Reshape(b.var(packed), _apart(b, graph, primal, rows, columns)), perm=[1, 0, 2])
        value.replace_all_uses_with(apart.value)
    for value in [v for v in graph.outputs if v.name in sensitivities]:
        primal = sensitivities[value.name or ""]
        rows, columns = _matrix(primal)
        if columns is None:
            packed = b.Transpose(b.Reshape(b.var(value), [-1, rows]), perm=[1, 0]).value
        else:
            packed = b.Reshape(b.Transpose(b.var(value), perm=[1, 0, 2]), [rows, -1]).value
        packed.name, packed.shape = f"{kind}_{primal.name}", ir.Shape([rows, _width(directions, columns)])
        graph.outputs[graph.outputs.index(value)] = packed
    graph.sort()
    return model


def _apart(b: Builder, graph: ir.Graph, primal: ir.Value, rows: int, columns: int | str) -> Any:
    """The shape [rows, directions, columns]."""
    if isinstance(columns, int):
        return [rows, -1, columns]
    (own,) = (v for v in graph.inputs if v.name == primal.name)
    return b.Concat(b.const([rows, -1], ir.DataType.INT64), b.Shape(b.var(own), start=1), axis=0)


def _sizes(value: ir.Value) -> list[int]:
    shape = not_none(value.shape)
    for size in shape:
        if not isinstance(size, int):
            raise BadInput(f"{value.name!r} has a size that is not fixed ({size}); CasADi's matrices have fixed sizes")
    return [d for d in shape if isinstance(d, int)]


def _matrix(value: ir.Value) -> tuple[int, int | str | None]:
    """Rows and columns of `value` as CasADi reads it; None as columns for a vector."""
    shape = not_none(value.shape)
    if len(shape) == 2 and isinstance(shape[0], int):
        columns = shape[1]
        return shape[0], columns if isinstance(columns, int) else str(columns)
    return math.prod(_sizes(value)), None


def _width(directions: str, columns: int | str | None) -> str:
    if columns in (None, 1):
        return directions
    return f"{directions}_x{columns}" if isinstance(columns, int) else f"{directions}_{columns}"

"""Exporting a recorded program as an ONNX model.

The function is called once, and the recording is the graph: Python's branches and loops are unrolled as they ran. Sizes
are constants, except along dynamic axes: for those the function is called at three sizes, every number that differs
between the recordings must be a simple formula of the sizes (n, n - 1, 2·n, n·m), and the model is compared with the
function at each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.bodies import call_on_variables
from onnxgrad.eager.core.executable import Executable, model_of
from onnxgrad.eager.core.plans import formal, new_builder
from onnxgrad.eager.core.primitives import Macro, StandardOp
from onnxgrad.eager.core.tape import Node, parameter
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.cleanup import end_derivation
from onnxgrad.model_io import to_proto

Dynamic = Mapping[str, Mapping[int, str]]


def export(f: Callable[..., Any], *args: Any, dynamic: Dynamic | None = None) -> onnx.ModelProto:
    """Export the computation of `f` on `args` as an ONNX model.

    Args:
        f: a function of arrays or containers of arrays. Derivatives inside it are recorded too:
            ``export(grad(f), x)`` is the model of a gradient.
        args: example arguments. Each of their leaves becomes an input, with its dtype and shape, named after the
            parameter of `f` and the path in the container (``w``, ``w_0_bias``).
        dynamic: for inputs by name, the dynamic axes with the name of each: ``{"x": {0: "N"}}``.

    Returns:
        A model whose outputs ``output_0``, … (or ``output``) are the arrays that `f` returned, in order.

    Raises:
        BadInput: an operation cannot be exported, or the program depends on a dynamic size in a way that has no such
            formula.
    """
    first = _Recording(f, args)
    dims = _dims(first, dynamic or {})
    if not dims:
        return to_proto(_model(first, _Sizes({}, [first]), {}))
    names = sorted(set(dims.values()))
    others = []
    for offsets in ((1, 2, 4), (3, 7, 5)):
        sizes = {n: _size(first, dims, n) + offsets[i % 3] + 6 * (i // 3) for i, n in enumerate(names)}
        others.append(_Recording(f, _resize_example(first, args, dims, sizes)))
    recordings = [first, *others]
    table = _Sizes({n: tuple(_size(r, dims, n) for r in recordings) for n in names}, recordings)
    model = _model(first, table, dims)
    run = Executable(model)
    for r in recordings:
        for name, want, got in zip(r.outputs, r.results, run([x._data for x in r.inputs])):
            if got.shape != want.shape or not np.allclose(got, want._data, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise BadInput(
                    f"the model differs from {r.name} at other sizes ({name})\n"
                    "  hint: does the function branch on sizes?"
                )
    return to_proto(model)


class _Recording:
    """One call of a function on inputs."""

    def __init__(self, f: Callable[..., Any], args: Sequence[Any]) -> None:
        self.name = getattr(f, "__name__", "the function")
        labels = _parameters(f, len(args))
        leaves = [(identifier(p), as_array(x)) for a, n in zip(args, labels) for p, x in trees.leaves(a, n)]
        self.names = ["_".join(filter(None, p.split("_"))) or "input" for p, _ in leaves]
        for name, x in zip(self.names, (x for _, x in leaves)):
            if x.dtype.kind == "c":
                hint = "hand over the real and the imaginary part"
                raise BadInput(f"{name} is {x.dtype}; ONNX has no complex numbers\n  hint: {hint}")
        self.leaves = [parameter(x._data) for _, x in leaves]
        self.inputs = [Array(n.value, n) for n in self.leaves]
        _, self.results, self.nodes = call_on_variables(f, self.name, args, self.leaves)
        several = len(self.results) > 1
        self.outputs = [f"output_{i}" if several else "output" for i in range(len(self.results))]


def _parameters(f: Callable[..., Any], count: int) -> list[str]:
    try:
        names = [p.name for p in inspect.signature(f).parameters.values() if p.kind.name.startswith("POSITIONAL")]
    except (TypeError, ValueError):
        names = []
    whole = [n for n in names if n not in ("args", "kwargs")]
    return whole if len(whole) >= count else [f"input_{i}" for i in range(count)]


# --- sizes -----------------------------------------------------------------------------------------


def _dims(r: _Recording, dynamic: Dynamic) -> dict[tuple[str, int], str]:
    """The dynamic axes of the inputs, by input and axis."""
    dims = {}
    shapes = {n: x.shape for n, x in zip(r.names, r.inputs)}
    for name, axes in dynamic.items():
        if name not in shapes:
            raise BadInput(f"`dynamic` names the input {name!r}; there are: {', '.join(shapes)}")
        for axis, symbol in axes.items():
            if not -len(shapes[name]) <= axis < len(shapes[name]):
                raise BadInput(f"`dynamic` names axis {axis} of {name!r}, which has {len(shapes[name])}")
            dims[name, axis % len(shapes[name])] = symbol
    for symbol in set(dims.values()):
        lengths = {shapes[n][a] for (n, a), s in dims.items() if s == symbol}
        if len(lengths) > 1:
            raise BadInput(f"the axes {symbol!r} have different lengths in the example: {sorted(lengths)}")
    return dims


def _size(r: _Recording, dims: Mapping[tuple[str, int], str], symbol: str) -> int:
    name, axis = next(place for place, s in dims.items() if s == symbol)
    return r.inputs[r.names.index(name)].shape[axis]


def _resize_example(
    r: _Recording, args: Sequence[Any], dims: Mapping[tuple[str, int], str], sizes: Mapping[str, int]
) -> Any:
    """The example at other sizes, by repeating its elements."""
    values = []
    for name, x in zip(r.names, r.inputs):
        data = x._data
        for axis in range(data.ndim):
            if (name, axis) in dims:
                if not data.shape[axis]:
                    raise BadInput(f"the example for {name!r} is empty along its dynamic axis {axis}")
                data = np.take(data, np.arange(sizes[dims[name, axis]]), axis=axis, mode="wrap")
        values.append(Array(data))
    return trees.rebuilt(tuple(args), values)


@dataclass(frozen=True)
class _Dim:
    """A formula for a number: ``factor · Π symbols + offset``."""

    symbols: tuple[str, ...]
    factor: int
    offset: int


class _Sizes:
    """Finds formulas for the numbers that differ between recordings at several sizes."""

    def __init__(self, table: dict[str, tuple[int, ...]], recordings: Sequence[_Recording]) -> None:
        self.table, self.recordings = table, recordings
        if len({tuple(n.op.key[0] for n in r.nodes) for r in recordings}) > 1:
            raise BadInput(
                f"{recordings[0].name} does other operations at other sizes\n"
                "  hint: loops over a dynamic axis cannot be recorded; use operations on whole arrays"
            )

    def explain(self, numbers: Sequence[float], where: str) -> Any:
        """The number if all of `numbers` agree, else a formula for them."""
        first = numbers[0]
        if all(n == first for n in numbers):
            return first
        pairs = [(a, b) for a in self.table for b in self.table if a <= b]
        for symbols in [*((s,) for s in self.table), *pairs]:
            sizes = [int(np.prod([self.table[s][k] for s in symbols])) for k in range(len(numbers))]
            if sizes[0] == sizes[1]:
                continue
            factor = (numbers[1] - first) / (sizes[1] - sizes[0])
            offset = first - factor * sizes[0]
            if factor == int(factor) and all(n == factor * s + offset for n, s in zip(numbers, sizes)):
                return _Dim(symbols, int(factor), int(offset))
        raise BadInput(f"{where} depends on the dynamic sizes in a way that cannot be written down: {list(numbers)}")

    def operator(self, i: int) -> Any:
        """The key of node `i`, with formulas for the numbers that differ."""
        keys = [r.nodes[i].op.key for r in self.recordings]
        return self._merged(keys, f"{self.recordings[0].nodes[i].op}")

    def _merged(self, parts: Sequence[Any], where: str) -> Any:
        if all(p == parts[0] for p in parts):
            return parts[0]
        if isinstance(parts[0], tuple) and len({len(p) for p in parts}) == 1:
            return tuple(self._merged(column, where) for column in zip(*parts))
        if all(isinstance(p, int) for p in parts):
            return self.explain(parts, where)
        raise BadInput(f"{where} does something else at other sizes")


# --- writing ---------------------------------------------------------------------------------------


class _Measured:
    """A builder that accepts formulas among the ints of an operand."""

    def __init__(self, b: Builder, dims: Mapping[str, Var]) -> None:
        self._b, self._dims = b, dims

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._b, name)
        return (lambda *xs, **how: attribute(*map(self._operand, xs), **how)) if name[:1].isupper() else attribute

    def emit(self, op_type: str, *inputs: Any, **how: Any) -> Any:
        return self._b.emit(op_type, *map(self._operand, inputs), **how)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, list) and any(isinstance(n, _Dim) for n in x):
            return self._b.join(*(self.vector(n) if isinstance(n, _Dim) else [n] for n in x))
        return x

    def vector(self, dim: _Dim) -> Var:
        """A formula as a vector of one element."""
        product = self._dims[dim.symbols[0]]
        for s in dim.symbols[1:]:
            product = self._b.Mul(product, self._dims[s])
        product = product if dim.factor == 1 else self._b.Mul(product, [dim.factor])
        return product if dim.offset == 0 else self._b.Add(product, [dim.offset])


def _model(r: _Recording, table: _Sizes, dims: Mapping[tuple[str, int], str]) -> ir.Model:
    b = new_builder(n.op for n in r.nodes)
    places: dict[Any, Var] = {}
    lengths: dict[str, Var] = {}
    for name, x, node in zip(r.names, r.inputs, r.leaves):
        shape = [dims.get((name, axis), n) for axis, n in enumerate(x.shape)]
        var = places[node] = formal(b, x._data, name, shape)
        var.value.name = b.names.exactly(name)
        for axis, n in enumerate(shape):
            if isinstance(n, str) and n not in lengths:
                lengths[n] = b.Shape(var, start=axis, end=axis + 1)
    measured = _Measured(b, lengths)
    for i, node in enumerate(r.nodes):
        operands = [
            places[p] if type(p) is Node and p in places else _constant(measured, table, i, k)
            for k, p in enumerate(node.inputs)
        ]
        op = node.op
        if dims and isinstance(op, (StandardOp, Macro)):
            op = type(op)(*table.operator(i))
        elif dims and any(r.nodes[i].op.key != other.nodes[i].op.key for other in table.recordings):
            raise BadInput(
                "a derivative or a model inside the function has the dynamic sizes in it\n"
                "  hint: export the function, and derive the model: onnxgrad.grad(export(f, x, dynamic=…), wrt=…)"
            )
        places[node] = op.write(measured if dims else b, operands)  # type: ignore[arg-type]
        if not dims and not isinstance(node.value, tuple) and places[node].value.producer() is not None:
            places[node].value.shape = ir.Shape(node.value.shape)
    for name, y in zip(r.outputs, r.results):
        var = places[y._node] if y._node in places else b.const(y._data)
        end = b.copy(var).value
        end.name = b.names.exactly(name)
        end.type = end.type or ir.TensorType(ir.DataType.from_numpy(y.dtype))
        end.shape = end.shape if end.shape is not None else ir.Shape([None] * y.ndim)
        b.graph.outputs.append(end)
    end_derivation(b)
    return model_of(b.graph)


def _constant(b: _Measured, table: _Sizes, i: int, k: int) -> Var:
    """Operand `k` of node `i`, which depends on no input, though maybe on the sizes."""
    recordings = table.recordings
    values = []
    for r in recordings:
        p = r.nodes[i].inputs[k]
        values.append(p.value if type(p) is Node else p)
    first = values[0]
    if all(v.shape == first.shape and np.array_equal(v, first, equal_nan=v.dtype.kind == "f") for v in values):
        return b.const(first)
    where = f"a constant that {recordings[0].nodes[i].op} reads"
    if any(v.ndim for v in values):
        raise BadInput(
            f"{where} has the dynamic sizes in it: shapes {', '.join(str(v.shape) for v in values)}\n"
            "  hint: make it from an input (x * 0), or let it broadcast"
        )
    dim = table.explain([v.item() for v in values], where)
    return b.Squeeze(b.Cast(b.vector(dim), to=int(ir.DataType.from_numpy(first.dtype))), [0])

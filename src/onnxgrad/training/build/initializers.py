"""The usual ways to initialize weights, written as the initialization graph of a training entry.

Such a graph has no inputs: it draws with RandomNormal and RandomUniform and computes other distributions from these.
The truncated normal is the inverse of its distribution, by Newton's method on Erf; an orthogonal matrix is a Gaussian
one, orthonormalized row by row (Gram-Schmidt, each row twice), which is uniformly distributed (Stewart 1980).

The fan depends on the reader of the weight: a convolution has [out, in, kernel…], a MatMul [in, out], a Gemm either
one, by its transB.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Names, Var, identifier
from onnxgrad.ir.match import normal_domain
from onnxgrad.ir.subgraphs import empty, formal, give
from onnxgrad.keywords import check_keywords
from onnxgrad.training.spec.training_info import model_proto

#: Newton's steps after which the inverse of Erf is exact in float32, within two standard deviations.
_NEWTON = 9


@dataclass(frozen=True)
class Draw:
    """One tensor to be drawn, as float32.

    Attributes:
        b: writes the graph.
        shape: its dimensions.
        fan_in, fan_out: how many elements go into one element that it makes, and the other way round.
        seed: of the random operators; None: each run draws other numbers.
    """

    b: Builder
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    seed: float | None = None

    def random(self, op: str, shape: tuple[int, ...] | None = None, **numbers: float) -> Var:
        """The output of a random operator."""
        dims = ir.AttrInt64s("shape", self.shape if shape is None else shape)
        attributes: dict[str, Any] = numbers if self.seed is None else {**numbers, "seed": self.seed}
        return self.b.emit(op, dtype=int(ir.DataType.FLOAT), shape=dims, **attributes)


Initializer = Callable[[Draw], Var]


def normal(mean: float = 0.0, scale: float = 0.02) -> Initializer:
    """N(mean, scale²), by RandomNormal."""
    return lambda d: d.random("RandomNormal", mean=float(mean), scale=float(scale))


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """U(low, high), by RandomUniform."""
    return lambda d: d.random("RandomUniform", low=float(low), high=float(high))


def constant(value: float = 0.0) -> Initializer:
    """Every element is `value`."""
    return lambda d: _filled(d.b, float(value), d.shape)


def _filled(b: Builder, number: float, shape: Sequence[int]) -> Var:
    return b.Expand(b.const(number, ir.DataType.FLOAT), np.array(shape, np.int64))


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def glorot_uniform(gain: float = 1.0) -> Initializer:
    """U(-a, a), a = gain·√(6/(fan_in + fan_out)) (Glorot & Bengio 2010)."""
    return lambda d: _symmetric(gain * math.sqrt(6 / (d.fan_in + d.fan_out)))(d)


def glorot_normal(gain: float = 1.0) -> Initializer:
    """N(0, gain²·2/(fan_in + fan_out))."""
    return lambda d: normal(0.0, gain * math.sqrt(2 / (d.fan_in + d.fan_out)))(d)


def he_uniform(gain: float = math.sqrt(2)) -> Initializer:
    """U(-a, a), a = gain·√(3/fan_in) (He et al. 2015; the gain √2 is that of ReLU)."""
    return lambda d: _symmetric(gain * math.sqrt(3 / d.fan_in))(d)


def he_normal(gain: float = math.sqrt(2)) -> Initializer:
    """N(0, gain²/fan_in)."""
    return lambda d: normal(0.0, gain / math.sqrt(d.fan_in))(d)


def _symmetric(bound: float) -> Initializer:
    return uniform(-bound, bound)


def truncated_normal(mean: float = 0.0, scale: float = 0.02) -> Initializer:
    """N(mean, scale²) given that it is within two `scale` of the mean (its standard deviation is 0.88·scale)."""

    def write(d: Draw) -> Var:
        bound, half, limit = math.erf(math.sqrt(2)), math.sqrt(math.pi) / 2, math.sqrt(2)
        u = d.random("RandomUniform", low=-bound, high=bound)
        x = u * half
        for _ in range(_NEWTON):  # from below
            x = x - (d.b.Erf(x) - u) * (d.b.Exp(x * x) * half)
        return d.b.Clip(x, -limit, limit) * (limit * scale) + float(mean)

    return write


def orthogonal(gain: float = 1.0) -> Initializer:
    """gain·Q, Q with orthonormal rows or columns (the first axis against all others), uniformly distributed."""

    def write(d: Draw) -> Var:
        if len(d.shape) < 2:
            raise BadInput(
                f"an orthogonal initialization takes a matrix or more, not a tensor of shape {list(d.shape)}"
            )
        b, rows, rest = d.b, d.shape[0], math.prod(d.shape[1:])
        k, m = min(rows, rest), max(rows, rest)
        drawn = d.random("RandomNormal", (k, m), mean=0.0, scale=1.0)
        nothing, eye = _filled(b, 0.0, (k, m)), b.EyeLike(_filled(b, 0.0, (k, k)))
        inner, body = empty(b, "orthonormalize")
        float32 = ir.TensorType(ir.DataType.FLOAT)
        shapes = {"so_far": [k, m], "row": [m], "place": [k]}
        formals = [formal(inner, ir.Value(type=float32, shape=ir.Shape(dims)), name) for name, dims in shapes.items()]
        body.inputs.extend([x.value for x in formals])
        so_far, row, place = formals
        for _ in range(2):
            row = row - (so_far @ row) @ so_far
        unit = row / inner.Sqrt(inner.ReduceSum(row * row, keepdims=0))
        give(inner, [so_far + inner.Unsqueeze(place, [1]) * unit])
        (q,) = scan(b, body, [nothing], [(drawn, ScanAxis()), (eye, ScanAxis())], [])
        q = b.Transpose(q, perm=[1, 0]) if rows > rest else q
        return b.reshape(q * float(gain), list(d.shape))

    return write


#: By name, with their defaults.
INITIALIZERS: dict[str, Callable[[], Initializer]] = {
    f.__name__: f
    for f in (
        zeros,
        ones,
        normal,
        uniform,
        glorot_uniform,
        glorot_normal,
        he_uniform,
        he_normal,
        truncated_normal,
        orthogonal,
    )
}


@check_keywords
def initialize(
    model: str | os.PathLike | onnx.ModelProto,
    rules: Mapping[str, str | Initializer],
    *,
    entry: int = 0,
    seed: float | None = None,
) -> onnx.ModelProto:
    """A copy of a training model whose initialization draws its weights.

    Args:
        model: a model with training information, such as `attach` gives; a path or an ``onnx.ModelProto``.
        rules: from a name of an initializer, or a pattern (``"*.weight"``) for those of the inference graph, to
            how it is drawn: one of the functions of this module, or its name. The first rule that fits counts.
            What fits none keeps its value.
        entry: the training entry that gets the initialization; one that it has is replaced.
        seed: of the random operators, each of which gets one of its own; default: none, so that every
            initialization draws other numbers.

    Raises:
        BadInput: a pattern that fits nothing, a tensor that is no float, an unknown way, or no such entry.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model_proto(model))
    if not 0 <= entry < len(copy.training_info):
        raise BadInput(f"there is no training entry {entry}: the model has {len(copy.training_info)}")
    info = copy.training_info[entry]
    held = {t.name: t for t in (*copy.graph.initializer, *info.algorithm.initializer)}
    for sparse in info.algorithm.sparse_initializer:
        name, kind = sparse.values.name, sparse.values.data_type
        held[name] = onnx.TensorProto(name=name, data_type=kind, dims=sparse.dims)
    weights = [t.name for t in copy.graph.initializer]
    chosen: dict[str, Initializer] = {}
    for pattern, way in rules.items():
        fitting = [pattern] if pattern in held else [n for n in weights if fnmatch.fnmatchcase(n, pattern)]
        if not fitting:
            raise BadInput(f"no initializer is called {pattern!r}; there are: {', '.join(sorted(held)[:8])}")
        for name in fitting:
            chosen.setdefault(name, _find_initializer(way))
    names = Names(held)
    opsets = {normal_domain(o.domain): o.version for o in copy.opset_import}
    graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="initialization")
    b = Builder(graph, names, noting=False, prefix="initial")
    bound = []
    for i, (name, write) in enumerate(chosen.items()):
        tensor = held[name]
        if tensor.data_type not in _FLOATS:
            raise BadInput(f"{name!r} is a tensor of {onnx.TensorProto.DataType.Name(tensor.data_type)}, no float")
        made = names.exactly(identifier(f"{name}_initial"))
        fans = _fans(copy, name, tuple(tensor.dims))
        y = write(Draw(b, tuple(tensor.dims), *fans, None if seed is None else float(seed) + i))
        y = y if tensor.data_type == onnx.TensorProto.FLOAT else b.Cast(y, to=tensor.data_type)
        y = b.copy(y) if y.value.is_graph_output() else y  # equal constants are one value
        y.value.name = made
        graph.outputs.append(y.value)
        bound.append((name, made))
    info.initialization.CopyFrom(ir.to_proto(graph))
    del info.initialization_binding[:]
    for key, value in bound:
        info.initialization_binding.add(key=key, value=value)
    return copy


_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}


def _find_initializer(way: str | Initializer) -> Initializer:
    if callable(way):
        return way
    if way not in INITIALIZERS:
        raise BadInput(f"there is no initialization {way!r}; there are: {', '.join(INITIALIZERS)}")
    return INITIALIZERS[way]()


def _fans(model: onnx.ModelProto, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """fan_in and fan_out of a weight, by its first reader; a vector has its length as both."""
    if len(shape) < 2:
        return (max(1, math.prod(shape)),) * 2
    kernel = math.prod(shape[2:])
    out, into = shape[0] * kernel, shape[1] * kernel  # as a convolution has it
    reader = next((n for n in model.graph.node if name in n.input), None)
    attributes = reader.attribute if reader is not None and reader.op_type == "Gemm" else ()
    if len(shape) == 2 and not any(a.name == "transB" and a.i for a in attributes):
        out, into = shape[1], shape[0]
    if reader is not None and reader.op_type == "ConvTranspose":
        out, into = into, out
    return max(1, into), max(1, out)

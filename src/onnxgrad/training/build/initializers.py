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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
from onnx import helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.ir import Names, identifier
from onnxgrad.keywords import check_keywords
from onnxgrad.training.spec.training_info import model_proto

#: Newton's steps after which the inverse of Erf is exact in float32, within two standard deviations.
_NEWTON = 9


@dataclass(frozen=True)
class Draw:
    """One tensor to be drawn, as float32.

    Attributes:
        name: its value, and the prefix of what is computed on the way.
        shape: its dimensions.
        fan_in, fan_out: how many elements go into one element that it makes, and the other way round.
        seed: the attribute of the random operators, or nothing.
    """

    name: str
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    seed: str = ""

    def random(self, op: str, name: str, shape: tuple[int, ...] | None = None, **numbers: float) -> str:
        """A random operator with the output `name`."""
        dims = ", ".join(map(str, self.shape if shape is None else shape))
        given = "".join(f", {key}: float = {value!r}" for key, value in numbers.items())
        return f"{name} = {op} <dtype = 1, shape = [{dims}]{given}{self.seed}> ()"


Initializer = Callable[[Draw], list[str]]


def normal(mean: float = 0.0, scale: float = 0.02) -> Initializer:
    """N(mean, scale²), by RandomNormal."""
    return lambda d: [d.random("RandomNormal", d.name, mean=float(mean), scale=float(scale))]


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """U(low, high), by RandomUniform."""
    return lambda d: [d.random("RandomUniform", d.name, low=float(low), high=float(high))]


def constant(value: float = 0.0) -> Initializer:
    """Every element is `value`."""

    def write(d: Draw) -> list[str]:
        dims = ", ".join(map(str, d.shape))
        return [
            f"{d.name}_of = Constant <value = float {{{float(value)!r}}}> ()",
            f"{d.name}_shape = Constant <value = int64[{len(d.shape)}] {{{dims}}}> ()",
            f"{d.name} = Expand ({d.name}_of, {d.name}_shape)",
        ]

    return write


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

    def write(d: Draw) -> list[str]:
        n, bound = d.name, math.erf(math.sqrt(2))
        lines = [
            d.random("RandomUniform", f"{n}_u", low=-bound, high=bound),
            f"{n}_half = Constant <value = float {{{math.sqrt(math.pi) / 2!r}}}> ()",
            f"{n}_limit = Constant <value = float {{{math.sqrt(2)!r}}}> ()",
            f"{n}_scale = Constant <value = float {{{math.sqrt(2) * scale!r}}}> ()",
            f"{n}_mean = Constant <value = float {{{float(mean)!r}}}> ()",
            f"{n}_least = Neg ({n}_limit)",
            f"{n}_0 = Mul ({n}_u, {n}_half)",
        ]
        for i in range(_NEWTON):  # x ← x - (erf x - u)·√π/2·exp(x²), from below
            lines += [
                f"{n}_e{i} = Erf ({n}_{i})",
                f"{n}_r{i} = Sub ({n}_e{i}, {n}_u)",
                f"{n}_s{i} = Mul ({n}_{i}, {n}_{i})",
                f"{n}_x{i} = Exp ({n}_s{i})",
                f"{n}_h{i} = Mul ({n}_x{i}, {n}_half)",
                f"{n}_d{i} = Mul ({n}_r{i}, {n}_h{i})",
                f"{n}_{i + 1} = Sub ({n}_{i}, {n}_d{i})",
            ]
        return [
            *lines,
            f"{n}_in = Clip ({n}_{_NEWTON}, {n}_least, {n}_limit)",
            f"{n}_z = Mul ({n}_in, {n}_scale)",
            f"{n} = Add ({n}_z, {n}_mean)",
        ]

    return write


def orthogonal(gain: float = 1.0) -> Initializer:
    """gain·Q, Q with orthonormal rows or columns (the first axis against all others), uniformly distributed."""

    def write(d: Draw) -> list[str]:
        if len(d.shape) < 2:
            raise BadInput(
                f"an orthogonal initialization takes a matrix or more, not a tensor of shape {list(d.shape)}"
            )
        n, rows, rest = d.name, d.shape[0], math.prod(d.shape[1:])
        k, m = min(rows, rest), max(rows, rest)
        dims = ", ".join(map(str, d.shape))
        final = f"{n}_q" if rows <= rest else f"{n}_turned"
        body = f"""{n}_body (float[{k}, {m}] {n}_so_far, float[{m}] {n}_row, float[{k}] {n}_at)
            => (float[{k}, {m}] {n}_next) {{
            {n}_c1 = MatMul ({n}_so_far, {n}_row)
            {n}_p1 = MatMul ({n}_c1, {n}_so_far)
            {n}_r1 = Sub ({n}_row, {n}_p1)
            {n}_c2 = MatMul ({n}_so_far, {n}_r1)
            {n}_p2 = MatMul ({n}_c2, {n}_so_far)
            {n}_r2 = Sub ({n}_r1, {n}_p2)
            {n}_squared = Mul ({n}_r2, {n}_r2)
            {n}_sum = ReduceSum <keepdims = 0> ({n}_squared)
            {n}_length = Sqrt ({n}_sum)
            {n}_unit = Div ({n}_r2, {n}_length)
            {n}_axis = Constant <value = int64[1] {{1}}> ()
            {n}_column = Unsqueeze ({n}_at, {n}_axis)
            {n}_placed = Mul ({n}_column, {n}_unit)
            {n}_next = Add ({n}_so_far, {n}_placed)
        }}"""
        return [
            d.random("RandomNormal", f"{n}_g", (k, m), mean=0.0, scale=1.0),
            f"{n}_none = Constant <value = float {{0.0}}> ()",
            f"{n}_size = Constant <value = int64[2] {{{k}, {m}}}> ()",
            f"{n}_empty = Expand ({n}_none, {n}_size)",
            f"{n}_square = Constant <value = int64[2] {{{k}, {k}}}> ()",
            f"{n}_zeros = Expand ({n}_none, {n}_square)",
            f"{n}_eye = EyeLike <dtype = 1> ({n}_zeros)",
            f"{n}_q = Scan <num_scan_inputs = 2, body = {body}> ({n}_empty, {n}_g, {n}_eye)",
            *([f"{n}_turned = Transpose <perm = [1, 0]> ({n}_q)"] if rows > rest else []),
            f"{n}_gain = Constant <value = float {{{float(gain)!r}}}> ()",
            f"{n}_scaled = Mul ({final}, {n}_gain)",
            f"{n}_shape = Constant <value = int64[{len(d.shape)}] {{{dims}}}> ()",
            f"{n} = Reshape ({n}_scaled, {n}_shape)",
        ]

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
    lines, outputs, bound = [], [], []
    for i, (name, write) in enumerate(chosen.items()):
        tensor = held[name]
        if tensor.data_type not in _FLOATS:
            raise BadInput(f"{name!r} is a tensor of {onnx.TensorProto.DataType.Name(tensor.data_type)}, no float")
        made = names.exactly(identifier(f"{name}_initial"))
        fans = _fans(copy, name, tuple(tensor.dims))
        plain = tensor.data_type == onnx.TensorProto.FLOAT
        seed_attribute = "" if seed is None else f", seed: float = {float(seed) + i!r}"
        lines += write(Draw(made if plain else f"{made}_drawn", tuple(tensor.dims), *fans, seed_attribute))
        if not plain:
            lines.append(f"{made} = Cast <to = {tensor.data_type}> ({made}_drawn)")
        outputs.append(helper.make_tensor_value_info(made, tensor.data_type, tensor.dims))
        bound.append((name, made))
    text = "initialization () => (" + ", ".join(f"float {v.name}" for v in outputs) + ") {\n" + "\n".join(lines) + "\n}"
    graph = parser.parse_graph(text)
    del graph.output[:]
    graph.output.extend(outputs)
    info.initialization.CopyFrom(graph)
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

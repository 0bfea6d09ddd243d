"""Random graphs: three to eight operators on small tensors, each tried out as it is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tests.rules.evaluators import Erf, Flatten, Gelu
from tests.rules.test_norm import LpNormalization
from tests.rules.windowed import AveragePool, Conv, ConvTranspose, GlobalMaxPool, MaxPool

Rng = np.random.Generator
OPSET = 21


class GatherElements(OpRun):
    """The index may be smaller along other axes too."""

    op_domain = ""

    def _run(self, data, indices, axis=None):
        at = list(np.indices(indices.shape, sparse=True))
        at[axis] = indices
        return (data[tuple(at)],)


class ScatterElements(OpRun):
    op_domain = ""

    def _run(self, data, indices, updates, axis=None, reduction=None):
        out, at = data.copy(), list(np.indices(indices.shape, sparse=True))
        at[axis] = indices
        how = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
        if reduction in how:
            how[reduction].at(out, tuple(at), updates)
        else:
            out[tuple(at)] = updates
        return (out,)


#: What the reference evaluator does wrong, or not for every shape.
CORRECTED = [Conv, ConvTranspose, AveragePool, MaxPool, GlobalMaxPool, Erf, Gelu, Flatten, LpNormalization]
CORRECTED += [GatherElements, ScatterElements]


class Unfit(Exception):
    """The operator has nothing to work on, or the graph cannot be judged."""


class Graph:
    """A graph that grows; every value has the number that it holds at one point."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.values: dict[str, np.ndarray] = {}
        for _ in range(rng.integers(1, 4)):
            self.input(tuple(int(d) for d in rng.integers(1, 5, rng.integers(1, 5))))

    def input(self, shape: tuple[int, ...]) -> str:
        """A new input."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.values[name] = self.rng.standard_normal(shape)
        return name

    def const(self, array: Any) -> str:
        """A constant: floats are float64 here."""
        array = np.asarray(array)
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        self.values[name] = array
        return name

    def weight(self, *shape: int) -> str:
        """A float operand of that shape: an input or a constant."""
        if self.rng.random() < 0.5 and len(self.inputs) < 5:
            return self.input(shape)
        return self.const(self.rng.standard_normal(shape))

    def pick(self, *, rank: int | None = None, least: int = 0) -> str:
        """A float value; late ones are likelier."""
        found = [n for n in self.values if n[0] in "xv" and self.values[n].ndim >= least]
        found = [n for n in found if rank is None or self.values[n].ndim == rank]
        if not found:
            raise Unfit
        weights = np.arange(1, len(found) + 1) ** 2.0
        return found[self.rng.choice(len(found), p=weights / weights.sum())]

    def axis(self, x: str) -> int:
        """An axis of `x`, counted from either end."""
        rank = self.values[x].ndim
        return int(self.rng.integers(-rank, rank))

    def add(self, op_type: str, *operands: str, keep: int = 0, outputs: int = 1, **attributes: Any) -> str:
        """Write a node, if it can be evaluated; the name of its output `keep`."""
        names = [f"v{len(self.nodes)}" + (f"_{i}" if i != keep else "") for i in range(outputs)]
        node = helper.make_node(op_type, list(operands), names, **attributes)
        feeds = {n: self.values[n] for n in operands if n}
        try:
            with np.errstate(all="ignore"):
                results = ReferenceEvaluator(node, opsets={"": OPSET}, new_ops=CORRECTED).run(None, feeds)
        except Exception as e:  # the operands do not fit
            raise Unfit from e
        y = np.asarray(results[keep])
        if y.dtype != np.float64 or not np.isfinite(y).all() or not 0 < y.size < 400 or np.abs(y).max() > 300:
            raise Unfit  # of no elements too: over those ONNX Runtime ends the process here and there
        self.nodes.append(node)
        self.values[names[keep]] = y
        return names[keep]


Maker = Callable[[Graph, Rng], Any]
MAKERS: list[Maker] = []


def maker(function: Maker) -> Maker:
    """Have random graphs call `function`."""
    MAKERS.append(function)
    return function


SMOOTH = [
    "Tanh",
    "Sigmoid",
    "Sin",
    "Cos",
    "Softplus",
    "Erf",
    "Neg",
    "Softsign",
    "Gelu",
    "Mish",
    "Sqrt",
    "Exp",
    "Atan",
    "Elu",
    "Selu",
    "Reciprocal",
    "Log",
]
KINKED = ["Relu", "LeakyRelu", "Abs", "HardSwish", "HardSigmoid", "ThresholdedRelu", "Floor"]


@maker
def unary(g: Graph, r: Rng) -> None:
    x, op = g.pick(), str(r.choice(SMOOTH + KINKED))
    if op in ("Sqrt", "Log", "Reciprocal"):
        x = g.add("Add", g.add("Mul", x, x), g.const(0.5))
    g.add(op, x)


def beside(g: Graph, r: Rng, x: str) -> str:
    """Something that broadcasts with `x`."""
    shape = list(g.values[x].shape)
    how = r.integers(4)
    if how == 0:
        return g.pick()
    if how == 1 and shape:
        return g.add("ReduceMean", x, g.const(np.array([g.axis(x)])), keepdims=1)
    small = [d if r.random() < 0.6 else 1 for d in shape][int(r.integers(0, len(shape) + 1)) :]
    return g.weight(*small)


@maker
def binary(g: Graph, r: Rng) -> None:
    x = g.pick()
    y, op = beside(g, r, x), str(r.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Pow"]))
    if op in ("Div", "Pow"):
        y = g.add("Add", g.add("Abs", y), g.const(0.7))
    if op == "Pow":
        x = g.add("Add", g.add("Mul", x, x), g.const(0.3))
    if op in ("Sum", "Mean", "Max"):
        g.add(op, x, y, beside(g, r, x))
    else:
        g.add(op, *((y, x) if r.random() < 0.3 and op not in ("Pow", "Div") else (x, y)))


@maker
def where(g: Graph, r: Rng) -> None:
    x = g.pick()
    mask = r.random(g.values[x].shape[int(r.integers(0, g.values[x].ndim + 1)) :]) < 0.5
    g.add("Where", g.const(mask), x, beside(g, r, x))


@maker
def moved(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    shape, rank = g.values[x].shape, g.values[x].ndim
    how = r.integers(8)
    if how == 0:
        g.add("Transpose", x, perm=[int(p) for p in r.permutation(rank)])
    elif how == 1:
        g.add("Reshape", x, g.const(np.array([*shape[1:], -1] if 0 not in shape else [0])))
    elif how == 2:
        g.add("Unsqueeze", x, g.const(np.array(sorted({int(a) for a in r.integers(0, rank + 1, 1)}))))
    elif how == 3:
        g.add("Squeeze", x)
    elif how == 4:
        wide = [int(r.integers(1, 3)), *(d if d > 1 else int(r.integers(1, 4)) for d in shape)]
        g.add("Expand", x, g.const(np.array(wide)))
    elif how == 5:
        g.add("Tile", x, g.const(r.integers(1, 3, rank)))
    elif how == 6:
        g.add("Flatten", x, axis=int(r.integers(0, rank + 1)))
    else:
        g.add("Trilu", g.pick(least=2), upper=int(r.integers(2)))


@maker
def joined(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    parts = [x, x if r.random() < 0.3 else g.weight(*g.values[x].shape)]
    g.add("Concat", *parts, axis=g.axis(x))


@maker
def parted(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    axis = g.axis(x)
    size = g.values[x].shape[axis]
    first = int(r.integers(0, size + 1))
    sizes = g.const(np.array([first, size - first]))
    g.add("Split", x, sizes, outputs=2, keep=int(first < size - first), axis=axis)


@maker
def sliced(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    axes = r.permutation(g.values[x].ndim)[: r.integers(1, 3)]
    steps = r.choice([1, 1, 2, -1, -2], len(axes))  # backwards from before the first: the reference evaluator errs
    starts, ends = r.integers(-4, 5, (2, len(axes)))
    starts = np.where(steps < 0, abs(starts), starts)
    ends = np.where(steps < 0, -100, np.where(r.random(len(axes)) < 0.4, 100, ends))
    g.add("Slice", x, *(g.const(np.asarray(v, np.int64)) for v in (starts, ends, axes, steps)))


@maker
def padded(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    mode = str(r.choice(["constant", "edge", "reflect", "wrap"]))
    pads = r.integers(-1 if mode == "constant" else 0, 3, 2 * g.values[x].ndim)
    if mode != "constant":
        pads = np.minimum(pads, np.tile(np.array(g.values[x].shape) - 1, 2))
    g.add("Pad", x, g.const(pads), mode=mode)


@maker
def gathered(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    shape, axis = g.values[x].shape, g.axis(x)
    size = shape[axis]
    how = r.integers(3)
    if how == 0:
        index = r.integers(-size, size, tuple(r.integers(1, 4, r.integers(0, 3))))
        g.add(
            "Gather",
            x,
            g.const(index.astype(np.int64) if isinstance(index, np.ndarray) else np.int64(index)),
            axis=axis,
        )
    elif how == 1:
        some = [int(r.integers(1, d + 1)) for d in shape]
        g.add("GatherElements", x, g.const(r.integers(0, size, some)), axis=axis)
    else:
        depth = int(r.integers(1, len(shape) + 1))
        index = np.stack([r.integers(0, d, 3) for d in shape[:depth]], -1)
        g.add("GatherND", x, g.const(index))


@maker
def scattered(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    shape, axis, how = g.values[x].shape, g.axis(x), str(r.choice(["none", "add", "mul", "max", "min"]))
    if r.random() < 0.5:
        if how == "none":  # no index twice
            index = np.argsort(r.random(shape), axis=axis)
        else:
            index = r.integers(0, shape[axis], [int(r.integers(1, d + 1)) for d in shape])
        g.add("ScatterElements", x, g.const(index), g.weight(*index.shape), axis=axis, reduction=how)
    else:
        rows = r.permutation(shape[0])[:2] if how == "none" else r.integers(0, shape[0], 3)
        g.add("ScatterND", x, g.const(rows[:, None]), g.weight(len(rows), *shape[1:]), reduction=how)


@maker
def sorted_(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    axis = g.axis(x)
    if r.random() < 0.5:
        k = int(r.integers(1, g.values[x].shape[axis] + 1)) if g.values[x].shape[axis] else 0
        g.add("TopK", x, g.const(np.array([k])), outputs=2, axis=axis, largest=int(r.integers(2)))
    else:
        way = {"exclusive": int(r.integers(2)), "reverse": int(r.integers(2))}
        g.add("CumSum", x, g.const(np.array(axis)), **way)


@maker
def reduced(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    op = str(r.choice(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare"]))
    axes = r.permutation(g.values[x].ndim)[: r.integers(1, 3)]
    g.add(f"Reduce{op}", x, g.const(axes.astype(np.int64)), keepdims=int(r.integers(2)))


@maker
def normalized(g: Graph, r: Rng) -> None:
    x = g.pick(least=2)
    shape, how = g.values[x].shape, r.integers(6)
    if how < 2:
        g.add(["Softmax", "LogSoftmax"][how], x, axis=g.axis(x))
    elif how == 2:
        axis = int(r.integers(1, len(shape)))
        g.add("LayerNormalization", x, g.weight(*shape[axis:]), g.weight(*shape[axis:]), axis=axis, epsilon=0.1)
    elif how == 3 and len(shape) > 2:
        g.add("InstanceNormalization", x, g.weight(shape[1]), g.weight(shape[1]), epsilon=0.1)
    elif how == 4:
        vectors = [g.weight(shape[1]), g.weight(shape[1]), g.const(np.zeros(shape[1])), g.const(np.ones(shape[1]))]
        g.add("BatchNormalization", x, *vectors, epsilon=0.1)
    else:
        g.add("LpNormalization", x, axis=g.axis(x), p=int(r.integers(1, 3)))


@maker
def multiplied(g: Graph, r: Rng) -> None:
    x = g.pick(least=1)
    shape, how = g.values[x].shape, r.integers(5)
    columns = int(r.integers(1, 4))
    if how == 0:
        g.add("MatMul", x, g.weight(shape[-1], columns))
    elif how == 1:
        g.add("MatMul", x, g.weight(*shape[:-2], shape[-1], columns) if len(shape) > 2 else g.weight(shape[-1]))
    elif how == 2 and len(shape) > 1:
        g.add("MatMul", g.weight(columns, shape[-2]), x)
    elif how == 3 and len(shape) > 1:
        g.add("MatMul", x, g.add("Transpose", x, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]))
    elif len(shape) == 2:
        ta, tb = (int(v) for v in r.integers(0, 2, 2))
        inner = shape[0] if ta else shape[1]
        w = g.weight(*((columns, inner) if tb else (inner, columns)))
        g.add("Gemm", x, w, g.weight(columns), transA=ta, transB=tb, alpha=0.5, beta=1.5)
    else:
        letters = "abcd"[: len(shape)]
        w = g.weight(shape[-1], shape[0], columns)
        if len(shape) < 2:
            raise Unfit
        g.add("Einsum", x, w, equation=f"{letters},{letters[-1]}{letters[0]}z->{letters[0]}z{letters[1:-1]}")


@maker
def windowed(g: Graph, r: Rng) -> None:
    x = g.pick(least=3)
    shape = g.values[x].shape
    rank = len(shape) - 2
    kernel = [int(r.integers(1, min(d, 3) + 1)) for d in shape[2:]]
    strides = [int(s) for s in r.integers(1, 3, rank)]
    pads = [int(p) for p in r.integers(0, 2, 2 * rank)]
    pads = [min(p, k - 1) for p, k in zip(pads, kernel * 2)]
    how = r.integers(5)
    if how == 0:
        w = g.weight(int(r.integers(1, 4)), shape[1], *kernel)
        g.add("Conv", x, w, strides=strides, pads=pads, dilations=[int(d) for d in r.integers(1, 3, rank)])
    elif how == 1:
        g.add("ConvTranspose", x, g.weight(shape[1], int(r.integers(1, 3)), *kernel), strides=strides)
    elif how == 2:
        g.add("MaxPool", x, kernel_shape=kernel, strides=strides, pads=pads)
    elif how == 3:
        g.add("AveragePool", x, kernel_shape=kernel, strides=strides, pads=pads, count_include_pad=int(r.integers(2)))
    else:
        g.add(str(r.choice(["GlobalAveragePool", "GlobalMaxPool"])), x)


def grown(rng: Rng) -> Graph:
    """A random graph."""
    g = Graph(rng)
    wanted = int(rng.integers(3, 9))
    for _ in range(60):
        if len(g.nodes) >= wanted:
            return g
        try:
            MAKERS[rng.integers(len(MAKERS))](g, rng)
        except (Unfit, ValueError, IndexError):  # nothing to choose from
            continue
    raise Unfit

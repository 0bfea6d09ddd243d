"""Random smooth programs, as a model and as a function of arrays in any namespace like numpy's (numpy, jax.numpy)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper

from tests.models import model, value

SHAPES = {"x": (2, 3), "v": (3,)}
WEIGHTS = {"w": np.random.default_rng(0).standard_normal((3, 2)), "c": np.float64(0.7)}


@dataclass
class Program:
    """The same computation twice.

    Attributes:
        model: of the inputs `SHAPES` and the initializers `WEIGHTS`, all float64; its output is ``y``.
        call: takes a namespace and the arrays by name, and gives all values by name.
        inner: an intermediate value that ``y`` depends on.
    """

    model: onnx.ModelProto
    call: Callable[[Any, dict[str, Any]], dict[str, Any]]
    inner: str
    text: str

    def __repr__(self) -> str:
        return self.text


def _softmax(xp, x, axis):
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


UNARY = {
    "Tanh": lambda xp, x: xp.tanh(x),
    "Sin": lambda xp, x: xp.sin(x),
    "Sigmoid": lambda xp, x: 1 / (1 + xp.exp(-x)),
    "Neg": lambda xp, x: -x,
    "Relu": lambda xp, x: xp.where(x > 0, x, 0 * x),
}
BINARY = {
    "Add": lambda xp, a, b: a + b,
    "Sub": lambda xp, a, b: a - b,
    "Mul": lambda xp, a, b: a * b,
    "Max": lambda xp, a, b: xp.where(a > b, a + 0 * b, b + 0 * a),
}


@st.composite
def programs(draw, symbolic: bool | None = None) -> Program:
    """Up to seven operators over two inputs and two weights."""
    shapes = SHAPES | {n: w.shape for n, w in WEIGHTS.items()}
    nodes, constants, steps, lines = [], {}, [], []

    def pick(names):
        recent = [n for n in names if n.startswith("t")][-2:]
        return draw(st.sampled_from(recent if recent and draw(st.integers(0, 3)) else names))

    def add(op, names, shape, run, more=(), **attrs):
        out = f"t{len(nodes)}"
        for i, array in enumerate(more):
            constants[f"{out}_{i}"] = np.asarray(array)
        nodes.append(helper.make_node(op, [*names, *(f"{out}_{i}" for i in range(len(more)))], [out], **attrs))
        steps.append((out, names, run))
        shapes[out] = shape
        lines.append(
            f"{out}{list(shape)} = {op}({', '.join(names)}) {attrs or ''}{[np.asarray(m).tolist() for m in more]}"
        )

    for _ in range(draw(st.integers(2, 7))):
        kind = draw(st.sampled_from(["unary", "binary", "binary", "matmul", "reduce", "move", "softmax", "index"]))
        a = pick(list(shapes))
        shape = shapes[a]
        if kind == "binary":
            fitting = [n for n, s in shapes.items() if _broadcast(s, shape) is not None]
            b, op = pick(fitting), draw(st.sampled_from(sorted(BINARY)))
            add(op, [a, b], _broadcast(shape, shapes[b]), lambda xp, x, z, op=op: BINARY[op](xp, x, z))
        elif (
            kind == "matmul"
            and shape
            and (right := [n for n, s in shapes.items() if s[:1] == shape[-1:] and len(s) <= 2])
        ):
            b = pick(right)
            add("MatMul", [a, b], (*shape[:-1], *shapes[b][1:]), lambda xp, x, z: x @ z)
        elif kind == "reduce" and shape:
            axis, keep = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.booleans())
            op = draw(st.sampled_from(["ReduceSum", "ReduceMean"]))
            after = [1 if i == axis % len(shape) else n for i, n in enumerate(shape) if keep or i != axis % len(shape)]
            total = {"ReduceSum": "sum", "ReduceMean": "mean"}[op]
            how = {"axis": axis, "keepdims": keep}
            add(op, [a], tuple(after), lambda xp, x, t=total, how=how: getattr(xp, t)(x, **how), [[axis]],
                keepdims=int(keep))  # fmt: skip
        elif kind == "move" and len(shape) == 2:
            if draw(st.booleans()):
                add("Transpose", [a], shape[::-1], lambda xp, x: x.T)
            else:
                add("Reshape", [a], (shape[0] * shape[1],), lambda xp, x: x.reshape(-1), [[-1]])
        elif kind == "softmax" and shape:
            axis = draw(st.integers(-len(shape), len(shape) - 1))
            add("Softmax", [a], shape, lambda xp, x, axis=axis: _softmax(xp, x, axis), axis=axis)
        elif kind == "index" and shape and shape[0]:
            which = draw(st.lists(st.integers(-shape[0], shape[0] - 1), min_size=1, max_size=3))
            op = draw(st.sampled_from(["Gather", "CumSum", "Concat", "Slice"]))
            if op == "Gather":
                add(
                    op,
                    [a],
                    (len(which), *shape[1:]),
                    lambda xp, x, w=tuple(which): x[list(w)] if xp is np else x[xp.array(w)],
                    [which],
                )
            elif op == "CumSum":
                add(op, [a], shape, lambda xp, x: xp.cumsum(x, axis=0), [0])
            elif op == "Concat":
                add(op, [a, a], (2 * shape[0], *shape[1:]), lambda xp, x, z: xp.concatenate([x, z], axis=0), axis=0)
            else:
                add(op, [a], shape, lambda xp, x: x[::-1], [[-1], [-(2**40)], [0], [-1]])
        else:
            op = draw(st.sampled_from(sorted(UNARY)))
            add(op, [a], shape, lambda xp, x, op=op: UNARY[op](xp, x))
    last = nodes[-1].output[0]
    nodes.append(helper.make_node("Tanh", [last], ["y"]))
    steps.append(("y", [last], lambda xp, x: xp.tanh(x)))
    shapes["y"] = shapes[last]
    dims = {2: "N", 3: "M"} if (draw(st.booleans()) if symbolic is None else symbolic) else {}
    inputs = [value(n, [dims.get(d, d) for d in s], T.DOUBLE) for n, s in SHAPES.items()]
    proto = model(nodes, inputs, [value("y", [None] * len(shapes[last]), T.DOUBLE)], WEIGHTS | constants)

    def call(xp, arrays):
        held = WEIGHTS | arrays
        for out, names, run in steps:
            held[out] = run(xp, *(held[n] for n in names)) + held.get(f"{out}+", 0)
        return held

    return Program(proto, call, last, "\n".join([*lines, f"y = Tanh({last}){' symbolic' if dims else ''}"]))


def _broadcast(a, b):
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None

"""Graphs of elementwise arithmetic, run by numpy in a few buffers that stay in the processor's cache.

A session of ONNX Runtime allocates memory for each result. If a graph has only + − · / on arrays that fit into the
cache, that allocation dominates the time: numpy writes into the memory of an operand after its last use. Arrays of one
shape are computed in pieces. The results have the same bits, as IEEE 754 defines these operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.core.buffers import empty
from onnxgrad.ir.match import constant, not_none

#: The largest array of such a graph in bytes. Calls of numpy cost more than small ones, and large ones do not fit into
#: the cache: both are for ONNX Runtime, the latter for its threads.
LEAST, MOST = 1 << 16, 1 << 23
#: The most elements that are computed at a time.
PIECE = 1 << 16
_KERNELS = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Neg": np.negative}
_VIEWS = frozenset({"Expand", "Identity", "Reshape", "Unsqueeze"})
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_Kind = tuple[tuple[int, ...], np.dtype]


class Arithmetic:
    """A graph that numpy runs; called with the inputs in order, it returns the outputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self._constants: list[np.ndarray] = []
        self._registers: list[_Kind] = []
        #: kernel (or None for a view), operands, result, and for a view its shape
        self._steps: list[tuple[Any, tuple[int, ...], int, tuple[int, ...]]] = []
        self._graph = graph
        self._place: dict[ir.Value, int] = {}  # where a value is: the inputs, the constants, then the registers
        self._count = len(graph.inputs)
        self._compile()

    def _compile(self) -> None:
        graph, place = self._graph, self._place
        for v in graph.inputs:
            place[v] = len(place)
        for v in graph.initializers.values():
            place[v] = self._count + len(self._constants)
            assert v.const_value is not None
            self._constants.append(v.const_value.numpy())
        nodes = _steps(graph)
        base = self._count + len(self._constants)
        views = {y: xs[0] for kernel, xs, y in nodes if kernel is None}
        kept = {_origin(v, views) for v in [*graph.outputs, *views]}  # not written over
        last = {v: i for i, (_, operands, _) in enumerate(nodes) for v in operands}
        free: dict[_Kind, list[int]] = {}
        slots = base
        for i, (kernel, operands, y) in enumerate(nodes):
            kind = _kind(y)
            if kernel is None:
                self._steps.append((None, (place[operands[0]],), slots, kind[0]))
                place[y] = slots
                self._registers.append(((), np.dtype(bool)))  # holds no memory of its own
                slots += 1
                continue
            at = tuple(place[v] for v in operands)
            for v in dict.fromkeys(operands):
                if last[v] == i and v not in kept and v.producer() is not None and v not in views:
                    free.setdefault(_kind(v), []).append(place[v])
            waiting = free.get(kind)
            if waiting:
                place[y] = waiting.pop()
            else:
                place[y] = slots
                self._registers.append(kind)
                slots += 1
            self._steps.append((kernel, at, place[y], ()))
        self._ends = [(place[v], _origin(v, views).producer() is None) for v in graph.outputs]
        kinds = {_kind(v) for kernel, operands, y in nodes for v in (*operands, y)} | set(map(_kind, graph.outputs))
        shapes = {shape for shape, _ in kinds if math.prod(shape) != 1}
        is_flat = len(shapes) == 1 and all(_kind(v)[0] in shapes for v in graph.outputs)
        #: the shape of all values but numbers, if they are computed in pieces
        self._shape = shapes.pop() if is_flat and math.prod(next(iter(shapes))) > PIECE else None

    def __call__(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, given the inputs in order."""
        if self._shape is not None:
            return self._in_pieces([*values, *self._constants], self._shape)
        registers = [empty(*kind) if kind[0] else None for kind in self._registers]
        cells = self._run([*values, *self._constants, *registers])
        return [cells[i].copy() if foreign or not cells[i].flags.writeable else cells[i] for i, foreign in self._ends]

    def _in_pieces(self, operands: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
        """The outputs, computed for some elements after the others."""
        size = math.prod(shape)
        flat = [v.reshape(-1) if v.size == size else v.reshape(()) if v.size == 1 else v for v in operands]
        registers = [np.empty(PIECE, kind[1]) if kind[0] else None for kind in self._registers]
        results = [empty(shape, _kind(v)[1]) for v in self._graph.outputs]
        for start in range(0, size, PIECE):
            part = slice(start, start + PIECE)
            inputs = [v[part] if v.size == size else v for v in flat]
            cells = self._run([*inputs, *(None if r is None else r[: size - start] for r in registers)])
            for y, (i, _) in zip(results, self._ends):
                y.reshape(-1)[part] = cells[i]
        return results

    def _run(self, cells: list[Any]) -> list[Any]:
        for kernel, at, to, shape in self._steps:
            if kernel is None:
                x = cells[at[0]]
                if self._shape is None:
                    x = np.broadcast_to(x.reshape(shape) if x.size == math.prod(shape) else x, shape)
                cells[to] = x
            elif cells[to] is None:
                cells[to] = np.asarray(kernel(*[cells[i] for i in at]))
            else:
                kernel(*[cells[i] for i in at], out=cells[to])
        return cells


def _steps(graph: ir.Graph) -> list[tuple[Any, list[ir.Value], ir.Value]]:
    """Kernel (None for a view), operands and result of each node; x + (−y) is one step, x − y."""
    made, inside = [], set()
    for node in reversed(list(graph)):
        operands = [v for v in node.inputs if v is not None]
        kernel = _KERNELS.get(node.op_type)
        for x, y in (operands, operands[::-1]) if node.op_type == "Add" else ():
            opposite = y.producer()
            if opposite is not None and opposite.op_type == "Neg" and len(y.uses()) == 1 and not y.is_graph_output():
                kernel, operands = np.subtract, [x, *(v for v in opposite.inputs if v is not None)]
                inside.add(opposite)
                break
        if node not in inside:
            made.append((kernel, operands[:1] if kernel is None else operands, node.outputs[0]))
    return made[::-1]


def _origin(v: ir.Value, views: dict[ir.Value, Any]) -> ir.Value:
    while v in views:
        v = views[v]
    return v


def _kind(v: ir.Value) -> _Kind:
    return tuple(int(n) for n in not_none(v.shape)), not_none(v.dtype).numpy()  # type: ignore[arg-type]


def is_arithmetic(graph: ir.Graph) -> bool:
    """True if `Arithmetic` can run `graph`: its operators only, float values of known sizes in its range."""
    largest = 0
    for node in graph:
        if node.domain or (node.op_type not in _KERNELS and node.op_type not in _VIEWS):
            return False
        if any(node.op_type in _VIEWS and constant(v) is None for v in node.inputs[1:] if v is not None):
            return False
        for v in (*node.inputs[: 1 if node.op_type in _VIEWS else 2], *node.outputs):
            if v is None or v.dtype not in _FLOATS or v.shape is None or not v.shape.is_static():
                return False
            largest = max(largest, math.prod(_kind(v)[0]) * _kind(v)[1].itemsize)
    return LEAST <= largest <= MOST and all(v.producer() is not None for v in graph.outputs)

"""The halves of a step as a machine runs them: each gradient is written to its place in the bucket, and read there.

In the graphs of a `SplitStep`, which a host in any language can run, the bucket is one vector: gradients are joined,
weighted, added to it, divided and split again. That is nine passes over it, 6 % of the step of a small transformer.
Here a gradient is an output of the first half and an input of the second, both bound to its part of the bucket in
place. Operations on the bucket as a whole (weighting, adding parts, summing over ranks, dividing) run in place on that
vector.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import named_values
from onnxgrad.runtime.tensors import aligned
from onnxgrad.training.step.step import Step, prune_step


def add_results(step: Step, pieces: Iterable[str], dtype: ir.DataType, without: Collection[str]) -> Step:
    """`step` with the values called `pieces` as further outputs of `dtype`, and without the state `without`."""
    model = step.model.clone()
    graph, values = model.graph, named_values(model.graph)
    builder = Builder(graph)
    state = {n: t for n, t in step.state.items() if n not in without}
    ends = [values[t.output] for t in state.values()]
    for name in pieces:
        value = values[name]
        if value.dtype != dtype:
            cast = builder.Cast(Var(builder, value), to=int(dtype)).value
            cast.name, value.name = name, builder.names.fresh(name)
            value = cast
        ends.append(value)
    return prune_step(replace(step, model=model, state=state), [*ends, *(values[name] for name in step.results)])


def taking(step: Step, pieces: Mapping[str, tuple[int, ...]], dtype: ir.DataType) -> tuple[Step, dict[str, str]]:
    """`step` with the values called `pieces`, of these shapes, as inputs of `dtype`, in place of the bucket.

    Returns:
        It, and the names of these inputs; none for a piece that nothing is computed from.
    """
    model = step.model.clone()
    graph, values = model.graph, named_values(model.graph)
    builder, before = Builder(graph), list(graph)
    names: dict[str, str] = {}
    for name, shape in pieces.items():
        if name not in values:
            continue
        old = values[name]
        given = ir.Value(name=builder.names.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        graph.inputs.append(given)
        new = builder.cast_like(Var(builder, given), Var(builder, old)).value
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, old.name = old.name, new.name  # by which notes on the graph know it
        names[name] = given.name or ""
    made = list(graph)[len(before) :]
    graph.remove(made)
    graph.insert_before(before[0], made)
    found = prune_step(replace(step, model=model), graph.outputs)
    inputs = {v.name for v in graph.inputs}
    return found, {name: given for name, given in names.items() if given in inputs}


class Bucket:
    """All gradients of a step in one vector.

    Args:
        pieces: their shapes by name, in order.
        dtype: of the vector.

    Attributes:
        array: the vector.
        pieces: the part of each, in its shape.
    """

    def __init__(self, pieces: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
        self.array = aligned((sum(math.prod(shape) for shape in pieces.values()),), dtype)
        self.pieces = Bucket.cut(self.array, pieces)

    @staticmethod
    def cut(array: np.ndarray, pieces: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The parts of `array`, one after the other, in these shapes."""
        ends = np.cumsum([0, *(math.prod(shape) for shape in pieces.values())]).tolist()
        return {
            name: array[low:high].reshape(shape) for (name, shape), low, high in zip(pieces.items(), ends, ends[1:])
        }

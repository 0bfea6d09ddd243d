"""A new head: a linear map on features that a model computes, for a task that it was not made for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.door import AnyModel, open_model
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.walk import prune


def with_head(model: AnyModel, outputs: int, *, of: str | None = None, name: str = "logits", seed: int = 0) -> Any:
    """`model` with ``logits = features · weight + bias`` for its only output.

    Weight [features, outputs] and bias [outputs] are drawn uniformly from ±1/√features, as PyTorch's Linear does. What
    only the old outputs needed is removed.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        outputs: how many numbers the head gives: classes, for instance.
        of: the value to read: [batch, features], or [batch, channels, …], which is averaged over the axes behind.
            Default: the only float output of rank 2, or else the only one with features of known size.
        name: of the new output; its weights are called ``{name}_weight`` and ``{name}_bias``.
        seed: of the weights.

    Returns:
        The model, in the kind that came in (a path gives an ``onnx.ModelProto``).

    Raises:
        UnknownName: there is no value `of`. BadInput: it has no features of known size, or `name` is taken.
    """
    if outputs < 1:
        raise BadInput(f"a head must give at least 1 number, not {outputs}")
    opened = open_model(model)
    graph = opened.model.graph
    ir.external_data.load_to_model(opened.model)
    values = {v.name: v for v in (*graph.inputs, *(v for n in graph for v in n.outputs)) if v.name}
    value = _features(graph, values, of)
    taken = [n for n in (name, f"{name}_weight", f"{name}_bias") if n in values or n in graph.initializers]
    if taken:
        raise BadInput(f"the model has a value {taken[0]!r} already; give the head another name")
    assert value.shape is not None
    builder = Builder(graph)
    features = builder.var(value)
    if len(value.shape) > 2:
        features = builder.ReduceMean(features, list(range(2, len(value.shape))), keepdims=0)
    size = value.shape[1]
    assert isinstance(size, int)
    draw = np.random.default_rng(seed)
    bound = 1 / math.sqrt(size)
    parts = []
    for what, shape in (("weight", (size, outputs)), ("bias", (outputs,))):
        array = draw.uniform(-bound, bound, shape)
        assert value.dtype is not None
        tensor = ir.tensor(array.astype(value.dtype.numpy()), name=f"{name}_{what}")
        held = ir.Value(name=tensor.name, type=ir.TensorType(value.dtype), shape=ir.Shape(shape), const_value=tensor)
        graph.initializers[held.name or ""] = held
        parts.append(builder.var(held))
    result = features @ parts[0] + parts[1]
    result.value.name = name
    graph.outputs[:] = [result.value]
    prune(graph)
    return opened.close()


def _features(graph: ir.Graph, values: dict[str, ir.Value], of: str | None) -> ir.Value:
    """The value that the head reads."""
    if of is not None:
        if of not in values:
            raise UnknownName(of, values, "value")
        found = [values[of]]
    else:
        usable = [v for v in graph.outputs if v.dtype in FLOATS and not _why_not(v)]
        flat = [v for v in usable if v.shape is not None and len(v.shape) == 2]
        found = flat if len(flat) == 1 else usable
        if len(found) != 1:
            names = ", ".join(repr(v.name) for v in usable or graph.outputs)
            raise BadInput(f"say which value the head shall read, with `of`; the outputs are {names}")
    why = _why_not(found[0])
    if why:
        raise BadInput(f"a head cannot read {found[0].name!r}: {why}")
    return found[0]


def _why_not(value: ir.Value) -> str:
    if value.dtype not in FLOATS:
        return f"it holds {value.dtype}"
    if value.shape is None or len(value.shape) < 2:
        return f"it has shape {'unknown' if value.shape is None else list(value.shape)}, not [batch, features]"
    if not isinstance(value.shape[1], int):
        return f"the number of its features, {value.shape[1]}, is not known"
    return ""

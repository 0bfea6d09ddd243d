"""A new head: a linear map on features that a model computes, for a task that it was not made for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import named_values, prune
from onnxgrad.ir.names import Names, described
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.model_io.aside import external_aside
from onnxgrad.training.adapters.config import Adapter, ChosenOutputs
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.graph.written_out import neutral_operand
from onnxgrad.training.metadata import CLASSES, HEAD


@check_keywords
def with_head(model: AnyModel, outputs: int, *, of: str | None = None, name: str = "logits", seed: int = 0) -> Any:
    """`model` with ``logits = features · weight + bias`` for its only output.

    Weight [features, outputs] and bias [outputs] are drawn uniformly from ±1/√features, as PyTorch's Linear does. Nodes
    that only the old outputs needed are removed.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        outputs: how many numbers the head gives: classes, for instance.
        of: the value to read: [batch, features], or [batch, channels, …], which is averaged over the axes behind.
            Default: what the last linear layer reads, whose place the head takes, if the model ends in one (with or
            without Softmax, Sigmoid, …); else the output. Of several float outputs, the only one of rank 2, or else
            the only one with features of known size.
        name: of the new output; its weights are called ``{name}_weight`` and ``{name}_bias``. They train as a whole,
            also beside adapters.
        seed: of the weights.

    Returns:
        The model, in the kind that came in (a path gives an ``onnx.ModelProto``).

    Raises:
        UnknownName: there is no value `of`. BadInput: it has no features of known size, it holds the probabilities that
            the model ends in, or `name` is taken.
    """
    return placed_head(model, outputs, of=of, name=name, seed=seed)[0]


def placed_head(
    model: AnyModel, outputs: int, *, of: str | None = None, name: str = "logits", seed: int = 0
) -> tuple[Any, str]:
    """`with_head`, and a message about the position of the head."""
    if outputs < 1:
        raise BadInput(f"a head must give at least 1 number, not {outputs}")
    opened = open_model(model)
    graph = opened.model.graph
    external_aside(opened.model)
    own_tensors(opened.model)  # before there are initializers of the head, beside which Constants may be constants
    values = {v.name: v for v in (*graph.inputs, *(v for n in graph for v in n.outputs)) if v.name}
    value, layer = _features(graph, values, of)
    assert value.shape is not None
    names = Names.of(opened.model)
    builder = Builder(graph)
    features = builder.var(value)
    tokens = layer is not None and layer.op_type == "MatMul"  # its features are the last axis, after any others
    if len(value.shape) > 2 and not tokens:
        features = builder.ReduceMean(features, list(range(2, len(value.shape))), keepdims=0)
    size = value.shape[-1 if tokens else 1]
    assert isinstance(size, int)
    draw = np.random.default_rng(seed)
    bound = 1 / math.sqrt(size)
    parts = []
    for what, shape in (("weight", (size, outputs)), ("bias", (outputs,))):
        array = draw.uniform(-bound, bound, shape)
        assert value.dtype is not None
        tensor = ir.tensor(array.astype(value.dtype.numpy()), name=names.exactly(f"{name}_{what}"))
        held = ir.Value(name=tensor.name, type=ir.TensorType(value.dtype), shape=ir.Shape(shape), const_value=tensor)
        graph.initializers[held.name or ""] = held
        parts.append(builder.var(held))
    result = features @ parts[0] + parts[1]
    graph.outputs[:] = [result.value]
    opened.model.metadata_props.pop(CLASSES, None)  # the old outputs had names
    opened.model.metadata_props[HEAD] = name
    prune(graph)
    _name(graph, name, result.value, *(p.value for p in parts))
    where = f"the head reads {value.name!r}, {size} features"
    if layer is not None:
        where += f", in the place of the last linear layer, {described(layer)}"
    return opened.close(), where


def _name(graph: ir.Graph, name: str, output: ir.Value, weight: ir.Value, bias: ir.Value) -> None:
    """Name the head. This comes last: the replaced layer may have had these names.

    Raises:
        BadInput: another input or weight of the model has one of the names.
    """
    for value, wanted in ((output, name), (weight, f"{name}_weight"), (bias, f"{name}_bias")):
        other = named_values(graph).get(wanted)
        if other is not None and other is not value:
            if other.producer() is None:
                raise BadInput(f"the model has a value {wanted!r} already; give the head another name")
            other.name = Names.of_graph(graph).fresh(wanted)
        value.name = wanted


def beside_head(model: ir.Model, adapter: Adapter) -> Adapter:
    """`adapter` extended to train the weights of a new head as a whole, unless a target names them.

    They are random: a frozen head with an adapter would learn less than a head.
    """
    own = [
        n
        for n in (f"{model.metadata_props.get(HEAD)}_{w}" for w in ("weight", "bias"))
        if n in model.graph.initializers
    ]
    own = [n for n in own if n not in adapter.patterns]
    if not own or isinstance(adapter, ChosenOutputs):
        return adapter
    left_out = [f"!{n}" for n in own if n.endswith("weight")]
    return replace(adapter, targets=[*adapter.patterns, *left_out], train_also=[*adapter.train_also, *own])


def _features(graph: ir.Graph, values: dict[str, ir.Value], of: str | None) -> tuple[ir.Value, ir.Node | None]:
    """The value that the head reads, and the layer that it replaces."""
    if of is not None:
        if of not in values:
            raise UnknownName(of, values, "value")
        _refuse_probabilities(graph, values[of])
        found, layer = values[of], None
    else:
        places: dict[tuple[ir.Value, ir.Node | None], ir.Value] = {}
        for output in (v for v in graph.outputs if v.dtype in FLOATS):
            layer = _tail(output)[1]
            place = (output if layer is None else _data(layer), layer)
            if not _why_not(*place):
                places.setdefault(place, output)
        flat = [p for p, output in places.items() if output.shape is not None and len(output.shape) == 2]
        usable = flat if len(flat) == 1 else list(places)
        if len(usable) != 1:
            names = ", ".join(repr(v.name) for v in places.values() or graph.outputs)
            raise BadInput(f"say which value the head shall read, with `of`; the outputs are {names}")
        found, layer = usable[0]
        if layer is None:
            _refuse_probabilities(graph, found)
    why = _why_not(found, layer)
    if why:
        raise BadInput(f"a head cannot read {found.name!r}: {why}")
    return found, layer


def _why_not(value: ir.Value, layer: ir.Node | None = None) -> str:
    if value.dtype not in FLOATS:
        return f"it holds {value.dtype}"
    if value.shape is None or len(value.shape) < 2:
        return f"it has shape {'unknown' if value.shape is None else list(value.shape)}, not [batch, features]"
    size = value.shape[-1 if layer is not None and layer.op_type == "MatMul" else 1]
    if not isinstance(size, int):
        return f"the number of its features, {size}, is not known"
    return ""


#: Operators between the last linear layer and an output: activations that give probabilities, and moves.
_BEHIND = {
    *("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid", "Log", "Exp", "Neg", "Reciprocal", "ArgMax"),
    *("Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Concat", "Slice", "Gather", "Normalizer"),
}
_POOLS = {"GlobalAveragePool", "ReduceMean", "AveragePool"}
_LAYERS = {"Gemm", "MatMul", "LinearClassifier", "LinearRegressor"}


def _tail(output: ir.Value) -> tuple[list[ir.Value], ir.Node | None]:
    """The values from `output` back to the last linear layer, and that; None if the model ends in something else."""
    passed, value, pooled = [output], output, False
    while (node := value.producer()) is not None:
        data = [v for v in node.inputs if v is not None and v.const_value is None and not _constant(v)]
        if not pooled and node.op_type in _LAYERS and len(data) == 1:
            return passed, node
        if node.op_type == "Conv" and len(data) == 1:
            return passed, node
        pooled |= node.op_type in _POOLS
        single = node.op_type in ("Add", "Sub", "Mul", "Div") and len(data) == 1  # a bias, a scale, a temperature
        inner = neutral_operand(node) or (data[0] if data and (single or node.op_type in _BEHIND | _POOLS) else None)
        if inner is None:
            break
        passed.append(inner)
        value = inner
    return passed, None


def last_layer(output: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """The last linear layer before `output` and the value that it reads; None if the model ends in something else."""
    layer = _tail(output)[1]
    return None if layer is None else (layer, _data(layer))


def _constant(value: ir.Value) -> bool:
    """True for a weight, or a Transpose, a Cast, … of a weight."""
    node = value.producer()
    return node is not None and all(v is None or v.const_value is not None for v in node.inputs)


def _data(layer: ir.Node) -> ir.Value:
    return next(v for v in layer.inputs if v is not None and v.const_value is None and not _constant(v))


def _refuse_probabilities(graph: ir.Graph, value: ir.Value) -> None:
    """Refuse a model whose output is probabilities: a head on them learns little."""
    if bounds(value) not in ((0.0, 1.0), (-np.inf, 0.0)):
        return
    for output in graph.outputs:
        passed, layer = _tail(output)
        if value in passed:
            hint = f"{_data(layer).name!r}, which the last linear layer reads" if layer else "the value before"
            raise BadInput(
                f"{value.name!r} holds the probabilities that the model ends in, and no features\n  hint: take {hint}"
            )

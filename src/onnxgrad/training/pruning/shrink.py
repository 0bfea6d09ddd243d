"""The smaller graph: channels removed from weights, attributes and shapes; and the model in which they are zero."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.graph import add_initializer, prune
from onnxgrad.ir.match import constant, is_op, not_none
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.training.pruning.channels import Axis, Channels, rank_of, size_of
from onnxgrad.training.pruning.operators import RMS
from onnxgrad.training.pruning.places import SHAPED

Kept = dict[Axis, np.ndarray]


def weight_masks(channels: Channels, removed: Iterable[int]) -> dict[str, np.ndarray]:
    """Masks of the weights that make or read the `removed` channels, in the shapes of the weights.

    With these elements at zero, the model computes what it computes without the channels.
    """
    found: dict[str, np.ndarray] = {}
    for (value, axis), mask in channels.keep_masks(removed).items():
        if (value, axis) not in channels.layers or value.const_value is None:
            continue
        if not value.const_value.dtype.is_floating_point():
            continue
        shape = [-1 if a == axis else 1 for a in range(rank_of(value))]
        whole = found.setdefault(value.name or "", np.ones(value.const_value.numpy().shape, bool))
        whole &= mask.reshape(shape)
    return found


def shrink(model: ir.Model, channels: Channels, removed: Iterable[int]) -> None:
    """Remove the channels `removed` from `model`, whose graph `channels` were found in, in place."""
    kept = channels.keep_masks(removed)
    if not kept:
        return
    graph = model.graph
    names = Names.of_graph(graph)
    for node in list(graph):
        _adapt(graph, node, kept, names)
    lifted: dict[ir.Value, ir.Value] = {}
    for (place, axis), mask in kept.items():
        if is_op(place.producer(), "Constant"):
            lifted[place] = _lifted(graph, place)
        value = lifted.get(place, place)
        if value.is_initializer() and value.const_value is not None:
            array = value.const_value.numpy()
            dtype = value.const_value.dtype
            smaller = np.compress(mask, array, axis)
            value.const_value = ir.tensor(smaller, dtype=dtype, name=value.name)
            value.shape = ir.Shape(smaller.shape)
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    prune(graph)
    infer_types(model)


def _lifted(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """An initializer in place of a Constant node."""
    node, array = not_none(value.producer()), not_none(constant(value))
    name, value.name = value.name, None
    held = add_initializer(graph, ir.tensor(array, dtype=value.dtype, name=name))
    value.replace_all_uses_with(held)
    graph.remove(node, safe=True)
    return held


def _adapt(graph: ir.Graph, node: ir.Node, kept: Kept, names: Names) -> None:
    """Change the attributes and operands of `node` that state sizes."""
    if is_op(node, ("Conv", "ConvTranspose")) and node.attributes.get_int("group", 1) > 1:
        _regroup(node, kept)
    elif is_op(node, ("LSTM", "GRU", "RNN")):
        r = node.inputs[2]
        if r is not None and (r, 2) in kept:
            node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", int(kept[r, 2].sum()))
    elif is_op(node, ("ReduceMean", *RMS)):
        _normalize(graph, node, kept, names)
    elif is_op(node, "Split"):
        axis = node.attributes.get_int("axis", 0) % max(rank_of(node.outputs[0]), 1)
        if any((v, axis) in kept for v in node.outputs):
            node.attributes.pop("num_outputs", None)
            sizes = [_size(v, axis, kept) for v in node.outputs]
            _set_input(graph, node, 1, np.array(sizes, np.int64), names)
    elif is_op(node, "Slice"):
        _cut(graph, node, kept, names)
    elif is_op(node, "Gather"):
        _pick(graph, node, kept, names)
    elif is_op(node, SHAPED):
        _reshape(graph, node, kept, names)


def _size(value: ir.Value, axis: int, kept: Kept) -> int:
    return int(kept[value, axis].sum()) if (value, axis) in kept else size_of(value, axis) or 0


def _set_input(graph: ir.Graph, node: ir.Node, at: int, array: np.ndarray, names: Names) -> None:
    held = add_initializer(graph, ir.tensor(array, name=names.fresh(f"{node.outputs[0].name}_sizes")))
    if len(node.inputs) <= at:
        node.resize_inputs(at + 1)
    node.replace_input_with(at, held)


def _regroup(node: ir.Node, kept: Kept) -> None:
    """The number of groups, where whole groups went."""
    x, w = map(not_none, node.inputs[:2])
    if node.op_type == "Conv":
        group = _size(x, 1, kept) // _size(w, 1, kept)
    else:
        group = _size(node.outputs[0], 1, kept) // _size(w, 1, kept)
    node.attributes["group"] = ir.AttrInt64("group", group)


def _normalize(graph: ir.Graph, node: ir.Node, kept: Kept, names: Names) -> None:
    """A mean of squares over features that are left, in units of that over all: what was removed is zero."""
    x, out = not_none(node.inputs[0]), node.outputs[0]
    is_reduction = node.op_type == "ReduceMean"
    is_reduced = [not is_reduction or (rank_of(out) == rank_of(x) and size_of(out, a) == 1) for a in range(rank_of(x))]
    axes = [a for a in range(rank_of(x)) if (x, a) in kept and is_reduced[a]]
    share, dtype = math.prod(float(kept[x, a].mean()) for a in axes), (out.dtype or ir.DataType.FLOAT).numpy()
    scale = None if is_reduction else node.inputs[1]
    if is_reduction and axes:
        name, out.name = out.name, names.fresh(f"{out.name}_left")
        factor = ir.tensor(np.array(share, dtype), name=names.fresh(f"{name}_share"))
        scaled = ir.Node("", "Mul", [out, add_initializer(graph, factor)], name=names.fresh(f"{name}_scaled"))
        scaled.outputs[0].name, scaled.outputs[0].type = name, out.type
        out.replace_all_uses_with(scaled.outputs[0])
        scaled.replace_input_with(0, out)
        graph.insert_after(node, scaled)
    elif axes and scale is not None and scale.const_value is not None:
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon / share)
        larger = scale.const_value.numpy()[kept[x, axes[0]]] / np.sqrt(share)
        own = ir.tensor(larger.astype(dtype), name=names.fresh(scale.name or "scale"))
        node.replace_input_with(1, add_initializer(graph, own))


def _cut(graph: ir.Graph, node: ir.Node, kept: Kept, names: Names) -> None:
    """The first and the last position of a slice, counted without those removed."""
    x = not_none(node.inputs[0])
    starts, ends, given = (constant(v) for v in (*node.inputs[1:4], None)[:3])
    if starts is None or ends is None:
        return
    axes = range(len(starts)) if given is None else [int(a) % rank_of(x) for a in given]
    new = starts.copy(), ends.copy()
    for k, axis in enumerate(axes):
        if (x, axis) in kept:
            mask = kept[x, axis]
            first, last, _ = slice(int(starts[k]), int(ends[k])).indices(len(mask))
            new[0][k], new[1][k] = mask[:first].sum(), mask[:last].sum()
    if any((x, axis) in kept for axis in axes):
        _set_input(graph, node, 1, new[0], names)
        _set_input(graph, node, 2, new[1], names)


def _pick(graph: ir.Graph, node: ir.Node, kept: Kept, names: Names) -> None:
    """The places of channels that a Gather puts in another order."""
    x, indices = node.inputs
    assert x is not None
    axis = node.attributes.get_int("axis", 0) % max(rank_of(x), 1)
    chosen = constant(indices)
    if (x, axis) in kept and chosen is not None:
        mask = kept[x, axis]
        place = np.cumsum(mask) - 1
        _set_input(graph, node, 1, place[chosen[mask[chosen]]].astype(chosen.dtype), names)


def _reshape(graph: ir.Graph, node: ir.Node, kept: Kept, names: Names) -> None:
    """Known sizes in the operand of a shape; those that a run computes stay computed."""
    out = node.outputs[0]
    at = {"ConstantOfShape": 0, "Resize": 3}.get(node.op_type, 1)
    given = (*node.inputs, *[None] * 4)[at]
    if given is None or not any((out, axis) in kept for axis in range(rank_of(out))):
        return
    if node.op_type == "Resize" and node.attributes.get_ints("axes") is not None:
        return
    sizes = [_size(out, axis, kept) if size_of(out, axis) is not None else None for axis in range(rank_of(out))]
    old = constant(given)
    if old is not None:
        new = [int(n) if s is None or n in (-1, 0) else s for n, s in zip(old.ravel(), sizes)]
        _set_input(graph, node, at, np.array(new, np.int64), names)
        return
    known = np.array([s is not None for s in sizes])
    numbers = np.array([s or 0 for s in sizes], np.int64)
    mask, values = (
        add_initializer(graph, ir.tensor(a, name=names.fresh(f"{out.name}_sizes"))) for a in (known, numbers)
    )
    choice = ir.Node("", "Where", [mask, values, given], name=names.fresh("sizes"))
    choice.outputs[0].name = names.fresh(f"{out.name}_shape")
    choice.outputs[0].type, choice.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(sizes)])
    graph.insert_before(node, choice)
    node.replace_input_with(at, choice.outputs[0])

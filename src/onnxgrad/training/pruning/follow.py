"""Positions of the operands and results of a node that go together, operator by operator.

`Coupling.visit` locks every axis that no function here mentions, so that no unknown operator is pruned through.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.einsum_labels import einsum_axes
from onnxgrad.ir.match import constant, is_op, not_none
from onnxgrad.ir.operators import Kind, traits_of
from onnxgrad.training.pruning import places  # noqa: F401  (it fills the table)
from onnxgrad.training.pruning.channels import Axis, Coupling, rank_of, size_of
from onnxgrad.training.pruning.operators import FOLLOWERS, RMS, broadcast, follows


def follow(joined: Coupling, node: ir.Node) -> None:
    """Join the axes of `node`."""
    traits = traits_of(node)
    own = FOLLOWERS.get(node.op_type) if is_op(node, FOLLOWERS) else None
    if own is not None:
        own(joined, node)
    elif traits.is_elementwise:
        _elementwise(joined, node)
    elif traits.kind is Kind.ALONG_AXIS:
        _along_axis(joined, node)
    elif traits.kind is Kind.REDUCTION:
        _reduction(joined, node)


def _elementwise(j: Coupling, node: ir.Node) -> None:
    for out in node.outputs:
        broadcast(j, node.inputs, out)


@follows("Dropout", "Identity", "Cast", "CastLike", "Clip", "PRelu", "Where", "Relu")
def _first(j: Coupling, node: ir.Node) -> None:
    for out in node.outputs:
        broadcast(j, node.inputs, out)


def _along_axis(j: Coupling, node: ir.Node) -> None:
    (x, *_), out = node.inputs, node.outputs[0]
    assert x is not None
    rank, axis = rank_of(x), node.attributes.get_int("axis", -1)
    if rank and rank == rank_of(out):
        for at in range(rank):
            if at != axis % rank:
                j.join(x, at, out, at)


def _reduction(j: Coupling, node: ir.Node) -> None:
    x, out = not_none(node.inputs[0]), node.outputs[0]
    given = constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    listed = node.attributes.get_ints("axes")
    axes = {int(a) % rank_of(x) for a in (listed if listed is not None else () if given is None else given.ravel())}
    if not axes:
        return
    keep = node.attributes.get_int("keepdims", 1)
    at = 0
    for axis in range(rank_of(x)):
        if axis not in axes:
            j.join(x, axis, out, at)
        at += int(bool(keep) or axis not in axes)
    if node.op_type == "ReduceMean" and keep and _is_square(x):  # of RMSNormalization, written out
        j.normalize(*((x, axis) for axis in axes))


def _is_square(x: ir.Value) -> bool:
    node = x.producer()
    if is_op(node, "Mul"):
        return node.inputs[0] is node.inputs[1]
    exponent = constant(node.inputs[1]) if is_op(node, "Pow") and node.inputs[1] is not None else None
    return exponent is not None and exponent.size == 1 and float(exponent.item()) == 2


# --- layers --------------------------------------------------------------------------------------


def _layer(j: Coupling, node: ir.Node, x: Axis, weight: Axis, out: Axis, out_weight: Axis) -> None:
    """`weight` reads the channels of x, and `out_weight` makes those of the result."""
    j.join(*x, *weight)
    j.join(*out, *out_weight)
    j.read[weight] = node
    j.made[out_weight] = node


@follows("Conv", "ConvTranspose")
def _conv(j: Coupling, node: ir.Node) -> None:
    x, w, bias = (*node.inputs, None)[:3]
    out, group = node.outputs[0], node.attributes.get_int("group", 1)
    assert x is not None
    assert w is not None
    turned = node.op_type == "ConvTranspose"
    if group == 1:
        _layer(j, node, (x, 1), (w, 0 if turned else 1), (out, 1), (w, 1 if turned else 0))
    else:
        _grouped(j, node, x, w, out, group, turned)
    j.join(x, 0, out, 0)
    if bias is not None:
        j.join(bias, 0, out, 1)
        j.made[bias, 0] = node


def _grouped(j: Coupling, node: ir.Node, x: ir.Value, w: ir.Value, out: ir.Value, group: int, turned: bool) -> None:
    """Whole groups go, or the same positions of each group."""
    reads, makes = j.positions(x, 1), j.positions(out, 1)
    first, second = j.positions(w, 0), j.positions(w, 1)
    if reads is None or makes is None or first is None or second is None:
        return
    depthwise = len(reads) == group and len(makes) == group
    way = 0 if depthwise else j.choose(node, [(x, 1), (out, 1)])
    shaped_in, shaped_out = reads.reshape(group, -1), makes.reshape(group, -1)
    outer, inner = (shaped_in, shaped_out) if turned else (shaped_out, shaped_in)
    j.touch((x, 1), (out, 1), (w, 0), (w, 1))
    j.tie(first.reshape(group, -1), outer)
    if way == 0:
        j.tie(shaped_in, shaped_in[:, :1])
        j.tie(shaped_out, shaped_in[:, :1])
        if not depthwise or len(second) > 1:
            j.lock(w, 1, "the width of a group")
    else:
        j.tie(inner, second[None])
        j.tie(outer, outer[:1])
    j.made[w, 0] = node


@follows("Gemm")
def _gemm(j: Coupling, node: ir.Node) -> None:
    a, b, c = (*node.inputs, None)[:3]
    out, ta, tb = node.outputs[0], node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)
    assert a is not None
    assert b is not None
    _contract(j, node, (a, 0 if ta else 1), (b, 1 if tb else 0))
    j.join(a, 1 if ta else 0, out, 0)
    j.join(b, 0 if tb else 1, out, 1)
    _note_made(j, node, (a, 1 if ta else 0), (b, 0 if tb else 1))
    if c is not None:
        broadcast(j, [c], out)
        if c in j.parameters and rank_of(c) and size_of(c, rank_of(c) - 1) != 1:
            j.made[c, rank_of(c) - 1] = node


@follows("MatMul")
def _matmul(j: Coupling, node: ir.Node) -> None:
    a, b = node.inputs
    out = node.outputs[0]
    assert a is not None
    assert b is not None
    if rank_of(a) < 2 or rank_of(b) < 2:
        return
    rows, columns = (a, rank_of(a) - 2), (b, rank_of(b) - 1)
    _contract(j, node, (a, rank_of(a) - 1), (b, rank_of(b) - 2))
    j.join(*rows, out, rank_of(out) - 2)
    j.join(*columns, out, rank_of(out) - 1)
    _note_made(j, node, rows, columns)
    broadcast(j, [a, b], out, skip=2)


@follows("Einsum")
def _einsum(j: Coupling, node: ir.Node) -> None:
    """Axes with the same letter; one that is summed over goes where it is that of a weight."""
    for axes in einsum_axes(node):
        j.touch(*axes)
        wide = [axis for axis in axes if size_of(*axis) != 1]
        for axis in wide[1:]:
            j.join(*wide[0], *axis)
        weights = [axis for axis in wide if axis[0] in j.parameters]
        if axes[-1][0] is node.outputs[0]:
            _note_made(j, node, *weights)
        elif weights:
            j.read.update(dict.fromkeys(weights, node))
        else:
            j.lock(*axes[0], "a sum over values that are computed")


def _contract(j: Coupling, node: ir.Node, left: Axis, right: Axis) -> None:
    """Axes that a product sums over: removable where one side is a weight, whose elements can be zero."""
    parameters = [side for side in (left, right) if side[0] in j.parameters]
    j.join(*left, *right)
    for side in parameters:
        j.read[side] = node
    if not parameters:
        j.lock(*left, "a product of two values that are computed")


def _note_made(j: Coupling, node: ir.Node, *axes: Axis) -> None:
    for value, axis in axes:
        if value in j.parameters:
            j.made[value, axis] = node


@follows("LSTM", "GRU", "RNN")
def _recurrent(j: Coupling, node: ir.Node) -> None:
    x, w, r, bias, lengths, h, c, peephole = (*node.inputs, *[None] * 8)[:8]
    assert x is not None
    assert w is not None
    assert r is not None
    hidden = j.positions(r, 2)
    if hidden is None:
        return
    size = len(hidden)
    j.join(x, 2, w, 2)
    j.read[w, 2] = node
    j.read[r, 2] = node
    j.touch((r, 2))
    for value, axis in ((w, 1), (r, 1), (bias, 1), (peephole, 1)):
        if value is not None and (ids := j.positions(value, axis)) is not None and not len(ids) % size:
            j.tie(ids.reshape(-1, size), hidden[None])
            j.touch((value, axis))
            j.made[value, axis] = node
    results = [v for v in node.outputs if v.name and v.shape is not None]
    for value in (*results, h, c):
        if value is not None:
            j.join(value, rank_of(value) - 1, r, 2)
    batch = 0 if node.attributes.get_int("layout", 0) else 1
    for value in results[:1]:
        j.join(x, 0, value, 0)
        j.join(x, 1, value, 1 if batch == 0 else 2)
    if lengths is not None:
        j.lock_all(lengths, "lengths of sequences")


@follows("BatchNormalization", "InstanceNormalization")
def _channel_norm(j: Coupling, node: ir.Node) -> None:
    x, *parameters = node.inputs
    for out in node.outputs[:1]:
        broadcast(j, [x], out)
        for at, value in enumerate(parameters):
            if value is not None:
                j.join(value, 0, out, 1)
                if node.op_type == "BatchNormalization" and at < 2:  # with these at zero, so is the result
                    j.made.setdefault((value, 0), node)
    for value in node.outputs[1:]:
        if value.name and x is not None:
            j.join(value, 0, x, 1)


@follows("LayerNormalization", *RMS)
def _layer_norm(j: Coupling, node: ir.Node) -> None:
    """Features of the mean of squares may go; without some of them, other means and deviations are no multiples."""
    x, scale, out = not_none(node.inputs[0]), node.inputs[1], node.outputs[0]
    first, last = node.attributes.get_int("axis", -1) % max(rank_of(x), 1), rank_of(x) - 1
    for axis in range(first):
        j.join(x, axis, out, axis)
    is_scaled = scale is not None and scale.is_initializer() and size_of(scale, 0) == size_of(x, last)
    if node.op_type in RMS and first == last and is_scaled:
        j.join(x, last, out, last)
        j.join(scale, 0, out, last)
        j.normalize((x, last))


@follows("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _pool(j: Coupling, node: ir.Node) -> None:
    for axis in (0, 1):
        j.join(node.inputs[0], axis, node.outputs[0], axis)


@follows("Resize", "Pad")
def _same_sizes(j: Coupling, node: ir.Node) -> None:
    x, out = not_none(node.inputs[0]), node.outputs[0]
    pads = constant(node.inputs[1]) if node.op_type == "Pad" and len(node.inputs) > 1 else np.zeros(2 * rank_of(x))
    listed = constant(node.inputs[3]) if node.op_type == "Pad" and len(node.inputs) > 3 else None
    if pads is None:
        return
    full = np.zeros(2 * rank_of(x))
    axes = np.arange(rank_of(x)) if listed is None else listed.ravel() % rank_of(x)
    full[np.concatenate([axes, axes + rank_of(x)])] = pads.ravel()
    for axis in range(2 if node.op_type == "Resize" else rank_of(x)):
        if not full[axis] and not full[axis + rank_of(x)]:
            j.join(x, axis, out, axis)


@follows("QuantizeLinear", "DequantizeLinear")
def _rounding(j: Coupling, node: ir.Node) -> None:
    x, *others = node.inputs
    out = node.outputs[0]
    broadcast(j, [x], out)
    for value in others:
        if value is not None and rank_of(value) == 1:
            j.join(value, 0, out, node.attributes.get_int("axis", 1) % rank_of(out))

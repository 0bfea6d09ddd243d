"""The same numbers with fewer passes over memory.

- Σⱼ pᵢⱼ·gᵢⱼ in the cotangent of attention, with g = dy·vᵀ and y = p·v, is Σₖ yᵢₖ·dyᵢₖ: over a head's numbers, of which
  there are fewer than keys (Dao et al., "FlashAttention", 2022, section 3.1).
- SoftmaxCrossEntropyLoss of rows of scores is a function whose LogSoftmax has a last axis of size 1 behind that of the
  classes. ONNX Runtime copies the scores before and after it, and takes 2 to 3 times as long as along the last axis.
- Softmax, LogSoftmax and that loss along a short axis before long ones, as over the classes of pixels, are written out:
  ONNX Runtime's kernels know the last axis alone: they transpose before and after, and take 2 to 10 times as long.
- The cotangent k·(p - 1) at labels of pixels, and k·p elsewhere, is k·(p - max(0, 1 - |label - class|)).
  ONNX Runtime's ScatterElements writes number by number on one thread, and takes 2 to 4 times as long.
- ½·(erf u + 1), as in the cotangent of Gelu, is a HardSigmoid of erf u: it is never clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import Dim, Found, constant, exchanged, is_op, not_none, only_reader, pattern, producer, rank
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite
from onnxgrad.runtime.setting import Setting

_EXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
#: The most entries of a short axis, and the least of the axes behind it together.
_SHORT, _LONG = 32, 256
#: The most classes whose labels are compared with each of them.
_CLASSES = 16

_ABOVE = pattern("Add", pattern("Erf", "u", name="erf"), 1.0, name="above", in_any_order=True)
_NORMAL = pattern("Mul", _ABOVE, 0.5, in_any_order=True)

_HIT = pattern("Sub", pattern("Exp", pattern("GatherElements", "log_p", "at", name="picked")), 1.0)
_CORRECTED = pattern(
    "ScatterElements", pattern("Mul", pattern("Exp", "log_p", name="p"), "k"), "at", pattern("Mul", _HIT, "k")
)


class _Sum(NamedTuple):
    """Σ p·g along rows, with y = p·v and g = dy·vᵀ."""

    y: ir.Value
    dy: ir.Value
    size: int


def _weighted_sum(node: ir.Node) -> _Sum | None:
    """The sum over each row of p·g that `node` computes, where the rows of y are shorter; None for other nodes."""
    if not is_op(node, "ReduceSum") or len(node.inputs) < 2 or not node.attributes.get_int("keepdims", 1):
        return None
    product, axes = producer(node.inputs[0], "Mul"), constant(node.inputs[1])
    if product is None or axes is None or only_reader(product.outputs[0], "ReduceSum") is None:
        return None
    count = rank(product.outputs[0])
    if count is None or axes.tolist() not in ([-1], [count - 1]) or product.outputs[0].dtype not in _EXACT:
        return None
    for p, g in (product.inputs, product.inputs[::-1]):
        matmul = producer(g, "MatMul")
        v = None if matmul is None else exchanged(matmul.inputs[1])
        if p is None or g is None or p.shape is None or g.shape is None or v is None:
            continue
        for reader, place in p.uses():
            if place == 0 and is_op(reader, "MatMul") and reader.inputs[1] is v:
                y, dy = reader.outputs[0], not_none(not_none(matmul).inputs[0])
                size = _shorter(y, dy, p.shape)
                if size is not None and same_dims(p.shape.dims, g.shape.dims):
                    return _Sum(y, dy, size)
    return None


def _shorter(y: ir.Value, dy: ir.Value, of: ir.Shape) -> int | None:
    """The size of the rows of y and dy, if these are as many as of `of` and shorter; else None."""
    dims = _dims(y)
    if dims is None or not same_dims(dims, _dims(dy)) or not same_dims(dims[:-1], of.dims[:-1]):
        return None
    return dims[-1] if isinstance(dims[-1], int) and isinstance(of[-1], int) and dims[-1] < of[-1] else None


def _error_function(node: ir.Node) -> ir.Value | None:
    """erf u where `node` is ½·(erf u + 1); None for other nodes."""
    found = _NORMAL.match(node.outputs[0]) if is_op(node, "Mul") else None
    if found is None or node.outputs[0].dtype != ir.DataType.FLOAT or only_reader(found["above"], "Mul") is None:
        return None
    return found["erf"] if same_dims(_dims(found["erf"]), _dims(node.outputs[0])) else None


def _corrected(node: ir.Node) -> Found | None:
    """The probabilities p, the labels and k where `node` is the cotangent of a loss of pixels; None for other nodes."""
    found = _CORRECTED.match(node.outputs[0]) if is_op(node, "ScatterElements") else None
    if found is None or node.attributes.get_string("reduction", "none") != "none":
        return None
    gathers, dims = not_none(found["picked"].producer()), _dims(found["p"])
    if any(n.attributes.get_int("axis", 0) != 1 for n in (node, gathers)) or found["p"].dtype != ir.DataType.FLOAT:
        return None
    if dims is None or len(dims) < 3 or not isinstance(dims[1], int) or not 0 < dims[1] <= _CLASSES:
        return None
    return found if _are_long(dims[2:]) and same_dims((dims[0], 1, *dims[2:]), _dims(found["at"])) else None


def _write_corrected(b: Builder, found: Found) -> Var:
    p, k = b.var(found["p"]), b.var(found["k"])
    classes = not_none(p.shape)[1]
    assert isinstance(classes, int)
    label = b.cast_like(b.var(found["at"]), p)
    label = label + b.HardSigmoid(label, alpha=-1.0, beta=0.0) * classes  # -1 is the last class
    column = np.arange(classes, dtype=np.float32).reshape(classes, *[1] * (p.rank - 2))
    return (p - b.HardSigmoid(b.Abs(label - column), alpha=-1.0, beta=1.0)) * k


def _dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...] | None:
    return None if value.shape is None else value.shape.dims


def _is_plain_loss(node: ir.Node) -> bool:
    """True for a loss of all rows, with equal weights."""
    is_loss = is_op(node, "SoftmaxCrossEntropyLoss") and "ignore_index" not in node.attributes
    return is_loss and (len(node.inputs) < 3 or node.inputs[2] is None)


def _is_loss_of_rows(node: ir.Node) -> bool:
    return _is_plain_loss(node) and rank(node.inputs[0]) == 2


def _short_axis(node: ir.Node) -> int | None:
    """The short axis, not the first, before long ones along which `node` has a softmax; None for other nodes."""
    if not (is_op(node, ("Softmax", "LogSoftmax")) or _is_plain_loss(node)):
        return None
    x = not_none(node.inputs[0])
    dims = _dims(x)
    if not dims or x.dtype not in _EXACT:
        return None
    axis = 1 if node.op_type == "SoftmaxCrossEntropyLoss" else node.attributes.get_int("axis", -1) % len(dims)
    size, behind = dims[axis], dims[axis + 1 :]
    is_short = isinstance(size, int) and 0 < size <= _SHORT
    return axis if axis and is_short and behind and _are_long(behind) else None


def _are_long(dims: Sequence[Dim]) -> bool:
    """True for axes of many entries together, and for several axes of unknown sizes."""
    known = math.prod(d for d in dims if isinstance(d, int))
    return known >= _LONG or (len(dims) > 1 and not all(isinstance(d, int) for d in dims))


def _write_softmax(b: Builder, node: ir.Node) -> tuple[Var, ...]:
    """The results of a softmax, or of a loss and the logarithms of probabilities in it."""
    x, axis = b.var(not_none(node.inputs[0])), _short_axis(node)
    if axis is None:
        log_p = b.LogSoftmax(x, axis=1)
    else:
        shifted = x - b.ReduceMax(x, [axis])
        powers = b.Exp(shifted)
        total = b.ReduceSum(powers, [axis])
        if node.op_type == "Softmax":
            return (powers / total,)
        log_p = shifted - b.Log(total)
    if node.op_type == "LogSoftmax":
        return (log_p,)
    return _write_loss(b, node, log_p), log_p


def _write_loss(b: Builder, node: ir.Node, log_p: Var) -> Var:
    """The loss, from the logarithms that its cotangent picks as well: a wrong label fails before any update."""
    labels = not_none(node.inputs[1])
    picked = b.GatherElements(log_p, b.Unsqueeze(labels, [1]), axis=1)
    readers = node.outputs[1].uses() if len(node.outputs) > 1 else ()
    for reader in {reader for reader, _ in readers if is_op(reader, "GatherElements")}:
        places = producer(reader.inputs[1], "Unsqueeze")
        axes = None if places is None else constant(places.inputs[1])
        if axes is None or axes.tolist() != [1] or reader.attributes.get_int("axis", 0) != 1:
            continue
        if not_none(places).inputs[0] is labels and reader.inputs[0] is node.outputs[1]:
            replace_value(picked, reader.outputs[0])
    losses = -b.Squeeze(picked, [1])
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "none":
        return losses
    return b.ReduceMean(losses, keepdims=0) if reduction == "mean" else b.ReduceSum(losses, keepdims=0)


def _write(b: Builder) -> int:
    places = 0
    seen: set[ir.Value] = set()
    corrected = {node: parts for node in b.graph if (parts := _corrected(node)) is not None}
    results: tuple[Var, ...]
    for node in list(b.graph):
        b.before = node
        if _is_loss_of_rows(node) or _short_axis(node) is not None:
            results = _write_softmax(b, node)
        elif node in corrected:
            results = (_write_corrected(b, corrected[node]),)
        elif (erf := _error_function(node)) is not None:
            results = (b.HardSigmoid(erf, alpha=0.5, beta=0.5),)
        elif (found := _weighted_sum(node)) is not None and found.y in seen:
            # ONNX Runtime's ReduceSum keeps the last axis of no rows
            ones = b.const(np.ones((found.size, 1)), not_none(found.y.dtype))
            results = (b.MatMul(b.var(found.y) * b.var(found.dy), ones),)
        else:
            seen.update(node.outputs)
            continue
        places += 1
        for new, old in zip(results, node.outputs):
            replace_value(new, old)
        seen.update(r.value for r in results)
    return places


def _applies(graph: ir.Graph) -> bool:
    finds = _is_loss_of_rows, _short_axis, _corrected, _weighted_sum, _error_function
    return any(find(node) for node in graph for find in finds)


FEWER_PASSES = replace(
    rewrite(
        "fewer_passes",
        "a LogSoftmax along the last axis, or exponentials; sums over heads, not keys; one operator for ½·(erf u + 1)",
        "SoftmaxCrossEntropyLoss of rows; softmax and that loss over the classes of pixels; cotangents of attention, "
        "with fewer numbers in a head than keys, and of Gelu",
        _applies,
        _write,
    ),
    unless=Setting.keeps_functions,
)

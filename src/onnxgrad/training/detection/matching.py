"""The loss of queries (DETR): predictions and labels are paired one to one at the least total cost, inside the graph.

The pairing is the algorithm of shortest augmenting paths (Crouse 2016, as in SciPy's ``linear_sum_assignment``), for
all pictures of a batch at once. One Loop has two kinds of steps: a picture either searches the path of a label, or
changes the pairs along it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.control_flow.iteration import loop
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.subgraphs import empty, formal, give, loop_lead
from onnxgrad.training.detection.assigners import Labels, number
from onnxgrad.training.detection.boxes import Decoded, at, from_centres, hold_constant, overlap
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.terms import cross_entropies, focal

#: Factors of costs and of terms: classes, L1 and GIoU of boxes (Carion et al. 2020); the weight of no object.
CLASSES, DISTANCE, OVERLAP, NOTHING = 1.0, 5.0, 2.0, 0.1
#: Of RT-DETR (Zhao et al. 2023): the factor of the cost of classes, and the share of what is no object in its loss.
VARIFOCAL_COST, VARIFOCAL_SHARE = 2.0, 0.75

#: The distance of a query that no path has reached.
_FAR = 1e30


def _assign(b: Builder, cost: Var, count: Var) -> Var:
    """The label of each query [N, Q], or -1, for costs [N, M, Q] of the first labels, `count` [N, 1] of them.

    In the body, `row` is the label that is being paired, `i` the label whose costs are scanned, `j` the query at the
    end of a path, and `walks` marks pictures that change pairs along one.
    """
    n, m, q = (b.shape_of(cost, axis, axis + 1) for axis in range(3))
    rows, queries = b.places_along(cost, 1), b.places_along(cost, 2)
    nil, none, zero = b.const(0.0, cost.dtype), b.const(-1), b.const(0)
    starts: dict[str, tuple[Var, Any]] = {
        **{"row": (zero, [1]), "i": (zero, [1]), "j": (zero, [1]), "walks": (b.const(False), [1]), "low": (nil, [1])},
        **{"u": (nil, m), "v": (nil, q), "distance": (b.const(_FAR, cost.dtype), q), "path": (none, q)},
        **{"scanned_rows": (nil, m), "scanned": (nil, q), "column": (none, m), "own": (none, q)},
    }
    initial = [b.Expand(start, b.join(n, width)) for start, width in starts.values()]
    w, body = empty(b, "assign")
    lead = loop_lead(w)
    states = [formal(w, first.value, name) for name, first in zip(starts, initial)]
    body.inputs.extend([x.value for x in (*lead, *states)])
    row, i, j, walks, low, u, v, distance, path, scanned_rows, scanned, column, own = states
    active = w.Less(row, count)
    searches, moves = w.And(active, w.Not(walks)), w.And(active, walks)
    # a step of a search: the distances by way of label i, and the nearest query that was not scanned
    here = w.Equal(rows, i)
    mark = w.cast_like(here, cost)
    costs = w.Squeeze(w.MatMul(w.Unsqueeze(mark, [1]), cost), [1])
    reached = costs - w.ReduceSum(mark * u, [1]) - v + low
    is_open = w.Equal(scanned, 0.0)
    is_better = w.And(w.And(w.Less(reached, distance), is_open), searches)
    distance, path = w.Where(is_better, reached, distance), w.Where(is_better, i, path)
    reachable = w.Where(is_open, distance, _FAR)
    best, lowest = w.ArgMin(reachable, axis=1, keepdims=1), w.ReduceMin(reachable, [1])
    owner = w.GatherElements(own, best, axis=1)
    ends = w.And(searches, w.Less(owner, 0))
    scanned = w.Max(scanned, w.cast_like(w.And(w.Equal(queries, best), searches), cost))
    scanned_rows = w.Max(scanned_rows, w.cast_like(w.And(here, searches), cost))
    # at its end, the duals
    others = lowest - w.GatherElements(distance, w.Max(column, 0), axis=1)
    u = u + w.Where(ends, w.Where(w.Equal(rows, row), lowest, others) * scanned_rows, 0.0)
    v = v - w.Where(ends, (lowest - distance) * scanned, 0.0)
    # a step along the path: query j gets the label before it, which loses its own query
    before = w.Max(w.GatherElements(path, w.Max(j, 0), axis=1), 0)
    own = w.Where(w.And(w.Equal(queries, j), moves), before, own)
    lost = w.GatherElements(column, before, axis=1)
    column = w.Where(w.And(w.Equal(rows, before), moves), j, column)
    is_finished = w.And(w.Equal(before, row), moves)
    following = row + 1
    i = w.Where(is_finished, following, w.Max(w.Where(searches, owner, i), 0))
    j = w.Where(ends, best, w.Where(moves, lost, j))
    walks = w.Or(w.And(walks, w.Not(is_finished)), ends)
    low = w.Where(is_finished, 0.0, w.Where(searches, lowest, low))
    row = w.Where(is_finished, following, row)
    distance, path = w.Where(is_finished, _FAR, distance), w.Where(is_finished, -1, path)
    scanned_rows, scanned = w.Where(is_finished, 0.0, scanned_rows), w.Where(is_finished, 0.0, scanned)
    states = [row, i, j, walks, low, u, v, distance, path, scanned_rows, scanned, column, own]
    give(w, [_any_less(w, row, count), *states])
    labels = b.size_of(cost, 1)
    most = (labels * labels + labels) * 4
    return loop(b, body, most.value, _any_less(b, initial[0], count).value, initial)[-1]


def _any_less(b: Builder, x: Var, y: Var) -> Var:
    """True if an element of `x` is less than that of `y`."""
    return b.Cast(b.ReduceMax(b.Cast(b.Less(x, y), to=int(ir.DataType.INT64)), keepdims=0), to=int(ir.DataType.BOOL))


def pair(b: Builder, cost: Var, there: Var) -> Var:
    """Pairs of the least total cost: 1 and 0 [N, M, Q].

    Args:
        b: the builder.
        cost: [N, M, Q], of no more labels than queries.
        there: [N, M] of 1 and 0; padding is last.
    """
    count = b.Cast(b.ReduceSum(there, [1], keepdims=1), to=7)
    owner = _assign(b, hold_constant(b, cost), count)
    rows = b.Reshape(b.places_along(there, 1), [1, -1, 1])
    return number(b, b.Equal(rows, b.Unsqueeze(owner, [1])))


def query_loss(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> dict[str, Var]:
    """Classes of all queries, with no object for those without a label, and boxes of the others."""
    scale = b.const(np.array([head.size[1], head.size[0]] * 2, np.float32))
    wanted = labels.boxes / scale
    predicted = b.Clip(found.encoded, 0.0, 1.0) if head.varifocal else found.encoded  # of D-FINE also beyond
    corners = from_centres(b, predicted)
    centres = b.Mul(at(b, wanted, 0, 2) + at(b, wanted, 2, 4), 0.5)
    encoded = b.Concat(centres, at(b, wanted, 2, 4) - at(b, wanted, 0, 2), axis=-1)
    kind = box_loss or "giou"
    overlaps = overlap(b, b.Unsqueeze(wanted, [2]), b.Unsqueeze(corners, [1]), kind, 0.0 if kind == "giou" else 1e-7)
    apart = b.ReduceSum(b.Abs(b.Unsqueeze(encoded, [2]) - b.Unsqueeze(predicted, [1])), [-1], keepdims=0)
    each = _costs(b, head, found.scores)
    by_class = b.MatMul(labels.one_hot, b.Transpose(each, perm=[0, 2, 1]))
    cost = by_class * (VARIFOCAL_COST if head.varifocal else CLASSES) + apart * DISTANCE - overlaps * OVERLAP
    mask = hold_constant(b, pair(b, cost, labels.there))
    count = b.Max(b.ReduceSum(labels.there, keepdims=0), 1.0)
    classes = hold_constant(b, b.MatMul(b.Transpose(mask, perm=[0, 2, 1]), labels.one_hot))
    if head.varifocal:
        iou = overlap(b, b.Unsqueeze(wanted, [2]), b.Unsqueeze(corners, [1]), "iou", 1e-16)
        own = b.ReduceSum(iou * mask, [1], keepdims=0)
        by_classes = _varifocal(b, found.scores, classes, hold_constant(b, b.Unsqueeze(own, [-1]))) / count
    else:
        by_classes = _of_classes(b, head, found.scores, classes, count)
    return {
        "classes": b.Mul(by_classes, CLASSES),
        "box": b.Mul(b.ReduceSum(apart * mask, keepdims=0) / count, DISTANCE),
        "overlap": b.Mul(b.ReduceSum((1.0 - overlaps) * mask, keepdims=0) / count, OVERLAP),
    }


def _costs(b: Builder, head: Head, scores: Var) -> Var:
    """The cost of each class [N, Q, K]: its probability less, or focal costs."""
    if head.background is not None:
        return b.Neg(at(b, b.Softmax(scores, axis=-1), 0, head.classes))
    p = b.Sigmoid(scores)
    right = b.Neg(b.Log(p + 1e-8)) * (1.0 - p) ** 2.0 * 0.25
    return right - b.Neg(b.Log(1.0 - p + 1e-8)) * p**2.0 * 0.75


def _varifocal(b: Builder, scores: Var, classes: Var, overlaps: Var) -> Var:
    """Cross entropy with the overlap of the box as the target, weighted by it, or by the score² of other classes."""
    targets = classes * overlaps
    weights = b.Sigmoid(scores) ** 2.0 * (1.0 - classes) * VARIFOCAL_SHARE + targets
    return b.ReduceSum(cross_entropies(b, scores, targets) * hold_constant(b, weights), keepdims=0)


def _of_classes(b: Builder, head: Head, scores: Var, classes: Var, count: Var) -> Var:
    """Weighted cross entropy with a class of no object, or focal loss."""
    if head.background is None:
        return b.ReduceSum(focal(b, scores, classes), keepdims=0) / count
    nothing = 1.0 - b.ReduceSum(classes, [-1], keepdims=1)
    targets = b.Concat(classes, nothing * NOTHING, axis=-1)
    return b.Neg(b.ReduceSum(b.LogSoftmax(scores, axis=-1) * targets, keepdims=0)) / b.ReduceSum(targets, keepdims=0)

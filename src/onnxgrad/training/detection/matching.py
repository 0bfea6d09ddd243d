"""The loss of queries (DETR): predictions and labels are paired one to one at the least total cost, inside the graph.

The pairing is the algorithm of shortest augmenting paths (Crouse 2016, as in SciPy's ``linear_sum_assignment``), for
all pictures of a batch at once. One Loop has two kinds of steps: a picture either searches the path of a label, or
changes the pairs along it.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.training.detection.assigners import Labels, number
from onnxgrad.training.detection.boxes import Decoded, at, from_centres, hold_constant, overlap
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.terms import cross_entropies, focal
from onnxgrad.training.graph.inline_graphs import Inlined

#: Factors of costs and of terms: classes, L1 and GIoU of boxes (Carion et al. 2020); the weight of no object.
CLASSES, DISTANCE, OVERLAP, NOTHING = 1.0, 5.0, 2.0, 0.1
#: Of RT-DETR (Zhao et al. 2023): the factor of the cost of classes, and the share of what is no object in its loss.
VARIFOCAL_COST, VARIFOCAL_SHARE = 2.0, 0.75

#: Costs [N, M, Q] and the number of labels [N, 1] to the label of each query [N, Q], or -1. In the body, `i` is the
#: label whose row is scanned, `j` the query at the end of a path, `walks` marks pictures that change pairs along one.
_ASSIGN = """
<opset_import: ["": 18], domain: "onnxgrad.detection">
assign (cost, count) => (own_end) {
    c0 = Constant <value = int64 {0}> ()
    c1 = Constant <value = int64 {1}> ()
    axis1 = Constant <value = int64[1] {1}> ()
    axis2 = Constant <value = int64[1] {2}> ()
    none = Constant <value = int64 {-1}> ()
    nil = Constant <value = float {0.0}> ()
    far = Constant <value = float {1e30}> ()
    n = Shape <start = 0, end = 1> (cost)
    m = Shape <start = 1, end = 2> (cost)
    q = Shape <start = 2, end = 3> (cost)
    m1 = Squeeze (m)
    q1 = Squeeze (q)
    rows = Range (c0, m1, c1)
    queries = Range (c0, q1, c1)
    one = Constant <value = int64[1] {1}> ()
    n_one = Concat <axis = 0> (n, one)
    n_m = Concat <axis = 0> (n, m)
    n_q = Concat <axis = 0> (n, q)
    row_0 = Expand (c0, n_one)
    low_0 = Expand (nil, n_one)
    u_0 = Expand (nil, n_m)
    v_0 = Expand (nil, n_q)
    far_q = Expand (far, n_q)
    nil_m = Expand (nil, n_m)
    nil_q = Expand (nil, n_q)
    path_0 = Expand (none, n_q)
    own_0 = Expand (none, n_q)
    col_0 = Expand (none, n_m)
    walks_0 = Less (row_0, row_0)
    two = Constant <value = int64 {4}> ()
    mm = Mul (m1, m1)
    most_m = Add (mm, m1)
    most = Mul (most_m, two)
    begun = Less (row_0, count)
    begun_n = Cast <to = 7> (begun)
    begun_any = ReduceMax <keepdims = 0> (begun_n)
    begin = Cast <to = 9> (begun_any)
    row_end, i_end, j_end, walks_end, low_end, u_end, v_end, dist_end, path_end, sr_end, sc_end, col_end, own_end =
        Loop (most, begin, row_0, row_0, row_0, walks_0, low_0, u_0, v_0, far_q, path_0, nil_m, nil_q, col_0, own_0)
        <body = step (int64 turn, bool go, int64[N, 1] row, int64[N, 1] i, int64[N, 1] j, bool[N, 1] walks,
            float[N, 1] low, float[N, M] u, float[N, Q] v, float[N, Q] dist, int64[N, Q] path,
            float[N, M] sr, float[N, Q] sc, int64[N, M] col, int64[N, Q] own)
            => (bool again, int64[N, 1] row_n, int64[N, 1] i_n, int64[N, 1] j_n, bool[N, 1] walks_n, float[N, 1] low_n,
            float[N, M] u_n, float[N, Q] v_n, float[N, Q] dist_n, int64[N, Q] path_n, float[N, M] sr_n,
            float[N, Q] sc_n, int64[N, M] col_n, int64[N, Q] own_n) {
            active = Less (row, count)
            rests = Not (walks)
            searches = And (active, rests)
            moves = And (active, walks)
            here = Equal (rows, i)
            here_f = Cast <to = 1> (here)
            here_3 = Unsqueeze (here_f, axis1)
            costs_3 = MatMul (here_3, cost)
            costs = Squeeze (costs_3, axis1)
            u_here = Mul (here_f, u)
            u_i = ReduceSum (u_here, axis1)
            r1 = Sub (costs, u_i)
            r2 = Sub (r1, v)
            r = Add (r2, low)
            open = Equal (sc, nil)
            less = Less (r, dist)
            better_1 = And (less, open)
            better = And (better_1, searches)
            dist_1 = Where (better, r, dist)
            path_1 = Where (better, i, path)
            reachable = Where (open, dist_1, far)
            best = ArgMin <axis = 1, keepdims = 1> (reachable)
            low_1 = ReduceMin (reachable, axis1)
            owner = GatherElements <axis = 1> (own, best)
            free = Less (owner, c0)
            ends = And (searches, free)
            at_best = Equal (queries, best)
            mark_q = And (at_best, searches)
            mark_q_f = Cast <to = 1> (mark_q)
            sc_1 = Max (sc, mark_q_f)
            mark_m = And (here, searches)
            mark_m_f = Cast <to = 1> (mark_m)
            sr_1 = Max (sr, mark_m_f)
            low_2 = Where (searches, low_1, low)
            known_col = Max (col, c0)
            dist_col = GatherElements <axis = 1> (dist_1, known_col)
            up_other = Sub (low_1, dist_col)
            root = Equal (rows, row)
            up_root = Expand (low_1, n_m)
            up_all = Where (root, up_root, up_other)
            up = Mul (up_all, sr_1)
            up_now = Where (ends, up, nil)
            u_n = Add (u, up_now)
            down_1 = Sub (low_1, dist_1)
            down_2 = Mul (down_1, sc_1)
            down = Where (ends, down_2, nil)
            v_n = Sub (v, down)
            known_j = Max (j, c0)
            from_j = GatherElements <axis = 1> (path_1, known_j)
            from = Max (from_j, c0)
            at_j = Equal (queries, j)
            sets_own = And (at_j, moves)
            own_n = Where (sets_own, from, own)
            next_j = GatherElements <axis = 1> (col, from)
            at_from = Equal (rows, from)
            sets_col = And (at_from, moves)
            col_n = Where (sets_col, j, col)
            is_root = Equal (from, row)
            finished = And (is_root, moves)
            row_up = Add (row, c1)
            row_n = Where (finished, row_up, row)
            j_1 = Where (moves, next_j, j)
            j_n = Where (ends, best, j_1)
            i_1 = Where (searches, owner, i)
            i_2 = Max (i_1, c0)
            i_n = Where (finished, row_up, i_2)
            goes_on = Not (finished)
            walks_1 = And (walks, goes_on)
            walks_n = Or (walks_1, ends)
            low_n = Where (finished, nil, low_2)
            dist_n = Where (finished, far, dist_1)
            path_n = Where (finished, none, path_1)
            sr_n = Where (finished, nil, sr_1)
            sc_n = Where (finished, nil, sc_1)
            left = Less (row_n, count)
            left_n = Cast <to = 7> (left)
            left_any = ReduceMax <keepdims = 0> (left_n)
            again = Cast <to = 9> (left_any)
        }>
}
"""


@functools.cache
def assignment() -> onnx.FunctionProto:
    """The function ``assign`` of costs [N, M, Q] and counts of labels int64 [N, 1]: the label of each query [N, Q]."""
    return onnx.parser.parse_function(_ASSIGN)


def pair(b: Builder, cost: Var, there: Var) -> Var:
    """Pairs of the least total cost: 1 and 0 [N, M, Q].

    Args:
        b: the builder.
        cost: [N, M, Q], of no more labels than queries.
        there: [N, M] of 1 and 0; padding is last.
    """
    count = b.Cast(b.ReduceSum(there, [1], keepdims=1), to=7)
    (owner,) = Inlined(assignment(), "the assignment").write(b, [hold_constant(b, cost), count])
    node = not_none(owner.value.producer())
    b.infer(node)
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

"""Attention and its cotangents, found by their operators, to calls of ``source/attention.c``.

No single emitter writes them: they result from products, a softmax and their cotangents. The search starts at the
cotangent of the softmax, a named part that is one node while attention is looked for:

    P = Softmax(s·Q·Kᵀ + mask), Y = P·V;   dP = dY·Vᵀ, dS = s·SoftmaxGrad(dP, P), dQ = dS·K, dKᵀ = Qᵀ·dS, dV = Pᵀ·dY

If no other node reads any of the matrices of scores, forward and backward become one call each, and none of the
matrices is ever written. The calls read and write through the surrounding Transposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.attention import Scores, is_idle
from onnxgrad.ir.execution_order import sort
from onnxgrad.ir.graph import add_initializer, prune, take_over
from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import constant, is_number, is_op, not_none, pattern, permutation, producer
from onnxgrad.ir.shapes import same_dim

#: The named part that attention is found by, and the node that stands for it meanwhile.
MARK = "SoftmaxGrad"
#: Axes of a matrix per head, transposed.
_SWAPPED = {3: (0, 2, 1), 4: (0, 1, 3, 2)}
#: The mask of scores without the rows that hide all keys: 0 there.
_UNMASKED = pattern("Where", pattern("Equal", pattern("ReduceMax", "mask", "axes"), "lowest", name="dead"), 0, "mask")
#: 0 in place of a product over nothing.
_GUARD = pattern("Where", pattern("Greater", pattern("Shape", "of", name="shape"), 0), "product", 0)


@dataclass(frozen=True)
class _View:
    """A value as a transpose of another: its axis i is `order[i]` of `root`."""

    root: ir.Value
    order: tuple[int, ...]

    @classmethod
    def of(cls, value: ir.Value) -> _View:
        """The view of a value's source through Transposes."""
        order = tuple(range(_rank(value)))
        while (node := producer(value, "Transpose")) is not None and (found := permutation(node)) is not None:
            value, order = not_none(node.inputs[0]), tuple(found[i] for i in order)
        return cls(value, order)

    @classmethod
    def to(cls, value: ir.Value) -> _View:
        """The value in place of `value`, which is computed: the Transpose that alone reads it, if one does."""
        order = tuple(range(_rank(value)))
        users = list(value.consumers())
        if len(users) != 1 or not is_op(users[0], "Transpose") or value.is_graph_output():
            return cls(value, order)
        found = permutation(users[0])
        return cls(value, order) if found is None else cls(users[0].outputs[0], tuple(map(found.index, order)))

    @property
    def transposed_view(self) -> _View:
        """The view with the last two axes exchanged."""
        return _View(self.root, self.order[:-2] + self.order[-2:][::-1])

    @property
    def four(self) -> tuple[int, ...]:
        """The order of four axes; three axes get another one in front."""
        return self.order if len(self.order) == 4 else (0, *(i + 1 for i in self.order))


def fuse_attention(graph: ir.Graph, domain: str) -> int:
    """Replace attention and its derivatives in `graph` by calls of kernels in `domain`. Returns the count.

    Cotangents of a softmax are the nodes `MARK` before; those that belong to no attention become operators again.
    """
    count = 0
    casts = [n for n in graph if is_op(n, "Cast") and is_idle(n)]  # exporters write them around a softmax
    for node in [n for n in casts if not n.outputs[0].is_graph_output()]:
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        graph.remove(node, safe=True)
    marks = [n for n in graph if n.op_type == MARK and n.domain == domain]
    left = []
    for node in marks:
        if _fuse_site(graph, node, domain, count):
            count += 1
        else:
            left.append(node)
    if count:
        sort(graph)
        prune(graph)
    for node in left:
        _write_operators(graph, node)
    return count


def _write_operators(graph: ir.Graph, mark: ir.Node) -> None:
    """Replace `mark` by y·(g - Σ g·y), where NaN in y counts as 0 if it is `guarded`."""
    g, y = map(not_none, mark.inputs)
    shape = not_none(y.shape)
    axis = mark.attributes["axis"].as_int()

    def const(array: np.ndarray, name: str) -> ir.Value:
        return add_initializer(graph, ir.tensor(array, name=f"{mark.name}.{name}"))

    def add(op: str, *operands: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: int) -> ir.Value:
        node = ir.node(op, operands, attributes, name=f"{mark.name}.{op}.{len(graph)}")
        out = node.outputs[0]
        out.name, out.type, out.shape = node.name, ir.TensorType(dtype), shape.copy()
        graph.insert_before(mark, node)
        return out

    if mark.attributes["guarded"].as_int():
        y = add("Where", add("IsNaN", y, dtype=ir.DataType.BOOL), const(np.array(0, np.float32), "zero"), y)
    total = add("ReduceSum", add("Mul", g, y), const(np.array([axis]), "axes"), keepdims=1)
    total.shape = ir.Shape([1 if i == axis else d for i, d in enumerate(shape)])
    take_over(add("Mul", y, add("Sub", g, total)), mark.outputs[0])
    graph.remove(mark, safe=True)


def _fuse_site(graph: ir.Graph, grad: ir.Node, domain: str, index: int) -> bool:
    dp, p = grad.inputs
    if dp is None or p is None or _rank(p) not in _SWAPPED:
        return False
    guarded = bool(grad.attributes["guarded"].as_int())
    discarded = _Discarded.of(p, dp) if guarded else _Discarded(p, dp, [], None)
    if discarded is None:
        return False
    shown, of_p, discarding = discarded.shown, discarded.of_p, discarded.nodes
    softmax, to_p, rank = producer(p, "Softmax"), producer(_guarded_product(of_p), "MatMul"), _rank(p)
    if softmax is None or to_p is None or grad.attributes["axis"].as_int() != rank - 1:
        return False
    scores = discarded.unmasked(Scores.of(softmax.inputs[0]))
    if scores is None or softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        return False
    if any(len(_readers(x)) != 1 for x in scores.made):
        return False
    dy, vt = map(not_none, to_p.inputs)
    if not scores.fits(vt, dy):
        return False
    q, k = _View.of(scores.q), _View.of(scores.kt).transposed_view
    v = _View.of(vt).transposed_view

    forward, to_v = _readers_of_p(shown, [grad, *discarding], v)
    ds = _scaled_by(grad.outputs[0], scores)
    if to_v is None or ds is None or _View.of(to_v[1]) != _View.of(dy):
        return False
    to_q, to_k = _readers_of_ds(ds, k, q)
    hidden = [*scores.made, p, shown, dp, of_p, to_p.outputs[0], grad.outputs[0], ds]
    hidden += [v for node in discarding for v in node.outputs]
    if to_q is None or to_k is None or any(x.is_graph_output() for x in hidden):
        return False
    if any(_rank(node.outputs[0]) != rank for node in (to_q, to_k, to_v[0], forward) if node is not None):
        return False
    if _readers(dp) != [grad] or len(_readers(of_p)) != 1 or len(_readers(to_p.outputs[0])) != 1:
        return False
    if shown is not p and {*_readers(p)} != {grad, *(n for n in discarding if p in n.inputs)}:
        return False
    operands = [q, k, v, _View.of(dy)]

    for value in [*hidden, *(x for user in (*_readers(p), *_readers(shown)) for x in user.outputs)]:
        _ask_others(value, [q.root, k.root, v.root])
    attributes = {"divides": int(scores.divides), "guarded": int(guarded)}
    extras = [scores.scale, scores.mask]
    calls = []
    if forward is not None:
        calls.append(("Attention", [q, k, v], [_View.to(forward.outputs[0])], forward, extras))
    dq, dk, dv = (_View.to(_guard_of(node)) for node in (to_q, to_k, to_v[0]))
    results = [dq, dk.transposed_view, dv]
    calls.append(("AttentionGrad", [operands[3], *operands[:3]], results, to_q, extras))
    for name, read, written, after, more in calls:
        views = [*operands[:3], *written] if name == "Attention" else [*operands, *written]
        order = [i for view in views for i in view.four]
        _call(graph, after, domain, f"native.{name}.{index}", [*(x.root for x in read), *more], written,
              {**attributes, "order": order})  # fmt: skip
    return True


@dataclass(frozen=True)
class _Discarded:
    """Probabilities of which a Where sets some to 0, forward and backward.

    Exporters write ``Where(IsNaN(p), 0, p)``. The operator Attention is written out as ``Where(dead, 0, p)``, where the
    mask of a query that is `dead`, as it sees no key, is 0. Either way, queries get 0 that see no key.

    Attributes:
        shown: the probabilities with zeros.
        of_p: their cotangent.
        nodes: the nodes that set zeros.
        dead: the condition, where it is not IsNaN.
    """

    shown: ir.Value
    of_p: ir.Value
    nodes: Sequence[ir.Node]
    dead: ir.Value | None

    @classmethod
    def of(cls, p: ir.Value, dp: ir.Value) -> _Discarded | None:
        """Match the Where before the cotangent `dp` of probabilities `p`. Returns None without a match."""
        back = producer(dp, "Where")
        condition = None if back is None else back.inputs[0]
        ahead = [n for n in p.consumers() if is_op(n, "Where") and n.inputs[0] is condition and n.inputs[2] is p]
        if back is None or condition is None or back.inputs[2] is None or len(ahead) != 1:
            return None
        if not all(is_number(where.inputs[1], 0) for where in (back, ahead[0])):
            return None
        found = ahead[0].outputs[0], back.inputs[2], [ahead[0], back]
        asked = producer(condition, "IsNaN")
        if asked is None:
            return cls(*found, condition)
        alone = asked.inputs[0] is p and {*condition.consumers()} == {*found[2]} and not condition.is_graph_output()
        return cls(found[0], found[1], [asked, *found[2]], None) if alone else None

    def unmasked(self, scores: Scores | None) -> Scores | None:
        """`scores` with a mask that hides all keys from `dead` queries; None if `dead` does not come from a mask."""
        if scores is None or self.dead is None:
            return scores
        found = _UNMASKED.match(scores.mask)
        if found is None or found["dead"] is not self.dead:
            return None
        axes, lowest = constant(found["axes"]), constant(found["lowest"])
        if axes is None or axes.tolist() != [-1] or lowest is None or not (lowest == -np.inf).all():
            return None
        return replace(scores, mask=found["mask"])


def _guarded_product(value: ir.Value) -> ir.Value | None:
    """The product in a Where that is there for products over nothing, which the kernels know; else `value`."""
    where = producer(value, "Where")
    product = None if where is None else producer(where.inputs[1], "MatMul")
    return value if product is None or _guard_of(product) is not value else product.outputs[0]


def _guard_of(product: ir.Node) -> ir.Value:
    """The result of a product, or of the Where that sets it to 0 for an empty sum."""
    value, users = product.outputs[0], _readers(product.outputs[0])
    found = _GUARD.match(users[0].outputs[0]) if len(users) == 1 and not value.is_graph_output() else None
    shape = None if found is None else found["shape"].producer()
    if found is None or shape is None or found["product"] is not value:
        return value
    start, end = (shape.attributes.get_int(name, None) for name in ("start", "end"))
    of, summed = found["of"], product.inputs[0]
    dims = None if of.shape is None else of.shape[start:end]
    if dims is None or len(dims) != 1 or summed is None or summed.shape is None:
        return value
    return users[0].outputs[0] if same_dim(dims[0], summed.shape[-1]) else value


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read `value`, except those that read its sizes for guards."""
    return [user for user in value.consumers() if not _asks(user)]


def _asks(node: ir.Node) -> bool:
    if not is_op(node, "Shape") or node.outputs[0].is_graph_output():
        return False
    compared = node.outputs[0].consumers()
    return all(is_op(c, "Greater") and all(is_op(w, "Where") for w in c.outputs[0].consumers()) for c in compared)


def _ask_others(value: ir.Value, others: Sequence[ir.Value]) -> None:
    """Have guards that read a size of `value`, which is to be removed, read it from one of `others`."""
    for node in [user for user in value.consumers() if _asks(user)]:
        start, end = (node.attributes.get_int(name, None) for name in ("start", "end"))
        dims = [] if value.shape is None else list(value.shape[start:end])
        for other in others if len(dims) == 1 else ():
            axes = [i for i, d in enumerate(other.shape or ()) if same_dim(d, dims[0])]
            if axes:
                node.replace_input_with(0, other)
                node.attributes["start"] = ir.AttrInt64("start", axes[0])
                node.attributes["end"] = ir.AttrInt64("end", axes[0] + 1)
                break


def _call(
    graph: ir.Graph, after: ir.Node, domain: str, name: str, inputs: Sequence[ir.Value | None],
    results: Sequence[_View], attributes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Insert a call after `after` that replaces the producers of `results`."""
    kernel = name.split(".")[1]
    node = ir.Node(domain, kernel, inputs, attributes_of(attributes),
                   num_outputs=len(results), name=name)  # fmt: skip
    graph.insert_after(after, node)
    for i, (old, new) in enumerate(zip((r.root for r in results), node.outputs)):
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, old.name = old.name, f"{name}.{i}"


def _readers_of_p(
    p: ir.Value, known: Sequence[ir.Node], v: _View
) -> tuple[ir.Node | None, tuple[ir.Node, ir.Value] | None]:
    """P·V, if that is still there, and Pᵀ·dY with dY; nothing else may read P."""
    forward = to_v = None
    for user in _readers(p):
        if user in known:
            continue
        if is_op(user, "MatMul") and user.inputs[0] is p and user.inputs[1] is not None and forward is None:
            if _View.of(user.inputs[1]) != v:
                return None, None
            forward = user
        elif is_op(user, "Transpose") and permutation(user) == _SWAPPED[_rank(p)] and to_v is None:
            turned = user.outputs[0]
            users = _readers(turned)
            if len(users) != 1 or not is_op(users[0], "MatMul") or users[0].inputs[0] is not turned:
                return None, None
            dy = users[0].inputs[1]
            if dy is None or turned.is_graph_output():
                return None, None
            to_v = users[0], dy
        else:
            return None, None
    return forward, to_v


def _readers_of_ds(ds: ir.Value, k: _View, q: _View) -> tuple[ir.Node | None, ir.Node | None]:
    """dS·K and Qᵀ·dS, which must be all that reads dS."""
    to_q = to_k = None
    for user in _readers(ds):
        a, b = user.inputs[:2] if is_op(user, "MatMul") else (None, None)
        if a is ds and b is not None and to_q is None and _View.of(b) == k:
            to_q = user
        elif b is ds and a is not None and to_k is None and _View.of(a).transposed_view == q:
            to_k = user
        else:
            return None, None
    return to_q, to_k


def _scaled_by(ds: ir.Value, scores: Scores) -> ir.Value | None:
    """dS, with the scale of the scores applied; None if it has another scale."""
    if scores.scale is None:
        return ds
    users = _readers(ds)
    if len(users) != 1 or ds.is_graph_output() or not is_op(users[0], "Div" if scores.divides else "Mul"):
        return None
    a, b = users[0].inputs
    fits = (a is ds and b is scores.scale) or (not scores.divides and b is ds and a is scores.scale)
    return users[0].outputs[0] if fits else None


def _rank(value: ir.Value) -> int:
    return -1 if value.shape is None else len(value.shape)

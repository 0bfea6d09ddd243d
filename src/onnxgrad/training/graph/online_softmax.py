"""Attention by blocks of queries and of keys, with an online softmax: of all scores, two numbers per query are kept.

FlashAttention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691) in standard operators: a Scan over blocks
of queries around a Scan over blocks of keys, which carries the largest score m, the sum l and the result Z so far:

    m' = max(m, max S)   E = exp(S - m')   l' = l·exp(m - m') + Σ E   Z' = Z·exp(m - m') + E·V;   Y = Z/l

The backward pass has Y, m and l, and recomputes the scores of a block, with rows of dY/l in the place of rows of P =
E/l:

    dS = E∘((dY/l)·Vᵀ - (Σ dY∘Y)/l + dl)   dV = Eᵀ·(dY/l);   Q and K by pulling S back to them

(The papers keep m + log l. Where a mask is a large negative number, and hides all, m is that number, and log l is lost
in the sum. As Y does not depend on m, where E and l are taken with the same one, it counts as a constant.)

A block that is entirely masked is skipped, forward and backward. By |q·k| ≤ ‖q‖‖k‖, the largest possible score of the
block is known; if its exponential is 0 beside the scores that each query has seen, so are all others. For causal
attention that saves half of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from ml_dtypes import finfo

from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.control_flow.row_blocks import RowBlocks
from onnxgrad.engine import reverse
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import dependents
from onnxgrad.ir.match import constant_tensor, not_none
from onnxgrad.ir.subgraphs import cond, empty, formal, give
from onnxgrad.lower.attention import product
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import OWN, General

#: exp of this is 0, also in float64.
_NOTHING = -750.0

#: Operators through which a larger product gives no smaller score, where it enters by any input, or by these.
_RISING: Mapping[str, Sequence[int]] = {
    "Add": (0, 1), "Sub": (0,), "Where": (1, 2), "Cast": (0,), "Identity": (0,), "Tanh": (0,), "Max": (0, 1),
    "Min": (0, 1), "Clip": (0,), "Expand": (0,),
}  # fmt: skip


@dataclass
class BlockedScores:
    """The queries and keys of attention, in blocks.

    Attributes:
        q, kt, v: queries [.., S, D], keys [.., D, T] and values [.., T, E]; several heads of queries may share one of
            keys.
        product: the name of q·kt.
        nodes: the elementwise nodes from the product to the scores, in order; masks may be computed among them.
        moving: those of them that depend on it.
        score: the operand of the softmax.
        reads: the other operands of the nodes, with their axes of queries and of keys; None for a missing axis.
        hides_lost: True if the result is 0 for a query that sees no key, where a softmax is no number.
    """

    q: Var
    kt: Var
    v: Var
    product: ir.Value
    nodes: Sequence[ir.Node]
    moving: set[ir.Node]
    score: ir.Value
    reads: Mapping[ir.Value, tuple[int | None, int | None]]
    hides_lost: bool = False

    @property
    def may_hide(self) -> bool:
        """True if a mask may hide whole blocks, in a way that can be detected."""
        made = {v for n in self.moving for v in n.outputs} | {self.product}
        for node in self.moving:
            entered = [i for i, v in enumerate(node.inputs) if v in made]
            if not set(entered) <= set(_RISING.get(node.op_type, ())) and not _is_scaled(node):
                return False
        others = {v for n in self.moving for v in n.inputs if v is not None and v not in made}
        inside = {v for n in self.nodes for v in n.outputs}
        return any(v in inside or self.reads.get(v, (None, None))[1] is not None for v in others)

    def write(self, b: Builder, values: dict[ir.Value, Var]) -> None:
        """Add the results of the nodes to `values`, unless they are present."""
        for node in self.nodes:
            if node.outputs[0] in values:
                continue
            operands = [None if v is None else values.get(v) or b.var(v) for v in node.inputs]
            if node.op_type == "Expand":  # its readers broadcast as well
                values[node.outputs[0]] = operands[0]  # type: ignore[assignment]
            else:
                attributes: dict[str, Any] = dict(node.attributes.items())
                values[node.outputs[0]] = b.emit(node.op_type, *operands, **attributes)


def _is_scaled(node: ir.Node) -> bool:
    """True if `node` multiplies or divides by a positive constant."""
    if node.op_type not in ("Mul", "Div"):
        return False
    given = node.inputs[1:] if node.op_type == "Div" else node.inputs
    known = [constant_tensor(v) for v in given]
    return any(t is not None and bool((t.numpy() > 0).all()) for t in known)


def attend(b: Builder, scores: BlockedScores, queries: int, keys: int) -> Var:
    """The result of attention, for at most so many `queries` and `keys` at a time."""
    return _Blocked(b, scores, queries, keys).result()


@dataclass
class _Column:
    """A tensor that is cut: `whole` has blocks of queries first, then blocks of keys, as far as it has them."""

    whole: Var
    has_rows: bool
    has_keys: bool


@dataclass
class _Blocked:
    b: Builder
    scores: BlockedScores
    most_queries: int
    most_keys: int
    columns: dict[ir.Value, _Column] = field(init=False, default_factory=dict)

    def result(self) -> Var:
        """Emit the Scan. Returns its result as one tensor."""
        b, s = self.b, self.scores
        self.rows = RowBlocks.of(b, s.q, s.q.rank - 2, self.most_queries)
        self.keys = RowBlocks.of(b, s.kt, s.kt.rank - 1, self.most_keys)
        self._cut(s.q, s.q.rank - 2, None)
        self._cut(s.kt, None, s.kt.rank - 1)
        self._cut(s.v, None, s.v.rank - 2)
        for value, (row, key) in s.reads.items():
            self._cut(b.var(value), row, key)
        self.real = self._real() if self.keys.filled else None
        self.norms = (self._norms(s.q, -1), self._norms(s.kt, -2)) if s.may_hide else None
        outer, body = empty(b, "queries")
        values = self._slices(outer, body, "rows")
        results = self._forward(outer, values)
        give(outer, results)
        with b.record() as nodes:
            stacks = scan(b, body, [], self._read("rows"), [ScanAxis()] * len(results))
        node = next(n for n in nodes if n.op_type == "Scan")
        node.meta[OWN] = General(self._pull)
        rank = s.q.rank
        turned = b.Transpose(stacks[0], perm=[*range(1, rank - 1), 0, rank - 1, rank])
        return self.rows.join_blocks(b, turned, rank - 2)

    # --- columns -------------------------------------------------------------------------------

    def _cut(self, x: Var, row: int | None, key: int | None) -> None:
        b, given, lead = self.b, x, []
        if key is not None:
            x, lead = self.keys.cut(b, x, key), [key]
        if row is not None:
            x, lead = self.rows.cut(b, x, row), [row, *(k + 1 for k in lead)]
        if lead:
            x = b.Transpose(x, perm=[*lead, *(i for i in range(x.rank) if i not in lead)])
        self.columns[given.value] = _Column(x, row is not None, key is not None)

    def _real(self) -> Var:
        """A mask of the keys of each block that are not padding."""
        b, keys = self.b, self.keys
        total = b.Mul(keys.count, keys.each)
        places = b.Range(b.const(0), b.Squeeze(total, [0]), b.const(1))
        there = b.reshape(places < b.Squeeze(b.Sub(total, keys.missing), [0]), b.join(keys.count, keys.each))
        there.value.shape = ir.Shape([keys.steps, keys.rows])
        self.columns[there.value] = _Column(there, False, True)
        return there

    def _norms(self, x: Var, axis: int) -> ir.Value:
        """The largest ‖row‖² of each block."""
        b, column = self.b, self.columns[x.value]
        squares = b.ReduceSumSquare(column.whole, [axis], keepdims=0)
        largest = b.ReduceMax(squares, list(range(1, squares.rank)), keepdims=0)
        self.columns[largest.value] = _Column(largest, column.has_rows, column.has_keys)
        return largest.value

    def _all(self, kind: str) -> list[tuple[ir.Value, _Column]]:
        return [(v, c) for v, c in self.columns.items() if (c.has_rows if kind == "rows" else c.has_keys)]

    def _read(self, kind: str, values: Mapping[ir.Value, Var] | None = None) -> list[tuple[Var, ScanAxis]]:
        return [(c.whole if values is None else values[v], ScanAxis()) for v, c in self._all(kind)]

    def _slices(
        self, b: Builder, body: ir.Graph, kind: str, outer: Mapping[ir.Value, Var] | None = None
    ) -> dict[ir.Value, Var]:
        """The values of a step: slices, which become inputs of its body, and values shared by all steps."""
        values = {v: b.var((c.whole if outer is None else outer[v]).value) for v, c in self.columns.items()}
        for v, _ in self._all(kind):
            values[v] = _slice(b, body, values[v])
        return values

    # --- steps ---------------------------------------------------------------------------------

    def _forward(self, outer: Builder, values: Mapping[ir.Value, Var]) -> list[Var]:
        """The result, the largest scores, and the sums of a block of queries."""
        s = self.scores
        q, v = values[s.q.value], values[s.v.value]
        b, body = empty(outer, "keys")
        dtype = not_none(s.score.dtype)
        lowest = outer.const(finfo(dtype.numpy()).min, dtype)
        heads = outer.shape_of(q, 0, q.rank - 1)
        first = []
        for start, wide in ((lowest, 1), (outer.const(0, dtype), 1), (outer.const(0, dtype), v.dims[-1])):
            size: Any = [1] if start is lowest or isinstance(wide, int) else outer.shape_of(v, v.rank - 1)
            size = [wide] if isinstance(wide, int) else size
            x = outer.Expand(start, outer.join(heads, size))
            x.value.shape = ir.Shape([*q.dims[:-1], wide])
            first.append(x)
        states = [formal(b, x.value, hint) for x, hint in zip(first, ("most", "sum", "result"))]
        body.inputs.extend(x.value for x in states)
        inside = self._slices(b, body, "keys", values)

        def step(w: Builder) -> list[Var]:
            most, total, result = (w.var(x.value) for x in states)
            score = self._score(w, inside)
            new = w.Max(most, w.ReduceMax(score, [-1], keepdims=1))
            e, shrunk = w.Exp(score - new), w.Exp(most - new)
            part = w.cast_like(product(w, w.cast_like(e, v), w.var(inside[s.v.value].value)), e)
            return [new, total * shrunk + w.ReduceSum(e, [-1], keepdims=1), result * shrunk + part]

        give(b, self._unless_hidden(b, inside, (), states[0], step, lambda w: [w.var(x.value) for x in states]))
        for out, like in zip(body.outputs, states):
            out.type, out.shape = like.value.type, like.value.shape
        most, total, result = scan(outer, body, first, self._read("keys", values), [])
        if s.hides_lost:
            total = outer.Where(outer.Equal(total, 0.0), 1.0, total)
        return [outer.cast_like(result / total, v), most, total]

    def _score(self, b: Builder, inside: Mapping[ir.Value, Var]) -> Var:
        """The scores of a block."""
        s = self.scores
        values = {v: b.var(x.value) for v, x in inside.items()}
        values[s.product] = product(b, values[s.q.value], values[s.kt.value])
        s.write(b, values)
        score = values[s.score]
        return score if self.real is None else b.Where(values[self.real.value], score, -np.inf)

    def _unless_hidden(
        self, b: Builder, inside: dict[ir.Value, Var], moved: Sequence[ir.Value], seen: Var,
        step: Callable[[Builder], list[Var]], otherwise: Callable[[Builder], list[Var]],
    ) -> list[Var]:  # fmt: skip
        """Write `step`, or `otherwise` for a block whose scores are negligible next to those `seen`.

        Masks are computed once, except those that depend on `moved`, which `step` is to differentiate.
        """
        s = self.scores
        if self.norms is None:
            return step(b)
        bound = b.Sqrt(inside[self.norms[0]] * inside[self.norms[1]])
        values = {**inside, s.product: b.cast_like(bound, b.var(s.product))}
        s.write(b, values)
        pulled = dependents(s.nodes, [s.product, *moved])
        inside.update((v, values[v]) for n in s.nodes for v in n.outputs if v not in pulled)
        largest = b.ReduceMax(values[s.score], None, keepdims=0)
        hidden = b.Less(largest - b.ReduceMin(seen, None, keepdims=0), b.const(_NOTHING, largest.dtype))
        like = [x.value for x in otherwise(b)]
        return cond(b, hidden, otherwise, step, like)

    # --- the way back --------------------------------------------------------------------------

    def _pull(self, op: Op, cotangents: Any) -> dict[ir.Value, Var]:
        """dS = E∘((dY/l)·Vᵀ - (Σ dY∘Y)/l + dl), dV = Eᵀ·(dY/l); S is pulled back to queries and keys"""
        b = op.builder
        y, most, total = (op.output(i) for i in range(3))
        gy, _, g_total = cotangents
        gy = b.zeros_like(y) if gy is None else gy
        wide = b.cast_like(gy, total) / total
        minus = b.Neg(b.ReduceSum(wide * b.cast_like(y, total), [-1], keepdims=1))
        kept = [most, b.cast_like(wide, gy), minus if g_total is None else minus + g_total]
        moved = [v for v, c in self.columns.items() if c.whole.value in op.active and v not in (self.norms or ())]
        outer, body = empty(b, "queries")
        sums = {v: formal(outer, c.whole.value, "sum") for v in moved if not (c := self.columns[v]).has_rows}
        body.inputs.extend(x.value for x in sums.values())
        values = self._slices(outer, body, "rows")
        own = [_slice(outer, body, x) for x in kept]
        parts = self._backward(outer, values, own, moved)
        stacked = [v for v in moved if v not in sums]
        give(outer, [*(total + parts[v] for v, total in sums.items()), *(parts[v] for v in stacked)])
        for out, x in zip(body.outputs, sums.values()):
            out.type, out.shape = x.value.type, x.value.shape
        zeros = [b.zeros_like(b.var(self.columns[v].whole.value)) for v in sums]
        columns = [(b.var(x.value), slot) for x, slot in self._read("rows")] + [(x, ScanAxis()) for x in kept]
        results = scan(b, body, zeros, columns, [ScanAxis()] * len(stacked))
        return {self.columns[v].whole.value: g for v, g in zip([*sums, *stacked], results)}

    def _backward(
        self, outer: Builder, values: Mapping[ir.Value, Var], own: Sequence[Var], moved: Sequence[ir.Value]
    ) -> dict[ir.Value, Var]:
        """The cotangents from a block of queries."""
        s = self.scores
        b, body = empty(outer, "keys")
        sums = {v: formal(b, values[v].value, "sum") for v in moved if not self.columns[v].has_keys}
        body.inputs.extend(x.value for x in sums.values())
        inside = self._slices(b, body, "keys", values)
        stacked = [v for v in moved if v not in sums]

        def step(w: Builder) -> list[Var]:
            most, gy, minus = (w.var(x.value) for x in own)
            with w.record() as nodes:
                e = w.Exp(self._score(w, inside) - most)
                part = product(w, w.cast_like(e, gy), w.var(inside[s.v.value].value))
            found = reverse(w, nodes, {part.value: gy, e.value: minus}, [inside[v].value for v in moved])
            parts = {v: found.get(inside[v].value) or w.zeros_like(inside[v]) for v in moved}
            return [*(w.var(x.value) + parts[v] for v, x in sums.items()), *(parts[v] for v in stacked)]

        def skip(w: Builder) -> list[Var]:
            return [*(w.var(x.value) for x in sums.values()), *(w.zeros_like(w.var(inside[v].value)) for v in stacked)]

        give(b, self._unless_hidden(b, inside, moved, b.var(own[0].value), step, skip))
        for out, like in zip(body.outputs, [*sums.values(), *(inside[v] for v in stacked)]):
            out.type, out.shape = like.value.type, like.value.shape
        zeros = [outer.zeros_like(values[v]) for v in sums]
        results = scan(outer, body, zeros, self._read("keys", values), [ScanAxis()] * len(stacked))
        return dict(zip([*sums, *stacked], results))


def _slice(b: Builder, body: ir.Graph, x: Var) -> Var:
    """A slice of `x` along its first axis, as an input of the body of a Scan."""
    value = ir.Value(name=b.names.fresh("slice"), type=x.value.type, shape=ir.Shape(x.dims[1:]))
    body.inputs.append(value)
    return b.var(value)

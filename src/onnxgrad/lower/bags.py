"""Loops over bags: a Loop whose steps reduce blocks of rows, written for all blocks at once.

PyTorch exports EmbeddingBag as a Loop. A step slices the rows between two offsets, and reduces them. The older exporter
slices the indices and gathers inside of the step. The newer one slices the gathered rows, chooses among several forms
by If, and collects the results in a sequence.

A value of a step becomes one value of all steps, with the steps as its first axis. The rows of all slices are gathered
one slice after the other, and reduced by the numbers of their slices. If the offsets are 0, L, 2L, … of a flattened
matrix of L columns, the slices are the rows of that matrix, and are reduced along its second axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.infer.loops import always_goes_on
from onnxgrad.ir.match import FLOATS, Dim, constant, is_number, is_op, not_none, producer, rank, single_constant
from onnxgrad.ir.shapes import same_dims
from onnxgrad.lower.offsets import Offsets, axes_of, find_counter, is_all, is_plain_slice
from onnxgrad.lower.registry import replace

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Equal", "Less", "Greater")
_CASTS = ("Cast", "CastLike", "Identity")
_VIEWS = ("Reshape", "Unsqueeze", *_CASTS)
_REDUCTIONS = {"ReduceSum": "add", "ReduceMean": "add", "ReduceMax": "max", "ReduceMin": "min"}
_OTHERS = ("Constant", "Slice", "Gather", "If", "SequenceInsert", "Expand", "Concat", "Shape", "Size")
_INT64 = int(ir.DataType.INT64)


class _NoForm(Exception):
    """A value of a step has no form for all steps."""


@dataclass(frozen=True)
class _Slices:
    """Slices of the steps: from `starts` to `ends`, of [steps]; or each of `length` rows, one after the other."""

    starts: ir.Value | None = None
    ends: ir.Value | None = None
    length: int = 0


@dataclass(frozen=True)
class _Lifted:
    """The value of all steps.

    Attributes:
        var: the values of the steps along a first axis; the rows of the slices; or a value that all steps share.
        is_stepped: whether its first axis is that of the steps.
        slices: the slices whose rows it has, if it has any.
    """

    var: Var
    is_stepped: bool = False
    slices: _Slices | None = None

    @property
    def rank(self) -> int:
        """The number of axes in a step."""
        return self.var.rank - self.is_stepped


def write_bags(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node` if it is such a Loop, or joins the sequence of one; the new nodes, or None."""
    if is_op(node, "ConcatFromSequence"):
        loop = producer(node.inputs[0], "Loop")
        is_plain = not node.attributes.get_int("axis", 0) and not node.attributes.get_int("new_axis", 0)
        element = _appended(loop, node.inputs[0]) if loop is not None and is_plain and _has_bags(loop) else None
        return None if loop is None or element is None else _replace(builder, node, loop, [element])
    if not is_op(node, "Loop") or len(node.inputs) != 2 or not always_goes_on(node) or not _has_bags(node):
        return None
    return _replace(builder, node, node, node.attributes["body"].as_graph().outputs[1:])


def _has_bags(loop: ir.Node) -> bool:
    """True if a Loop has the nodes of loops over bags alone."""
    nodes = [n for graph in scopes(loop.attributes["body"].as_graph()) for n in graph]
    known = (*_ELEMENTWISE, *_VIEWS, *_REDUCTIONS, *_OTHERS)
    return any(is_op(n, _REDUCTIONS) for n in nodes) and all(is_op(n, known) for n in nodes)


def _appended(loop: ir.Node, sequence: ir.Value | None) -> ir.Value | None:
    """The value that each step appends to a sequence, which is empty at first; None if it is not made so."""
    place = next(i for i, v in enumerate(loop.outputs) if v is sequence)
    body = loop.attributes["body"].as_graph()
    insert = producer(body.outputs[1 + place], "SequenceInsert")
    if insert is None or len(insert.inputs) > 2 or insert.inputs[0] is not body.inputs[2 + place]:
        return None
    return insert.inputs[1] if producer(loop.inputs[2 + place], "SequenceEmpty") is not None else None


def _replace(
    builder: Builder, node: ir.Node, loop: ir.Node, outputs: Sequence[ir.Value | None]
) -> list[ir.Node] | None:
    """Replace `node` by the `outputs` of a step of `loop` for all steps; None where one has no such form."""

    def write(b: Builder, _: ir.Node) -> list[Var] | None:
        try:
            lift = _Lift(b, loop)
            found = [lift.spread(lift(v)) for v in outputs]
        except (_NoForm, NotDifferentiable):
            return None
        if node is loop:
            return found
        return [b.Squeeze(found[0], [1])] if found[0].dims[1] == 1 else None

    return replace(builder, node, write)


class _Lift:
    """Writes values of the steps of a Loop for all steps, with `b`."""

    def __init__(self, b: Builder, loop: ir.Node) -> None:
        body = loop.attributes["body"].as_graph()
        counter = find_counter(loop)
        if counter is None:
            raise _NoForm
        self.b = b
        self.inner = {v for g in scopes(body) for n in g for v in n.outputs}
        self.inner |= {v for g in scopes(body) for v in (*g.inputs, *g.initializers.values())}
        self.offsets = Offsets(*counter, b.infer.context)
        self.count = b.reshape(counter[1], [])
        self.values = {counter[0]: _Lifted(b.Range(0, self.count, 1), is_stepped=True)}

    def __call__(self, value: ir.Value | None) -> _Lifted:
        """`value` of a step for all steps."""
        if value is None:
            raise _NoForm
        if value not in self.values:
            self.values[value] = self._of_step(value) if value in self.inner else _Lifted(self.b.var(value))
        return self.values[value]

    def _of_step(self, value: ir.Value) -> _Lifted:
        node, known = value.producer(), constant(value)
        if known is not None:
            return _Lifted(self.b.const(known))
        if node is None:
            raise _NoForm
        if is_op(node, "If"):
            return self._choose(node, value.index() or 0)
        if is_op(node, "Slice") and node.inputs[0] not in self.inner:
            return self._slice(node)
        operands = [self(v) for v in node.inputs]
        if not any(x.is_stepped or x.slices for x in operands):
            attributes: dict[str, Any] = dict(node.attributes)
            return _Lifted(self.b.emit(node.op_type, *(x.var for x in operands), **attributes))
        return self._write(node, operands)

    def _write(self, node: ir.Node, operands: list[_Lifted]) -> _Lifted:
        x = operands[0]
        if is_op(node, "Gather") and node.attributes.get_int("axis", 0) == 0 and not (x.is_stepped or x.slices):
            return with_changes(operands[1], var=self.b.Gather(x.var, operands[1].var, axis=0))
        if is_op(node, _CASTS):
            to = operands[1].var.dtype if is_op(node, "CastLike") else x.var.dtype
            to = ir.DataType(node.attributes["to"].as_int()) if is_op(node, "Cast") else to
            return x if to == x.var.dtype else with_changes(x, var=self.b.Cast(x.var, to=int(to or 0)))
        if is_op(node, "Unsqueeze") and (axes := axes_of(node)) is not None:
            axes = [a % (x.rank + len(axes)) for a in axes]
            if x.slices is None or 0 not in axes:
                return with_changes(x, var=self.b.Unsqueeze(x.var, [a + x.is_stepped for a in axes]))
        if is_op(node, "Reshape") and not x.slices and is_all([-1], node.inputs[1]) and {*x.var.dims[1:]} <= {1}:
            return with_changes(x, var=self.b.reshape(x.var, [-1, 1]))
        if is_op(node, _REDUCTIONS) and x.slices and axes_of(node) == [0]:
            return self._reduce(node, x.var, x.slices)
        if not is_op(node, _ELEMENTWISE):
            raise _NoForm
        rows = [o for o in operands if o.slices]
        if not rows:
            most = max(o.rank for o in operands)
            return _Lifted(self.b.emit(node.op_type, *(self.spread(o, most) for o in operands)), is_stepped=True)
        first = rows[0]
        if any((o.slices, o.rank) != (first.slices, first.rank) for o in rows) or any(
            o.is_stepped or o.rank >= first.rank for o in operands if not o.slices
        ):
            raise _NoForm
        return with_changes(first, var=self.b.emit(node.op_type, *(o.var for o in operands)))

    def spread(self, x: _Lifted, count: int | None = None) -> Var:
        """`x` with the steps first and at least `count` axes behind; if `count` is given, a shared value as it is."""
        if x.slices or not (x.is_stepped or count is not None):
            raise _NoForm
        missing = count - x.rank if x.is_stepped and count is not None else 0
        return self.b.Unsqueeze(x.var, list(range(1, 1 + missing))) if missing > 0 else x.var

    def _choose(self, node: ir.Node, place: int) -> _Lifted:
        """The results of an If, where the branch depends on the step."""
        then, other = (node.attributes[n].as_graph().outputs[place] for n in ("then_branch", "else_branch"))
        which = self(node.inputs[0])
        if (known := which.var.const) is not None and known.size == 1:
            return self(then if known.all() else other)
        equal = producer(node.inputs[0], "Equal")
        one, two = producer(then, "Slice"), producer(other, "Slice")
        if equal is not None and self.offsets.length(*equal.inputs):
            return self(other)  # no slice is empty
        if one is not None and two is not None and equal is not None and one.inputs[:2] == two.inputs[:2]:
            if not self.offsets.are_ends_of_last(one.inputs[2], equal, two.inputs[2]):
                raise _NoForm
            return self(other)
        x, y = self(then), self(other)
        most = max(x.rank, y.rank)
        if not which.is_stepped or which.rank > most:
            raise _NoForm
        return _Lifted(self.b.Where(*(self.spread(v, most) for v in (which, x, y))), is_stepped=True)

    # --- slices -----------------------------------------------------------------------------------

    def _slice(self, node: ir.Node) -> _Lifted:
        source, first, last = node.inputs[:3]
        if source is None or not is_plain_slice(node):
            raise _NoForm
        b = self.b
        if self.offsets.is_element(node):
            return _Lifted(b.Gather(b.var(source), self(first).var, axis=0), is_stepped=True)
        if length := self.offsets.length(first, last, source):
            slices = _Slices(length=length)
        else:
            size, bounds = b.size_of(b.var(source), 0), [self(first), self(last)]
            if any(not v.is_stepped or v.var.dims[1:] != (1,) for v in bounds):
                raise _NoForm
            places = [b.Cast(b.Squeeze(v.var, [1]), to=_INT64) for v in bounds]
            starts, ends = [b.Max(b.Min(b.Where(v < 0, v + size, v), size), 0) for v in places]
            slices = _Slices(starts.value, ends.value)
        rows = self._rows(source, slices)
        if not rows.slices:
            raise _NoForm
        return rows

    def _rows(self, source: ir.Value | None, slices: _Slices) -> _Lifted:
        """The rows of `source` in `slices`: where it is computed row by row, from the rows of its operands.

        A number that fills all of `source` is returned without axes.
        """
        if source is None or source.shape is None:
            raise _NoForm
        b, node, count = self.b, source.producer(), len(source.shape)
        inputs = [] if node is None else list(node.inputs)
        if node is not None and is_op(node, _CASTS):
            return self._write(node, [self._rows(inputs[0], slices), *map(self, inputs[1:])])
        if is_op(node, "Gather") and rank(inputs[1]) == 1 and node.attributes.get_int("axis", 0) == 0:
            return self._write(node, [self(inputs[0]), self._rows(inputs[1], slices)])
        if is_op(node, "Unsqueeze") and count == 2 and axes_of(node) in ([1], [-1]):
            x = self._rows(inputs[0], slices)
            return self._write(node, [x]) if x.slices else x
        if is_op(node, "Expand") and (filled := single_constant(inputs[0])) is not None:
            return _Lifted(b.const(filled.reshape(())))
        shapes = [v.shape for v in inputs if v is not None and v.shape is not None and len(v.shape) == count > 0]
        if is_op(node, "Mul") and len(shapes) == 2 and all(same_dims(d[:1], source.shape[:1]) for d in shapes):
            x, y = (self._rows(v, slices) for v in inputs)
            if not y.slices and is_number(y.var.value, 1):
                return x
            return self._write(node, [x, y]) if x.slices or y.slices else _Lifted(b.Mul(x.var, y.var))
        if not slices.length:
            return _Lifted(b.Gather(b.var(source), self._bags(slices)[2], axis=0), slices=slices)
        dims = [*([] if self.offsets.steps is None else [self.offsets.steps]), slices.length]
        matrix = source
        while count == 1 and not _is_of(matrix, dims) and (flat := producer(matrix, "Reshape")) is not None:
            matrix = not_none(flat.inputs[0])
        if _is_of(matrix, dims):
            return _Lifted(b.var(matrix), True, slices)
        shape = b.join(b.reshape(self.count, [1]), [slices.length], b.shape_of(b.var(source), 1))
        return _Lifted(b.reshape(source, shape), True, slices)

    def _bags(self, slices: _Slices) -> tuple[Var, Var, Var]:
        """The number of rows of each slice; of all their rows, the numbers of the slices and the places."""
        b = self.b
        starts, ends = (b.var(not_none(v)) for v in (slices.starts, slices.ends))
        counts = b.Max(ends - starts, 0)
        behind = b.CumSum(counts, 0)
        marks = b.Expand(b.const(np.int64(0)), b.ReduceSum(counts, [0]) + 1)  # one more, for empty slices at the end
        ones = b.Expand(b.const(np.int64(1)), b.shape_of(counts))
        bags = b.Slice(b.CumSum(b.ScatterElements(marks, behind, ones, axis=0, reduction="add"), 0), [0], [-1], [0])
        return counts, bags, b.places_along(bags, 0) + b.Gather(starts - (behind - counts), bags, axis=0)

    def _reduce(self, node: ir.Node, rows: Var, slices: _Slices) -> _Lifted:
        b, keepdims = self.b, node.attributes.get_int("keepdims", 1)
        if slices.length:
            return _Lifted(b.emit(node.op_type, rows, [1], keepdims=keepdims), is_stepped=True)
        counts, bags, _ = self._bags(slices)
        x, reduction = b.widen(rows), _REDUCTIONS[node.op_type]
        if x.dtype not in FLOATS:
            raise _NoForm
        start = b.const({"add": 0, "max": -np.inf, "min": np.inf}[reduction], x.dtype)
        table = b.Expand(start, b.join(b.reshape(self.count, [1]), b.shape_of(x, 1)))
        index = b.Expand(b.reshape(bags, [-1, *[1] * (x.rank - 1)]), b.shape_of(x))
        y = b.ScatterElements(table, index, x, axis=0, reduction=reduction)
        if is_op(node, "ReduceMean"):
            y = y / b.reshape(b.cast_like(b.Max(counts, 1), y), [-1, *[1] * (x.rank - 1)])
        y = b.cast_like(y, rows)
        return _Lifted(b.Unsqueeze(y, [1]) if keepdims else y, is_stepped=True)


def _is_of(value: ir.Value, dims: Sequence[Dim]) -> bool:
    return value.shape is not None and same_dims(value.shape.dims, dims)

"""vmap as a transform of whole models: a model of one row becomes a model of a batch of rows.

Nodes that depend on a mapped input are batched over all rows (see `onnxgrad.batching`); the others run once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir

from onnxgrad import control_flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.batching.operator_rules import SIZES, batching_rule
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import dependents, named_values, reads, required_inputs, subgraphs
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import described
from onnxgrad.ir.operators import traits_of
from onnxgrad.ir.shapes import move_axis
from onnxgrad.lower import expand
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.gradient_lowering import open_lowered
from onnxgrad.transforms.keep_functions import transform

#: An axis for all, or one by name; None: not mapped.
Axes = int | None | Mapping[str, int | None]


@transform
def vmap(model: AnyModel, in_axes: Axes = 0, out_axes: Axes = 0, *, axis_size: int | str = "batch") -> Any:
    """The model over a new batch axis, applied to every row of its mapped inputs.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        in_axes: where the batch axis lies in each input, by name: ``{"x": 0, "w": None}``. Inputs that are not named,
            or with None, are the same for all rows. An initializer may be named: it becomes an input. A number is the
            axis in every input that is no initializer. All of them must come with the same number of rows, which a run
            does not check: one row beside many broadcasts.
        out_axes: where the batch axis lies in each output: a number for all, or by name (0 for those not named). An
            output with None must not depend on mapped inputs, and stays as it is.
        axis_size: the number of rows, or a name for one that each run chooses (it gets a suffix if it is taken).

    Returns:
        A model of the argument's kind with the same names of inputs and outputs (an output that is an input, or an
        initializer, gets another name unless it is handed through as it is). Mapped inputs, and outputs, have
        one more axis; an output that depends on no mapped input is repeated. Local functions are inlined.

        Products, convolutions, recurrent layers and elementwise operators process all rows at once, and If, Loop and
        Scan keep their form. An If whose condition differs between rows becomes a Where over both branches, and a Loop
        that is longer for some rows runs to the longest under a mask, if its operators are total. All other nodes run
        in a Scan over the rows. A random operator that reads no mapped value draws once for all rows, others draw for
        every row.

    Raises:
        UnknownName: an input or output that the model does not have.
        BadInput: an axis that is not there; a mapped input or output that is a sequence or an optional, or whose rank
            is not known; an output whose size differs between rows.
    """
    opened = open_lowered(model)
    graph = opened.model.graph
    b = Builder(graph, infer=opened.inference)
    b.names.reserve(opened.training)
    size = _size(axis_size, graph)
    axes = _input_axes(graph, in_axes)
    ends = dict(zip([v.name or "" for v in graph.outputs], graph.outputs))
    columns = [_column(b, v, axis, size) for v, axis in axes.items()]
    _write_out(b, axes)
    ends = {name: b.now(v) for name, v in ends.items()}
    places = _output_axes(graph, ends, out_axes, axes)
    graph.outputs.clear()
    for value in ends.values():
        if value in places and value.producer() is not None:
            value.name = b.names.fresh(value.name or "row")
    old = list(axes)
    new: dict[ir.Value, ir.Value] = {}

    def write(slices: list[Var]) -> list[Var]:
        for value, piece in zip(old, slices):
            piece.value.shape = value.shape
            value.replace_all_uses_with(piece.value)
            new[value] = piece.value
        return [b.var(new.get(v, v)) for v in places]

    sizes = _Sizes(b, columns, axes)
    results = [Batched(b.var(v), at, sizes.of(v)) for v, at in places.items()]
    stacks = dict(zip(places, vmapped(b, columns, write, results, guarded=False)))
    graph.sort()
    for name, value in ends.items():
        graph.outputs.append(_output(b, name, stacks[value], value) if value in stacks else value)
    opened.finish(b)
    return opened.close()


def _size(axis_size: int | str, graph: ir.Graph) -> int | str:
    """The number of rows; a name is made unique among the dimensions."""
    if isinstance(axis_size, int) and not isinstance(axis_size, bool) and axis_size > 0:
        return axis_size
    if not isinstance(axis_size, str) or not axis_size:
        raise BadInput(f"`axis_size` is a number of rows or the name of a dimension, not {axis_size!r}")
    taken = {str(d) for v in named_values(graph).values() for d in v.shape or ()}
    return next(n for n in [axis_size, *(f"{axis_size}_{i}" for i in range(1, len(taken) + 2))] if n not in taken)


def _axis(name: str, axis: Any, rank: int) -> int:
    """`axis` of a value that has `rank` axes besides it."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise BadInput(f"the batch axis of {name!r} is a number or None, not {axis!r}")
    if not -rank - 1 <= axis <= rank:
        raise BadInput(f"{name!r} has {rank + 1} axes with the batch axis, which cannot be axis {axis}")
    return axis % (rank + 1)


def _rank(value: ir.Value, role: str) -> int:
    if not isinstance(value.type, ir.TensorType):
        kind = "value of unknown type" if value.type is None else type(value.type).__name__.removesuffix("Type").lower()
        raise BadInput(f"{role} {value.name!r} is a {kind}, which has no axis for rows\n  hint: map it with None")
    if value.shape is None:
        hint = "declare its shape in the model"
        raise BadInput(f"the rank of {role} {value.name!r} is not known\n  hint: {hint}")
    return len(value.shape)


def _input_axes(graph: ir.Graph, in_axes: Axes) -> dict[ir.Value, int]:
    """The mapped inputs and initializers, each with its batch axis."""
    known = {v.name or "": v for v in graph.inputs} | dict(graph.initializers)
    if isinstance(in_axes, Mapping):
        named = dict(in_axes)
    else:
        named = {v.name or "": in_axes for v in required_inputs(graph)}
    for name in named:
        if name not in known:
            raise UnknownName(name, known, "input")
    axes = {known[n]: _axis(n, at, _rank(known[n], "input")) for n, at in named.items() if at is not None}
    if not axes:
        raise BadInput("no input is mapped: `in_axes` gives none of them a batch axis")
    return axes


def _output_axes(
    graph: ir.Graph, ends: Mapping[str, ir.Value], out_axes: Axes, mapped: Collection[ir.Value]
) -> dict[ir.Value, int]:
    """The outputs that get a batch axis, each with that axis."""
    named = out_axes if isinstance(out_axes, Mapping) else dict.fromkeys(ends, out_axes)
    for name in named:
        if name not in ends:
            raise UnknownName(name, ends, "output")
    moved = dependents((n for n in graph if n.op_type not in SIZES), mapped)
    blame = _sized_by_rows(graph, moved)
    known = {str(d) for v in graph.inputs for d in v.shape or () if not isinstance(d, int) and d.value}
    places = {}
    for name, value in ends.items():
        axis = named.get(name, 0)
        if axis is None:
            if value in moved:
                raise BadInput(f"output {name!r} differs between rows: it needs a batch axis in `out_axes`")
            continue
        places[value] = _axis(name, axis, _rank(value, "output"))
        if value in blame and any(not isinstance(d, int) and str(d) not in known for d in value.shape or ()):
            hint = "have the model pad it, or declare the output's shape if it is the same for all rows"
            raise BadInput(f"the size of output {name!r} may differ between rows: {blame[value]}\n  hint: {hint}")
    return places


def _sized_by_rows(graph: ir.Graph, moved: Collection[ir.Value]) -> dict[ir.Value, str]:
    """The values whose sizes depend on values that differ between rows, each with the node where that begins."""
    causes: dict[ir.Value, str] = {}
    for node in graph:
        cause = next((causes[v] for v in reads(node) if v in causes), None)
        if cause is None and _is_sized(node, moved):
            cause = f"it depends on the values that {described(node)} reads"
        if cause is not None:
            causes |= dict.fromkeys(node.outputs, cause)
    return causes


def _is_sized(node: ir.Node, moved: Collection[ir.Value]) -> bool:
    if any(i < len(node.inputs) and node.inputs[i] in moved for i in traits_of(node).sized_by):
        return True
    inner = subgraphs(node)
    if node.op_type == "Loop":
        body = inner[0]
        ended = {body.outputs[0]} & dependents(body, {*moved, *body.inputs[2:]})
        if len(body.outputs) > len(body.inputs) - 1 and (ended or any(v in moved for v in node.inputs[:2])):
            return True
    return any(_is_sized(n, {*moved, *g.inputs, *(v for m in g for v in m.outputs)}) for g in inner for n in g)


def _write_out(b: Builder, mapped: Collection[ir.Value]) -> None:
    """Write out the operators that depend on `mapped` inputs and have a stacked form only as others."""
    while True:
        moved = dependents(b.graph, mapped)
        rest = [n for n in b.graph if any(v in moved for v in n.outputs) and not _is_stackable(n, moved)]
        if not any(expand(b, node) for node in rest):
            return


def _is_stackable(node: ir.Node, moved: Collection[ir.Value]) -> bool:
    """True if `node` has a stacked form, or is a non-standard operator without a known one."""
    if node.op_type in ("GRU", "LSTM", "RNN"):  # with weights that are the same for all rows
        return not any(i in (1, 2, 3, 7) and v in moved for i, v in enumerate(node.inputs))
    return bool(node.domain) or node.op_type in SIZES or batching_rule(node) is not None or bool(subgraphs(node))


def _column(b: Builder, value: ir.Value, axis: int, size: int | str) -> Var:
    """A new graph input in place of `value`, with all rows; returned with the rows first."""
    dims = list(not_none(value.shape))
    name = value.name or ""
    graph, new = b.graph, ir.Value(name=name, type=value.type, shape=ir.Shape([*dims[:axis], size, *dims[axis:]]))
    if name in graph.initializers:
        del graph.initializers[name]
        value.const_value = None  # which shares its name with the caller's tensor
    inputs = [new if v is value else v for v in graph.inputs]
    graph.inputs[:] = inputs if new in inputs else [*inputs, new]
    value.name = b.names.fresh(name)
    return move_axis(b.var(new), axis, 0)


class _Sizes:
    """The shape of one row of a result, derived from inputs: there may be no row to read it from."""

    def __init__(self, b: Builder, columns: Collection[Var], mapped: Collection[ir.Value]) -> None:
        self.b = b
        self.held: dict[str, tuple[Var, int]] = {}
        for x, lead in [*((x, 1) for x in columns), *((b.var(v), 0) for v in b.graph.inputs if v not in mapped)]:
            for i, dim in enumerate((x.shape or ())[lead:], start=lead):
                if not isinstance(dim, int) and dim.value:
                    self.held.setdefault(dim.value, (x, i))

    def of(self, value: ir.Value) -> Var:
        """The sizes of `value`; 0 for a size that is not known without a row."""
        parts: list[Any] = []
        for dim in value.shape or ():
            x, i = (None, 0) if isinstance(dim, int) else self.held.get(str(dim), (None, 0))
            parts.append(self.b.shape_of(x, i, i + 1) if x is not None else [dim if isinstance(dim, int) else 0])
        return self.b.join(*parts)


def _output(b: Builder, name: str, found: Var, old: ir.Value) -> ir.Value:
    """`found` as a graph output in place of `old`."""
    value = found.value
    if value.producer() is None and value.name == name:  # an input that is returned
        return value
    if value.producer() is None or value.is_graph_output():
        value = b.copy(value).value
    value.name = name if old.producer() is not None else b.names.fresh(name)  # an input or initializer has that name
    value.type = value.type or old.type
    return value

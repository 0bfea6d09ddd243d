"""Updates of large weights whose gradients are never there as a whole.

The gradient of a matrix is a product AᵀB over the rows of a batch, and the update of a weight needs each of its numbers
once. So a kernel of an optimizer takes the factors, and computes a part of the product, adds what else there is of the
gradient, and updates that part of the weight.

The gradient of a large vocabulary is a sum over blocks of rows, the steps of a Scan (see `running_sums`). The last
block goes to the update as factors, and a Loop adds up the blocks before it. Few rows, as many as the matrix is wide,
are one block: then no sum is there at all. The table of words may be the head as well. Then the factors wait for the
gradients of its lookups, to whose rows the sum is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import add_initializer, captured, prune, subgraphs
from onnxgrad.ir.match import is_op, not_none
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.kernels.elementwise import PHASE
from onnxgrad.runtime.kernels.elementwise_steps import DOMAIN
from onnxgrad.runtime.kernels.optimizer_kernels import STATES
from onnxgrad.runtime.kernels.products import match_cotangent
from onnxgrad.runtime.setting import Setting

#: Weights of fewer numbers have their gradients at once.
_LARGE = 1 << 22


def factor_gradients(graph: ir.Graph) -> int:
    """Have updates of large weights of `graph` take the factors of their gradients. Returns the count."""
    count = 0
    for update in [n for n in graph if _is_update(n)]:
        g = update.inputs[1]
        node = None if g is None else g.producer()
        if g is None or node is None or len(g.uses()) > 1 or g.is_graph_output() or update.inputs[-3] is not None:
            continue
        factors = match_cotangent(node)
        if factors is not None and _numbers(g) >= _LARGE:
            empty = ir.tensor(np.zeros(0, np.float32), name=f"{update.name}.rest")
            _take(update, add_initializer(graph, empty), *factors)
            count += 1
    if count:
        prune(graph)
    return count


def _is_update(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in STATES


def _numbers(value: ir.Value) -> int:
    return math.prod(value.shape.numpy()) if value.shape is not None and value.shape.is_static() else 0


def _take(update: ir.Node, rest: ir.Value, a: ir.Value, b: ir.Value) -> None:
    """Have `update` take the gradient AᵀB + `rest`."""
    update.replace_input_with(1, rest)
    update.replace_input_with(len(update.inputs) - 2, a)
    update.replace_input_with(len(update.inputs) - 1, b)


@dataclass(frozen=True)
class _Sum:
    """A running sum of a Scan.

    Attributes:
        start, end: the nodes that make and return the sum.
        update: the node whose gradient it is, or a part of it.
        factors: of what a step adds.
        lookups: calls that make the other terms of the gradient.
    """

    start: ir.Node
    end: ir.Node
    update: ir.Node
    factors: tuple[ir.Value, ir.Value]
    lookups: list[ir.Node]


def give_last_blocks(b: Builder) -> int:
    """Take the last block of rows out of Scans that only add up gradients. Returns the count."""
    count = 0
    for scan in [n for n in b.graph if is_op(n, "Scan")]:
        body = scan.attributes["body"].as_graph()
        sums = _sums(scan, body)
        if sums:
            _take_out(b, scan, body, sums)
            count += 1
    if count:
        prune(b.graph)
    return count


def _sums(scan: ir.Node, body: ir.Graph) -> list[_Sum]:
    """The states of `scan` if all are gradients of large weights, and blocks may have any size; else empty."""
    count = len(body.inputs) - scan.attributes["num_scan_inputs"].as_int()
    axes = [*scan.attributes.get_ints("scan_input_axes", ()), *scan.attributes.get_ints("scan_output_axes", ())]
    first = scan.inputs[count] if len(scan.inputs) > count else None
    rows = None if first is None else first.shape
    ways = [tuple(scan.attributes.get_ints(f"scan_{end}_directions", ())) for end in ("input", "output")]
    if (
        len({*ways[0], *ways[1]}) > 1
        or any(ways) is not all(ways)
        or any(axes)
        or not count
        or rows is None
        or len(rows) < 2
        or isinstance(rows[1], int)
    ):
        return []
    found = [_sum(scan, body, i) for i in range(count)]
    totals = {s.start.outputs[0] for s in found if s is not None}
    fixed = any(v.dtype != ir.DataType.FLOAT for v in captured(scan) if v not in totals)  # sizes, perhaps
    if fixed or any(any(True for _ in subgraphs(node)) for node in body):
        return []
    return [] if None in found else [s for s in found if s is not None]


def _sum(scan: ir.Node, body: ir.Graph, i: int) -> _Sum | None:
    """State `i` of `scan` as a gradient that only the update of a large weight reads; None if it is something else."""
    first, add = scan.inputs[i], body.outputs[i].producer()
    start = None if first is None else first.producer()
    if start is None or add is None or start.op_type != "RunningSum" or add.op_type != "RunningSumAdd":
        return None
    end = next((n for n in scan.outputs[i].consumers() if n.op_type == "RunningSumEnd"), None)
    part = add.inputs[2]
    if end is None or part is None or len(scan.outputs[i].uses()) > 1 or len(part.uses()) > 1:
        return None
    total = end.outputs[0]
    factors = None if part.producer() is None else match_cotangent(part.producer())
    if factors is None or _numbers(total) < _LARGE or (found := _update_of(total)) is None:
        return None
    return _Sum(start, end, found[0], factors, found[1])


def _update_of(part: ir.Value) -> tuple[ir.Node, list[ir.Node]] | None:
    """The update whose gradient is `part` plus those of lookups, and the calls for these; None for another reader."""
    lookups: list[ir.Node] = []
    value = part
    while len(value.uses()) == 1 and not value.is_graph_output() and value.shape == part.shape:
        node, at = next(iter(value.uses()))
        if _is_update(node):
            return (node, lookups) if at == 1 and node.inputs[-3] is None else None
        other = node.inputs[1 - at] if is_op(node, "Add") else None
        call = None if other is None else other.producer()
        if call is None or (call.domain, call.op_type, len(call.inputs)) != (DOMAIN, "GatherGrad", 4):
            return None
        lookups.append(call)
        value = node.outputs[0]
    return None


def _take_out(b: Builder, scan: ir.Node, body: ir.Graph, sums: list[_Sum]) -> None:
    """Write the last block of `scan` behind it, and a Loop over the others in its place."""
    count = len(sums)
    columns = [b.var(v) for v in scan.inputs[count:] if v is not None]
    b.before = sums[0].start
    blocks, rows = b.Shape(columns[0], start=0, end=1), b.Shape(columns[0], start=1, end=2)
    most = min(d for s in sums for d in s.end.outputs[0].shape or () if isinstance(d, int))
    taken = b.Where(b.LessOrEqual(b.Mul(blocks, rows), [most]), blocks, [1])  # as many scores as the weight has numbers
    left = b.Sub(blocks, taken)
    for s in sums:  # a sum of no blocks is empty
        sizes = not_none(s.start.inputs[0])
        s.start.replace_input_with(0, b.Mul(b.var(sizes), b.Concat(b.Min(left, [1]), [1], axis=0)).value)
    b.before = scan
    ahead = [b.Slice(x, [0], left, [0]) for x in columns]
    last = []
    for x in columns:
        tail = b.Slice(x, left, blocks, [0])
        last.append(b.Reshape(tail, b.Concat([-1], b.Shape(x, start=2), axis=0) if x.rank > 2 else [-1]))
    size = b.names.fresh("rows")
    for x, x_last in zip(columns, last):
        x_last.value.shape = ir.Shape([size, *x.dims[2:]])
    stacks = _write_last(b, body, count, last, size, sums)
    loop = _as_loop(b, scan, body, count, ahead, left)
    b.before = scan
    for i, (old, made) in enumerate(zip(scan.outputs, loop.outputs)):
        if i >= count:
            of_last = stacks[i - count]
            dims = [int(d) if isinstance(d, int) else -1 for d in of_last.dims[1:]]
            flat = b.Reshape(b.var(made), [-1, *dims])
            shape = b.Concat(blocks, rows, *([b.Shape(of_last, start=1)] if dims else []), axis=0)
            made = b.Reshape(b.Concat(flat, of_last, axis=0), shape).value
        made.type, made.shape = old.type, old.shape
        old.replace_all_uses_with(made, replace_graph_outputs=True)
    b.graph.remove(scan, safe=True)


def _write_last(b: Builder, body: ir.Graph, count: int, last: list[Var], size: str, sums: list[_Sum]) -> list[Var]:
    """Write the nodes of `body` for the last rows. Returns their rows of each stack."""
    shape = body.inputs[count].shape
    rows = None if shape is None else shape[0]
    values = dict(zip(body.inputs[count:], (x.value for x in last)))
    for value in body.initializers.values():
        tensor = not_none(value.const_value)
        copy = ir.Value(name=b.names.fresh("const"), type=value.type, shape=value.shape, const_value=tensor)
        b.graph.register_initializer(copy)
        values[value] = copy
    copies = Copies(values, b.names)
    sinks = {n for n in body if n.op_type == "RunningSumAdd"}
    for node in body:
        if node in sinks:
            continue
        made = copies.node(node)
        for v in made.outputs:
            if v.shape is not None and rows is not None and rows in v.shape.dims:
                v.shape = ir.Shape([size if d == rows else d for d in v.shape.dims])
        b.append(made)
    for s in sums:
        _take(s.update, _rest(b, s), *(copies.values[v] for v in s.factors))
    return [b.var(copies.values[v]) for v in body.outputs[count:]]


def _rest(b: Builder, s: _Sum) -> ir.Value:
    """The gradient of an update but for the last block: the sum of the blocks before it, and rows of lookups."""
    total = s.end.outputs[0]
    if not s.lookups:
        return total
    before, b.before = b.before, s.update
    table = s.lookups[0].inputs[0]
    width = [int(d) for d in total.shape[1:] if isinstance(d, int)]  # type: ignore[index]
    total.shape = ir.Shape([b.names.fresh("rows"), *width])
    summed = b.var(total)
    rows = b.Concat(summed, *(b.Reshape(b.var(n.inputs[1]), [-1, *width]) for n in s.lookups), axis=0)  # type: ignore[arg-type]
    every = b.Range(0, b.Squeeze(b.Shape(summed, start=0, end=1), [0]), 1)
    index = b.Concat(every, *(b.Reshape(b.var(n.inputs[3]), [-1]) for n in s.lookups), axis=0)  # type: ignore[arg-type]
    name = b.names.fresh("lookups")
    call = ir.Node(DOMAIN, "GatherGrad", [table, rows.value, None, index.value], num_outputs=1, name=name)
    like = s.lookups[0].outputs[0]
    call.outputs[0].name, call.outputs[0].type, call.outputs[0].shape = name, like.type, like.shape
    b.append(call)
    b.before = before
    return call.outputs[0]


def _as_loop(b: Builder, scan: ir.Node, body: ir.Graph, count: int, ahead: list[Var], left: Var) -> ir.Node:
    """`scan` over the columns `ahead` as a Loop: a Scan has one step at least."""
    at, go = (ir.Value(name=b.names.fresh(n), type=ir.TensorType(t), shape=ir.Shape([]))
              for n, t in (("step", ir.DataType.INT64), ("go", ir.DataType.BOOL)))  # fmt: skip
    for x, row in zip(ahead, body.inputs[count:]):
        pick = ir.Node("", "Gather", [x.value, at], [ir.AttrInt64("axis", 0)], name=b.names.fresh("block"))
        (value,) = pick.outputs
        value.name, value.type, value.shape = b.names.fresh("block"), row.type, row.shape
        body.insert_before(body[0], pick)
        row.replace_all_uses_with(value)
    keep = ir.Node("", "Identity", [go], name=b.names.fresh("go"))
    keep.outputs[0].name, keep.outputs[0].type, keep.outputs[0].shape = keep.name, go.type, go.shape
    body.append(keep)
    states = body.inputs[:count]
    body.inputs[:] = [at, go, *states]
    body.outputs[:] = [keep.outputs[0], *body.outputs]
    scan.attributes.pop("body")
    trips = b.Squeeze(left, [0])
    loop = ir.Node("", "Loop", [trips.value, None, *scan.inputs[:count]], [ir.AttrGraph("body", body)],
                   num_outputs=len(scan.outputs), name=scan.name)  # fmt: skip
    for old, new in zip(scan.outputs, loop.outputs):
        new.name, new.type, new.shape = b.names.fresh(old.name or "loop"), old.type, old.shape
    b.graph.insert_before(scan, loop)
    return loop


def _is_worth(model: ir.Model) -> bool:
    return any(_is_update(node) and _numbers(node.outputs[0]) >= _LARGE for node in model.graph)


LAST_BLOCKS = Pass(
    "last_blocks",
    PHASE,
    "the last block of rows apart, and its gradients as factors",
    "Scans that only add up gradients of large weights, block by block",
    lambda model, _: _is_worth(model) and any(is_op(n, "Scan") for n in model.graph),
    lambda model, setting: give_last_blocks(setting.builder(model.graph, "last_block")),
    Setting.lacks_kernels,
)
FACTORED_UPDATES = Pass(
    "factored_updates",
    PHASE,
    "updates that compute the gradient part by part",
    "optimizers of large weights whose gradient is a product",
    lambda model, _: _is_worth(model),
    lambda model, _: factor_gradients(model.graph),
    Setting.lacks_kernels,
)

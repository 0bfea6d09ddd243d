"""Scans whose forward run is redundant: the backward Scan computes their results on its way.

The backward Scan over row blocks (see `row_blocks`) recomputes each block. If it reads nothing that depends on the
results of the forward Scan, as for a loss summed over rows, it can return these results as well. Then the forward Scan
is removed, which saves one of two computations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, save_policy
from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import dependents, prune
from onnxgrad.ir.match import Dim, is_op, not_none
from onnxgrad.ir.names import Names
from onnxgrad.ir.shapes import same_dim

#: Operators that a block must share with its backward pass; without one, removal saves little.
_PRODUCTS = frozenset(["MatMul", "Gemm"])


def row_scans(graph: ir.Graph) -> list[ir.Node]:
    """The Scans of `graph` over blocks of rows, which their ways back compute again."""
    scans = [n for n in graph if is_op(n, "Scan")]
    return [n for n in scans if save_policy(n) is SavePolicy.STATES and Iteration.of(n).count == 0]


def give_results_on_the_way_back(graph: ir.Graph) -> int:
    """Let the backward Scans of row blocks in `graph` compute the results of the forward ones. Returns the count."""
    scans = [n for n in graph if is_op(n, "Scan")]
    names: Names | None = None
    count = 0
    for node in row_scans(graph):
        _ask_others(graph, node)
        made = dependents(graph, node.outputs)
        for back in scans[scans.index(node) + 1 :]:
            values = _read_alike(node, back)
            if values and not made & set(back.outputs):
                names = names or Names.of_graph(graph)
                if _merge_nodes(node, back, values, names):
                    graph.sort()
                    count += 1
                    break
    if names is not None:
        prune(graph)
    return count


def _ask_others(graph: ir.Graph, scan: ir.Node) -> None:
    """Read sizes of values that depend on `scan` from earlier values with the same dimensions, where possible."""
    made, before = dependents(graph, scan.outputs), list(graph.inputs)
    for node in graph:
        if node is scan:
            break
        before += [v for v in node.outputs if v.shape is not None]
    for node in graph:
        x = node.inputs[0] if is_op(node, "Shape") else None
        if x is None or x not in made or x.shape is None:
            continue
        dims = list(x.shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])
        for other, start in _that_have(before, dims):
            node.replace_input_with(0, other)
            node.attributes["start"] = ir.AttrInt64("start", start)
            node.attributes["end"] = ir.AttrInt64("end", start + len(dims))
            break


def _that_have(values: Iterable[ir.Value], dims: Sequence[Dim]) -> Iterator[tuple[ir.Value, int]]:
    """Yield each of `values` that has the dimensions `dims`, with the first axis of these."""
    for value in values:
        shape = list(value.shape or ())
        for i in range(len(shape) - len(dims) + 1):
            if all(map(same_dim, shape[i : i + len(dims)], dims)):
                yield value, i


def _read_alike(node: ir.Node, back: ir.Node) -> dict[ir.Value, ir.Value]:
    """Map each slice of a step of `node` to the slice of `back` of the same values; empty if one has none."""
    there, here = Iteration.of(back), Iteration.of(node)
    columns = {(x, slot): s for x, slot, s in zip(there.scanned, there.ins, there.slices)}
    partners = {s: columns.get((x, slot.reverse())) for s, x, slot in zip(here.slices, here.scanned, here.ins)}
    return {} if None in partners.values() else {k: v for k, v in partners.items() if v is not None}


def _merge_nodes(node: ir.Node, back: ir.Node, values: dict[ir.Value, ir.Value], names: Names) -> bool:
    """Let `back` compute the results of `node` too."""
    it, body = Iteration.of(node), Iteration.of(back).body
    values |= _constants(it.body, body)
    missing, shared = [], False
    for inner in it.body:
        same = _same(inner, body, values)
        if same is None:
            missing.append(inner)
        else:
            values |= zip(inner.outputs, same.outputs)
            shared |= inner.op_type in _PRODUCTS
    if not shared:
        return False
    for own in (v for v in it.body.initializers.values() if v not in values):
        assert own.const_value is not None
        copy = ir.Value(name=names.fresh("const"), type=own.type, shape=own.shape, const_value=own.const_value)
        body.register_initializer(copy)
        values[own] = copy
    copies = Copies(values, names)
    values = copies.values
    for inner in missing:
        again = copies.unnamed(inner)
        again.name = names.fresh("row")
        for old, new in zip(inner.outputs, again.outputs):
            new.name = names.fresh(old.name or "row")
        body.append(again)
    slots = [*Iteration.of(back).outs, *(slot.reverse() for slot in it.outs)]
    for slice_result, out in zip(it.slice_results, node.outputs):
        identity = ir.Node("", "Identity", [values.get(slice_result, slice_result)], name=names.fresh("row"))
        (new,) = identity.outputs
        new.name, new.type, new.shape = names.fresh(slice_result.name or "row"), slice_result.type, slice_result.shape
        body.append(identity)
        body.outputs.append(new)
        back.resize_outputs(len(back.outputs) + 1)
        result = back.outputs[-1]
        result.type, result.shape = out.type, out.shape
        out.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name, out.name = out.name, names.fresh(out.name or "row")
    _lay(back, slots)
    return True


def _constants(graph: ir.Graph, other: ir.Graph) -> dict[ir.Value, ir.Value]:
    """The constants of `graph` that `other` has as well."""
    by_content = {_content(v): v for v in other.initializers.values()}
    return {v: by_content[key] for v in graph.initializers.values() if (key := _content(v)) in by_content}


def _content(value: ir.Value) -> tuple[str, tuple[int, ...], bytes]:
    tensor = not_none(value.const_value)
    return tensor.dtype.name, tuple(tensor.shape.numpy()), tensor.tobytes()


def _same(node: ir.Node, body: ir.Graph, values: Mapping[ir.Value, ir.Value]) -> ir.Node | None:
    """The node of `body` that computes the same as `node`, under a map of values."""
    inputs = [None if v is None else values.get(v, v) for v in node.inputs]
    attributes = {k: a.value for k, a in node.attributes.items()}
    for other in body:
        alike = (other.domain, other.op_type, other.overload) == (node.domain, node.op_type, node.overload)
        alike = alike and {k: a.value for k, a in other.attributes.items()} == attributes
        if alike and list(other.inputs) == inputs and len(other.outputs) >= len(node.outputs):
            return other
    return None


def _lay(scan: ir.Node, slots: list[ScanAxis]) -> None:
    """Set the axes and directions of the scan outputs of `scan`."""
    scan.attributes["scan_output_axes"] = ir.AttrInt64s("scan_output_axes", [s.axis for s in slots])
    backwards = [int(s.backwards) for s in slots]
    scan.attributes["scan_output_directions"] = ir.AttrInt64s("scan_output_directions", backwards)

"""Weights that were one tensor in the framework, and that the exporter has stored twice, become one again.

A language model often reads one matrix as its embedding and, transposed, as its output layer. Exporters fold the
Transpose, or copy the tensor. Trained, the two would move apart.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import is_op, is_standard, not_none


def tie_weights(graph: ir.Graph, patterns: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Let output layers of `graph` read the embeddings that they equal, in place.

    The value keeps its name: an Identity or a Transpose of the embedding makes it.

    Args:
        graph: every weight is an initializer.
        patterns: by which the caller has chosen weights; a pair stays apart if they name one of the two alone, and all
            pairs do if weights are chosen by operators or depth (``type:Gather``, ``last:1``).

    Returns:
        The names of each output layer and of the embedding that it is tied to.
    """
    tables = [v for v in graph.initializers.values() if _is_matrix(v) and _is_embedding(v)]
    outputs = [v for v in graph.initializers.values() if tables and _is_matrix(v) and _is_output_layer(v)]
    chosen = list(patterns)
    if any(text.startswith(("type:", "last:", "first:")) for text in chosen):
        return []
    found = []
    for output in outputs:
        for table in tables:
            if table is output or (how := _alike(table, output)) is None or _chooses_one(chosen, table, output):
                continue
            found.append((output.name or "", table.name or ""))
            _hand_out(graph, table, output, how)
            break
    return found


def _is_matrix(value: ir.Value) -> bool:
    held = value.const_value
    return held is not None and value.dtype in FLOATS and len(held.shape) == 2 and not value.is_graph_output()


def _is_embedding(value: ir.Value) -> bool:
    return any(is_op(n, "Gather") and at == 0 for n, at in value.uses())


def _is_output_layer(value: ir.Value) -> bool:
    """True if products read `value` on the right, directly or transposed, and no lookup reads it."""
    right = False
    for node, at in value.uses():
        if not is_standard(node) or node.op_type == "Gather":
            return False
        if node.op_type == "Transpose":
            right |= _is_output_layer(node.outputs[0])
        else:
            right |= node.op_type in ("MatMul", "Gemm") and at == 1
    return right


def _alike(table: ir.Value, output: ir.Value) -> str | None:
    """The operator that computes `output` from `table`: for equal tensors, or a transpose; else None."""
    one, other = not_none(table.const_value), not_none(output.const_value)
    if one.dtype != other.dtype or sorted(map(int, one.shape)) != sorted(map(int, other.shape)):  # type: ignore[arg-type]
        return None
    a, b = one.numpy(), other.numpy()
    for how, turned in (("Identity", a), ("Transpose", a.T)):
        if turned.shape == b.shape and np.array_equal(turned[:1], b[:1]) and np.array_equal(turned, b):
            return how if (a != a.flat[:1]).any() else None  # fresh weights are equal by chance
    return None


def _chooses_one(patterns: Sequence[str], table: ir.Value, output: ir.Value) -> bool:
    names = table.name or "", output.name or ""
    return any(len({name == text or fnmatch.fnmatchcase(name, text) for name in names}) > 1 for text in patterns)


def _hand_out(graph: ir.Graph, table: ir.Value, output: ir.Value, how: str) -> None:
    """Replace the initializer `output` by the operator `how` on `table`."""
    node = ir.Node("", how, [table], [ir.AttrInt64s("perm", [1, 0])] if how == "Transpose" else [], name=f"tied/{how}")
    value = node.outputs[0]
    value.type, value.shape = output.type, output.shape
    output.replace_all_uses_with(value)
    del graph.initializers[output.name or ""]
    value.name = output.name
    graph.insert_before(graph[0], node)

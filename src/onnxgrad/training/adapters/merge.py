"""Adapted weights as plain weights: W + s·A·B in the place of W, and nothing beside it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.training.adapters.record import Entry, record_in
from onnxgrad.training.metadata import ADAPTER


def merged(model: ir.Model) -> ir.Model:
    """`model`, which is used up, with its adapters in its weights; itself if it has none.

    Where a weight is quantized, its adapter stays beside it.
    """
    record = record_in(model)
    if record is None:
        return model
    graph = model.graph
    staying = {name for name, entry in record.weights.items() if entry.quantized}
    try:
        for scope in (graph, *graph.subgraphs()):
            _take_off(scope, staying)
    except ValueError as error:  # what is read elsewhere was not written by `insert`
        raise BadInput(f"the model's nodes with the metadata {ADAPTER!r} are no adapters: {error}") from error
    for name, entry in record.weights.items():
        if name in staying:
            continue
        held, a, b = (graph.initializers[n] for n in (name, entry.a, entry.b))
        assert held.const_value is not None
        old = held.const_value.numpy()
        try:
            delta = product(entry, a.const_value.numpy(), b.const_value.numpy())  # type: ignore[union-attr]
        except (ValueError, IndexError, ZeroDivisionError):
            delta = np.empty(0)
        if delta.shape != old.shape:
            raise BadInput(
                f"{entry.a!r} and {entry.b!r} are no factors of {name!r}, which has the shape {list(old.shape)}"
            )
        new = old.astype(np.float64) + delta
        held.const_value = ir.tensor(new.astype(old.dtype), name=name)
        for own in (a, b):
            if not own.uses():
                del graph.initializers[own.name or ""]
    del model.metadata_props[ADAPTER]
    return model


def product(entry: Entry, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """s·A·B in the layout of the weight."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if entry.kind == "conv":
        parts = a.reshape(entry.groups, -1, *a.shape[1:])  # by group: rank, channels, kernel
        outs = b.reshape(entry.groups, -1, b.shape[1])  # by group: channels, rank
        return entry.scale * np.einsum("gor,gr...->go...", outs, parts).reshape(len(b), *a.shape[1:])
    found = entry.scale * (a @ b)
    return np.swapaxes(found, -1, -2) if entry.transposed else found


def _take_off(graph: ir.Graph, staying: set[str]) -> None:
    """Remove the nodes of adapters from `graph`; sums become what they were added to, under their names."""
    own = [n for n in graph if n.metadata_props.get(ADAPTER, "") and n.metadata_props[ADAPTER] not in staying]
    marked = set(own)
    for node in own:
        base = node.inputs[0] if node.op_type == "Add" else None
        if base is None or base.producer() in marked:
            continue
        (total,) = node.outputs
        name = total.name
        total.replace_all_uses_with(base, replace_graph_outputs=True)
        total.name = ""
        base.name = name
    for node in reversed(own):
        graph.remove(node, safe=True)

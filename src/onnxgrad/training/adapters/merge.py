"""Merge adapters: replace W by its adapted value, and remove the adapter's nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Names
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import not_none
from onnxgrad.model_io.aside import FROM, KeptTensor, Scratch
from onnxgrad.training.adapters.forms import CHANNELS
from onnxgrad.training.adapters.insert import FIXED, insert
from onnxgrad.training.adapters.parts import outputs
from onnxgrad.training.adapters.record import Entry, Record, record_in
from onnxgrad.training.adapters.sites import bias_of, weights
from onnxgrad.training.adapters.targets import Target
from onnxgrad.training.adapters.values import adapted_weight
from onnxgrad.training.metadata import ADAPTER

#: The last operator of a branch (see `branches`).
_SUMS = ("Add", "Mul")


def merged(model: ir.Model) -> ir.Model:
    """`model`, which is used up, with its adapters in its weights; itself if it has none.

    Where a weight is quantized, its adapter stays beside it.
    """
    record = record_in(model)
    if record is None:
        return model
    graph = model.graph
    staying = {e.weight for e in record.entries if e.quantized}
    try:
        _take_off(graph, staying)
    except ValueError as error:  # `insert` does not write values with other readers
        raise BadInput(f"the model's nodes with the metadata {ADAPTER!r} are no adapters: {error}") from error
    held = {n: v.const_value for n, v in graph.initializers.items() if v.const_value is not None}
    adapted = [e for e in record.entries if e.weight not in staying]
    large = sum(held[name].nbytes for name in {e.weight for e in adapted}) >= FROM
    scratch = Scratch()
    for weight, entries in itertools.groupby(sorted(adapted, key=lambda e: e.weight), key=lambda e: e.weight):
        new = _adapted(held[weight], list(entries), record, held)
        graph.initializers[weight].const_value = _store(new, held[weight].dtype, weight, scratch if large else None)
        del new  # before the next one is read
    _scale_biases(graph, adapted)
    for name in (*record.own, *record.constants):
        if not graph.initializers[name].uses():
            del graph.initializers[name]
    del model.metadata_props[ADAPTER]
    return model


def _adapted(
    tensor: ir.TensorProtocol, entries: Sequence[Entry], record: Record, held: Mapping[str, ir.TensorProtocol]
) -> np.ndarray:
    """The values of a weight with its adapters in them."""
    new, is_own = tensor.numpy(), isinstance(tensor, KeptTensor)
    for entry in entries:
        tensors = record.shared | entry.tensors | entry.fixed
        given = {letter: held[name].numpy() for letter, name in tensors.items()}
        try:
            new, is_own = adapted_weight(entry, new, given, in_place=is_own), True
        except (ValueError, IndexError, ZeroDivisionError) as error:
            factors = " and ".join(map(repr, entry.tensors.values()))
            raise BadInput(
                f"{factors} are no factors of {entry.weight!r}, which has the shape {list(new.shape)}"
            ) from error
    return new


def _scale_biases(graph: ir.Graph, entries: Sequence[Entry]) -> None:
    """Multiply the biases behind weights whose outputs (IA)³ scales."""
    scaled = [e for e in entries if "ia3_l" in e.tensors and not e.feedforward]
    found, names = weights(graph) if scaled else {}, Names.of_graph(graph)
    for entry in scaled:
        weight, vector = found[entry.weight], not_none(graph.initializers[entry.tensors["ia3_l"]].const_value)
        for site in weight.sites:
            where = bias_of(site, outputs(weight))
            bias = None if where is None else where[0].inputs[where[1]]
            if where is None or bias is None or bias.const_value is None:
                continue
            old = bias.const_value.numpy()
            new = (old.astype(np.float64) * vector.numpy().astype(np.float64).reshape(-1)).astype(old.dtype)
            if len(bias.uses()) > 1:  # other layers have an equal one
                own = add_initializer(graph, ir.tensor(new, name=names.fresh(bias.name or "bias")))
                where[0].replace_input_with(where[1], own)
            else:
                bias.const_value = ir.tensor(new, name=bias.name)
                bias.shape = ir.Shape(new.shape)


def make_plain(model: ir.Model) -> None:
    """Write an adapter of an initial form as LoRA of twice the rank, in place: [A, A₀]·[B, −B₀].

    PEFT converts its own in the same way, so that they fit the weights as they were before training.
    """
    record = record_in(model)
    if record is None or record.form == CHANNELS or not any(e.fixed for e in record.entries):
        return
    graph, entries, values = model.graph, record.entries, []
    for entry in entries:
        given = {k: graph.initializers[n].const_value.numpy() for k, n in (entry.tensors | entry.fixed).items()}  # type: ignore[union-attr]
        first = [given.pop(letter) for letter in FIXED]
        joined = {k: np.concatenate([given[k], a], axis) for k, a, axis in zip("AB", first, (-1, -2))}
        values.append(given | joined)
    _take_off(graph, set())
    for name in (*record.own, *record.constants):
        del graph.initializers[name]
    found = weights(graph)
    record.alpha *= math.sqrt(2) if record.rslora else 2
    record.rank, record.entries = 2 * record.rank, []
    insert(
        graph,
        [Target(found[e.weight], e.part, e.label) for e in entries],
        values,
        entries,
        {},
        record,
    )
    record.write(model)


def _store(array: np.ndarray, dtype: ir.DataType, name: str, scratch: Scratch | None) -> ir.TensorProtocol:
    """A tensor with `array`, on disk if there is a `scratch` with room for it."""
    try:
        if scratch is not None:
            return scratch.keep_array(array, dtype, name)
    except OSError:  # no room
        pass
    return ir.tensor(array, dtype=dtype, name=name)


def _take_off(graph: ir.Graph, staying: set[str]) -> None:
    """Remove the nodes of adapters; each of their outputs is replaced by the unadapted value, under its name."""
    scopes = [*graph.subgraphs(), graph]  # values computed beforehand are read in all of them
    own = [
        [n for n in scope if n.metadata_props.get(ADAPTER, "") and n.metadata_props[ADAPTER] not in staying]
        for scope in scopes
    ]
    marked = {n for nodes in own for n in nodes}
    for node in (n for nodes in own for n in nodes):
        total = node.outputs[0]
        if not total.is_graph_output() and all(user in marked for user, _ in total.uses()):
            continue
        base: ir.Value | None = total
        while base is not None and (maker := base.producer()) in marked and maker is not None:
            base = maker.inputs[0] if maker.op_type in _SUMS else None
        if base is None:
            raise ValueError(f"{total.name!r} is no sum")
        name = total.name
        total.replace_all_uses_with(base, replace_graph_outputs=True)
        if (base.name or "").startswith(f"{name}_base"):  # not the input of a node
            total.name = ""
            base.name = name
    for scope, nodes in zip(scopes, own):
        for node in reversed(nodes):
            scope.remove(node, safe=True)

"""TrainingInfoProto: its entries, its bindings, and the graph that is executed.

An entry has an *algorithm*, a graph that continues where the inference graph ends: the executed graph is the
concatenation of both. Its *update bindings* map an initializer (of either graph) to the output that replaces it after
the step. ``onnx.checker`` checks none of this: `validation` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.graph import add_initializer, into_input, named_values, required_inputs
from onnxgrad.model_io import AnyModel, load_model, training_info, zeros
from onnxgrad.model_io.read import is_ordered, read_proto
from onnxgrad.model_io.save import gathered
from onnxgrad.training.metadata import FED, MASKS, TAKEN_OF, TRAINS
from onnxgrad.training.spec.graph_call import without_calls
from onnxgrad.transforms.gradient_node import DOMAIN

Bindings = dict[str, str]


@dataclass
class Source:
    """An inference model and its training entries; neither is ever changed.

    Attributes:
        model: the inference model.
        infos: its entries.
        recorded: losses that are functions or graphs, to be compared with their recording on the first batch.
        terms: the names of the terms of the loss, if there are several.
        compared: Identities of the predictions, where the loss compares those of all rows of a batch.
        join: puts the one algorithm behind the graph again that it was cut off; called once, by the first `merge`.
    """

    model: ir.Model
    infos: list[onnx.TrainingInfoProto]
    recorded: Sequence[Any] = ()
    terms: Sequence[str] = ()
    compared: Sequence[str] = ()
    join: Callable[[], ir.Model] | None = None

    def inference(self) -> ir.Model:
        """A copy of the inference model, weights shared, without traces of training."""
        copy = self.model.clone()
        copy.metadata_props.pop(MASKS, None)
        if not any(node.domain == DOMAIN for graph in copy.graphs() for node in graph):
            copy.opset_imports.pop(DOMAIN, None)
        return copy


def read(model: AnyModel) -> Source:
    """`model` with its training information; external data are not read, and large weights of a message not shared."""
    if isinstance(model, (onnx.ModelProto, ir.Model)):
        found = read_proto(model, aside=True) if isinstance(model, onnx.ModelProto) else model
    else:
        found = load_model(model, aside=True)
    is_ordered(found.graph)  # or it names a value without a producer
    return Source(found, [without_calls(found, info, i) for i, info in enumerate(training_info(found))])


def model_proto(model: AnyModel) -> onnx.ModelProto:
    """`model` as one message with all of its weights; the caller's own message if it is one."""
    if isinstance(model, onnx.ModelProto):
        return model
    return gathered(load_model(model) if isinstance(model, (str, os.PathLike)) else model)


def training_notes(model: onnx.ModelProto | ir.Model) -> list[str]:
    """Human-readable notes that `attach` stored in the model's training metadata."""
    infos = training_info(model) if isinstance(model, ir.Model) else model.training_info
    props = [p for info in infos for p in info.algorithm.metadata_props]
    return [p.value for key in (TAKEN_OF, TRAINS) for p in props if p.key == key]


def chosen_entries(source: Source, entry: int | None) -> list[int]:
    """The indices of the entries to run: one, or all in sequence."""
    count = len(source.infos)
    if not count:
        raise BadInput("the model carries no training information\n  hint: attach(model, loss=…, optimizer=…) adds it")
    if entry is None:
        return list(range(count))
    if not 0 <= entry < count:
        raise BadInput(f"there is no training entry {entry}: the model has {count}, counted from 0")
    return [entry]


def bindings(source: Source, chosen: Sequence[int]) -> dict[int, Bindings]:
    """The update bindings of the `chosen` entries: per entry, from initializer to its output."""
    return {i: {b.key: b.value for b in source.infos[i].update_binding} for i in chosen}


@dataclass
class Merged:
    """The executed graph of one entry, with initializers that the host stores turned into inputs.

    Attributes:
        model: inference graph, then algorithm; the initializers of `hosted` and `fed` are graph inputs.
        hosted: value in the model of each initializer that an update binding (of any entry) changes.
        fed: the same of those that the host may feed at every step (learning rates).
        own: names of the initializers that belong to the algorithm.
    """

    model: ir.Model
    hosted: dict[str, ir.TensorProtocol]
    fed: dict[str, ir.TensorProtocol]
    own: set[str]


def merge(source: Source, index: int, bound: Mapping[str, str], others: set[str]) -> Merged:
    """Concatenate the inference graph and the algorithm of entry `index`.

    It updates what is `bound`; it may read the state of `others`, which change as well.
    """
    algorithm = source.infos[index].algorithm
    join, source.join = source.join, None
    model = concatenate(source, index)[0] if join is None else join()
    graph = model.graph
    names = [*bound, *sorted(n for n in others - bound.keys() if n in graph.initializers)]
    hosted = {name: into_input(graph, name) for name in names}
    rates = {name: into_input(graph, name) for name in sorted(fed(algorithm) - hosted.keys())}
    return Merged(model, hosted, rates, {t.name for t in algorithm.initializer})


def concatenate(source: Source, index: int) -> tuple[ir.Model, list[ir.Node]]:
    """The graph that the specification has executed for entry `index`: the inference graph, then the algorithm.

    The caller must have checked that each name is defined once, and before it is read (see `validate`). The second
    result is the list of the algorithm's nodes. Its outputs are not listed as outputs. Initializers that are listed as
    inputs as well are initializers only.
    """
    algorithm = source.infos[index].algorithm
    model = copy_model(source.model)
    graph = model.graph
    for value in list(graph.inputs):
        if value.is_initializer():  # an input with a default value: a weight
            graph.inputs.remove(value)
    _declare_shared(source, index, graph)
    known = named_values(graph)
    added = _deserialize_algorithm(algorithm, known)
    nodes, initializers = list(added), list(added.initializers.values())
    inputs = required_inputs(added)
    added.remove(nodes)
    added.inputs.clear()
    added.initializers.clear()
    graph.extend(nodes)
    graph.inputs.extend(inputs)
    for value in initializers:
        graph.register_initializer(value)
    return model, nodes


def _declare_shared(source: Source, index: int, graph: ir.Graph) -> None:
    """Declare state variables of other entries that this graph reads: they are visible in every graph."""
    algorithm = source.infos[index].algorithm
    wanted = (set(_mentioned(algorithm)) & mutable(source.infos)) - graph.initializers.keys() - own_names(algorithm)
    for info in source.infos:
        for tensor in (t for t in info.algorithm.initializer if t.name in wanted and t.name not in graph.initializers):
            held = zeros.read_tensor(tensor)
            add_initializer(graph, held)


def own_names(algorithm: onnx.GraphProto) -> set[str]:
    """The names that the algorithm of an entry defines."""
    fixed = {v.name for v in algorithm.input} | {t.name for t in algorithm.initializer}
    return fixed | {name for node in algorithm.node for name in node.output if name}


def _deserialize_algorithm(algorithm: onnx.GraphProto, known: dict[str, ir.Value]) -> ir.Graph:
    """The graph of `algorithm`; where it names values of the inference graph, it reads those.

    Its initializers, moments as large as the weights among them, stay where they are in `algorithm`.
    """
    proto = onnx.GraphProto()
    for part, held in algorithm.ListFields():
        if part.name == "name":
            proto.name = held
        elif part.name not in ("output", "initializer", "doc_string"):
            getattr(proto, part.name).extend(held)
    outside = sorted(set(_mentioned(algorithm)) & known.keys())
    fixed = {t.name: t for t in algorithm.initializer}
    bare = fixed.keys() - {v.name for v in algorithm.input}
    proto.input.extend(onnx.ValueInfoProto(name=name) for name in (*outside, *sorted(bare - set(outside))))
    graph: ir.Graph = ir.from_proto(proto)  # type: ignore[assignment]
    for value in list(graph.inputs):
        if value.name in fixed:
            value.const_value = tensor = lasting(fixed[value.name])
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape)  # type: ignore[arg-type]
            if value.name in bare:
                graph.inputs.remove(value)
            graph.register_initializer(value)
    for value in list(graph.inputs):
        if value.name in known:
            graph.inputs.remove(value)
            value.replace_all_uses_with(known[value.name], replace_graph_outputs=True)
    return graph


def lasting(proto: onnx.TensorProto) -> ir.TensorProtocol:
    """The tensor in `proto`, whose name can be changed independently of `proto`."""
    held = zeros.read_tensor(proto)
    if isinstance(held, ir.ExternalTensor) or held.dtype == ir.DataType.STRING:
        return held
    shape = ir.Shape(held.shape)  # type: ignore[arg-type]
    props = dict(held.metadata_props)
    return ir.LazyTensor(lambda: held, dtype=held.dtype, shape=shape, name=held.name, metadata_props=props)


def updated(infos: Iterable[onnx.TrainingInfoProto]) -> set[str]:
    """The initializers that an update binding of any entry changes."""
    return {b.key for info in infos for b in info.update_binding}


def mutable(infos: Iterable[onnx.TrainingInfoProto]) -> set[str]:
    """The initializers that training may change: keys of bindings, and rates that the host feeds."""
    keys = {b.key for i in infos for b in (*i.update_binding, *i.initialization_binding)}
    return keys.union(*(fed(i.algorithm) for i in infos))


def conflicts(infos: Sequence[onnx.TrainingInfoProto]) -> Iterator[str]:
    """Errors for state that several algorithms declare differently: it is one variable."""
    keys = {b.key for i in infos for b in (*i.update_binding, *i.initialization_binding)}
    declared: dict[str, tuple[int, onnx.TensorProto]] = {}
    for index, info in enumerate(infos):
        for tensor in (t for t in info.algorithm.initializer if t.name in keys):
            first, same = declared.setdefault(tensor.name, (index, tensor))
            if first != index and not _equal(same, tensor):
                yield (
                    f"training entries {first} and {index} declare the state {tensor.name!r}, which is one variable, "
                    "with different values"
                )


def _equal(a: onnx.TensorProto, b: onnx.TensorProto) -> bool:
    one, other = zeros.read_tensor(a), zeros.read_tensor(b)
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and one.numpy().tobytes() == other.numpy().tobytes()


class MutableInputs:
    """Mutable initializers as graph inputs, while passes must not treat them as constants."""

    def __init__(self, graph: ir.Graph, names: Iterable[str]) -> None:
        self.order = list(graph.initializers)
        self.listed = [v.name for v in graph.inputs]
        self.held = {n: into_input(graph, n) for n in sorted(set(names) & graph.initializers.keys())}

    def restore(self, graph: ir.Graph) -> None:
        """Make them initializers again, in their old places."""
        for value in [v for v in graph.inputs if v.name in self.held]:
            if value.name not in self.listed:
                graph.inputs.remove(value)
            value.const_value = self.held[value.name or ""]
            graph.initializers[value.name or ""] = value
        places = {name: i for i, name in enumerate(self.order)}
        values = sorted(graph.initializers.values(), key=lambda v: places.get(v.name or "", len(places)))
        graph.initializers.clear()
        for value in values:
            graph.initializers[value.name or ""] = value


def fed(algorithm: onnx.GraphProto) -> set[str]:
    """Initializers that are marked as fed, and those that an optimizer operator reads as its rate."""
    own = {t.name for t in algorithm.initializer}
    marked = {t.name for t in algorithm.initializer if any(p.key == FED for p in t.metadata_props)}
    rates = {n.input[0] for n in algorithm.node if n.domain == DOMAIN and n.op_type != "Gradient" and n.input}
    return marked | (rates & own)


def read_outside(algorithm: onnx.GraphProto) -> set[str]:
    """The outer names that `algorithm` uses: inputs of nodes, names in a Gradient, and its own outputs."""
    return {*_mentioned(algorithm), *(v.name for v in algorithm.output)} - own_names(algorithm) - {""}


def _mentioned(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that nodes of `graph`, and graphs inside it, read; those in a Gradient included."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if node.domain == DOMAIN and node.op_type == "Gradient":
                yield from (s.decode() for s in (*attribute.strings, attribute.s))
            for inner in (attribute.g, *attribute.graphs):
                yield from _mentioned(inner)
                yield from (v.name for v in inner.output)

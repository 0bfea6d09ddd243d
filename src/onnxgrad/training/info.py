"""TrainingInfoProto: reading it, checking its bindings, and the graph that it says is executed.

An entry holds an *algorithm*, a graph that goes on where the inference graph ends: the executed graph is
the concatenation of both. Its *update bindings* say which initializer (of either graph) takes which
output when the step is over. ``onnx.checker`` looks at none of this, so it is checked here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from onnxgrad.errors import BadInput, UnknownName

#: The domain of Gradient, Adam, Adagrad and Momentum.
DOMAIN = "ai.onnx.preview.training"
#: Metadata of an initializer that the host may feed at every step, such as the learning rate.
FED = "onnxgrad.fed"

AnyTrainingModel = str | os.PathLike | onnx.ModelProto | ir.Model


@dataclass
class Source:
    """A model that carries training information, and where its external data lies."""

    proto: onnx.ModelProto
    folder: str = ""

    def tensor(self, proto: onnx.TensorProto) -> ir.TensorProtocol:
        """An initializer, its bytes shared with the proto (or read from its file when asked for)."""
        tensor = ir.serde.deserialize_tensor(proto)
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = self.folder
        return tensor

    def inference(self) -> ir.Model:
        """The inference model alone."""
        model = ir.from_proto(self.proto)
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.base_dir = self.folder
        if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
            model.opset_imports.pop(DOMAIN, None)
        return model


def read(model: AnyTrainingModel) -> Source:
    """The protobuf of `model`; external data stays where it is."""
    if isinstance(model, onnx.ModelProto):
        return Source(model)
    if isinstance(model, ir.Model):
        return Source(ir.to_proto(model))
    path = Path(model)
    try:
        return Source(onnx.load(path, load_external_data=False), str(path.parent))
    except (OSError, DecodeError) as e:
        raise BadInput(f"cannot read {str(path)!r} as an ONNX model: {e}") from e


def entries(source: Source, entry: int | None) -> list[int]:
    """The indices of the entries to run: one, or all in sequence."""
    count = len(source.proto.training_info)
    if not count:
        raise BadInput("the model carries no training information; attach a loss and an optimizer first")
    if entry is None:
        return list(range(count))
    if not 0 <= entry < count:
        raise BadInput(f"there is no training entry {entry}: the model has {count}, counted from 0")
    return [entry]


def bindings(source: Source, chosen: Sequence[int]) -> dict[int, dict[str, str]]:
    """The update bindings of the `chosen` entries: per entry, from initializer to the output it takes.

    Raises:
        BadInput: a key that is no initializer, a key bound twice, a value that is no output.
    """
    inference = source.proto.graph
    found: dict[int, dict[str, str]] = {}
    owner: dict[str, int] = {}
    for index in chosen:
        algorithm = source.proto.training_info[index].algorithm
        keys = {t.name for g in (inference, algorithm) for t in g.initializer}
        values = {v.name for g in (inference, algorithm) for v in g.output}
        found[index] = {}
        for binding in source.proto.training_info[index].update_binding:
            where = f"training entry {index}, update binding {binding.key!r} ← {binding.value!r}"
            if binding.key in owner:
                twice = "twice" if owner[binding.key] == index else f"by entry {owner[binding.key]} too"
                raise BadInput(f"{where}: {binding.key!r} is bound {twice}; keys are unique in a model")
            if binding.key not in keys:
                raise BadInput(f"{where}: {UnknownName(binding.key, keys, 'initializer')}")
            if binding.value not in values:
                raise BadInput(f"{where}: {UnknownName(binding.value, values, 'output')}")
            owner[binding.key] = index
            found[index][binding.key] = binding.value
    return found


@dataclass
class Merged:
    """The executed graph of one entry, with what the host feeds turned from initializers into inputs.

    Attributes:
        model: inference graph, then algorithm; the initializers of `state` and `fed` are graph inputs.
        state: value in the model of each initializer that an update binding changes.
        fed: the same of those that the host may feed at every step (learning rates).
        own: names of the initializers that belong to the algorithm.
    """

    model: ir.Model
    state: dict[str, ir.TensorProtocol]
    fed: dict[str, ir.TensorProtocol]
    own: set[str]


def merge(source: Source, index: int, bound: Sequence[str]) -> Merged:
    """Concatenate the inference graph and the algorithm of entry `index`; `bound` names the state."""
    inference, algorithm = source.proto.graph, source.proto.training_info[index].algorithm
    graph = onnx.GraphProto(name=inference.name or "step")
    tensors = {t.name: t for g in (inference, algorithm) for t in g.initializer}
    fed_names = _fed(algorithm) - set(bound)
    for part in (inference, algorithm):
        graph.node.extend(part.node)
        graph.output.extend(part.output)
        graph.value_info.extend(part.value_info)
        graph.input.extend(v for v in part.input if v.name not in tensors)
    _check_names(graph, [*[t.name for g in (inference, algorithm) for t in g.initializer]], index)
    hosted = [*bound, *sorted(fed_names)]
    for name in hosted:
        held = tensors[name]
        graph.input.append(onnx.helper.make_tensor_value_info(name, held.data_type, list(held.dims)))
    rest = [t for name, t in tensors.items() if name not in set(hosted)]
    graph.initializer.extend(_stub(t) for t in rest)
    proto = onnx.ModelProto(ir_version=source.proto.ir_version, graph=graph)
    proto.opset_import.extend(source.proto.opset_import)
    proto.functions.extend(source.proto.functions)
    model = ir.from_proto(proto)
    for t in rest:
        model.graph.initializers[t.name].const_value = source.tensor(t)
    return Merged(
        model,
        {name: source.tensor(tensors[name]) for name in bound},
        {name: source.tensor(tensors[name]) for name in sorted(fed_names)},
        {t.name for t in algorithm.initializer},
    )


def _fed(algorithm: onnx.GraphProto) -> set[str]:
    """Initializers that are marked as fed, and those that an optimizer operator takes as its rate."""
    own = {t.name for t in algorithm.initializer}
    marked = {t.name for t in algorithm.initializer if any(p.key == FED for p in t.metadata_props)}
    rates = {n.input[0] for n in algorithm.node if n.domain == DOMAIN and n.op_type != "Gradient" and n.input}
    return marked | (rates & own)


def _stub(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """`tensor` without its bytes, which are handed over separately, not copied."""
    stub = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    stub.data_location = onnx.TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="stub")
    return stub


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (v.name for v in graph.input)
    yield from (o for n in graph.node for o in n.output if o)


def _check_names(graph: onnx.GraphProto, initializers: Sequence[str], index: int) -> None:
    """Every name is defined once, and before it is read."""
    seen: set[str] = set()
    for name in [*initializers, *_defined(graph)]:
        if name in seen:
            raise BadInput(f"training entry {index}: {name!r} is defined twice in the merged graph")
        seen.add(name)
    known = set(initializers) | {v.name for v in graph.input}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                why = "is read before it is computed" if name in seen else "does not exist"
                reader = f"{node.op_type} node {node.name!r}"
                raise BadInput(f"training entry {index}: {name!r}, an input of {reader}, {why}")
        known.update(node.output)
    for output in graph.output:
        if output.name not in known:
            raise BadInput(f"training entry {index}: no node computes the output {output.name!r}")

"""Models without operators of the training domain: main graph, branches, functions and training entries.

Entries are preserved. Each algorithm is appended to the inference graph, as the specification executes it, lowered
there, and cut off again. Additions that the derivative needs in the inference graph (a further output of a node, a
function body in place of its node) stay in that graph; its outputs do not change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import reads, subgraphs
from onnxgrad.ir.match import is_standard, not_none
from onnxgrad.model_io import AnyModel, training_info
from onnxgrad.model_io.open import all_names
from onnxgrad.training.metadata import FED
from onnxgrad.training.spec.initialization import as_model, trains
from onnxgrad.training.spec.lowering import Lowered, Opening, lowered_graph, open_bound
from onnxgrad.training.spec.training_info import MutableInputs, Source, concatenate, fed, mutable, read, read_outside
from onnxgrad.training.spec.validation import refuse_invalid
from onnxgrad.transforms.gradient_node import DOMAIN

#: A node between the two parts, with a name that no model has.
_END = "onnxgrad.end_of_inference"


def lower_gradients(model: AnyModel, *, variables: Collection[str] = ()) -> Any:
    """`model` with its Gradient nodes and optimizer operators written out as standard operators.

    They are lowered in the main graph, in branches and bodies, in local functions (which are inlined), and in the
    algorithms of the training information, which stay entries with the same inputs, outputs and bindings. A GraphCall
    becomes the form that newer versions use.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        variables: initializers whose values may be replaced later, so that nothing is computed from them in
            advance; those that bindings of the training information name are anyway.

    Returns:
        A model of the argument's kind (a path gives a ModelProto), with the same inputs and outputs.

    Raises:
        BadInput: a node, or training information, that the specification does not allow.
        NotDifferentiable: no path from `xs` to `y`, or an operator on it has no rule.
    """
    original: Source | None = None

    def take_entries(private: ir.Model) -> set[str]:
        nonlocal original
        infos = training_info(private)
        if infos:
            refuse_invalid(private)
            original = Source(private.clone(), read(private).infos)
        names = mutable(infos)
        infos.clear()  # entries are lowered below: opening need not raise them
        return names

    opening = Opening(model, variables, take_entries)
    infos = [] if original is None else original.infos
    reads = set().union(*(read_outside(i.algorithm) for i in infos))  # also of dead nodes in the main graph
    opening.write_out(set().union(*map(all_names, infos)), reads)
    if original is not None:
        opening.opened.model = _with_entries(opening.opened.model, original)
    return opening.close()


def _with_entries(model: ir.Model, original: Source) -> ir.Model:
    """`model`, the lowered main graph of `original`, with the training entries lowered as well."""
    infos = list(original.infos)
    for index, info in enumerate(infos):
        infos[index] = _with_initialization(info, original.model, model)
        if info.algorithm.node:
            model, infos[index] = _lower_entry(model, infos, index, original.model.clone())
    training_info(model)[:] = infos
    return model


def _lower_entry(
    model: ir.Model, infos: list[onnx.TrainingInfoProto], index: int, original: ir.Model
) -> tuple[ir.Model, onnx.TrainingInfoProto]:
    """The model and its entry `index`, lowered; `original` has the local functions that the entry may call."""
    joined, nodes = concatenate(Source(model, infos), index)
    training_info(joined).clear()
    joined.functions.update(original.functions)
    for domain, version in original.opset_imports.items():
        joined.opset_imports.setdefault(domain, version)
    joined.opset_imports.setdefault(DOMAIN, 1)
    if original.opset_imports.get("", 1) < joined.opset_imports[""]:  # the graph was raised, the algorithm was not
        for node in (n for top in nodes for n in (top, *(i for g in subgraphs(top) for i in g.all_nodes()))):
            if is_standard(node):
                node.version = original.opset_imports.get("", 1)
    joined.graph.insert_before(nodes[0], _end())
    listed = [v.name for v in model.graph.inputs]
    names = mutable(infos)
    unfolded = MutableInputs(joined.graph, names)
    made = {v.name: v for node in nodes for v in node.outputs}
    outputs = len(joined.graph.outputs)  # further ones only while they must not be folded
    joined.graph.outputs.extend(made[o.name] for o in infos[index].algorithm.output if o.name in made)
    lowered = Lowered(open_bound(joined, names).model)
    del lowered.graph.outputs[outputs:]
    unfolded.restore(lowered.graph)
    info = _cut(lowered, infos[index], model.graph.initializers.keys())
    _mark_rates(info, fed(infos[index].algorithm))
    model = lowered.model
    for name in listed:  # initializers that were inputs as well are so again, in their places
        value = model.graph.initializers.get(name or "")
        if value is not None:
            model.graph.inputs.insert(listed.index(name), value)
    return model, info


def _with_initialization(info: onnx.TrainingInfoProto, source: ir.Model, model: ir.Model) -> onnx.TrainingInfoProto:
    """An entry whose initialization is lowered, for the opset of `model`, to which `source` was raised."""
    own = trains(info.initialization.node) or bool(source.functions)  # which the lowered model has no more
    if not info.initialization.node or (source.opset_imports.get("", 1) == model.opset_imports[""] and not own):
        return info
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    copy.initialization.CopyFrom(lowered_graph(as_model(source, info.initialization)).graph)
    return copy


def _mark_rates(info: onnx.TrainingInfoProto, rates: set[str]) -> None:
    """Record the initializers that an optimizer read as its rate: the lowered graph has none."""
    for tensor in info.algorithm.initializer:
        if tensor.name in rates and not any(p.key == FED for p in tensor.metadata_props):
            tensor.metadata_props.add(key=FED, value="rate")


def _end() -> ir.Node:
    held = ir.tensor(np.zeros(1, np.float32))
    end = ir.Node("", "Constant", [], [ir.AttrTensor("value", held)], num_outputs=1, name=_END)
    end.outputs[0].name = _END
    return end


def _cut(lowered: Lowered, info: onnx.TrainingInfoProto, inference_weights: Collection[str]) -> onnx.TrainingInfoProto:
    """Move the added nodes from the graph into the entry, in place of its old ones."""
    graph = lowered.graph
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    algorithm = copy.algorithm
    at = next(i for i, n in enumerate(graph) if n.name == _END)
    inference = set(list(graph)[: at + 1])
    made_before = {v for node in inference for v in node.outputs}
    inference_outputs = list(graph.outputs)
    for out in algorithm.output:
        value = lowered[out.name]
        if value.name != out.name and (value in made_before or value.producer() is None):
            value = lowered.builder.copy(value).value
            value.name = out.name
        elif value.name != out.name:
            value = lowered.expose(out.name)
        graph.outputs.append(value)
    finish(graph, [*made_before, *graph.initializers.values()])
    graph.outputs[:] = inference_outputs
    nodes = [n for n in graph if n not in inference]
    del algorithm.node[:]
    algorithm.node.extend(ir.to_proto(n) for n in nodes)
    defined = {v.name for n in nodes for v in n.outputs}
    for i in reversed(range(len(algorithm.value_info))):
        if algorithm.value_info[i].name not in defined:
            del algorithm.value_info[i]
    used_before = {v for node in inference for v in reads(node)} | set(inference_outputs)
    used_after = {v for node in nodes for v in reads(node)}
    graph.remove(nodes, safe=False)
    graph.remove([n for n in inference if n.name == _END], safe=False)
    for value in [v for v in graph.inputs if v.name in {i.name for i in algorithm.input}]:
        graph.inputs.remove(value)
    own = {t.name for t in algorithm.initializer}
    for name, value in list(graph.initializers.items()):
        if name in inference_weights or value in used_before:
            continue
        if name not in own and value in used_after:
            algorithm.initializer.append(ir.to_proto(not_none(value.const_value)))
        del graph.initializers[name]
    return copy

"""The algorithms of training information lowered in their place: entries stay entries, of standard operators.

Each algorithm is written behind the inference graph, as the specification has it executed, lowered there, and
cut off again. What the derivative asks of the inference graph in addition (a further output of a node, a function
body in place of its node) stays in that graph; its outputs do not change.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import reads, subgraphs
from onnxgrad.model_io import AnyModel, training_info
from onnxgrad.training.spec.gradient_node import DOMAIN
from onnxgrad.training.spec.initialization import as_model, trains
from onnxgrad.training.spec.lowering import Lowered, lower_gradients, open_bound
from onnxgrad.training.spec.training_info import FED, Source, Unfolded, concatenated, fed, mutable, read

#: A node between the two parts; its name is one that no model has.
_END = "onnxgrad.end_of_inference"


def lower_entries(model: ir.Model, original: AnyModel) -> ir.Model:
    """`model`, which is `original` with its main graph lowered, with its training entries lowered as well."""
    source = read(original)
    infos = list(source.infos)
    for index, info in enumerate(infos):
        infos[index] = _with_initialization(info, source.model, model)
        if info.algorithm.node:
            model, infos[index] = _lowered(model, infos, index, source.model.clone())
    training_info(model)[:] = infos
    return model


def _lowered(
    model: ir.Model, infos: list[onnx.TrainingInfoProto], index: int, original: ir.Model
) -> tuple[ir.Model, onnx.TrainingInfoProto]:
    """The model and its entry `index`, lowered; `original` has the local functions that the entry may call."""
    joined, nodes = concatenated(Source(model, infos), index)
    training_info(joined).clear()
    joined.functions.update(original.functions)
    for domain, version in original.opset_imports.items():
        joined.opset_imports.setdefault(domain, version)
    joined.opset_imports.setdefault(DOMAIN, 1)
    if original.opset_imports.get("", 1) < joined.opset_imports[""]:  # the graph was raised, the algorithm was not
        for node in (n for top in nodes for n in (top, *(i for g in subgraphs(top) for i in g.all_nodes()))):
            if node.domain in ("", "ai.onnx"):
                node.version = original.opset_imports.get("", 1)
    joined.graph.insert_before(nodes[0], _end())
    listed = [v.name for v in model.graph.inputs]
    names = mutable(infos)
    unfolded = Unfolded(joined.graph, names)
    made = {v.name: v for node in nodes for v in node.outputs}
    outputs = len(joined.graph.outputs)  # further ones only for as long as what they are must not be folded
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
    copy.initialization.CopyFrom(lower_gradients(as_model(source, info.initialization)).graph)
    return copy


def _mark_rates(info: onnx.TrainingInfoProto, rates: set[str]) -> None:
    """Keep in mind which initializers an optimizer took as its rate, now that none is there to tell."""
    for tensor in info.algorithm.initializer:
        if tensor.name in rates and not any(p.key == FED for p in tensor.metadata_props):
            tensor.metadata_props.add(key=FED, value="rate")


def _end() -> ir.Node:
    held = ir.tensor(np.zeros(1, np.float32))
    end = ir.Node("", "Constant", [], [ir.AttrTensor("value", held)], num_outputs=1, name=_END)
    end.outputs[0].name = _END
    return end


def _cut(lowered: Lowered, info: onnx.TrainingInfoProto, inference_weights: Collection[str]) -> onnx.TrainingInfoProto:
    """Take what was added off the graph: the entry with it in place of what it had."""
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
            (var,) = lowered.builder.append(ir.Node("", "Identity", [value]))
            value = var.value
            value.name = out.name
        elif value.name != out.name:
            value = lowered.expose(out.name)
        graph.outputs.append(value)
    finish(graph, [*made_before, *graph.initializers.values()])
    graph.outputs.clear()
    graph.outputs.extend(inference_outputs)
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
            assert value.const_value is not None
            algorithm.initializer.append(ir.to_proto(value.const_value))
        del graph.initializers[name]
    return copy

"""Training information through other tools, which rename values without it, or drop it.

Bindings, and the strings in a Gradient, are names that other tools do not know. So renaming is done here for the whole
model; and training information that a tool has dropped is copied from its source, if it is still valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import onnx

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import is_standard
from onnxgrad.training.spec.graph_call import defined_inside, rename_in_graph
from onnxgrad.training.spec.training_info import model_proto
from onnxgrad.training.spec.validation import validate

AnyProto = str | os.PathLike | onnx.ModelProto


def renamed(model: AnyProto, names: Mapping[str, str] | Callable[[str], str]) -> onnx.ModelProto:
    """A copy of `model` with other names for its values, in all graphs, bindings and Gradient nodes alike.

    Args:
        model: a path or an ``onnx.ModelProto``.
        names: from old to new name (values that it lacks keep theirs), or a function, such as one that adds a prefix.
            Local functions have names of their own, which stay.

    Raises:
        BadInput: two values of one graph would get the same name.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model_proto(model))
    algorithms = [i.algorithm for i in copy.training_info]
    others = [i.initialization for i in copy.training_info]
    known = {n for g in (copy.graph, *algorithms, *others) for n in defined_inside(g)}
    new = {n: names(n) if callable(names) else names.get(n, n) for n in known}
    for graphs in ([copy.graph, algorithm] for algorithm in algorithms or [onnx.GraphProto()]):
        taken: dict[str, str] = {}
        for name in sorted({n for g in graphs for n in defined_inside(g)}):
            first = taken.setdefault(new[name], name)
            if first != name:
                raise BadInput(f"{first!r} and {name!r} would both be called {new[name]!r}")
    for graph in [copy.graph, *algorithms, *others]:
        rename_in_graph(graph, new)
        for sparse in graph.sparse_initializer:
            sparse.values.name = new.get(sparse.values.name, sparse.values.name)
        for annotation in graph.quantization_annotation:
            annotation.tensor_name = new.get(annotation.tensor_name, annotation.tensor_name)
            for pair in annotation.quant_parameter_tensor_names:
                pair.value = new.get(pair.value, pair.value)
    for info in copy.training_info:
        for pair in (*info.update_binding, *info.initialization_binding):
            pair.key, pair.value = new.get(pair.key, pair.key), new.get(pair.value, pair.value)
    return copy


def carry_training_info(source: AnyProto, target: AnyProto) -> onnx.ModelProto:
    """A copy of `target`, a tool's rewrite of `source`, with the training information that the tool dropped.

    Raises:
        BadInput: it does not hold there: a value has another name or is gone, or an operator means something else.
    """
    before, copy = model_proto(source), onnx.ModelProto()
    copy.CopyFrom(model_proto(target))
    del copy.training_info[:]
    copy.training_info.extend(before.training_info)
    have = {o.domain for o in copy.opset_import}
    copy.opset_import.extend(o for o in before.opset_import if o.domain not in have)
    versions = [next((o.version for o in m.opset_import if is_standard(o)), 0) for m in (before, copy)]
    for index, info in enumerate(copy.training_info):
        for node in (*info.algorithm.node, *info.initialization.node):
            if not _means_the_same(node, *versions):
                raise BadInput(
                    f"training entry {index} uses {node.op_type}, which opset {versions[1]} defines otherwise than "
                    f"opset {versions[0]}\n  hint: write the model out with lower_gradients for the newer opset first"
                )
    problems = validate(copy)
    if problems:
        listed = "\n".join(f"  {p}" for p in problems[:5])
        raise BadInput(f"the training information does not fit the model that the tool has made\n{listed}")
    return copy


def _means_the_same(node: onnx.NodeProto, before: int, after: int) -> bool:
    """True if a node means the same at both opsets."""
    if not is_standard(node) or before == after:
        return True
    try:
        old, new = (onnx.defs.get_schema(node.op_type, version, "") for version in (before, after))
    except onnx.defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return True
    # a newer version that takes the same operands and attributes has only been given more types
    attributes = [{n: a.default_value.SerializeToString() for n, a in s.attributes.items()} for s in (old, new)]
    return attributes[0].items() <= attributes[1].items() and [i.name for i in old.inputs] == [
        i.name for i in new.inputs
    ]

"""Maps at the ends of a model: wrappers that converters of classical models add around tensors.

skl2onnx ends classifiers in a ZipMap, which turns each row of probabilities into a dictionary by class. Its output
becomes the tensor that it reads, under its name, as the converter writes with ``zipmap=False``. Its keys are stored in
the model's metadata as the names of the classes. A map as an input (CastMap, DictVectorizer) has no equivalent tensor,
and is refused.
"""

from __future__ import annotations

import json

import onnx

from onnxgrad.errors import BadInput, warn_caller

#: Key of a model's metadata: the names of its classes in the order of their numbers, as JSON.
CLASSES = "onnxgrad.classes"


def without_maps(proto: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """`proto`, or a copy of it without ZipMaps at its end.

    Raises:
        BadInput: another input or output is a map.
    """
    graph = proto.graph
    if not any(_is_map(v.type) for v in (*graph.input, *graph.output, *graph.value_info)):
        return proto
    for value in graph.input:
        if _is_map(value.type):
            raise BadInput(
                f"the input {value.name!r} of {what} is a map, which is no tensor and has no derivative\n"
                "  hint: export the model behind it, with a tensor of features for its input"
            )
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    sources = {}
    labels = []
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == "ai.onnx.ml" and len(node.input) == len(node.output) == 1:
            sources[node.output[0]] = node.input[0]
            labels += [[str(i) for i in a.ints] or [t.decode() for t in a.strings] for a in node.attribute]
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
    for value in graph.output:
        if _is_map(value.type):
            if value.name not in sources:
                raise BadInput(
                    f"the output {value.name!r} of {what} is a map, which is no tensor, and no ZipMap makes it\n"
                    "  hint: drop that output"
                )
            warn_caller(
                f"the output {value.name!r} is the tensor {sources[value.name]!r} here; the ZipMap that made "
                "dictionaries of its rows is left out"
            )
            value.type.Clear()
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    if len(labels) == 1 and not any(p.key == CLASSES for p in copy.metadata_props):
        copy.metadata_props.add(key=CLASSES, value=json.dumps(labels[0], ensure_ascii=False))
    for i in reversed(range(len(graph.value_info))):
        if _is_map(graph.value_info[i].type):
            del graph.value_info[i]
    return copy


def _is_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _is_map(kind.sequence_type.elem_type)
    return kind.HasField("map_type") or (kind.HasField("optional_type") and _is_map(kind.optional_type.elem_type))

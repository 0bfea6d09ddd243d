"""Cut the algorithm of a training step off the inference graph that it was appended to, and put it there again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from onnxgrad.ir.composites import plain_value
from onnxgrad.ir.notes import notes
from onnxgrad.ir.serialize import serialize_nodes
from onnxgrad.model_io.zeros import declare_tensor
from onnxgrad.training.spec.training_info import lasting


def cut_off(
    graph: ir.Graph,
    nodes: list[ir.Node],
    inputs: list[ir.Value],
    initializers: list[ir.Value],
    ends: Iterable[ir.Value],
    bindings: Mapping[str, str],
) -> onnx.TrainingInfoProto:
    """Move `nodes`, with the inputs and initializers added for them, from `graph` into a training entry.

    Args:
        graph: the inference graph with the algorithm.
        nodes: those of the algorithm, in order.
        inputs: its own inputs.
        initializers: its own initializers.
        ends: the values that it computes.
        bindings: which initializer takes which of these values.
    """
    info = onnx.TrainingInfoProto()
    algorithm = info.algorithm
    algorithm.name = "training"
    serialize_nodes(nodes, algorithm)
    algorithm.input.extend(ir.serde.serialize_value(v) for v in inputs)
    for value in initializers:
        assert value.const_value is not None
        tensor = declare_tensor(value.const_value)
        for key, text in value.metadata_props.items():
            tensor.metadata_props.add(key=key, value=text)
        algorithm.initializer.append(tensor)
    algorithm.output.extend(ir.serde.serialize_value(v) for v in ends)
    for key, text in bindings.items():
        info.update_binding.add(key=key, value=text)
    graph.remove(nodes, safe=False)
    for value in inputs:
        graph.inputs.remove(value)
    for value in initializers:
        del graph.initializers[value.name or ""]
    return info


def put_back(
    model: ir.Model,
    info: onnx.TrainingInfoProto,
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    initializers: Sequence[ir.Value],
) -> ir.Model:
    """Append the algorithm that was cut off `model` to it, as `concatenate` does with messages. Returns `model`.

    Notes in memory are dropped; initial values are those of `info`, which has no data for large zeros.
    """
    graph = model.graph
    for value in [v for v in graph.inputs if v.is_initializer()]:
        graph.inputs.remove(value)
    graph.inputs.extend(inputs)
    given = {t.name: t for t in info.algorithm.initializer}
    for value in sorted(initializers, key=lambda v: v.name or ""):  # the order that `concatenate` gives them
        held = given[value.name or ""]
        value.const_value = lasting(held)
        value.metadata_props.clear()  # those of the tensor
        graph.register_initializer(value)
    for node in nodes:
        for result in node.outputs:
            result.const_value = None  # known of initializers that training changes, as of the number of steps
        both: list[ir.Node | ir.Value] = [node, *node.outputs]
        for noted in both:
            if notes(noted):
                noted.meta.clear()
        for name, a in node.attributes.items():
            if a.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
                node.attributes[name] = ir.Attr(name, a.type, plain_value(a.value))
    graph.extend(nodes)
    return model

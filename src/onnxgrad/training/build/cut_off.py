"""Cut the algorithm of a training step off the inference graph that it was appended to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from onnxgrad.model_io.zeros import declare_tensor


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
        ends: what it computes.
        bindings: which initializer takes which of these values.
    """
    info = onnx.TrainingInfoProto()
    algorithm = info.algorithm
    algorithm.name = "training"
    algorithm.node.extend(ir.serde.serialize_node(node) for node in nodes)
    algorithm.input.extend(ir.serde.serialize_value(v) for v in inputs)
    for value in initializers:
        assert value.const_value is not None
        tensor = declare_tensor(value.const_value)
        for key, text in value.metadata_props.items():
            tensor.metadata_props.add(key=key, value=text)
        algorithm.initializer.append(tensor)
    made = (v for node in nodes for v in node.outputs if v.name)
    algorithm.value_info.extend(ir.serde.serialize_value(v) for v in made if v.type is not None or v.shape is not None)
    algorithm.output.extend(ir.serde.serialize_value(v) for v in ends)
    for key, text in bindings.items():
        info.update_binding.add(key=key, value=text)
    graph.remove(nodes, safe=False)
    for value in inputs:
        graph.inputs.remove(value)
    for value in initializers:
        del graph.initializers[value.name or ""]
    return info

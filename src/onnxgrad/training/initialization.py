"""The initialization of a training entry: a graph without inputs whose outputs some initializers take.

The specification has those of all entries evaluated, in order, when a training process starts. That is when the
step is compiled: its state then starts from what the graphs give, which may be random.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Session
from onnxgrad.training.gradients import DOMAIN
from onnxgrad.training.info import Source
from onnxgrad.training.lowering import lower_gradients


def initialized(source: Source) -> Source:
    """`source` with the initializations of all entries done, in order; itself if there are none."""
    if not any(info.initialization_binding for info in source.infos):
        return source
    model, infos = source.model.clone(), [_copied(info) for info in source.infos]
    for index, info in enumerate(infos):
        values = _evaluated(source.model, info.initialization, index)
        for binding in info.initialization_binding:
            where = f"training entry {index}, initialization binding {binding.key!r} ← {binding.value!r}"
            array = values[binding.value]
            own = next((t for t in info.algorithm.initializer if t.name == binding.key), None)
            if own is not None:
                _check_fits(where, array, ir.serde.deserialize_tensor(own))
                own.CopyFrom(onnx.numpy_helper.from_array(array, own.name))
            else:
                held = model.graph.initializers[binding.key]
                assert held.const_value is not None
                _check_fits(where, array, held.const_value)
                held.const_value = ir.tensor(array, name=binding.key)
    return Source(model, infos)


def _evaluated(model: ir.Model, graph: onnx.GraphProto, index: int) -> dict[str, np.ndarray]:
    """The outputs of an initialization graph."""
    if not graph.output:
        return {}
    proto = as_model(model, graph)
    try:
        return Session(ir.from_proto(lower_gradients(proto) if proto.functions or trains(graph.node) else proto)).run(
            {}
        )
    except BadInput as e:
        raise BadInput(f"training entry {index}: its initialization cannot be evaluated: {e}") from e


def as_model(model: ir.Model, graph: onnx.GraphProto) -> onnx.ModelProto:
    """An initialization graph as a model of its own, in the opsets of `model`."""
    proto = onnx.ModelProto(ir_version=max(8, model.ir_version), graph=graph)
    proto.graph.name = graph.name or "initialization"
    proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items())
    proto.functions.extend(ir.to_proto(f) for f in model.functions.values())
    return proto


def trains(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether any of `nodes`, or of those inside them, belongs to the training domain."""
    return any(n.domain == DOMAIN or any(trains(g.node) for a in n.attribute for g in (a.g, *a.graphs)) for n in nodes)


def _check_fits(where: str, array: np.ndarray, like: ir.TensorProtocol) -> None:
    new = ir.tensor(array)
    if (new.dtype, new.shape) != (like.dtype, like.shape):
        raise BadInput(f"{where}: a tensor of {like.dtype}{like.shape} cannot take one of {new.dtype}{new.shape}")


def _copied(info: onnx.TrainingInfoProto) -> onnx.TrainingInfoProto:
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    return copy

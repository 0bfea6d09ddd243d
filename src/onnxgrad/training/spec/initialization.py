"""The initialization of a training entry: a graph without inputs whose outputs replace initializers.

By the specification, those of all entries are evaluated, in order, when a training process starts. That is when the
step is compiled: its state then starts from the outputs of the graphs, which may be random.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import is_op, is_standard, not_none
from onnxgrad.runtime import Session
from onnxgrad.training.spec.lowering import lowered_graph
from onnxgrad.training.spec.training_info import Source
from onnxgrad.transforms.gradient_node import DOMAIN
from onnxgrad.wording import tensor_text


def run_initializations(source: Source, seed: int | None = None) -> Source:
    """`source` with the initializations of all entries applied, in order; itself without any.

    Random operators that have no seed get one, by `seed`; default: others every time.
    """
    if not any(info.initialization_binding for info in source.infos):
        return source
    model, infos = source.model.clone(), [_copy_entry(info) for info in source.infos]
    draws = np.random.default_rng(seed)
    for index, info in enumerate(infos):
        values = _evaluate(source.model, info.initialization, index, draws)
        for binding in info.initialization_binding:
            where = f"training entry {index}, initialization binding {binding.key!r} ← {binding.value!r}"
            array = values[binding.value]
            # a state variable that several algorithms declare is one
            declared = [t for i in infos for t in i.algorithm.initializer if t.name == binding.key]
            for tensor in declared:
                _check_fits(where, array, ir.serde.deserialize_tensor(tensor))
                new = onnx.numpy_helper.from_array(array, tensor.name)
                new.metadata_props.extend(tensor.metadata_props)  # a rate stays one
                tensor.CopyFrom(new)
            if not declared:
                held = model.graph.initializers[binding.key]
                _check_fits(where, array, not_none(held.const_value))
                held.const_value = ir.tensor(array, name=binding.key)
    return replace(source, model=model, infos=infos, join=None)


def _evaluate(model: ir.Model, graph: onnx.GraphProto, index: int, draws: np.random.Generator) -> dict[str, np.ndarray]:
    """The outputs of an initialization graph."""
    if not graph.output:
        return {}
    proto = as_model(model, graph)
    try:
        if proto.functions or trains(graph.node):
            proto = lowered_graph(proto)
        seed_all(proto.graph.node, draws)
        return Session(ir.from_proto(proto)).run({})
    except BadInput as e:
        raise BadInput(f"training entry {index}: its initialization cannot be evaluated: {e}") from e


def seed_all(nodes: Iterable[onnx.NodeProto], draws: np.random.Generator) -> None:
    """Give every random operator without a seed one, in place.

    The specification has it generated. ONNX Runtime generates one per process, with which every session begins.
    """
    for node in nodes:
        for inner in (g for a in node.attribute for g in (a.g, *a.graphs)):
            seed_all(inner.node, draws)
        random = is_op(node, _seeded())
        if random and not any(a.name == "seed" for a in node.attribute):
            seed = int(draws.integers(1 << 24))  # a float32 holds it
            node.attribute.append(
                onnx.helper.make_attribute("seed", seed if node.op_type == "Dropout" else float(seed))
            )


@functools.cache
def _seeded() -> set[str]:
    """The operators that have a seed."""
    return {s.name for s in onnx.defs.get_all_schemas() if is_standard(s) and "seed" in s.attributes}


def as_model(model: ir.Model, graph: onnx.GraphProto) -> onnx.ModelProto:
    """An initialization graph as a model of its own, in the opsets of `model`."""
    proto = onnx.ModelProto(ir_version=max(8, model.ir_version), graph=graph)
    proto.graph.name = graph.name or "initialization"
    proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items())
    proto.functions.extend(ir.to_proto(f) for f in model.functions.values())
    return proto


def trains(nodes: Iterable[onnx.NodeProto]) -> bool:
    """True if a node of `nodes`, or one inside it, belongs to the training domain."""
    return any(n.domain == DOMAIN or any(trains(g.node) for a in n.attribute for g in (a.g, *a.graphs)) for n in nodes)


def _check_fits(where: str, array: np.ndarray, like: ir.TensorProtocol) -> None:
    new = ir.tensor(array)
    if (new.dtype, new.shape) != (like.dtype, like.shape):
        raise BadInput(
            f"{where}: {tensor_text(like.dtype, like.shape)} cannot take {tensor_text(new.dtype, new.shape)}"
        )


def _copy_entry(info: onnx.TrainingInfoProto) -> onnx.TrainingInfoProto:
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    return copy

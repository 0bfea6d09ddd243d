"""Operators on stored integers in their places again, as they were before `operators` opened them for training."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.ir.graph import named_values, prune
from onnxgrad.ir.match import not_none
from onnxgrad.training.quantization.record import Storage


def close_operators(model: ir.Model, record: Storage) -> None:
    """Put the operators on record in their places again, in place; `model` stores its integers."""
    graph = model.graph
    for texts in record.operators:
        values = named_values(graph)
        nodes = [onnx.NodeProto.FromString(base64.b64decode(text)) for text in texts]
        results = [values.get(name) for name in nodes[-1].output]
        place = next((v.producer() for v in results if v is not None and v.producer() is not None), None)
        if place is None:
            continue
        for k, proto in enumerate(nodes):
            inputs = [values[name] if name else None for name in proto.input]
            attributes = [ir.serde.deserialize_attribute(a) for a in proto.attribute]
            if k < len(nodes) - 1 and all(name in values for name in proto.output):
                continue  # a node that others read as well has stayed
            count = len(proto.output)
            made = ir.Node(proto.domain, proto.op_type, inputs, attributes, num_outputs=count, name=proto.name)
            for new, name in zip(made.outputs, proto.output):
                old = values.get(name) if k == len(nodes) - 1 else None
                if old is not None:
                    new.type, new.shape, old.name = old.type, old.shape, None
                    new.name = name
                    old.replace_all_uses_with(new, replace_graph_outputs=True)
                new.name = name
                values[name] = new
            graph.insert_before(place, made)
    prune(graph)
    for name, (dtype, *shape) in record.forms.items():
        if name in graph.initializers:
            _restore(graph.initializers[name], ir.DataType(dtype), shape)


def _restore(value: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> None:
    """The form that the operators read: numbers of 4 bits packed into bytes, and scales with their axes."""
    held = not_none(value.const_value)
    array = held.numpy()
    if held.dtype == ir.DataType.UINT4:
        numbers = array.astype(np.uint8)
        if numbers.shape[1] % 2:
            numbers = np.pad(numbers, ((0, 0), (0, 1)))
        array = (numbers[:, ::2] | numbers[:, 1::2] << 4).astype(np.uint8)
    value.const_value = ir.tensor(array.reshape(tuple(shape)), dtype=dtype, name=value.name)
    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)

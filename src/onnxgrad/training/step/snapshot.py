"""Snapshot of a training model: its training information with the present state as initial one.

The state in a training model is its starting point, so a model with the present state as initial one continues from it.
Initializations are done by then and are omitted; the position of the masks of Dropout, which no initializer stores,
becomes metadata of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.model_io import training_info
from onnxgrad.model_io.zeros import write_declared
from onnxgrad.training.metadata import MASKS
from onnxgrad.training.spec.training_info import Source, updated


def training_model(source: Source, state: Mapping[str, np.ndarray]) -> ir.Model:
    """The model of `source` with its training information, all of it beginning with a copy of `state`."""
    model, moments = standing(source, state)
    for name in state:
        held = model.graph.initializers.get(name)
        if held is not None:
            held.const_value = ir.tensor(np.array(state[name]), name=name)
    write_declared(training_info(model), moments)
    return model


def standing(source: Source, state: Mapping[str, np.ndarray]) -> tuple[ir.Model, dict[str, ir.TensorProtocol]]:
    """The snapshot for `save_model`: nothing of `state` is copied, and the algorithms only declare it."""
    model = source.model.clone()
    for name, array in state.items():
        held = model.graph.initializers.get(name)
        if held is not None:
            held.const_value = ir.tensor(np.asarray(array, order="C"), name=name)
    infos = training_info(model)
    infos[:] = [_declaring(info, state) for info in source.infos]
    for name in state.keys() - updated(source.infos):
        model.metadata_props[MASKS] = str(int(state[name]))
    own = {t.name for info in infos for t in info.algorithm.initializer if t.name in state}
    return model, {name: ir.tensor(np.asarray(state[name], order="C"), name=name) for name in sorted(own)}


def _declaring(info: onnx.TrainingInfoProto, state: Mapping[str, np.ndarray]) -> onnx.TrainingInfoProto:
    """A copy of `info` whose algorithm only declares the tensors in `state`."""
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    copy.ClearField("initialization")
    copy.ClearField("initialization_binding")
    for tensor in copy.algorithm.initializer:
        if tensor.name in state:
            held, props = state[tensor.name], list(tensor.metadata_props)
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=held.shape))
            tensor.metadata_props.extend(props)
    return copy

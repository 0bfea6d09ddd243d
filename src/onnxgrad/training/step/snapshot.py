"""A training model as it stands: its training information, with the present state in the place of the first.

What a training model says of state is where it starts, so one that starts where another stands goes on with it.
Initializations are done then and are left out; where the masks of Dropout stand, which no initializer holds, is kept
as metadata of the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.model_io import training_info
from onnxgrad.training.metadata import MASKS
from onnxgrad.training.spec.training_info import Source, updated


def training_model(source: Source, state: Mapping[str, np.ndarray]) -> ir.Model:
    """The model of `source` with its training information, all of it beginning with `state`."""
    model = source.model.clone()
    for name, array in state.items():
        held = model.graph.initializers.get(name)
        if held is not None:
            held.const_value = ir.tensor(np.array(array), name=name)
    infos = training_info(model)
    infos[:] = [_standing(info, state) for info in source.infos]
    for name in state.keys() - updated(source.infos):
        model.metadata_props[MASKS] = str(int(state[name]))
    return model


def _standing(info: onnx.TrainingInfoProto, state: Mapping[str, np.ndarray]) -> onnx.TrainingInfoProto:
    """A copy of `info` whose algorithm begins with `state`."""
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    copy.ClearField("initialization")
    copy.ClearField("initialization_binding")
    for tensor in copy.algorithm.initializer:
        if tensor.name in state:
            props = list(tensor.metadata_props)
            tensor.CopyFrom(ir.to_proto(ir.tensor(np.array(state[tensor.name]), name=tensor.name)))
            tensor.metadata_props.extend(props)
    return copy

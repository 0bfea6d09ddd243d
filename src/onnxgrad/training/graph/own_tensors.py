"""A model that was opened, as training reads it: every weight is an initializer with a name of its own.

Training, adapters, loading and quantization use this same graph, so that weights have the same names in all of them.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.known_branches import take_known_branches
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.training.graph.lift_weights import own_weights
from onnxgrad.training.graph.linear_models import with_own_weights


def own_tensors(model: ir.Model, wanted: Collection[str] = ()) -> None:
    """Inline branches with known conditions, and make every weight (and all `wanted`) an initializer, in place.

    An input with a default value is a weight.
    """
    graph = model.graph
    while take_known_branches(graph):
        infer_types(model)  # the types of a branch are more precise than those of its If
    with_own_weights(graph)
    own_weights(model, wanted)
    for value in list(graph.inputs):
        if value.is_initializer():
            graph.inputs.remove(value)
    metadata = "".join(model.metadata_props.values())
    for name, value in list(graph.initializers.items()):
        unused = not value.uses() and not value.is_graph_output()
        if unused and value.dtype not in FLOATS and f'"{name}"' not in metadata:
            del graph.initializers[name]  # shapes that were folded: ONNX Runtime warns of each

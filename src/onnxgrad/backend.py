"""An ``onnx.backend`` Backend, so that the onnx package's own backend tests run against onnxgrad.

Operators of the training domain are written out, and stock ONNX Runtime runs what results::

    import onnx.backend.test, onnxgrad.backend
    tests = onnx.backend.test.BackendTest(onnxgrad.backend, __name__)

`ReferenceEvaluator` is that of onnx with the same beforehand: an operator in it sees only values, and a Gradient
is about a graph.
"""

from __future__ import annotations

import os
import re
import unittest
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.backend.base
import onnx.reference
from onnx import helper
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.ir.match import is_standard
from onnxgrad.runtime import Session
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.feeds import feed
from onnxgrad.training import lower_gradients
from onnxgrad.training.spec.graph_call import DOMAIN
from onnxgrad.training.spec.initialization import trains as any_trains

#: Tensors of types that numpy lacks, as the runtime calls them.
_ODD = re.compile(r"tensor\((bfloat16|float[468]\w+|u?int[24])\)")


class BackendRep(onnx.backend.base.BackendRep):
    """A model, ready to run."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.session = Session(model.SerializeToString())

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs for `inputs`: by name, or in order."""
        if not isinstance(inputs, Mapping):
            listed = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            inputs = dict(zip(self.session.inputs, listed))
        feeds = {k: feed(k, v) if isinstance(v, (np.ndarray, np.generic)) else v for k, v in inputs.items()}
        given = any(isinstance(v, np.ndarray) and v.dtype.isbuiltin == 2 for v in feeds.values())
        if given or any(_ODD.fullmatch(v.type) for v in self.session.native.get_outputs()):
            found = self.session.run(feeds)
            return tuple(found[name] for name in self.session.outputs)
        try:
            found = dict(zip(self.session.outputs, self.session.native.run(None, feeds)))  # strings, sequences as well
            return tuple(self.session.reshape(found).values())
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {one_line(error)}") from error


class Backend(onnx.backend.base.Backend):
    """Models run by ONNX Runtime, with everything of ai.onnx.preview.training written out before."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """True if ONNX Runtime can load the model after the training domain is lowered."""
        try:
            cls.prepare(model, device, **kwargs)
        except (OnnxGradError, ValueError, unittest.SkipTest):
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """A model that can be run."""
        if not cls.supports_device(device):
            raise ValueError(f"onnxgrad runs on the CPU here, not on {device}")
        if trains(model):
            return BackendRep(lowered(model))
        try:
            return BackendRep(model)
        except BadInput as e:  # nothing of ours: newer than the runtime, or without a kernel there
            raise BackendIsNotSupposedToImplementIt(str(e)) from e

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Any:
        """Run one node on arrays."""
        arrays = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in zip(dict.fromkeys(n for n in node.input if n), map(np.asarray, arrays))
        ]
        made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "node", given, made)
        opsets = [helper.make_opsetid("", kwargs.get("opset_version", 21)), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return cls.prepare(onnx.shape_inference.infer_shapes(model), device).run(arrays)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """The CPU only."""
        return device.partition(":")[0] == "CPU"


class ReferenceEvaluator(onnx.reference.ReferenceEvaluator):
    """The reference evaluator of onnx, which then executes Gradient and every optimizer as well.

    Args:
        proto: a path, bytes, or what the evaluator of onnx takes; in a model (the others pass unchanged), operators of
            the training domain are written out.
        **kwargs: as there.
    """

    def __init__(self, proto: Any, **kwargs: Any) -> None:
        if isinstance(proto, (str, os.PathLike)):
            proto = onnx.load(proto)
        elif isinstance(proto, bytes):
            proto = onnx.load_from_string(proto)
        if isinstance(proto, onnx.ModelProto) and trains(proto):
            proto = lowered(proto)
        super().__init__(proto, **kwargs)


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The inference graph of `model` without operators of the training domain; training information is left out.

    A model that imports no standard operators, having none, imports opset 21 of them.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.training_info[:]
    if not any(is_standard(o) for o in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid("", 21))
    return lower_gradients(copy)


def trains(model: onnx.ModelProto) -> bool:
    """True if the model uses the training domain outside its training information."""
    return any_trains(model.graph.node) or any(any_trains(f.node) for f in model.functions)


is_compatible = Backend.is_compatible
prepare = Backend.prepare
run = Backend.run_model
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device

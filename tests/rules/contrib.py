"""The operators of ONNX Runtime in tests: what they are written out as, as models and for the reference evaluator."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad.ir import Builder
from onnxgrad.lower import expand
from onnxgrad.lower.contrib import formals
from onnxgrad.model_io import open_model
from onnxgrad.testing import Case
from tests.rules.evaluators import Erf

MICROSOFT = "com.microsoft"


def body(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with standard operators in the place of ONNX Runtime's."""
    opened = open_model(model)
    builder = Builder(opened.model.graph)
    for node in [n for n in opened.model.graph if (n.domain, n.op_type) in formals]:
        assert expand(builder, node)
    proto = ir.to_proto(opened.model)
    onnx.checker.check_model(proto, full_check=True)
    assert not [n for n in proto.graph.node if n.domain]
    return proto


class _Written(OpRun):
    """Computes an operator by what it is written out as."""

    known: ClassVar[dict[Any, ReferenceEvaluator]] = {}

    def _run(self, *xs: Any, **_: Any) -> tuple:
        given = [(f"x{i}", x) for i, x in enumerate(xs) if x is not None]
        key = (self.onnx_node.SerializeToString(), tuple((n, str(x.dtype), x.shape) for n, x in given))
        if key not in self.known:
            names = [f"x{i}" if x is not None else "" for i, x in enumerate(xs)]
            outs = [f"y{i}" for i, name in enumerate(self.onnx_node.output) if name]
            outputs = iter(outs)
            node = onnx.NodeProto()
            node.CopyFrom(self.onnx_node)
            del node.input[:], node.output[:]
            node.input.extend(names)
            node.output.extend(next(outputs) if name else "" for name in self.onnx_node.output)
            infos = [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in given
            ]
            graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=o) for o in outs])
            opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
            self.known[key] = ReferenceEvaluator(body(model), new_ops=[Erf])
        found = iter(self.known[key].run(None, dict(given)))
        return tuple(next(found) if name else None for name in self.onnx_node.output)


def contrib(
    op: str, inputs: list, attrs: dict | None = None, note: str = "plain", domain: str = MICROSOFT, **more
) -> Case:
    """A case of an operator of ONNX Runtime."""
    evaluator = type(op, (_Written,), {"op_domain": domain})
    return Case(op, inputs, attrs or {}, note=note, domain=domain, evaluators=[evaluator, Erf], **more)


def whole(*shape: int, low: int = 0, high: int = 256, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    """Random whole numbers."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)

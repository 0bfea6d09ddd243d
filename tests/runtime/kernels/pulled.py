"""The pullback of one or a few nodes, run on both targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.passes import with_kernels


class Pulled:
    """The cotangents of `wrt` for a cotangent of the last node's first output.

    `arrays` are the operands by name; `symbolic` hides their sizes from the compiler, or says what it knows of some.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        arrays: Mapping[str, np.ndarray],
        wrt: Sequence[str],
        symbolic: bool | Mapping[str, Sequence[int | str]] = False,
        opset: int = 18,
    ) -> None:
        result = nodes[-1].output[0]
        told = dict(symbolic) if isinstance(symbolic, Mapping) else {}
        if symbolic and not told:
            told = {k: [f"{k}_{i}" for i in range(a.ndim)] for k, a in arrays.items() if k not in ("w", "scale")}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), told.get(name, a.shape))
            for name, a in arrays.items()
        ]
        kind = helper.np_dtype_to_tensor_dtype(next(iter(arrays.values())).dtype)
        outputs = [helper.make_tensor_value_info(result, kind, None)]
        graph = helper.make_graph(list(nodes), "pulled", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        self.arrays = dict(arrays)
        self.model: ir.Model = vjp(ir.from_proto(onnx.shape_inference.infer_shapes(model)), wrt=list(wrt), of=[result])
        known = {v.name for v in self.model.graph.inputs} - set(arrays)
        (self.seed,) = known
        self.results = [v.name for v in self.model.graph.outputs][-len(wrt) :]

    @property
    def kernels(self) -> list[str]:
        """The kernels that take the place of operators, in order."""
        return [node.op_type for node in with_kernels(self.model).graph if node.domain == DOMAIN]

    def run(self, seed: np.ndarray, target: str, threads: int = 1) -> list[np.ndarray]:
        """The cotangents."""
        session = Session(self.model, Options(threads=threads, target=target))
        found = session.run({**self.arrays, self.seed: seed})
        return [found[name] for name in self.results]

    def native(self, seed: np.ndarray) -> list[np.ndarray]:
        """The cotangents by kernels, which one and two threads give alike to the last bit."""
        one, two = (self.run(seed, "native", threads) for threads in (1, 2))
        for a, b in zip(one, two):
            np.testing.assert_array_equal(a, b)
        return one

    def compare(self, seed: np.ndarray, kernels: Sequence[str], **tolerances: Any) -> list[np.ndarray]:
        """The cotangents by kernels, which are those of the operators."""
        assert self.kernels == list(kernels)
        found = self.native(seed)
        for a, b in zip(found, self.run(seed, "portable")):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, **tolerances)
        return found

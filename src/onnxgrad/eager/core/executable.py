"""Running graphs: on ONNX Runtime, or on the reference evaluator where ONNX Runtime lacks a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad._later import without_collection
from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.tape import computing, differs_between_calls
from onnxgrad.errors import BadInput, reason_of
from onnxgrad.runtime import Options, ReferenceSession, Session

#: Options of the sessions. Idle threads do not spin: between two runs, Python is busy. Of small arrays, a thread takes
#: longer to wake than to compute, and rewrites longer than they save.
OPTIONS = Options(spinning=False)
SMALL = Options(spinning=False, threads=1, layout="plain", level="none")
#: The most elements of a small array, and the most multiplications of a small product.
LARGEST, LONGEST = 1 << 13, 1 << 20


def model_of(graph: ir.Graph) -> ir.Model:
    """`graph` as a model, in the oldest IR version that has its opsets."""
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    return ir.Model(graph, ir_version=version, producer_name="onnxgrad")


class Executable:
    """A model that runs on sessions of its own, which the first run makes.

    Attributes:
        model: the model.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.names = [v.name or "" for v in model.graph.inputs]

    @functools.cached_property
    def session(self) -> Session | ReferenceSession:
        """The session: one of ONNX Runtime, if that has all operators."""
        with without_collection():
            return _session(self.model)

    @functools.cached_property
    def _run(self) -> Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]]:
        session, ends = self.session, [*self.model.graph.inputs, *self.model.graph.outputs]
        if isinstance(session, Session) and not session.shapes and all(v.dtype != ir.DataType.BFLOAT16 for v in ends):
            run = session.native.run
            return lambda feeds: run(None, feeds)
        return lambda feeds: list(session.run(feeds).values())

    def results(self, operands: Sequence[Array]) -> list[np.ndarray]:
        """The outputs, given the inputs in order; numbers in their stead if only shapes and dtypes matter."""
        known = None
        if not computing.get() and differs_between_calls(x._node for x in operands):
            known = self._placeholders()
        return self([x._data for x in operands]) if known is None else known

    def _placeholders(self) -> list[np.ndarray] | None:
        """Any numbers, of the shapes and dtypes of the outputs; None if these are not known."""
        rng, found = np.random.default_rng(0), []
        for v in self.model.graph.outputs:
            if v.shape is None or not v.shape.is_static() or v.dtype is None:
                return None
            found.append(np.asarray(rng.standard_normal(v.shape.numpy())).astype(v.dtype.numpy()))
        return found

    def __call__(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, given the inputs in order."""
        try:
            return list(self._run(dict(zip(self.names, values))))
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {reason_of(error)}") from error


def _is_small(model: ir.Model) -> bool:
    """True if all arrays and products in `model` are known to be small."""
    small: dict[tuple[Any, ...], bool] = {}
    for node in model.graph.all_nodes():
        if node.op_type in ("Conv", "ConvTranspose", "Einsum"):
            return False
        shapes = [v.shape for v in (*node.inputs, *node.outputs) if v is not None]
        for shape in shapes:
            if shape is None:
                return False
            if shape.dims not in small:
                small[shape.dims] = shape.is_static() and math.prod(shape.numpy()) <= LARGEST
            if not small[shape.dims]:
                return False
        if node.op_type in ("MatMul", "Gemm"):
            rows, columns = (s.numpy() for s in shapes[:2] if s is not None)
            if math.prod(rows) * columns[-1] > LONGEST or math.prod(columns) * rows[0] > LONGEST:
                return False
    return True


def _session(model: ir.Model) -> Session | ReferenceSession:
    try:
        return Session(model, SMALL if _is_small(model) else OPTIONS)
    except BadInput as error:
        if "implementation" not in str(error) and "NOT_IMPLEMENTED" not in str(error):
            raise
        return ReferenceSession(model)

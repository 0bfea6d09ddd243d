"""Running graphs: on ONNX Runtime, or on the reference evaluator where ONNX Runtime lacks a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, ReferenceSession, Session

#: Options of the sessions. Idle threads do not spin: between two runs, Python is busy.
OPTIONS = Options(spinning=False)


def model_of(graph: ir.Graph) -> ir.Model:
    """`graph` as a model, in the oldest IR version that has its opsets."""
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    return ir.Model(graph, ir_version=version, producer_name="onnxgrad")


class Executable:
    """A model that is ready to run.

    Attributes:
        model: the model.
        native: whether ONNX Runtime runs it.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.names = [v.name or "" for v in model.graph.inputs]
        session = _session(model)
        self.native = isinstance(session, Session)
        plain = all(v.dtype != ir.DataType.BFLOAT16 for v in [*model.graph.inputs, *model.graph.outputs])
        if isinstance(session, Session) and plain:
            native = session.native
            self._run: Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]] = lambda feeds: native.run(None, feeds)
        else:
            self._run = lambda feeds: list(session.run(feeds).values())

    def __call__(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, given the inputs in order."""
        try:
            return list(self._run(dict(zip(self.names, values))))
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {' '.join(str(error).split())}") from error


def _session(model: ir.Model) -> Session | ReferenceSession:
    try:
        return Session(model, OPTIONS)
    except BadInput as error:
        if "implementation" not in str(error) and "NOT_IMPLEMENTED" not in str(error):
            raise
        return ReferenceSession(model)

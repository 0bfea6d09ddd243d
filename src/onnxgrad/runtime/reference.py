"""The reference evaluator of onnx as a session, for graphs that ONNX Runtime does not run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir


class ReferenceSession:
    """A model on the reference evaluator of onnx, with the interface of `Session`."""

    def __init__(self, model: ir.Model) -> None:
        from onnx.reference import ReferenceEvaluator  # it takes 20 ms

        self.evaluator = ReferenceEvaluator(ir.to_proto(model))
        self.outputs = list(self.evaluator.output_names)

    def run(self, feeds: Mapping[str, np.ndarray], outputs: list[str] | None = None) -> dict[str, np.ndarray]:
        """Evaluate `outputs` (default: all)."""
        names = self.outputs if outputs is None else outputs
        return dict(zip(names, map(np.asarray, self.evaluator.run(names, dict(feeds)))))

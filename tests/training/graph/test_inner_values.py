from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.training.graph.inner_values import inner_values

MODEL = """<ir_version: 10, opset_import: ["": 21]>
net (float[N, 2] x, float[N] unused) => (float[N, 2] y) { h = Add (x, x)
 k = Neg (h)
 y = Exp (k) }"""


def test_inputs_and_results_of_nodes_for_each_batch():
    model = ir.from_onnx_text(MODEL)
    batches = [{"x": np.full((n, 2), n, np.float32), "further": np.zeros(3)} for n in (1, 4)]
    for names in (["k", "x", "h"], ["x"]):
        found = list(inner_values(model, names, batches))
        assert [list(each) for each in found] == [names, names]
        for batch, each in zip(batches, found, strict=True):
            wanted = {"x": batch["x"], "h": 2 * batch["x"], "k": -2 * batch["x"]}
            assert all(np.array_equal(each[n], wanted[n]) for n in names)
    assert [v.name for v in model.graph.outputs] == ["y"]
    assert len(model.graph) == 3

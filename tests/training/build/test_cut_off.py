"""The algorithm that is put back in memory compiles to the step that its messages compile to."""

from dataclasses import replace

import onnx
import pytest

from onnxgrad.ir.serialize import serialize
from onnxgrad.training.build.attach import attached
from onnxgrad.training.step.compile import compile_step

NET = """<ir_version: 10, opset_import: ["": 21]>
    net (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {0.1, 0.2, -0.3, 0.4, 0.5, -0.6}, float[2] s = {1, 1},
        float[2] b = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}> {
        h = MatMul (x, w) n = BatchNormalization (h, s, b, mean, var) y = Tanh (n) }"""


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
def test_the_step_is_that_of_the_messages(optimizer):
    model = onnx.parser.parse_model(NET)
    source = attached(model, loss="mse", optimizer=optimizer, metrics=["gradient_norm"], learning_rate=0.1)
    assert source.join is not None
    again = replace(source, join=None)
    steps = [compile_step(source), compile_step(again), compile_step(source)]
    assert source.join is None
    assert len({step.fingerprint for step in steps}) == 1
    assert len({serialize(step.model).SerializeToString(deterministic=True) for step in steps}) == 1
    assert len({str({n: t.initial.numpy().tolist() for n, t in step.state.items()}) for step in steps}) == 1

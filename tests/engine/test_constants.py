"""Nodes that are marked as constants: no derivative passes, in either mode and to any order."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import ZeroDerivative, grad, jvp


def unit(mark):
    """float32[2] x → the sum of x/‖x‖."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        unit (float[2] x) => (float loss) {
            n = ReduceL2 (x)
            y = Div (x, n)
            loss = ReduceSum <keepdims = 0> (y)
        }""")
    next(n for n in model.graph.node if n.op_type == mark).metadata_props.add(key="onnxgrad.constant", value="why")
    return model


def run(model, **feeds):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[-1]


X = np.float32([3, 4])


def test_only_the_other_ways_count():
    np.testing.assert_allclose(run(grad(unit("ReduceL2"), wrt="x"), x=X), [0.2, 0.2])
    np.testing.assert_allclose(run(jvp(unit("ReduceL2"), wrt="x"), x=X, x_tangent=np.float32([1, 2])), 0.6, rtol=1e-6)


def test_nothing_else_connects_them():
    with pytest.warns(ZeroDerivative):
        assert not run(grad(unit("Div"), wrt="x"), x=X).any()

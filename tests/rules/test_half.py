"""Extrema of 16 bits beside operators that ONNX Runtime computes in 32, without rounding what goes on to the next.

An operand is then not equal to the result that was rounded: its cotangent must not get lost, or become 0/0.
"""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import grad

BODIES = {
    "Max": "y = Max (x, a, m)",
    "Min": "y = Min (x, a, m)",
    "Max of two": "y = Max (x, m)",
    "ReduceMax": "j = Concat <axis = 0> (x, m) y = ReduceMax <keepdims = 1> (j)",
    "ReduceMin": "j = Concat <axis = 0> (x, m) y = ReduceMin <keepdims = 1> (j)",
    "Clip": "d = Sub (x, m) y = Clip (d, low)",
    "Clip from above": "d = Sub (x, m) y = Clip (d, , high)",
    "ScatterElements": 'y = ScatterElements <axis = 0, reduction = "max"> (x, at, m)',
}


def model(body, kind, code):
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({kind}[N] x, {kind}[1] a) => ({kind} z)
        <float lowest = {{-0.6}}, float highest = {{0.7}}, int64[1] at = {{1}}, int64[1] axis = {{0}}> {{
            low = Cast <to = {code}> (lowest)
            high = Cast <to = {code}> (highest)
            m = ReduceMean <keepdims = 1> (x, axis)
            {BODIES[body]}
            z = ReduceSum <keepdims = 0> (y)
        }}""")


@pytest.mark.parametrize("body", BODIES)
def test_the_cotangent_of_an_extremum_is_not_lost(body):
    sessions = [
        onnxruntime.InferenceSession(grad(model(body, *kind), wrt=["x", "a"]).SerializeToString())
        for kind in (("float16", 10), ("float", 1))
    ]
    rng, judged = np.random.default_rng(3), 0
    for _ in range(40):
        x, a = (rng.standard_normal(n).astype(np.float16) for n in (5, 1))
        half = sessions[0].run(None, {"x": x, "a": a})
        single = sessions[1].run(None, {"x": x.astype(np.float32), "a": a.astype(np.float32)})
        for got, want in zip(half, single):
            np.testing.assert_allclose(got.astype(np.float32), want, atol=2e-2)
        judged += any(w.any() for w in single)
    assert judged > 10

"""If: the oracle is the model with the taken branch written out in place of the If."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad

THEN = "{0} = Tanh(h)"
OTHER = "q_{0} = Mul(x, h)  {0} = Mul(q_{0}, W)"
HEAD = """<ir_version: 8, opset_import: ["":18]>
agraph (float[N,3] x, bool c) => (float[N,3] y)
<float[3] W = {1, 2, 3}>
{ h = Mul(x, W) """

BRANCHED = onnx.parser.parse_model(
    HEAD
    + f"""z = If(c) <then_branch = t () => (float[N,3] a) {{ {THEN.format("a")} }},
                    else_branch = e () => (float[N,3] b) {{ {OTHER.format("b")} }}>
       y = Mul(z, x) }}"""
)
TAKEN = {
    taken: onnx.parser.parse_model(HEAD + body.format("z") + " y = Mul(z, x) }")
    for taken, body in ((True, THEN), (False, OTHER))
}
X = np.array([[0.1, 0.2, 0.3], [0.4, -0.2, 0.3]], np.float32)


def run(model, **feeds):
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in wanted})


TRANSFORMS = {
    "vjp": lambda m: onnxgrad.vjp(m, wrt=["x", "W", "h"]),
    "jvp": lambda m: onnxgrad.jvp(m, wrt=["x", "W"]),
    "jvp of grad": lambda m: onnxgrad.jvp(onnxgrad.grad(m, wrt="x"), wrt="x"),
    "grad of grad": lambda m: onnxgrad.grad(onnxgrad.grad(m, wrt=["x", "W"]), wrt=["x", "W"]),
    "grad of jvp": lambda m: onnxgrad.grad(onnxgrad.jvp(m, wrt="x"), wrt="x", of="y_tangent"),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("taken", [True, False])
def test_an_if_equals_the_branch_it_takes(transform, taken):
    feeds = {"x": X, "c": np.array(taken), "y_cotangent": X + 1, "x_tangent": X * 2, "W_tangent": X[0] - 1}
    for got, want in zip(run(transform(BRANCHED), **feeds), run(transform(TAKEN[taken]), **feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_branch_not_taken_never_spreads_nan():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["":18]>
        agraph (float[2] x, bool c) => (float[2] y) {
        y = If(c) <then_branch = t () => (float[2] a) { a = Sqrt(x) },
                   else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
    )
    (gradient,) = run(onnxgrad.grad(model, wrt="x"), x=np.float32([-1, 0]), c=np.array(False))
    np.testing.assert_array_equal(gradient, [-1, -1])


def test_a_branch_that_does_not_depend_on_wrt_gives_zeros():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["":18]>
        agraph (float[N] x, bool c) => (float[N] y) <float[1] k = {3}> {
        s = Shape(x)
        y = If(c) <then_branch = t () => (float[N] a) { a = Expand(k, s) },
                   else_branch = e () => (float[N] b) { b = Mul(x, x) }> }"""
    )
    derived = onnxgrad.grad(model, wrt="x")
    for taken, want in ((True, [0, 0, 0]), (False, [2, 4, 6])):
        np.testing.assert_array_equal(run(derived, x=np.float32([1, 2, 3]), c=np.array(taken))[0], want)


def test_branches_of_different_rank():
    head = '<ir_version: 8, opset_import: ["":18]> agraph (float[1,N,3] x, float[3] w, bool c) => (float y) { '
    model = onnx.parser.parse_model(
        head
        + """k = Constant <value_ints = [0]>() m = Mul(x, w)
        z = If(c) <then_branch = t () => (float[N,3] a) { a = Squeeze(m, k) },
                   else_branch = e () => (float[1,N,3] b) { b = Mul(m, m) }>
        s = Sin(z) y = ReduceSum <keepdims = 0> (s) }"""
    )
    x, w = np.float32([[[0.1, 0.2, 0.3], [0.4, -0.2, 0.3]]]), np.float32([1, 2, 3])
    for taken, body in ((True, "z = Mul(x, w)"), (False, "m = Mul(x, w) z = Mul(m, m)")):
        written = onnx.parser.parse_model(head + body + " s = Sin(z) y = ReduceSum <keepdims = 0> (s) }")
        for transform in (
            lambda m: onnxgrad.grad(m, wrt=["x", "w"]),
            lambda m: onnxgrad.grad(onnxgrad.grad(m, wrt=["x", "w"]), wrt=["x", "w"]),
        ):
            feeds = {"x": x, "w": w, "c": np.array(taken)}
            for got, want in zip(run(transform(model), **feeds), run(transform(written), **feeds), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

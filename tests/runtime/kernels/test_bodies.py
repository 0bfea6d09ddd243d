"""Kernels in the graphs inside If, Loop and Scan."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import Function
from onnxgrad.ir.graph import subgraphs
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels

BODIES = {
    "Scan": """h, hs = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] x) => (float[4] n, float[4] o) {
            r = MatMul (w, h)  s = Add (r, x)  z = Relu (s)  n = Gather (z, turned)  o = Mul (n, n)
        }> (h0, xs)
        y = ReduceSum <keepdims = 0> (hs)""",
    "Loop": """count = Constant <value_int = 3> ()
        yes = Constant <value = bool {1}> ()
        h = Loop <body = b (int64 i, bool c, float[4] h) => (bool d, float[4] n) {
            d = Identity (c)  r = MatMul (w, h)  z = Relu (r)  n = Gather (z, turned)
        }> (count, yes, h0)
        y = ReduceSum <keepdims = 0> (h)""",
    "If": """total = ReduceSum <keepdims = 0> (xs)
        zero = Constant <value_float = 0.0> ()
        up = Greater (total, zero)
        h = If (up) <then_branch = t () => (float[4] a) { r = MatMul (w, h0)
            z = Relu (r)  a = Gather (z, turned) }, else_branch = e () => (float[4] b) { q = Sub (h0, total)
            z = Relu (q)  b = Gather (z, turned) }>
        y = ReduceSum <keepdims = 0> (h)""",
    "Loop in If": """total = ReduceSum <keepdims = 0> (xs)
        zero = Constant <value_float = 0.0> ()
        up = Greater (total, zero)
        h = If (up) <then_branch = t () => (float[4] a) {
            count = Constant <value_int = 2> ()
            yes = Constant <value = bool {1}> ()
            a = Loop <body = b (int64 i, bool c, float[4] h) => (bool d, float[4] n) {
                d = Identity (c)  r = MatMul (w, h)  z = Relu (r)  n = Gather (z, turned)
            }> (count, yes, h0)
        }, else_branch = e () => (float[4] b) { b = Identity (h0) }>
        y = ReduceSum <keepdims = 0> (h)""",
}


def inside(graph):
    """The kernels that the graphs inside `graph` run."""
    bodies = [body for node in graph for body in subgraphs(node)]
    return [n.op_type for b in bodies for n in b if n.domain == DOMAIN] + [k for b in bodies for k in inside(b)]


@needs_kernels
@pytest.mark.parametrize("where", BODIES)
@pytest.mark.parametrize("sign", [1, -1])
def test_cotangents_in_bodies(where, sign):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[4] h0, float[5, 4] xs, float[4, 4] w) => (float y) {'
        f"turned = Constant <value_ints = [3, 1, 1, 0]> () {BODIES[where]} }}"
    )
    rng = np.random.default_rng(0)
    feeds = [np.float32(rng.standard_normal(s)) for s in ((4,), (5, 4), (4, 4))]
    feeds[1] = sign * np.abs(feeds[1])
    wrt = ["h0", "w", *(["xs"] if where == "Scan" else [])]
    found = {t: Function(model, options=Options(threads=1, target=t)).grad(wrt=wrt) for t in ("portable", "native")}
    swapped = with_kernels(found["native"].model)
    assert "GatherGrad" in inside(swapped.graph)
    onnx.checker.check_model(ir.to_proto(found["native"].model))  # which stays as it was
    assert not inside(found["native"].model.graph)
    portable, native = (f(*feeds) for f in found.values())
    for name in wrt:
        np.testing.assert_allclose(native[name], portable[name], rtol=1e-6, err_msg=name)

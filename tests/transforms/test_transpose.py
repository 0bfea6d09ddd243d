"""The transpose of a linearized model is its vjp, also through loops, branches and operators with a singular point."""

import numpy as np
import onnx
import pytest

from onnxgrad import linearize, signature, transpose, vjp
from tests.control_flow.compare import model, run

PROGRAMS = {
    "Where": "agraph (F[3,4] x) => (F[3,4] y) { z = Sub(x, x) c = Greater(x, z) t = Tanh(x) y = Where(c, t, x) }",
    "ReduceL2": """agraph (F[3,4] x) => (F[3] y)
        { axis = Constant<value_ints=[1]>() y = ReduceL2<keepdims=0>(x, axis) }""",
    "Div": "agraph (F[3,4] x, F[3,4] w) => (F[3,4] y) { e = Exp(w) y = Div(x, e) }",
    "a norm of rows": """agraph (F[N,4] x, F[4,4] w) => (F[N,4] y)
        { t = MatMul(x, w) n = ReduceL2(t) y = Div(t, n) }""",
    "a root that a Where discards": """agraph (F[3,4] x) => (F[3,4] y)
        { z = Sub(x, x) c = Greater(x, z) r = Sqrt(x) y = Where(c, r, z) }""",
    "If": """agraph (F[2,3] x, bool c) => (F[2,3] y) { y = If(c)
        <then_branch = t () => (F[2,3] a) { e = Exp(x) a = Mul(e, x) },
         else_branch = e () => (F[2,3] b) { b = Tanh(x) }> }""",
    "Loop": """agraph (F[2,3] x, F[3,3] w, int64 n) => (F[2,3] y, F[M,2,3] s) {
        y, s = Loop(n, , x) <body = b (int64 i, bool k, F[2,3] a) => (bool k2, F[2,3] b, F[2,3] o) {
            k2 = Identity(k) m = MatMul(a, w) b = Sin(m) o = Mul(a, a) }> }""",
    "a Loop with an exit that depends on data": """agraph (F[2,3] x, F[3,3] w, int64 n) => (F[2,3] y) {
        yes = Constant<value_int=1>() c = Cast<to=9>(yes)
        y = Loop(n, c, x) <body = b (int64 i, bool k, F[2,3] a) => (bool k2, F[2,3] b) {
            m = MatMul(a, w) b = Sin(m) f = ReduceMax<keepdims=0>(b) z = Sub(f, f) k2 = Greater(f, z) }> }""",
    "a Loop with a root that a Where discards": """agraph (F[2,3] x, F[2,3] w, int64 n) => (F[2,3] y) {
        y = Loop(n, , x) <body = b (int64 i, bool k, F[2,3] a) => (bool k2, F[2,3] b) {
            k2 = Identity(k) z = Sub(a, a) c = Greater(a, z) r = Sqrt(a) q = Where(c, r, a) b = Mul(q, w) }> }""",
    "Scan": """agraph (F[2] h, F[5,2] x) => (F[2] y, F[5,2] s) {
        y, s = Scan(h, x) <num_scan_inputs = 1, body = b (F[2] a, F[2] e) => (F[2] b, F[2] o) {
            c = Mul(a, e) b = Tanh(c) o = Exp(b) }> }""",
    "a Loop that begins with the result of a Scan": """agraph (F[2,3] x, int64 n) => (F[2,3] y) {
        h, o = Scan(x, x) <num_scan_inputs = 1, body = c (F[2,3] s, F[3] e) => (F[2,3] t, F[3] f) {
            t = Add(s, e) f = Identity(e) }>
        y = Loop(n, , h) <body = b (int64 i, bool k, F[2,3] a) => (bool k2, F[2,3] b) {
            k2 = Identity(k) b = Sin(a) }> }""",
    "a Loop in a Loop, with unread copies of a value of x": """agraph (F[2,3] x, int64 n) => (F[2,3] y) { t = Mul(x, x)
        y = Loop(n, , x) <body = b (int64 i, bool k, F[2,3] a) => (bool k2, F[2,3] b) { k2 = Identity(k)
            b, s = Loop(n, , a) <body = c (int64 j, bool l, F[2,3] p) => (bool l2, F[2,3] q, F[2,3] o) {
                l2 = Identity(l) q = Sin(p) o = Identity(t) }> }> }""",
    "a Scan, last step first, along axis 1": """agraph (F[2] h, F[2,5] x) => (F[2] y, F[2,5] s) {
        y, s = Scan(h, x) <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
            scan_output_axes = [1], scan_output_directions = [1], body = b (F[2] a, F[2] e) => (F[2] b, F[2] o) {
            c = Mul(a, e) b = Tanh(c) o = Exp(b) }> }""",
    "LSTM": """agraph (F[5,2,3] x, F[1,16,3] w, F[1,16,4] r) => (F[5,1,2,4] y) { y = LSTM<hidden_size=4>(x, w, r) }""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_linearized_model_is_transposed(name):
    dtype = "float" if name == "LSTM" else "double"
    program, rng, feeds = model(PROGRAMS[name], dtype), np.random.default_rng(0), {}
    for v in program.graph.input:
        tensor = v.type.tensor_type
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        shape = [d.dim_value or 3 for d in tensor.shape.dim]
        feeds[v.name] = np.asarray(
            rng.standard_normal(shape) if kind.kind == "f" else 3 if kind.kind == "i" else True, kind
        )
    feeds["x"][0] = 0 if name in ("ReduceL2", "a root that a Where discards") else feeds["x"][0]
    wrt = [n for n, a in feeds.items() if a.dtype.kind == "f"]
    forward, linear = linearize(program, wrt=wrt)
    back = transpose(linear, wrt=[f"{n}_tangent" for n in wrt])
    primal = run(forward, feeds)
    results = {o.name: primal[o.name] for o in program.graph.output}
    tangents = {f"{n}_tangent": rng.standard_normal(feeds[n].shape).astype(feeds[n].dtype) for n in wrt}
    cotangents = {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in results.items()}
    pushed = run(linear, {**feeds, **primal, **tangents})
    names = signature(back)
    into = {names.cotangents[f"{n}_tangent"]: g for n, g in cotangents.items()}
    pulled = run(back, {**feeds, **primal, **into})
    whole = run(vjp(program, wrt=wrt), {**feeds, **{f"{n}_cotangent": g for n, g in cotangents.items()}})
    tolerance = 1e-5 if dtype == "float" else 1e-12
    for n in wrt:
        np.testing.assert_allclose(
            pulled[names.gradients[f"{n}_tangent"]], whole[f"{n}_grad"], rtol=tolerance, atol=tolerance
        )
    one = sum(np.vdot(cotangents[n], pushed[f"{n}_tangent"]) for n in cotangents)
    other = sum(np.vdot(pulled[names.gradients[t]], tangents[t]) for t in tangents)
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)

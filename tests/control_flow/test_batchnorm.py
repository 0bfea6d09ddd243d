"""BatchNormalization in training mode in branches and bodies: values and gradients of the unrolled program, by PyTorch.

ONNX Runtime overwrites its running statistics there; so every run is repeated, and nothing that was fed may change.
"""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import vjp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
STATE = "float[3] s, float[3] b, float[3] m0, float[3] v0"
NORM = "BatchNormalization <training_mode = 1, momentum = 0.7>"
PROGRAMS = {
    "If": f"""{HEAD} g (float[N, 3] x, {STATE}, bool c) => (float z, float[3] m, float[3] v) {{
        y, m, v = If (c) <
            then_branch = t () => (float[N, 3] ty, float[3] tm, float[3] tv) {{
                ty, tm, tv = {NORM} (x, s, b, m0, v0)
            }},
            else_branch = e () => (float[N, 3] ey, float[3] em, float[3] ev) {{
                ey = Mul (x, s) em = Mul (m0, b) ev = Identity (v0)
            }}>
        h = Tanh (y)
        q = Mul (h, x)
        z = ReduceSum <keepdims = 0> (q)
    }}""",
    "Loop": f"""{HEAD} g (float[N, 3] x, {STATE}, int64 n) => (float z, float[3] m, float[3] v) <bool go = {{1}}> {{
        y, m, v = Loop (n, go, x, m0, v0) <body = turn (int64 i, bool on, float[N, 3] a, float[3] am, float[3] av) =>
            (bool still, float[N, 3] ay, float[3] bm, float[3] bv) {{
            still = Identity (on)
            h, bm, bv = {NORM} (a, s, b, am, av)
            t = Tanh (h)
            ay = Add (t, a)
        }}>
        q = Mul (y, y)
        z = ReduceSum <keepdims = 0> (q)
    }}""",
    "Scan": f"""{HEAD} g (float[T, N, 3] x, {STATE}) => (float z, float[3] m, float[3] v) {{
        m, v, y = Scan <num_scan_inputs = 1, body = turn (float[3] am, float[3] av, float[N, 3] a) =>
            (float[3] bm, float[3] bv, float[N, 3] ay) {{
            h, bm, bv = {NORM} (a, s, b, am, av)
            ay = Tanh (h)
        }}> (m0, v0, x)
        q = Mul (y, y)
        z = ReduceSum <keepdims = 0> (q)
    }}""",
}


def unrolled(name, t):
    """z, and the running statistics."""

    def norm(x, m, v):
        mean, var = x.mean(0), x.var(0, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * t["s"] + t["b"], 0.7 * m + 0.3 * mean, 0.7 * v + 0.3 * var

    x, m, v = t["x"], t["m0"], t["v0"]
    if name == "If":
        y, m, v = norm(x, m, v) if t["c"] else (x * t["s"], m * t["b"], v * 1)
        return (torch.tanh(y) * x).sum(), m, v
    if name == "Loop":
        y = x
        for _ in range(int(t["n"])):
            h, m, v = norm(y, m, v)
            y = torch.tanh(h) + y
        return (y * y).sum(), m, v
    rows = []
    for a in x:
        h, m, v = norm(a, m, v)
        rows.append(torch.tanh(h))
    return (torch.stack(rows) ** 2).sum(), m, v


@pytest.mark.parametrize(
    ("name", "extra"),
    [("If", {"c": True}), ("If", {"c": False}), ("Loop", {"n": 0}), ("Loop", {"n": 3}), ("Scan", {})],
)
def test_training_mode_inside(name, extra):
    rng = np.random.default_rng(0)
    wrt = ["x", "s", "b", "m0", "v0"]
    feeds = {"x": rng.standard_normal((4, 5, 3) if name == "Scan" else (5, 3))}
    feeds |= {w: rng.random(3) + 0.5 for w in wrt[1:]}
    held = {k: torch.tensor(v, requires_grad=True) for k, v in feeds.items()} | extra
    want = unrolled(name, held)
    cotangents = [rng.standard_normal(w.shape) for w in want]
    sum((w * torch.tensor(u)).sum() for w, u in zip(want, cotangents)).backward()

    model = vjp(onnx.parser.parse_model(PROGRAMS[name]), wrt=wrt, of=["z", "m", "v"])
    onnx.checker.check_model(model, full_check=True)
    fed = {k: v.astype(np.float32) for k, v in feeds.items()} | {k: np.array(v) for k, v in extra.items()}
    fed |= {f"{o}_cotangent": np.asarray(u, np.float32) for o, u in zip("zmv", cotangents)}
    kept = {k: v.copy() for k, v in fed.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for _ in range(2):
        got = dict(zip([o.name for o in session.get_outputs()], session.run(None, fed)))
        for o, value in zip("zmv", want):
            np.testing.assert_allclose(got[o], value.detach(), rtol=1e-5, atol=1e-5)
        for w in wrt:
            gradient = held[w].grad
            expected = np.zeros(feeds[w].shape) if gradient is None else gradient.numpy()
            np.testing.assert_allclose(got[f"{w}_grad"], expected, rtol=1e-4, atol=3e-5)
        assert all((kept[k] == fed[k]).all() for k in fed)

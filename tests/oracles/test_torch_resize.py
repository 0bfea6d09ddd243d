"""Resize against torch.nn.functional.interpolate, on ONNX Runtime in float32."""

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COPIES = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
EXACT = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
PYTORCH = {"coordinate_transformation_mode": "pytorch_half_pixel"}
CORNERS = {"coordinate_transformation_mode": "align_corners"}
#: torch's mode, its options, ours
MODES = [
    ("nearest", {}, COPIES),
    ("nearest-exact", {}, EXACT),
    ("bilinear", {"align_corners": False}, {"mode": "linear", **PYTORCH}),
    ("bilinear", {"align_corners": True}, {"mode": "linear", **CORNERS}),
    ("bicubic", {"align_corners": False}, {"mode": "cubic", **PYTORCH}),
    ("bicubic", {"align_corners": True}, {"mode": "cubic", **CORNERS}),
    ("bilinear", {"antialias": True}, {"mode": "linear", "antialias": 1, "exclude_outside": 1}),
    ("bicubic", {"antialias": True}, {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5, "exclude_outside": 1}),
    ("trilinear", {"align_corners": False}, {"mode": "linear", **PYTORCH}),
    ("trilinear", {"align_corners": True}, {"mode": "linear", **CORNERS}),
]


@pytest.mark.parametrize("symbolic", [None, {0: (0,)}, {0: (0, 2, 3, 4)}], ids=["static", "batch", "space"])
@pytest.mark.parametrize("to", [(14, 10, 6), (4, 9, 3), (3, 4, 5)], ids=str)
@pytest.mark.parametrize(("mode", "options", "attrs"), MODES, ids=[f"{m}{list(o.values())}" for m, o, _ in MODES])
def test_interpolate(mode, options, attrs, to, symbolic):
    rank = 3 if mode == "trilinear" else 2
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 7, 5, 3)[: 2 + rank]).astype(np.float32)
    t = torch.tensor(x, requires_grad=True)
    out = torch.nn.functional.interpolate(t, to[:rank], mode=mode, **options)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))
    sizes = np.array([2, 3, *to[:rank]])
    held = Case("Resize", [x, None, None, sizes], attrs, symbolic=symbolic or True)
    feeds = {"x0": x, "x3": sizes}
    model = vjp(node_model(held, feeds, symbolic=symbolic is not None, dtype=np.float32), wrt=["x0"], of=["y0"])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sig = signature(model)
    y, g = session.run(["y0", sig.gradients["x0"]], {"x0": x, sig.cotangents["y0"]: u})
    np.testing.assert_allclose(y, out.detach().numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(g, t.grad.numpy(), rtol=0, atol=2e-5)

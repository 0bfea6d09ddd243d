"""Straight through fake quantization, against PyTorch's, with fixed and with learned scales."""

import numpy as np
import pytest

from onnxgrad import straight_through, vjp
from tests.rules.dtypes import session
from tests.rules.test_straight_through import RNG, X, pair

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

S = [0.02, 0.03, 0.011, 0.04]
Z = [3, -5, 0, 7]


def per_tensor(x, s):
    return torch.fake_quantize_per_tensor_affine(x, 0.03, 4, -128, 127)


def per_channel(x, s):
    return torch.fake_quantize_per_channel_affine(x, torch.tensor(S), torch.tensor(Z, dtype=torch.int32), 1, -128, 127)


def learned(x, s):
    return torch._fake_quantize_learnable_per_tensor_affine(x, s, torch.tensor([4.0]), -128, 127, 1.0)


def learned_per_channel(x, s):
    points = torch.tensor(Z, dtype=torch.float32)
    return torch._fake_quantize_learnable_per_channel_affine(x, s, points, 1, -128, 127, 1.0)


WAYS = {
    "tensor": (per_tensor, 0.03, 4, {}),
    "channels": (per_channel, S, Z, {"axis": 1}),
    "tensor, learned": (learned, [0.03], [4], {}),
    "channels, learned": (learned_per_channel, S, Z, {"axis": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_fake_quantization(way: str) -> None:
    same, scale, point, attrs = WAYS[way]
    u = RNG.standard_normal(X.shape).astype(np.float32)
    with straight_through("QuantizeLinear"):
        back = vjp(pair(scale=scale, point=np.array(point, np.int8), **attrs), wrt=["x", "s"])
    y, dx, ds = session(back).run(["y", "x_grad", "s_grad"], {"x": X, "y_cotangent": u})
    x, s = (torch.tensor(np.asarray(a, np.float32), requires_grad=True) for a in (X, scale))
    fake = same(x, s)
    fake.backward(torch.tensor(u))
    np.testing.assert_allclose(y, fake.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-5)
    if "learned" in way:
        np.testing.assert_allclose(ds, s.grad.numpy(), rtol=1e-3, atol=2e-3)

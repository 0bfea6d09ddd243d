"""jacobian, hessian, hvp and gauss_newton_vp against torch.func, on the same function."""

import numpy as np
import pytest
from onnx import numpy_helper

from onnxgrad import gauss_newton_vp, hessian, hvp, jacobian
from tests.transforms.numbers import net, session

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

rng = np.random.default_rng(2)
SOURCE = net([3, 4, 5, 2])
WEIGHTS = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in SOURCE.graph.initializer}


def function(x, w1=WEIGHTS["w1"]):
    w = WEIGHTS | {"w1": w1}
    t = torch.tanh(torch.tanh(x @ w["w0"] + w["b0"]) @ w["w1"] + w["b1"])
    return t @ w["w2"] + w["b2"]


X, V = rng.standard_normal((3, 3)), rng.standard_normal((3, 3))


def close(a, b):
    np.testing.assert_allclose(a, b.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_jacobian(mode):
    got = session(jacobian(SOURCE, wrt=["x", "w1"], mode=mode))({"x": X})
    by_x, by_w = torch.func.jacrev(function, argnums=(0, 1))(torch.tensor(X), WEIGHTS["w1"])
    close(got["y_x_jacobian"], by_x)
    close(got["y_w1_jacobian"], by_w)
    rows = torch.func.vmap(torch.func.jacfwd(function))(torch.tensor(X))
    close(session(jacobian(SOURCE, wrt="x", batch=0, mode=mode))({"x": X})["y_x_jacobian"], rows)


def test_hessian_and_hvp():
    def total(x, w1):
        return function(x, w1).sum()

    blocks = torch.func.hessian(total, argnums=(0, 1))(torch.tensor(X), WEIGHTS["w1"])
    got = session(hessian(SOURCE, wrt=["x", "w1"]))({"x": X})
    for i, a in enumerate(["x", "w1"]):
        for j, b in enumerate(["x", "w1"]):
            close(got[f"{a}_{b}_hessian"], blocks[i][j])
    _, want = torch.func.jvp(torch.func.grad(total), (torch.tensor(X), WEIGHTS["w1"]),
                             (torch.tensor(V), torch.zeros_like(WEIGHTS["w1"])))  # fmt: skip
    close(session(hvp(SOURCE, wrt="x"))({"x": X, "x_tangent": V})["x_hvp"], want)


def test_gauss_newton():
    _, pushed = torch.func.jvp(function, (torch.tensor(X),), (torch.tensor(V),))
    _, pull = torch.func.vjp(function, torch.tensor(X))
    close(session(gauss_newton_vp(SOURCE, wrt="x"))({"x": X, "x_tangent": V})["x_gnvp"], pull(pushed)[0])

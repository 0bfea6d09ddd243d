"""GridSample against torch.nn.functional.grid_sample, on ONNX Runtime in float32, edges included."""

import itertools

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MODES = list(itertools.product(["nearest", "linear", "cubic"], ["zeros", "border", "reflection"], [0, 1]))
TORCH = {"linear": "bilinear", "cubic": "bicubic"}


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def edges(room, rng):
    """Points on the grid of the elements themselves, the corners among them, and far outside.

    Not half way between elements that are mirrored: there ONNX Runtime takes another nearest than PyTorch.
    """
    line = [np.linspace(-1, 1, n) for n in room[::-1]]
    exact = np.stack(np.meshgrid(*line, indexing="ij"), -1).reshape(1, -1, *[1] * (len(room) - 1), len(room))
    return np.concatenate([exact, exact * 2.4, rng.standard_normal(exact.shape)], 1)


@pytest.mark.parametrize(("room", "symbolic"), [((4, 5), True), ((3, 4, 3), False), ((1, 4), False)], ids=str)
@pytest.mark.parametrize(("mode", "padding", "corners"), MODES)
def test_grid_sample(mode, padding, corners, room, symbolic):
    if mode == "cubic" and len(room) == 3:
        pytest.skip("neither has it")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, *room)).astype(np.float32)
    grid = edges(room, rng).astype(np.float32)
    tx, tg = (torch.tensor(v, requires_grad=True) for v in (x, grid))
    out = torch.nn.functional.grid_sample(tx, tg, TORCH.get(mode, mode), padding, bool(corners))
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    feeds = {"x0": x, "x1": grid}
    primal = node_model(Case("GridSample", [x, grid], attrs, opset=20), feeds, symbolic=symbolic, dtype=np.float32)
    model = vjp(primal, wrt=["x0", "x1"], of=["y0"])
    sig = signature(model)
    got = run(model, feeds | {sig.cotangents["y0"]: u})
    np.testing.assert_allclose(got["y0"], out.detach().numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(got["y0"], run(primal, feeds)["y0"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(got[sig.gradients["x0"]], tx.grad.numpy(), rtol=0, atol=5e-5)
    np.testing.assert_allclose(got[sig.gradients["x1"]], tg.grad.numpy(), rtol=0, atol=2e-4)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("room", [(2, 7), (16, 62), (100, 93), (2, 3, 62)], ids=str)
@pytest.mark.parametrize(("mode", "padding", "corners"), MODES)
def test_points_that_rounding_puts_beside_an_element(mode, padding, corners, room, symbolic):
    """Whole coordinates, scaled to -1 … 1 as optical flow does it, come back with a digit lost: on PyTorch's side.

    The image grows faster than linearly, so that the slopes on the two sides of an element differ clearly.
    """
    if mode == "cubic" and len(room) == 3:
        pytest.skip("neither has it")
    line = [np.arange(-2, n + 2, dtype=np.float32) for n in room[::-1]]
    line = [2 * c / np.float32(n - 1) - 1 if corners else (2 * c + 1) / np.float32(n) - 1
            for c, n in zip(line, room[::-1])]  # fmt: skip
    grid = np.stack(np.meshgrid(*line, indexing="ij"), -1)[None]
    x = np.float32(sum(np.indices(room) ** 2))[None, None]
    tx, tg = (torch.tensor(v, requires_grad=True) for v in (x, grid))
    torch.nn.functional.grid_sample(tx, tg, TORCH.get(mode, mode), padding, bool(corners)).sum().backward()
    attrs, feeds = {"mode": mode, "padding_mode": padding, "align_corners": corners}, {"x0": x, "x1": grid}
    primal = node_model(Case("GridSample", [x, grid], attrs, opset=20), feeds, symbolic=symbolic, dtype=np.float32)
    model = vjp(primal, wrt=["x0", "x1"], of="y0")
    sig = signature(model)
    got = run(model, feeds | {sig.cotangents["y0"]: np.ones((1, 1, *grid.shape[1:-1]), np.float32)})
    slope = max(room) / 2
    np.testing.assert_allclose(got[sig.gradients["x1"]] / slope, tg.grad.numpy() / slope, rtol=1e-4, atol=0.1)
    np.testing.assert_allclose(got[sig.gradients["x0"]], tx.grad.numpy(), rtol=0, atol=1e-2)


def test_opset_16_has_other_names_for_the_modes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 4, 5)).astype(np.float32)
    grid = rng.standard_normal((1, 3, 2, 2)).astype(np.float32)
    tg = torch.tensor(grid, requires_grad=True)
    torch.nn.functional.grid_sample(torch.tensor(x), tg, "bicubic", align_corners=False).sum().backward()
    case = Case("GridSample", [x, grid], {"mode": "bicubic"}, opset=16)
    model = vjp(node_model(case, {"x0": x, "x1": grid}, dtype=np.float32), wrt=["x1"], of=["y0"])
    sig = signature(model)
    got = run(model, {"x0": x, "x1": grid, sig.cotangents["y0"]: np.ones((1, 2, 3, 2), np.float32)})
    np.testing.assert_allclose(got[sig.gradients["x1"]], tg.grad.numpy(), rtol=0, atol=1e-4)

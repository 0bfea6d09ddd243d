"""Classification losses against PyTorch: every reduction, weights, ignored targets, more axes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import vjp
from onnxgrad.model_io import signature
from tests.rules.dtypes import session

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

RNG = np.random.default_rng(5)
ROWS = (RNG.standard_normal((6, 4)).astype(np.float32) * 3, np.array([3, 0, -1, 2, 3, 1]))
IMAGES = (
    RNG.standard_normal((2, 4, 3, 2)).astype(np.float32),
    np.array([[[0, 2], [-1, 1], [3, 3]], [[2, -1], [0, 1], [1, 1]]]),
)
WEIGHT = np.array([0.5, 1.7, 0.8, 0.0], np.float32)


def model(op: str, x: np.ndarray, t: np.ndarray, weighted: bool, reduction: str) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *x.shape[1:]]),
        helper.make_tensor_value_info("t", TensorProto.INT64, ["N", *t.shape[1:]]),
    ]
    if weighted:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    node = helper.make_node(op, [i.name for i in inputs], ["y"], reduction=reduction, ignore_index=-1)
    dims = ["N", *t.shape[1:]] if reduction == "none" else []
    graph = helper.make_graph([node], "loss", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("op", "data", "weighted", "reduction"),
    [
        *itertools.product(
            ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"],
            [ROWS, IMAGES],
            [False, True],
            ["none", "sum", "mean"],
        )
    ],
    ids=lambda v: "images" if v is IMAGES else "rows" if v is ROWS else str(v),
)
def test_loss(op: str, data: tuple, weighted: bool, reduction: str) -> None:
    x, t = data
    loss = F.cross_entropy if op.startswith("S") else F.nll_loss
    theirs = torch.tensor(x, requires_grad=True)
    w = torch.tensor(WEIGHT) if weighted else None
    y = loss(theirs, torch.tensor(t), weight=w, reduction=reduction, ignore_index=-1)
    u = torch.tensor(RNG.standard_normal(y.shape).astype(np.float32), requires_grad=True)
    (g,) = torch.autograd.grad(y, theirs, u, create_graph=True)

    back = vjp(model(op, x, t, weighted, reduction), wrt="x", of="y")
    sig = signature(back)
    feeds = {"x": x, "t": t} | ({"w": WEIGHT} if weighted else {}) | {sig.cotangents["y"]: u.detach().numpy()}
    got = session(back).run(["y", sig.gradients["x"]], feeds)
    np.testing.assert_allclose(got[0], y.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got[1], g.detach().numpy(), rtol=2e-5, atol=2e-6)

    v = torch.tensor(RNG.standard_normal(g.shape).astype(np.float32))
    second = torch.autograd.grad(g, [theirs, u], v, allow_unused=True)
    twice = vjp(back, wrt=["x", sig.cotangents["y"]], of=sig.gradients["x"])
    names = signature(twice)
    feeds[names.cotangents[sig.gradients["x"]]] = v.numpy()
    results = [names.gradients[n] for n in ("x", sig.cotangents["y"])]
    for value, want in zip(session(twice).run(results, feeds), second):
        want = np.zeros(value.shape) if want is None else want.numpy(force=True)
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)

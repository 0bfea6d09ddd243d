"""Elementwise functions, softmaxes and reductions against PyTorch: value, VJP, Hessian-vector product, kinks.

The points include the kinks and ties of these functions, so the conventions there are PyTorch's. Second
derivatives at a kink are not compared: here they are those of the branch that gives the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from onnxgrad import vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import session

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

LINE = np.array([-7.0, -3.0, -2.5, -1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 2.5, 3.0, 6.0, 7.0])
SMOOTH = LINE[np.abs(LINE) > 0.05]
BASES = np.array([0.0, 0.0, 0.0, 0.0, 2.0, 3.0])
INSIDE = np.array([-0.99, -0.5, 0.0, 0.1, 0.9])
POSITIVE = np.array([0.05, 0.5, 1.0, 2.0, 30.0])
PAIRS = np.array([[0.0, 1.0, -1.0, 2.0], [0.0, -1.0, -1.0, 2.5]])
ROWS = np.array([[1.0, 3.0, 3.0], [-2.0, -2.0, -2.0], [0.0, 0.0, 0.0], [0.5, -1.5, 4.0]])
ROW = np.array([1], np.int64)
PRODUCTS = np.array([[1.0, 3.0, -2.0], [0.0, -2.0, 1.5], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]])


@dataclass
class Pair:
    """An ONNX operator on `inputs` and what it is in PyTorch."""

    op: str
    torch: Callable[..., Any]
    inputs: list[np.ndarray] = field(default_factory=lambda: [LINE])
    attrs: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    second: bool = True
    operands: int = 2
    note: str = ""


PAIRS_OF_FUNCTIONS = [
    Pair("Relu", torch.relu),
    Pair("LeakyRelu", lambda x: F.leaky_relu(x, 0.2), attrs={"alpha": 0.2}),
    Pair("LeakyRelu", lambda x: F.leaky_relu(x, 1.5), attrs={"alpha": 1.5}, note="steep"),
    Pair("PRelu", F.prelu, [np.stack([LINE, LINE]), np.array([0.3])], second=False),
    Pair("Elu", lambda x: F.elu(x, 1.3), attrs={"alpha": 1.3}, second=False),
    Pair("Selu", F.selu, second=False),
    Pair("Celu", lambda x: F.celu(x, 1.3), attrs={"alpha": 1.3}, second=False),
    Pair("PRelu", F.prelu, [np.stack([SMOOTH, SMOOTH]), np.array([0.3])], note="off the kink"),
    Pair("Elu", lambda x: F.elu(x, 1.3), [SMOOTH], attrs={"alpha": 1.3}, note="off the kink"),
    Pair("Selu", F.selu, [SMOOTH], note="off the kink"),
    Pair("Celu", lambda x: F.celu(x, 1.3), [SMOOTH], attrs={"alpha": 1.3}, note="off the kink"),
    Pair("Softplus", F.softplus),
    Pair("Softsign", F.softsign),
    Pair("HardSigmoid", F.hardsigmoid, attrs={"alpha": 1 / 6, "beta": 0.5}, second=False),
    Pair("HardSwish", F.hardswish),
    Pair("Mish", F.mish),
    Pair("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), attrs={"alpha": 0.5}),
    Pair("Shrink", lambda x: F.softshrink(x, 0.5), attrs={"lambd": 0.5, "bias": 0.5}),
    Pair("Shrink", lambda x: F.hardshrink(x, 0.5), attrs={"lambd": 0.5}, note="hard"),
    Pair("Gelu", F.gelu),
    Pair("Gelu", lambda x: F.gelu(x, approximate="tanh"), attrs={"approximate": "tanh"}, note="tanh"),
    Pair("Swish", F.silu, opset=24),
    Pair("Sigmoid", torch.sigmoid),
    *[Pair(n.capitalize(), getattr(torch, n)) for n in ("tanh", "sin", "cos", "tan", "atan", "sinh", "cosh")],
    *[Pair(n.capitalize(), getattr(torch, n)) for n in ("asinh", "erf", "exp", "abs", "neg")],
    *[Pair(n.capitalize(), getattr(torch, n), [INSIDE]) for n in ("asin", "acos", "atanh")],
    *[Pair(n.capitalize(), getattr(torch, n), [POSITIVE]) for n in ("log", "sqrt", "reciprocal")],
    Pair("Acosh", torch.acosh, [POSITIVE + 1]),
    Pair("Clip", lambda x: torch.clamp(x, -1.0, 2.5), [LINE, np.array(-1.0), np.array(2.5)], operands=1),
    Pair("Max", torch.maximum, list(PAIRS)),
    Pair("Min", torch.minimum, list(PAIRS)),
    Pair("Pow", torch.pow, [BASES, np.array([3.0, 2.0, 1.0, 0.0, 0.0, -1.5])], second=False),
    Pair("Pow", torch.pow, [np.array([0.5, 2.0, 3.0]), np.array([2.0, 1.0, -1.5])], note="off zero"),
    Pair("Pow", lambda x: x**3, [LINE, np.array(3.0)], operands=1, note="cube"),
    Pair("Pow", lambda x: x**2, [LINE, np.array(2, np.int64)], note="whole exponent"),
    Pair("Mod", torch.fmod, [LINE, np.full(14, 0.7)], {"fmod": 1}),
    Pair("Softmax", lambda x: torch.softmax(x, 1), [ROWS * 40], {"axis": 1}),
    Pair("LogSoftmax", lambda x: torch.log_softmax(x, 1), [ROWS * 40], {"axis": 1}),
    Pair("ReduceSum", lambda x: x.sum(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceMean", lambda x: x.mean(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceMax", lambda x: x.amax(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceMin", lambda x: x.amin(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceL1", lambda x: x.abs().sum(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceL2", lambda x: torch.linalg.vector_norm(x, dim=1), [ROWS, ROW], {"keepdims": 0}, second=False),
    Pair(
        "ReduceL2",
        lambda x: torch.linalg.vector_norm(x, dim=1),
        [ROWS[[0, 1, 3]], ROW],
        {"keepdims": 0},
        note="2",
    ),
    Pair("ReduceLogSumExp", lambda x: x.logsumexp(1), [ROWS * 40, ROW], {"keepdims": 0}),
    Pair("ReduceLogSum", lambda x: x.sum(1).log(), [np.abs(ROWS) + 0.1, ROW], {"keepdims": 0}),
    Pair("ReduceSumSquare", lambda x: (x * x).sum(1), [ROWS, ROW], {"keepdims": 0}),
    Pair("ReduceProd", lambda x: x[:, 0] * x[:, 1] * x[:, 2], [PRODUCTS, ROW], {"keepdims": 0}),
    Pair("ReduceProd", lambda x: x.prod(1), [PRODUCTS, ROW], {"keepdims": 0}, note="prod", second=False),
    Pair("CumSum", lambda x: x.cumsum(1), [ROWS, np.array(1)]),
]


@pytest.mark.parametrize("pair", PAIRS_OF_FUNCTIONS, ids=lambda p: f"{p.op} {p.note}".strip())
def test_against_torch(pair: Pair) -> None:
    case = Case(pair.op, pair.inputs, pair.attrs, opset=pair.opset)
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": x.astype(np.float32) if x.dtype.kind == "f" else x for i, x in enumerate(pair.inputs)}
    wrt = [n for n, x in feeds.items() if x.dtype.kind == "f"][: pair.operands]
    primal = node_model(case, feeds, dtype=np.float32)
    xs = [torch.tensor(feeds[n], requires_grad=True) for n in wrt]
    y = pair.torch(*xs)
    u = torch.tensor(rng.standard_normal(y.shape).astype(np.float32), requires_grad=True)
    gradients = torch.autograd.grad(y, xs, u, create_graph=True)

    back = vjp(primal, wrt=wrt, of="y0")
    sig = signature(back)
    feeds[sig.cotangents["y0"]] = u.detach().numpy()
    run = session(back)
    names = [o.name for o in run.get_outputs()]
    got = dict(zip(names, run.run(names, {i.name: feeds[i.name] for i in run.get_inputs()})))
    np.testing.assert_allclose(got["y0"], y.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg="value")
    for n, g in zip(wrt, gradients):
        np.testing.assert_allclose(
            got[sig.gradients[n]], g.detach().numpy(), rtol=5e-5, atol=5e-6, err_msg=f"gradient of {n}"
        )
    if not pair.second:
        return
    v = [torch.tensor(rng.standard_normal(g.shape).astype(np.float32)) for g in gradients]
    moving = [(g, w) for g, w in zip(gradients, v) if g.requires_grad]
    through = [*xs, u]
    second = torch.autograd.grad([g for g, _ in moving], through, [w for _, w in moving], allow_unused=True)
    twice = vjp(back, wrt=[*wrt, sig.cotangents["y0"]], of=[sig.gradients[n] for n in wrt])
    names = signature(twice)
    feeds |= {names.cotangents[sig.gradients[n]]: w.numpy() for n, w in zip(wrt, v)}
    run = session(twice)
    results = [names.gradients[n] for n in [*wrt, sig.cotangents["y0"]]]
    values = run.run(results, {i.name: feeds[i.name] for i in run.get_inputs()})
    for name, value, want in zip(results, values, second):
        want = np.zeros(value.shape) if want is None else want.numpy(force=True)
        np.testing.assert_allclose(value, want, rtol=2e-4, atol=2e-5, err_msg=f"second order, {name}")

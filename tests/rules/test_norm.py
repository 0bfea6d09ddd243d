"""Normalizations up the ladder."""

import numpy as np
import pytest
from onnx.reference.op_run import OpRun

from onnxgrad import jvp, vjp
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes, session
from tests.rules.evaluators import Cast
from tests.rules.ladder import ladder

C2 = [(2,)] * 2
STATISTICS = [np.array([0.3, -0.7]), np.array([0.8, 1.4])]


class LRN(OpRun):
    """The reference evaluator's takes the size of the batch for the number of channels."""

    op_domain = ""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):
        total = np.zeros_like(x)
        for c in range(x.shape[1]):
            first, last = max(0, c - (size - 1) // 2), min(x.shape[1] - 1, c + size // 2)
            total[:, c] = (x[:, first : last + 1] ** 2).sum(1)
        return (x / (bias + alpha / size * total) ** beta,)


class LpNormalization(OpRun):
    """The reference evaluator's leaves out the absolute value for p = 1."""

    op_domain = ""

    def _run(self, x, axis=None, p=None):
        norm = np.linalg.norm(x, ord=p, axis=axis, keepdims=True)
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)),)


class GroupNormalization(OpRun):
    """The function body that the reference evaluator takes has constants in float32 only."""

    op_domain = ""

    def _run(self, x, scale, bias, epsilon=None, num_groups=None, stash_type=None):
        grouped = x.reshape(x.shape[0], num_groups, -1)
        d = grouped - grouped.mean(-1, keepdims=True)
        normal = (d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon)).reshape(x.shape)
        room = [1] * (x.ndim - 2)
        return (normal * scale.reshape(-1, *room) + bias.reshape(-1, *room),)


ALL = {"outputs": 3, "wrt": [0], "evaluators": [Cast]}
BATCH = {"symbolic": {0: (0,)}, "note": "batch"}
GROUPS = {"evaluators": [GroupNormalization]}
NORM = {"evaluators": [LpNormalization]}
LOCAL = {"evaluators": [LRN]}


def batch(x, note, *, outputs=1, **options):
    attrs = {k: options.pop(k) for k in ("training_mode", "momentum", "epsilon") if k in options}
    return Case("BatchNormalization", [x, *C2, *STATISTICS], attrs, note=note, outputs=outputs, **options)


TRAINING = {"training_mode": 1, "outputs": 3, "epsilon": 1e-2}

CASES = [
    batch((3, 2), "vectors"),
    batch((2, 2, 3), ""),
    batch((2, 2, 2, 2), "batch", symbolic={0: (0,)}),
    batch((3, 2), "training, vectors", **TRAINING),
    batch((2, 2, 3), "training", **TRAINING),
    batch((2, 2, 2, 2), "training, batch", symbolic={0: (0,)}, **TRAINING),
    batch((2, 2, 3), "training, momentum 0", momentum=0.0, **TRAINING),
    batch((2, 2, 3), "training, momentum 1", momentum=1.0, **TRAINING),
    batch((3, 2), "training, running mean", of=[1], order=1, **TRAINING),
    batch((3, 2), "training, running variance", of=[2], **TRAINING),
    Case("LayerNormalization", [(2, 2, 3), (3,), (3,)]),
    Case("LayerNormalization", [(2, 2, 3), (2, 3)], {"axis": 1, "epsilon": 1e-2}, note="no bias"),
    Case("LayerNormalization", [(2, 4), (1,), (4,)], {"axis": -1}, note="one scale"),
    Case("LayerNormalization", [(2, 2, 3), (3,), (3,)], outputs=3, note="all outputs", evaluators=[Cast]),
    Case(
        "LayerNormalization",
        [(2, 4), (4,), (4,)],
        outputs=3,
        of=[1],
        order=1,
        note="mean",
        wrt=[0],
        evaluators=[Cast],
    ),
    Case(
        "LayerNormalization",
        [(2, 4), (4,), (4,)],
        outputs=3,
        of=[2],
        note="deviation",
        wrt=[0],
        evaluators=[Cast],
    ),
    Case("LayerNormalization", [(2, 3, 2), (3, 2), (3, 2)], {"axis": 1}, **BATCH),
    Case("RMSNormalization", [(2, 2, 3), (3,)], opset=23),
    Case("RMSNormalization", [(2, 2, 3), (2, 3)], {"axis": 1, "epsilon": 1e-2}, opset=23),
    Case("RMSNormalization", [(2, 3, 2), (3, 2)], {"axis": -2}, symbolic={0: (0,)}, opset=23, note="batch"),
    Case("InstanceNormalization", [(2, 2, 3), *C2]),
    Case("InstanceNormalization", [(2, 2, 2, 3), *C2], {"epsilon": 1e-2}, symbolic={0: (0, 2)}, note="batch"),
    Case("GroupNormalization", [(2, 4, 2), (4,), (4,)], {"num_groups": 2}, **GROUPS),
    Case(
        "GroupNormalization",
        [(2, 4, 2, 1), (4,), (4,)],
        {"num_groups": 2},
        symbolic={0: (0,)},
        note="batch",
        **GROUPS,
    ),
    Case("GroupNormalization", [(2, 4), (4,), (4,)], {"num_groups": 2}, note="vectors", **GROUPS),
    Case("LRN", [(2, 5, 2, 1)], {"size": 3, "alpha": 0.3, "beta": 0.6, "bias": 1.2}, **LOCAL),
    Case(
        "LRN",
        [(2, 4, 1, 2)],
        {"size": 2, "alpha": 0.5},
        **LOCAL,
        runtime=False,
        note="even size, which ONNX Runtime refuses",
    ),
    Case("LRN", [(1, 3, 2, 2)], {"size": 5, "alpha": 0.5}, **LOCAL, symbolic={0: (0, 2)}, note="wide"),
    Case("LpNormalization", [(2, 3)], **NORM),
    Case("LpNormalization", [(2, 3, 2)], {"axis": 1}, **NORM),
    Case("LpNormalization", [(2, 3)], {"axis": 0, "p": 1}, **NORM, note="p 1"),
    Case("LpNormalization", [(3, 2)], {"axis": -2}, **NORM, note="axis -2"),
    Case("LpNormalization", [(2, 1, 3)], {"axis": -1, "p": 1}, opset=22, **NORM, note="opset 22, p 1"),
    Case("LpNormalization", [(2, 1)], **NORM),
    Case("LRN", [(2, 1, 2, 2)], {"size": 1, "alpha": 0.5, "beta": 2.0}, **LOCAL, note="one channel"),
    Case(
        "LRN",
        [(2, 3, 2)],
        {"size": 3, "alpha": 0.7},
        **LOCAL,
        runtime=False,
        note="of rank 3, which ONNX Runtime refuses",
    ),
    Case("InstanceNormalization", [(2, 1, 3), (1,), (1,)], note="one channel"),
    Case("InstanceNormalization", [(1, 2, 2, 1, 2), *C2], symbolic={0: (0, 3)}, note="of rank 5"),
    Case("RMSNormalization", [(2, 2, 3), ()], opset=23, note="one scale"),
    Case("RMSNormalization", [(2, 2, 3), (2, 2, 3)], {"axis": 0}, opset=23, note="axis 0"),
]
test_rule = ladder("norm", CASES)
test_dtype = dtypes([c for c in CASES if c.of is None])  # the other outputs are float32 whatever x is


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("p", [1, 2])
def test_a_row_of_zeros(p: int, dtype: type) -> None:
    """Its norm has no derivative; it gets 0, in both modes and to second order, and the other row is not touched."""
    x = np.array([[0, 0, 0], [3, 0, -4]], dtype)
    model = node_model(Case("LpNormalization", [x], {"p": p}), {"x0": x}, dtype=dtype)
    u = np.array([[1, 2, 3]] * 2, dtype)
    back = vjp(model, wrt="x0")
    (g,) = session(back).run(["x0_grad"], {"x0": x, "y0_cotangent": u})
    np.testing.assert_array_equal(g[0], 0)
    y = x[1] / (7 if p == 1 else 5)
    slope = np.sign(x[1]) if p == 1 else y
    np.testing.assert_allclose(g[1], (u[1] - slope * (u[1] @ y)) / (7 if p == 1 else 5), rtol=1e-5)
    push = jvp(model, wrt="x0")
    (t,) = session(push).run(["y0_tangent"], {"x0": x, "x0_tangent": u})
    np.testing.assert_array_equal(t[0], 0)
    second = vjp(back, wrt=["x0", "y0_cotangent"], of="x0_grad")
    feeds = {"x0": x, "y0_cotangent": u, "x0_grad_cotangent": u}
    for h in session(second).run(["x0_grad_1", "y0_cotangent_grad"], feeds):
        assert np.isfinite(h).all()
        np.testing.assert_array_equal(h[0], 0)


def test_a_constant_row_has_a_finite_derivative() -> None:
    """Without variance y = d/ε, whose derivative is large but finite."""
    x = np.array([[[[2.0, 2.0]]]], np.float32)
    model = node_model(Case("MeanVarianceNormalization", [x]), {"x0": x}, dtype=np.float32)
    (g,) = session(vjp(model, wrt="x0")).run(["x0_grad"], {"x0": x, "y0_cotangent": x * np.float32([1, 2])})
    np.testing.assert_allclose(g, [[[[-1e9, 1e9]]]], rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 1), (1, 6), (0, 3), (70, 130)])
@pytest.mark.parametrize("wrt", [["x0", "x1", "x2"], ["x0", "x1"], ["x0"]])
def test_layers_of_float32(shape: tuple[int, ...], wrt: list[str]) -> None:
    """The mean of ĝ·x̂ is a product of g·x̂ with the scale where the gradient of the scale is wanted as well."""
    rng = np.random.default_rng(0)
    x, g, s, b = (rng.standard_normal(n).astype(np.float32) for n in (shape, shape, shape[-1:], shape[-1:]))
    model = node_model(Case("LayerNormalization", [x, s, b]), {"x0": x, "x1": s, "x2": b}, dtype=np.float32)
    found = session(vjp(model, wrt=wrt)).run([f"{w}_grad" for w in wrt], {"x0": x, "x1": s, "x2": b, "y0_cotangent": g})
    wide = x.astype(np.float64)
    d = wide - wide.mean(-1, keepdims=True)
    r = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
    xh, gs = d * r, g.astype(np.float64) * s
    dx = r * (gs - gs.mean(-1, keepdims=True) - xh * (gs * xh).mean(-1, keepdims=True))
    before = tuple(range(len(shape) - 1))
    for array, expected in zip(found, (dx, (g * xh).sum(before), g.sum(before, dtype=np.float64))):
        np.testing.assert_allclose(array, expected, rtol=2e-4, atol=2e-4 * max(1, r.max(initial=0) / 10))

"""GridSample up the ladder: every mode and padding, with respect to the image and the grid."""

import itertools

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder
from tests.rules.sampled import GridSample
from tests.rules.windowed import GatherElements, ScatterElements

EVALUATORS = (GatherElements, GridSample, ScatterElements)


def points(shape, x, seed=0):
    """A grid some of whose points lie outside, none near a kink: coordinates end in .3 or .7."""
    rng = np.random.default_rng(seed)
    corners = np.stack([rng.integers(-3, n + 3, shape) + rng.choice([0.3, 0.7], shape) for n in x[:1:-1]], -1)
    return corners


def case(x, out, *, note="", order=1, symbolic=True, opset=20, **attrs):
    size = np.array(x[:1:-1])
    at = points((x[0], *out), x)
    grid = at * 2 / (size - 1) - 1 if attrs.get("align_corners") else (at * 2 + 1) / size - 1
    corners = "corners" * attrs.get("align_corners", 0)
    parts = [attrs.get("mode", "linear"), attrs.get("padding_mode", ""), corners, note]
    rest = {"order": order, "symbolic": symbolic, "opset": opset, "evaluators": EVALUATORS}
    return Case("GridSample", [x, grid], attrs, note=" ".join(filter(None, parts)), **rest)


MODES = itertools.product(["nearest", "linear", "cubic"], ["zeros", "border", "reflection"], [0, 1])
CASES = [
    *(
        case(
            (2, 2, 3, 4),
            (2, 1),
            mode=m,
            padding_mode=p,
            align_corners=c,
            order=1 + ((m == "linear" and c == 0) or (m, p, c) == ("cubic", "zeros", 1)),
        )
        for m, p, c in MODES
    ),
    *(
        case((1, 2, 2, 3, 2), (1, 2, 1), mode=m, padding_mode=p, align_corners=c)
        for m, p, c in [("nearest", "zeros", 0), ("linear", "border", 1), ("linear", "reflection", 0)]
    ),
    case((1, 1, 3, 4), (2, 2), note="batch of one", symbolic={0: (2, 3)}),
    case((2, 3, 3, 3), (1, 2), note="batch", symbolic={0: (0,), 1: (0,)}),
    case((2, 1, 3, 4), (2, 2), padding_mode="reflection", note="one channel"),
]
test_rule = ladder("sampling", CASES)
test_dtype = dtypes(CASES[6:8])


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_points_without_place(mode):
    """Nothing is at a point beyond all integers, or at infinity; a point that is NaN gives NaN."""
    x = np.arange(1, 13, dtype=np.float32).reshape(1, 1, 3, 4)
    grid = np.array([1e30, 0, 0, -1e30, np.inf, 0, np.nan, 0, 0, 0], np.float32).reshape(1, 1, 5, 2)
    feeds = {"x0": x, "x1": grid}
    model = vjp(
        node_model(Case("GridSample", [x, grid], {"mode": mode}, opset=20), feeds, dtype=np.float32), wrt="x0", of="y0"
    )
    feeds[signature(model).cotangents["y0"]] = np.array([1, 1, 1, 0, 0], np.float32).reshape(1, 1, 1, 5)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y, _ = session.run(["y0", signature(model).gradients["x0"]], feeds)
    np.testing.assert_array_equal(y.ravel()[:3], 0)
    assert np.isnan(y.ravel()[3])
    np.testing.assert_allclose(y.ravel()[4], x.mean(), rtol=1e-6)

"""GridSample up the ladder: every mode and padding, with respect to the image and the grid."""

import itertools

import numpy as np

from onnxgrad.testing import Case
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
        case((2, 2, 3, 4), (2, 1), mode=m, padding_mode=p, align_corners=c, order=1 + (m != "nearest" and c == 0))
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

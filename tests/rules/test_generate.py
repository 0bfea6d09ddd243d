"""Range and AffineGrid up the ladder."""

import numpy as np

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.evaluators import AffineGrid
from tests.rules.ladder import ladder


def ints(*values):
    return np.array(values, np.int64)


CASES = [
    Case("Range", [np.array(0.5), np.array(3.2), np.array(0.7)], wrt=[0, 2]),
    Case("Range", [np.array(3.1), np.array(0.2), np.array(-0.7)], note="down"),
    Case("Range", [np.array(0.5), np.array(0.2), np.array(0.7)], note="empty"),
    Case("Range", [np.array(0.5), np.array(3.2), np.array(0.7)], wrt=[0], note="start only"),
    Case("AffineGrid", [(2, 2, 3), ints(2, 1, 2, 3)], opset=20, evaluators=[AffineGrid]),
    Case(
        "AffineGrid",
        [(1, 2, 3), ints(1, 1, 2, 2)],
        {"align_corners": 1},
        opset=20,
        evaluators=[AffineGrid],
        note="corners",
    ),
    Case("AffineGrid", [(1, 3, 4), ints(1, 1, 1, 2, 2)], opset=20, evaluators=[AffineGrid]),
]
test_rule = ladder("generate", CASES)
test_dtype = dtypes(CASES)

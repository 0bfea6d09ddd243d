"""Pad up the ladder."""

import numpy as np

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder


def ints(*values):
    return np.array(values, np.int64)


CASES = [
    Case("Pad", [(2, 3), ints(1, 0, 0, 2)]),
    Case("Pad", [(2, 3), ints(1, 0, 0, 2), ()], note="value"),
    Case("Pad", [(2, 3), ints(2, 1), (), ints(-1)], note="axes"),
    Case("Pad", [(2, 3), ints(0, 0, 0, 0), ()], note="none"),
    Case("Pad", [(0, 3), ints(1, 0, 1, 1), ()], note="empty"),
    Case("Pad", [(2, 3), ints(1, 0, 0, 2), ()], fed=True, note="fed"),
    Case("Pad", [(2, 3), ints(2, 1), None, ints(-1)], fed=True, note="axes fed"),
    Case("Pad", [(3, 4), ints(1, 0, 0, 2)], {"mode": "reflect"}, note="reflect"),
    Case("Pad", [(3,), ints(2, 2)], {"mode": "reflect"}, note="reflect all"),
    Case("Pad", [(3, 4), ints(1, 0, 0, 2)], {"mode": "edge"}, note="edge"),
    Case("Pad", [(2,), ints(3, 4)], {"mode": "edge"}, note="edge far"),
    Case("Pad", [(3, 4), ints(1, 0, 0, 2)], {"mode": "wrap"}, note="wrap"),
    Case("Pad", [(3,), ints(3, 2)], {"mode": "wrap"}, note="wrap all"),
    Case("Pad", [(3, 4), ints(1, 2), None, ints(1)], {"mode": "reflect"}, fed=True, note="reflect fed"),
    Case("Pad", [(3, 4), ints(1, 1, 2, 0)], {"mode": "edge"}, fed=True, note="edge fed"),
    Case("CenterCropPad", [(3, 4), ints(5, 2)]),
    Case("CenterCropPad", [(3, 4), ints(2)], {"axes": [-1]}, note="axis"),
]
test_rule = ladder("pad", CASES)
test_dtype = dtypes(CASES)

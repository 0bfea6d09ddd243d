"""Writing elements into a copy of a tensor up the ladder."""

import numpy as np

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder

ONCE = np.array([[0, 2, 1], [2, 0, -1]])
TWICE = np.array([[0, 2, 1], [0, 0, -1]])
CELLS = np.array([[0, 1], [2, 2]])
SAME = np.array([[0, 1], [2, 2], [0, 1]])
ZEROS = np.array([[0.0, 0.7, 1.5], [0.5, 0.0, -2.0]])
CASES = [
    Case("ScatterElements", [(3, 3), ONCE, (2, 3)]),
    Case("ScatterElements", [(2, 4), ONCE, (2, 3)], {"axis": -1}, note="axis -1", runtime=True, symbolic=False),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "add"}, note="add"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "mul"}, note="mul"),
    Case("ScatterElements", [(3, 3), TWICE, ZEROS], {"reduction": "mul"}, note="mul zeros"),
    Case("ScatterElements", [(3, 3), TWICE, np.zeros((2, 3))], {"reduction": "mul"}, note="mul all zeros"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "max"}, note="max"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "min", "axis": 0}, note="min"),
    Case("ScatterElements", [(4,), np.array([1, 1]), (2,)], {"reduction": "add"}, fed=True, note="fed"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "mul"}, wrt=[2], note="mul update"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "max"}, wrt=[0], note="max data"),
    Case("ScatterElements", [(3, 3), TWICE, (2, 3)], {"reduction": "add"}, wrt=[0], note="add data"),
    Case("TensorScatter", [(2, 4, 3), (2, 2, 3)], opset=24),
    Case("TensorScatter", [(2, 4, 3), (2, 2, 3), np.array([1, 2])], opset=24),
    Case(
        "TensorScatter", [(2, 1, 4, 2), (2, 1, 3, 2), np.array([3, 2])], {"mode": "circular"}, opset=24, note="circular"
    ),
    Case(
        "TensorScatter", [(2, 3, 2, 2), (2, 1, 2, 2), np.array([2, 0])], {"axis": 1}, opset=24, fed=True, note="axis 1"
    ),
    Case("TensorScatter", [(2, 4, 3), (2, 4, 3), np.array([1, 2])], {"mode": "circular"}, opset=24, note="all"),
    Case("TensorScatter", [(2, 4, 3), (2, 2, 3), np.array([1, 2])], wrt=[1], opset=24, note="update"),
    Case("ScatterND", [(3, 4), CELLS, (2,)]),
    Case("ScatterND", [(3, 4), np.array([[1], [-1]]), (2, 4)], note="rows"),
    Case("ScatterND", [(3, 4), SAME, (3,)], {"reduction": "add"}, note="add"),
    Case("ScatterND", [(3, 2), np.array([[1], [1]]), (2, 2)], {"reduction": "add"}, note="add rows"),
    Case("ScatterND", [(3, 4), SAME, (3,)], {"reduction": "mul"}, note="mul"),
    Case("ScatterND", [(3, 4), SAME, np.array([0.0, 2.0, 3.0])], {"reduction": "mul"}, note="mul zeros"),
    Case("ScatterND", [(3, 4), SAME, (3,)], {"reduction": "max"}, fed=True, note="max"),
    Case("ScatterND", [(3, 4), SAME, (3,)], {"reduction": "min"}, note="min"),
]
test_rule = ladder("scatter", CASES)
test_dtype = dtypes(CASES)

"""Movement of elements up the ladder."""

import numpy as np
import onnx
import onnxruntime

from onnxgrad import vjp
from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder


def ints(*values):
    return np.array(values, np.int64)


CASES = [
    Case("Transpose", [(2, 3)]),
    Case("Transpose", [(2, 3, 4)], {"perm": [1, 2, 0]}),
    Case("Transpose", [()]),
    Case("Transpose", [(0, 3)]),
    Case("Reshape", [(2, 3, 4), ints(4, 6)]),
    Case("Reshape", [(2, 3, 4), ints(0, -1)], note="copied and inferred"),
    Case("Reshape", [(0, 3), ints(3, 0)], {"allowzero": 1}),
    Case("Reshape", [(1, 1), ints()], note="to a scalar"),
    Case("Reshape", [(), ints(1, 1)]),
    Case("Flatten", [(2, 3, 4)]),
    Case("Flatten", [(2, 3, 4)], {"axis": -1}, note="axis -1"),
    Case("Flatten", [(2, 3, 4)], {"axis": 0}, note="axis 0"),
    Case("Flatten", [(2, 0, 3)]),
    Case("Squeeze", [(1, 3, 1)], symbolic=False),
    Case("Squeeze", [(1, 3, 1), ints(-1)]),
    Case("Squeeze", [(1, 3, 1), ints(0, 2)], fed=True, note="axes fed", symbolic=False),
    Case("Squeeze", [(1, 0), ints(0)]),
    Case("Unsqueeze", [(2, 3), ints(0, -1)]),
    Case("Unsqueeze", [(), ints(0)]),
    Case("Expand", [(3, 1), ints(2, 3, 4)]),
    Case("Expand", [(3, 1), ints(1, 1)], note="to less"),
    Case("Expand", [(), ints(2, 3)]),
    Case("Expand", [(1, 3), ints(0, 3)]),
    Case("Expand", [(2, 3), ints(2, 3)], note="to itself"),
    Case("Tile", [(2, 3), ints(2, 1)], note="one axis"),
    Case("Tile", [(2, 3), ints(2, 3)]),
    Case("Tile", [(2, 3), ints(1, 1)], note="once"),
    Case("Tile", [(2, 3), ints(0, 2)], note="no copies"),
    Case("Tile", [(2, 3), ints(3, 2)], fed=True, note="repeats fed"),
    Case("Concat", [(2, 3), (2, 1), (2, 2)], {"axis": 1}),
    Case("Concat", [(2, 3), (1, 3)], {"axis": -2}),
    Case("Concat", [(2, 3), (2, 1)], {"axis": -1}),
    Case("Concat", [(2, 3)], {"axis": 0}),
    Case("Concat", [(2, 3), (0, 3)], {"axis": 0}),
    Case("Concat", [(2, 3), (2, 3)], {"axis": 0}, wrt=[1], note="one of two"),
    Case("Split", [(2, 6)], {"axis": 1, "num_outputs": 3}, outputs=3),
    Case("Split", [(2, 7)], {"axis": -1, "num_outputs": 3}, outputs=3, note="uneven"),
    Case("Split", [(2, 6), ints(1, 0, 5)], {"axis": 1}, outputs=3),
    Case("Split", [(2, 6), ints(4, 2)], {"axis": 1}, outputs=2, of=[1], note="one of two"),
    Case("Split", [(6,), ints(6)], outputs=1),
    Case("Split", [(6, 2), ints(1, 5)], outputs=2, fed=True, note="sizes fed"),
    Case("DepthToSpace", [(1, 8, 1, 2)], {"blocksize": 2}),
    Case("DepthToSpace", [(1, 8, 2, 1)], {"blocksize": 2, "mode": "CRD"}, note="CRD"),
    Case("SpaceToDepth", [(1, 2, 2, 4)], {"blocksize": 2}),
    Case("SpaceToDepth", [(1, 2, 2, 4)], {"blocksize": 2, "mode": "CRD"}, opset=28, runtime=False, note="CRD"),
    Case("Trilu", [(3, 4)]),
    Case("Trilu", [(2, 3, 3), np.array(-1)], {"upper": 0}),
    Case("Trilu", [(3, 4), np.array(1)], fed=True, note="k fed"),
    Case("ReverseSequence", [(3, 2, 2), ints(3, 1)]),
    Case("ReverseSequence", [(2, 3), ints(2, 3)], {"batch_axis": 0, "time_axis": 1}, fed=True),
]
test_rule = ladder("shape", CASES)
test_dtype = dtypes(CASES)


def test_an_axis_that_is_one_number():
    """As PyTorch's newer exporter writes attention with grouped queries; ONNX Runtime squeezes by vectors alone."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[2, N] x) => (float[2, 1, N] y) <int64 axis = {1}> { y = Unsqueeze (x, axis) }""")
    session = onnxruntime.InferenceSession(vjp(model, wrt="x", of="y").SerializeToString())
    g = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    (back,) = session.run(["x_grad"], {"x": g[:, 0], "y_cotangent": g})
    assert np.array_equal(back, g[:, 0])

"""Products of matrices up the ladder."""

import numpy as np
import pytest

from onnxgrad import vjp
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes, session
from tests.rules.evaluators import Flatten
from tests.rules.ladder import ladder

CASES = [
    Case("MatMul", [(2, 3), (3, 4)]),
    Case("MatMul", [(2, 2, 3), (3, 4)]),
    Case("MatMul", [(2, 1, 2, 3), (3, 2)]),
    Case("MatMul", [(2, 1, 2, 3), (3, 3, 4)]),
    Case("MatMul", [(2, 3), (2, 3, 2)]),
    Case("MatMul", [(1, 2, 3), (2, 3, 2)]),
    Case("MatMul", [(3,), (3, 4)]),
    Case("MatMul", [(3,), (2, 3, 4)]),
    Case("MatMul", [(2, 5, 3), (3,)]),
    Case("MatMul", [(2, 3), (3,)]),
    Case("MatMul", [(3,), (3,)]),
    Case("MatMul", [(0, 3), (3, 2)]),
    Case("MatMul", [(2, 0), (0, 3)]),
    Case("MatMul", [(0, 2, 3), (3, 2)], evaluators=[Flatten]),
    Case("MatMul", [(3,), (2, 3, 0)]),
    Case("MatMul", [(2, 2, 3), (3, 4)], wrt=[1], note="weight only"),
    Case("Gemm", [(2, 3), (3, 4)]),
    Case("Gemm", [(2, 3), (3, 4), (4,)]),
    Case("Gemm", [(2, 3), (3, 4), (2, 4)], {"alpha": 0.5, "beta": 2.0}, note="scaled"),
    Case("Gemm", [(3, 2), (3, 4), (2, 1)], {"transA": 1, "alpha": 0.5}, note="transA"),
    Case("Gemm", [(2, 3), (4, 3), ()], {"transB": 1, "beta": -1.0}, note="transB"),
    Case("Gemm", [(3, 2), (4, 3), (1, 4)], {"transA": 1, "transB": 1, "alpha": 3.0}, note="both"),
    Case("Gemm", [(2, 3), (3, 4), (4,)], wrt=[2], note="bias only"),
    Case("Gemm", [(2, 3), (3, 4), (4,)], wrt=[0], note="input only"),
    Case("Gemm", [(0, 3), (3, 2), (2,)]),
    Case("Det", [(3, 3)]),
    Case("Det", [(2, 2, 2)], opset=22),
    Case("Det", [(2, 1, 1)]),
    Case("Det", [np.array([[1.0, 2.0, 0.5], [2.0, 4.0, 1.0], [0.3, -1.0, 0.7]])], note="rank 2"),
    Case("Det", [np.outer([1.0, 2.0, -1.0], [0.5, 1.5, 1.0])], note="rank 1"),
    Case("Det", [np.zeros((2, 2))], note="zeros"),
]
test_rule = ladder("linalg", CASES)
test_dtype = dtypes(CASES)


EMPTY = [((0, 300), (2, 300, 200), False), ((1, 0, 300), (2, 300, 200), False), ((300,), (300, 0), False)]


@pytest.mark.parametrize(("a", "b", "symbolic"), [*EMPTY, ((300,), (300, 0), True)])
def test_a_sum_of_nothing_is_zero(a, b, symbolic):
    """On ONNX Runtime as well, whose memory is made to hold something."""
    feeds = {"x0": np.ones(a), "x1": np.ones(b)}
    run = session(vjp(node_model(Case("MatMul", [a, b]), feeds, symbolic=symbolic), wrt=["x0", "x1"]))
    y = np.matmul(*feeds.values())
    for _ in range(5):
        full = [np.full(size, 7.7) for size in (300, 300, 60000, 120000) for _ in range(5)]
        del full
        _, *found = run.run(None, feeds | {"y0_cotangent": np.ones(y.shape)})
        assert not any(g.any() for g in found)

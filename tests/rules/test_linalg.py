"""Products of matrices up the ladder."""

import numpy as np

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
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

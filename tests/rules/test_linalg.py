"""Products of matrices up the ladder."""

from onnxgrad.testing import Case
from tests.rules.ladder import ladder

CASES = [
    Case("MatMul", [(2, 3), (3, 4)]),
    Case("MatMul", [(2, 2, 3), (3, 4)]),
    Case("MatMul", [(2, 1, 2, 3), (3, 3, 4)]),
    Case("MatMul", [(3,), (3, 4)]),
    Case("MatMul", [(2, 5, 3), (3,)]),
    Case("MatMul", [(3,), (3,)]),
]
test_rule = ladder("linalg", CASES)

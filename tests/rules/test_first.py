import pytest
from onnxgrad.testing import Case, check_rule
import numpy as np
CASES=[Case("Add",[(2,3),(3,)]),Case("Mul",[(2,1,3),(4,1)]),Case("Div",[(2,3),np.array([1.,2.,3.])]),Case("Tanh",[(2,3)]),Case("Softmax",[(2,3)]),Case("LogSoftmax",[(2,3)],{"axis":0}),
Case("MatMul",[(2,3),(3,4)]),Case("MatMul",[(2,2,3),(3,4)]),Case("MatMul",[(3,),(3,4)]),Case("MatMul",[(2,5,3),(3,)]),Case("MatMul",[(3,),(3,)]),
Case("ReduceSum",[(2,3,4),np.array([1])],{"keepdims":0}),Case("Transpose",[(2,3,4)],{"perm":[1,2,0]}),Case("Where",[np.array([True,False,True]),(2,3),(3,)]),
Case("Relu",[(2,3)]),Case("Reshape",[(2,3),np.array([3,2])]),Case("Expand",[(3,1),np.array([2,3,4])]),Case("Selu",[(2,3)]),Case("Sqrt",[np.array([1.,2.])])]
@pytest.mark.parametrize("case",CASES,ids=lambda c:c.id)
def test_rule(case): print(check_rule(case))

"""A loss written with onnxscript (which reads the source of a function, so it is in a file of its own)."""

from onnxscript import FLOAT, script
from onnxscript import opset21 as op


@script()
def margin(scores: FLOAT["N", "C"], goal: FLOAT["N", "C"]):  # noqa: F821
    wrong = op.Relu(1.0 - scores * goal)
    return op.ReduceMean(wrong, keepdims=0)

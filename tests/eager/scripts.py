"""An onnxscript function (onnxscript reads its source, so it has a file of its own)."""

from onnxscript import opset18 as op
from onnxscript import script

from onnxgrad.eager.onnxscript import on_tape


@script()
def written(x, w):
    h = op.Tanh(op.MatMul(x, w)) * 2.0
    for _ in range(2):
        h = h + op.Sigmoid(h)
    s = op.ReduceSum(h, op.Constant(value_ints=[1]), keepdims=0)
    return op.Softmax(s, axis=0)


function = on_tape(written)

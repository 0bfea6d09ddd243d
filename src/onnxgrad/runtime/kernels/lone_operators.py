"""Single elementwise operators of which a program is quicker than ONNX Runtime's kernel."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.runtime.kernels.elementwise_steps import Dims, dims, letter

#: Operators of which a program is quicker than ONNX Runtime's kernel. It goes through operands that are broadcast in
#: runs of the last axes, and is slow where these have fewer numbers.
_QUICK = frozenset(
    {"Div", "Elu", "LeakyRelu", "Log", "Mish", "Reciprocal", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt"}
)
_RUN = 64
#: The same of float64, of which ONNX Runtime has no vectors.
_QUICK_DOUBLE = frozenset({"Cos", "Exp", "Log", "Sigmoid", "Sin", "Sqrt", "Tanh"})


def is_slow_alone(node: ir.Node, shape: Dims) -> bool:
    """True if a program of this operator alone is quicker than the kernel of ONNX Runtime; unknown sizes count as 1."""
    if letter(node.outputs[0]) != "F":
        return letter(node.outputs[0]) == "D" and node.op_type in _QUICK_DOUBLE
    if node.op_type in _QUICK:
        return True
    run, last = 1, None
    operands = [(1,) * (len(shape) - len(given)) + given for v in node.inputs if v is not None and (given := dims(v))]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        goes = [given[axis] == shape[axis] for given in operands]
        if last is not None and goes != last:
            return run < _RUN
        size = shape[axis]
        run, last = run * (size if isinstance(size, int) else 1), goes
    return False

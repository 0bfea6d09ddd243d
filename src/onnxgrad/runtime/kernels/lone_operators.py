"""Single elementwise operators of which a program is quicker than ONNX Runtime's kernel, and those that it fuses."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.match import is_constant, is_op, is_standard, single_constant
from onnxgrad.runtime.kernels.elementwise_steps import Dims, dims
from onnxgrad.runtime.kernels.steps import letter

#: Operators of which a program is quicker than ONNX Runtime's kernel. It goes through operands that are broadcast in
#: runs of the last axes, and is slow where these have fewer numbers.
_QUICK = frozenset(
    """Div Elu LeakyRelu Log Mish PRelu Reciprocal Selu Sigmoid Sign Softplus Softsign Sqrt""".split()  # noqa: SIM905
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


def is_the_runtimes(node: ir.Node) -> bool:
    """True if ONNX Runtime fuses this operator into a neighbouring product or convolution, at no cost."""
    if len(dims(node.outputs[0]) or ()) < 2 or (letter(node.outputs[0]) == "D" and node.op_type != "Add"):
        return False  # float64 has a Gemm, but no other fused kernel
    for value in node.inputs:
        before = None if value is None else value.producer()
        if (
            before is None
            or not is_standard(before)
            or value is None
            or len(value.uses()) > 1
            or value.is_graph_output()
        ):
            continue
        if before.op_type in ("Conv", "Gemm") and node.op_type in ("Relu", "LeakyRelu", "Sigmoid", "Tanh"):
            return True
        if node.op_type in ("Add", "Sum") and _has_constant_filter(before):
            return True  # it stays in the layout of that convolution, and so does a Relu after it
        if before.op_type in ("Add", "Sum") and node.op_type == "Relu" and is_the_runtimes(before):
            return True
        if before.op_type != "MatMul":
            continue
        others = [v for v in node.inputs if v is not value]
        if node.op_type in ("Mul", "Div") and single_constant(others[0]) is not None:
            return True
        shapes = [dims(v) for v in before.inputs if v is not None]
        if node.op_type == "Add" and all(s is not None and len(s) == 2 for s in shapes):
            return others[0] is not None and len(dims(others[0]) or (1, 1)) == 1
    return (
        node.op_type in ("Mul", "Div")
        and len(users := node.outputs[0].consumers()) == 1
        and users[0].op_type == "MatMul"
        and any(single_constant(v) is not None for v in node.inputs)
    )


def _has_constant_filter(node: ir.Node) -> bool:
    """True for a Conv, perhaps with a BatchNormalization, that ONNX Runtime may give a layout of its own."""
    given = node.inputs[0].producer() if node.op_type == "BatchNormalization" and node.inputs[0] is not None else node
    if given is None or not is_op(given, "Conv") or given.inputs[1] is None:
        return False
    weights = given.inputs[1]
    return is_constant(weights)

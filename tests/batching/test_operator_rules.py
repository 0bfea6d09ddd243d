"""Each operator with a stacked form: what it gives for a stack of operands is what it gives for each of them.

Any of its operands may be stacks, linear or not; where there is no such form, the node runs in a Scan of its own.
"""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.batching.operator_rules import batching_rule
from onnxgrad.ir import Builder
from onnxgrad.ir.cleanup import finish
from tests.models import nodes_of
from tests.transforms.numbers import session

rng = np.random.default_rng(3)
K = 3


def floats(*shape):
    return rng.uniform(0.1, 0.9, shape)


def ints(*numbers):
    return np.array(numbers, np.int64)


def bools(*shape):
    return rng.standard_normal(shape) > 0


def image(*shape):
    return rng.standard_normal(shape).astype(np.float32)


class Fixed:
    """An operand that is never a stack, and constant."""

    def __init__(self, array):
        self.array = array


def fixed(*numbers):
    return Fixed(np.array(numbers, np.int64))


UNARY = """
    Abs Acos Asin Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity IsInf IsNaN
    LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh
    ThresholdedRelu Asinh""".split()  # noqa: SIM905
#: operator, operands, attributes, and how many of the subsets of operands need a Scan
CASES = [
    *[(op, [image(2, 3) * 0.1 + 0.5], {}, 0) for op in UNARY],
    ("Acosh", [1 + image(2, 3) ** 2], {}, 0),
    ("Not", [bools(2, 3)], {}, 0),
    ("Cast", [floats(2, 3)], {"to": 1}, 0),
    *[(op, [floats(*a), floats(*b)], {}, 0) for op in ("Add", "Pow", "Less", "Equal", "Max", "Min", "Sum", "Sub",
      "Div", "Mul", "Greater", "GreaterOrEqual", "LessOrEqual") for a, b in (((2, 3), (3,)), ((3,), (2, 3)))],
    ("Mean", [image(2, 3), image(3)], {}, 0),
    *[(op, [bools(2, 3), bools(3)], {}, 0) for op in ("And", "Or", "Xor")],
    ("Mod", [floats(2, 3), floats(3)], {"fmod": 1}, 0),
    ("Where", [bools(3), floats(2, 3), floats(2, 1)], {}, 0),
    ("Clip", [image(2, 3), np.float32(-0.2), np.float32(0.3)], {}, 6),
    *[(f"Reduce{op}", [floats(2, 3, 2), axes], {"keepdims": k}, 0)
      for op in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
      for axes, k in ((fixed(1), 0), (fixed(-1, 0), 1))],
    *[(f"Reduce{op}", [image(2, 3)], {"noop_with_empty_axes": 1}, 0) for op in ("L1", "Max", "SumSquare")],
    ("ReduceSumSquare", [floats()], {}, 0),
    ("ReduceL2", [floats(2, 3)], {"keepdims": 0}, 0),
    *[(op, [floats(2, 3, 2)], {"axis": a}, 0) for op in ("Softmax", "LogSoftmax", "ArgMax", "ArgMin") for a in (1, -1)],
    ("Hardmax", [image(2, 3, 2)], {"axis": 1}, 0),
    ("Softmax", [floats(2, 3)], {}, 0),
    ("ArgMax", [floats(2, 3)], {}, 0),
    ("LpNormalization", [image(2, 3)], {"axis": 0}, 0),
    ("LayerNormalization", [floats(2, 3), floats(3)], {}, 2),
    ("TopK", [floats(2, 5), fixed(2)], {"axis": -1}, 0),
    ("CumSum", [floats(2, 3), Fixed(np.int64(1))], {"reverse": 1}, 0),
    ("CumSum", [floats(2, 3), Fixed(np.int64(-2))], {"exclusive": 1}, 0),
    ("CumProd", [floats(2, 3), Fixed(np.int64(1))], {}, 0),
    ("Split", [floats(4, 6), fixed(2, 4)], {"axis": 1}, 0),
    ("Split", [floats(4, 6)], {"num_outputs": 2}, 0),
    ("Pad", [floats(2, 3), fixed(1, 0, 0, -1)], {}, 0),
    ("Pad", [floats(2, 3), fixed(1, 2), Fixed(np.float64(0.5)), fixed(-1)], {}, 0),
    ("Pad", [floats(2, 3), fixed(1, 0, 0, 1)], {"mode": "reflect"}, 0),
    ("Tile", [floats(2, 3), fixed(2, 1)], {}, 0),
    ("Concat", [floats(2, 3), floats(1, 3)], {"axis": 0}, 0),
    ("Compress", [floats(4, 3), Fixed(np.array([True, False, True]))], {"axis": -1}, 0),
    ("Compress", [floats(2, 2), Fixed(np.array([True, False, True]))], {}, 1),
    ("DFT", [image(2, 5, 1)], {}, 0),
    ("DFT", [image(5, 2, 2), Fixed(np.int64(5)), Fixed(np.int64(0))], {"inverse": 1}, 0),
    ("OneHot", [Fixed(ints(1, 0)), Fixed(np.int64(3)), image(2)], {}, 1),
    ("OneHot", [ints(1, 0), Fixed(np.int64(3)), Fixed(image(2))], {"axis": 0}, 0),
    ("Flatten", [floats(2, 3, 4)], {"axis": 2}, 0),
    ("Flatten", [floats(2, 3)], {"axis": 0}, 0),
    ("Flatten", [floats(2, 3, 4)], {"axis": -1}, 0),
    ("Reshape", [floats(2, 6), fixed(3, 0, -1)], {}, None),
    ("Expand", [floats(3, 1), fixed(2, 1, 4)], {}, 0),
    ("Squeeze", [floats(1, 3, 1)], {}, 0),
    ("Squeeze", [floats(2, 3)], {}, 0),
    ("Unsqueeze", [floats(3), fixed(-1, 0)], {}, 0),
    ("Transpose", [floats(2, 3, 4)], {"perm": [2, 0, 1]}, 0),
    ("Slice", [floats(4, 5), fixed(1), fixed(3)], {}, 0),
    ("Slice", [floats(4, 5), fixed(4), fixed(0), fixed(-1), fixed(-2)], {}, 0),
    ("Gather", [floats(4, 3), np.array([[2, 0], [1, 1]])], {"axis": 1}, 1),
    ("Gather", [floats(4, 3), np.int64(1)], {}, 1),
    ("GatherElements", [floats(4, 3), np.array([[2, 0], [1, 1]])], {"axis": 1}, 0),
    ("GatherND", [floats(4, 3, 2), np.array([[2, 0], [1, 1]])], {}, 0),
    ("GatherND", [floats(2, 3, 2), np.array([[2], [1]])], {"batch_dims": 1}, 0),
    ("ScatterElements", [floats(4, 3), np.array([[2, 0], [1, 1]]), floats(2, 2)], {"axis": 1, "reduction": "add"}, 0),
    ("ScatterND", [floats(4, 3), np.array([[2], [0]]), floats(2, 3)], {}, 4),
    ("ScatterND", [floats(4, 3), np.array([[2], [2]]), floats(2, 3)], {"reduction": "add"}, 4),
    ("ReverseSequence", [floats(4, 2, 3), Fixed(ints(2, 4))], {}, 0),
    ("ReverseSequence", [floats(2, 4), Fixed(ints(2, 4))], {"batch_axis": 0, "time_axis": 1}, 0),
    ("Trilu", [floats(3, 4)], {"upper": 0}, 0),
    *[("MatMul", [floats(*a), floats(*b)], {}, 0) for a, b in (
      ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 3), (3, 2)),
      ((4, 2, 3), (3,)), ((3,), (4, 3, 2)), ((4, 2, 3), (3, 2)), ((2, 3), (4, 3, 2)), ((5, 1, 2, 3), (4, 3, 2)))],
    ("Gemm", [image(2, 3), image(3, 4), image(4)], {"alpha": 2.0, "beta": 0.5}, 0),
    ("Gemm", [image(3, 2), image(4, 3), image(2, 1)], {"transA": 1, "transB": 1}, 0),
    ("Gemm", [image(2, 3), image(3, 4)], {}, 0),
    ("Einsum", [floats(2, 3), floats(3, 4)], {"equation": "ij,jk->ki"}, 0),
    ("Einsum", [floats(2, 3, 4), floats(2, 4)], {"equation": "b...d, bd -> b..."}, 0),
    ("Einsum", [floats(2, 3), floats(3)], {"equation": "ij,j"}, 3),
    ("AffineGrid", [image(2, 2, 3), fixed(2, 3, 4, 5)], {"align_corners": 1}, 0),
    ("Conv", [image(2, 4, 5, 5), image(6, 4, 3, 3)], {"pads": [1, 0, 1, 0], "strides": [2, 1]}, 0),
    ("Conv", [image(2, 4, 5, 5), image(6, 2, 3, 3)], {"group": 2}, 0),
    ("Conv", [image(2, 4, 5), image(6, 2, 3), Fixed(image(6))], {"group": 2}, 2),
    ("ConvTranspose", [image(2, 4, 5, 5), image(4, 3, 3, 3)], {"strides": [2, 2]}, 0),
    ("ConvTranspose", [image(2, 4, 5), image(4, 3, 3)], {"group": 2}, 0),
    ("Resize", [image(2, 3, 4, 4), Fixed(np.float32([])), Fixed(np.float32([1, 1, 2, 2]))], {"mode": "nearest"}, 0),
    ("AveragePool", [image(2, 3, 4, 4)], {"kernel_shape": [2, 2]}, 0),
    ("MaxPool", [image(2, 3, 4)], {"kernel_shape": [2]}, 0),
    ("LpPool", [image(2, 3, 4, 4)], {"kernel_shape": [2, 2]}, 0),
    *[(op, [image(2, 3, 4, 4)], {}, 0) for op in ("GlobalAveragePool", "GlobalMaxPool")],
    ("BatchNormalization", [image(2, 3, 4), *(Fixed(image(3) ** 2) for _ in range(4))], {}, 0),
    ("InstanceNormalization", [image(2, 3, 4), Fixed(image(3)), image(3)], {}, 2),
    ("LRN", [image(2, 3, 4, 4)], {"size": 3}, 0),
    ("DepthToSpace", [image(2, 8, 2, 3)], {"blocksize": 2}, 0),
    ("SpaceToDepth", [image(2, 2, 4, 6)], {"blocksize": 2}, 0),
    ("Col2Im", [image(2, 12, 4), fixed(3, 3), fixed(2, 2)], {}, 0),
    ("GroupNormalization", [image(2, 4, 3), Fixed(image(4)), Fixed(image(4))], {"num_groups": 2}, 0),
    ("MeanVarianceNormalization", [image(2, 4, 3, 3)], {}, 1),
    ("RMSNormalization", [image(2, 3), Fixed(image(3))], {}, 0),
    ("PRelu", [image(2, 3), image(3)], {}, 0),
    ("Det", [image(2, 3, 3)], {}, 0),
    ("CastLike", [floats(2, 3), Fixed(np.float32(1))], {}, 0),
    ("Dropout", [image(2, 3)], {}, 0),
    ("QuantizeLinear", [image(2, 3), Fixed(np.float32([0.1, 0.2])), Fixed(np.uint8([3, 4]))], {"axis": 0}, 0),
    ("DequantizeLinear", [Fixed(np.uint8([[2, 30]])), image()], {}, 1),
    ("DequantizeLinear", [np.int32([[2, 30], [5, 7]]), Fixed(np.float32([0.1, 0.2]))], {}, 0),
    *[(op, [ints(5, 6, 7), ints(3)], {}, 0) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")],
    ("BitwiseNot", [ints(5, 6, 7)], {}, 0),
    ("BitShift", [np.uint8([5, 6]), Fixed(np.uint8([1, 2]))], {"direction": "LEFT"}, 0),
    *[(op, [image(4, 2, 3), Fixed(image(1, g * 3, 3)), Fixed(image(1, g * 3, 3))], {"hidden_size": 3}, 0)
      for op, g in (("LSTM", 4), ("GRU", 3), ("RNN", 1))],
    ("LSTM", [image(4, 2, 3), Fixed(image(1, 12, 3)), image(1, 12, 3)], {"hidden_size": 3}, 2),
]  # fmt: skip


def outputs_of(op, operands, attrs):
    """The number of outputs of the node, and their values for these operands."""
    count = 2 if op in ("Split", "TopK") else 1
    return count, session(ir.to_proto(build(op, operands, attrs, (), None, count)[0]))


def build(op, operands, attrs, which, symbolic, count=1):
    """A model of the node, of which the operands `which` are stacks (of as many as `symbolic` says)."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 26 if op == "CumProd" else 24}, name="g")
    b = Builder(graph)
    xs = []
    for i, x in enumerate(operands):
        if isinstance(x, Fixed):
            xs.append(b.const(x.array))
            continue
        lead = [] if i not in which else [symbolic or K]
        kind = ir.TensorType(ir.DataType.from_numpy(np.asarray(x).dtype))
        value = ir.Value(name=f"x{i}", type=kind, shape=ir.Shape([*lead, *np.shape(x)]))
        graph.inputs.append(value)
        xs.append(b.var(value))

    def write(slices):
        given = dict(zip(which, slices))
        found = b.emit(op, *(given.get(i, x) for i, x in enumerate(xs)), outputs=count, **attrs)
        return [found] if count == 1 else list(found)

    if which:
        likes = ir.Graph([], [], nodes=[], opset_imports=graph.opset_imports, name="likes")
        one = Builder(likes, b.names, b.infer)
        alike = [ir.Value(name=b.names.fresh("like"), type=x.value.type, shape=ir.Shape(x.value.shape[1:]))
                 if i in which else x.value for i, x in enumerate(xs)]  # fmt: skip
        found = one.emit(op, *(one.var(v) for v in alike), outputs=count, **attrs)
        results = vmapped(b, [xs[i] for i in which], write, [Batched(y) for y in ([found] if count == 1 else found)])
    else:
        results = write([])
    graph.outputs.extend(y.value for y in results)
    finish(graph)
    return ir.Model(graph, ir_version=11), [v.name for v in graph.outputs]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{[np.shape(getattr(x, 'array', x)) for x in c[1]]}")
def test_all_at_once_and_one_by_one(case):
    op, operands, attrs, scans = case
    if op == "Reshape":
        operands, scans = [operands[0], fixed(3, -1)], 0
    count, one = outputs_of(op, operands, attrs)
    free = [i for i, x in enumerate(operands) if not isinstance(x, Fixed)]
    used = 0
    for size in range(1, len(free) + 1):
        for which in itertools.combinations(free, size):
            feeds = {f"x{i}": operands[i] for i in free}
            for i in which:  # indices and booleans are moved around, floats changed
                x = np.asarray(operands[i])
                more = [np.roll(x, k) if x.dtype.kind in "ib" else x * (1 - 0.2 * k) for k in range(K)]
                feeds[f"x{i}"] = np.stack(more).astype(x.dtype)
            want = []
            for k in range(K):
                want.append(list(one({n: x[k] if int(n[1:]) in which else x for n, x in feeds.items()}).values()))
            for symbolic in (None, "K") if size == len(free) else (None,):
                model, names = build(op, operands, attrs, which, symbolic, count)
                proto = ir.to_proto(model)
                used += not symbolic and "Scan" in {n.op_type for n in nodes_of(proto.graph)}
                got = session(proto)(feeds)
                for j, name in enumerate(names):
                    np.testing.assert_allclose(got[name], np.stack([w[j] for w in want]), rtol=1e-5, atol=1e-6)
    assert used == scans


def test_every_written_operator_is_tested():
    random = {"Bernoulli", "RandomNormalLike", "RandomUniformLike"}  # in tests/transforms/test_vmap.py
    names = {s.name for s in onnx.defs.get_all_schemas() if not s.domain}
    written = {name for name in names if batching_rule(ir.Node("", name, []))}
    assert len(written) > 100
    assert {c[0] for c in CASES} >= written - random

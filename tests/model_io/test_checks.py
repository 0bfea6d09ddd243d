"""A model that is not valid is one error that names the node: never a traceback, and never a derivative that runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import BadInput, grad, jacobian, jvp, sparse_jacobian


def ints(*values):
    return np.array(values, np.int64)


def zeros(shape):
    return np.zeros(shape, np.int64)


X = (2, 3, 4)

#: Operator, operands (a shape: a float input; an array: a constant), attributes, number of results, opset.
ROWS = [
    ("LayerNormalization", [X, (4,)], {"axis": 5}, 1),
    ("LayerNormalization", [X, (4,)], {"axis": -4}, 1),
    ("LayerNormalization", [X], {}, 1),
    ("LayerNormalization", [X, (5,)], {}, 1),
    ("RMSNormalization", [X, (4,)], {"axis": 3}, 1, 23),
    ("Softmax", [X], {"axis": 3}, 1),
    ("LogSoftmax", [X], {"axis": -4}, 1),
    ("Hardmax", [X], {"axis": 3}, 1),
    ("LpNormalization", [X], {"axis": 3}, 1, 22),
    ("LpNormalization", [X], {"p": 3}, 1, 22),
    ("MeanVarianceNormalization", [X], {"axes": [0, 3]}, 1),
    ("Transpose", [X], {"perm": [0, 1]}, 1),
    ("Transpose", [X], {"perm": [0, 1, 1]}, 1),
    ("Transpose", [X], {"perm": [0, 1, 3]}, 1),
    ("Transpose", [X], {"perm": [0, 1, 2, 3]}, 1),
    ("Transpose", [X], {"perm": [0, 1, -1]}, 1),
    ("Concat", [X, X], {"axis": 3}, 1),
    ("Concat", [X, X], {"axis": -4}, 1),
    ("Concat", [X, X], {}, 1),
    ("Concat", [X, (2, 5, 4)], {"axis": 0}, 1),
    ("Concat", [X, (2, 3)], {"axis": 0}, 1),
    ("Flatten", [X], {"axis": 4}, 1),
    ("Flatten", [X], {"axis": -4}, 1),
    ("Split", [X], {"axis": 3, "num_outputs": 2}, 2),
    ("Split", [X, ints(2, 2)], {"axis": 1}, 2),
    ("Split", [X, ints(1, 2)], {"axis": 1}, 3),
    ("Split", [X, ints(-1, 4)], {"axis": 1}, 2),
    ("Gather", [X, ints(0, 1)], {"axis": 3}, 1),
    ("Gather", [X, ints(0, 5)], {"axis": 1}, 1),
    ("GatherElements", [X, zeros((1, 1, 1))], {"axis": 3}, 1),
    ("GatherElements", [X, zeros((1, 1))], {"axis": 0}, 1),
    ("GatherND", [X, zeros((2, 4))], {}, 1),
    ("GatherND", [X, zeros((2, 2))], {"batch_dims": 3}, 1),
    ("ScatterElements", [X, zeros((1, 1, 1)), (1, 1, 1)], {"axis": 3}, 1),
    ("ScatterElements", [X, zeros((1, 1, 1)), (1, 1, 2)], {"axis": 0}, 1),
    ("ScatterElements", [X, zeros((1, 1, 1)), (1, 1, 1)], {"axis": 0, "reduction": "avg"}, 1),
    ("ScatterND", [X, zeros((1, 4)), (1,)], {}, 1),
    ("ScatterND", [X, zeros((1, 1)), (1, 3)], {}, 1),
    ("Squeeze", [(2, 1, 4), ints(3)], {}, 1),
    ("Squeeze", [(2, 1, 4), ints(0)], {}, 1),
    ("Unsqueeze", [X, ints(5)], {}, 1),
    ("Unsqueeze", [X, ints(1, 1)], {}, 1),
    ("Unsqueeze", [X], {}, 1),
    ("ReduceSum", [X, ints(3)], {}, 1),
    ("ReduceMean", [X, ints(-4)], {}, 1),
    ("ReduceL2", [X, ints(3)], {}, 1),
    ("ReduceProd", [X, ints(3)], {}, 1),
    ("ReduceLogSumExp", [X, ints(3)], {}, 1),
    ("CumSum", [X, ints(3)[0]], {}, 1),
    ("CumSum", [X, ints(0, 1)], {}, 1),
    ("TopK", [X, ints(2)], {"axis": 3}, 2),
    ("TopK", [X, ints(9)], {"axis": 1}, 2),
    ("TopK", [X, ints(-1)], {"axis": 1}, 2),
    ("Slice", [X, ints(0), ints(1), ints(3)], {}, 1),
    ("Slice", [X, ints(0, 0), ints(1), ints(0)], {}, 1),
    ("Slice", [X, ints(0), ints(1), ints(0), ints(0)], {}, 1),
    ("Slice", [X, ints(0, 0), ints(1, 1), ints(1, 1)], {}, 1),
    ("Pad", [X, ints(1, 1, 1)], {}, 1),
    ("Pad", [X, ints(1, 1), None, ints(3)], {}, 1),
    ("Pad", [X, ints(1, 1, 1, 1, 1, 1)], {"mode": "around"}, 1),
    ("Pad", [X, ints(-3, 0, 0, -3, 0, 0)], {}, 1),
    ("Reshape", [X, ints(5, 5)], {}, 1),
    ("Reshape", [X, ints(-1, -1)], {}, 1),
    ("Reshape", [X, ints(2, 3, 4, 0)], {}, 1),
    ("Expand", [X, ints(5, 4)], {}, 1),
    ("Tile", [X, ints(2)], {}, 1),
    ("Tile", [X, ints(2, -1, 1)], {}, 1),
    ("Add", [X, (5,)], {}, 1),
    ("Add", [X], {}, 1),
    ("Add", [X, X, X], {}, 1),
    ("Relu", [X, X], {}, 1),
    ("Relu", [], {}, 1),
    ("Tanh", [X], {}, 2),
    ("Where", [np.array([True]), X], {}, 1),
    ("MatMul", [(2, 3), (4, 5)], {}, 1),
    ("MatMul", [(), (4, 5)], {}, 1),
    ("MatMul", [(2, 2, 3), (5, 3, 4)], {}, 1),
    ("Gemm", [(2, 3), (4, 5)], {}, 1),
    ("Gemm", [X, (4, 5)], {}, 1),
    ("Gemm", [(2, 3), (3, 5), (7,)], {}, 1),
    ("Einsum", [(2, 3), (4, 5)], {"equation": "ij,jk->ik"}, 1),
    ("Einsum", [(2, 3)], {"equation": "ijk->ik"}, 1),
    ("Einsum", [(2, 3)], {"equation": "ij->iq"}, 1),
    ("Einsum", [(2, 3), (3, 4)], {"equation": "ij->ij"}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 2, 3, 3)], {}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3)], {}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"strides": [1]}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"pads": [1, 1]}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"dilations": [1, 1, 1]}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"kernel_shape": [2, 2]}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"group": 2}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"group": 0}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"strides": [0, 1]}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3)], {"auto_pad": "SAME"}, 1),
    ("Conv", [(1, 3, 5, 5), (4, 3, 3, 3), (5,)], {}, 1),
    ("ConvTranspose", [(1, 3, 5, 5), (4, 2, 3, 3)], {}, 1),
    ("ConvTranspose", [(1, 3, 5, 5), (3, 2, 3, 3)], {"strides": [1]}, 1),
    ("ConvTranspose", [(1, 3, 5, 5), (3, 2, 3, 3)], {"output_padding": [1]}, 1),
    ("ConvTranspose", [(1, 3, 5, 5), (3, 2, 3, 3)], {"output_shape": [7]}, 1),
    ("MaxPool", [(1, 3, 5, 5)], {}, 1),
    ("MaxPool", [(1, 3, 5, 5)], {"kernel_shape": [2]}, 1),
    ("MaxPool", [(1, 3, 5, 5)], {"kernel_shape": [2, 2], "strides": [2]}, 1),
    ("MaxPool", [(1, 3, 5, 5)], {"kernel_shape": [2, 2], "pads": [0, 0]}, 1),
    ("MaxPool", [(1, 3, 5, 5)], {"kernel_shape": [0, 2]}, 1),
    ("AveragePool", [(1, 3, 5, 5)], {"kernel_shape": [2, 2], "strides": [2, 2, 2]}, 1),
    ("AveragePool", [(1, 3, 5, 5)], {"kernel_shape": [7, 7]}, 1),
    ("LpPool", [(1, 3, 5, 5)], {"kernel_shape": [2]}, 1),
    ("GlobalAveragePool", [(3,)], {}, 1),
    ("BatchNormalization", [(2, 3, 4), (3,), (3,), (3,)], {}, 1),
    ("BatchNormalization", [(2, 3, 4), (5,), (5,), (5,), (5,)], {}, 1),
    ("InstanceNormalization", [(2, 3, 4), (4,), (4,)], {}, 1),
    ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 4}, 1),
    ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {}, 1),
    ("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 0}, 1),
    ("LRN", [(2, 6, 4, 4)], {}, 1),
    ("LRN", [(2, 6, 4, 4)], {"size": 0}, 1),
    ("PRelu", [(2, 3), (4,)], {}, 1),
    ("DepthToSpace", [(1, 6, 2, 2)], {"blocksize": 2}, 1),
    ("DepthToSpace", [(1, 8, 2, 2)], {"blocksize": 2, "mode": "XYZ"}, 1),
    ("SpaceToDepth", [(1, 2, 3, 3)], {"blocksize": 2}, 1),
    ("Resize", [(1, 2, 3, 3), None, np.array([1, 1, 2], np.float32)], {}, 1),
    ("Resize", [(1, 2, 3, 3)], {}, 1),
    ("Resize", [(1, 2, 3, 3), None, np.array([1, 1, 2, 2], np.float32)], {"mode": "quadratic"}, 1),
    ("Resize", [(1, 2, 3, 3), None, np.array([2], np.float32)], {"axes": [4]}, 1),
    ("GridSample", [(1, 2, 3, 3), (1, 4, 4, 3)], {}, 1),
    ("GridSample", [(1, 2, 3, 3), (1, 4, 4, 2)], {"mode": "fancy"}, 1),
    ("SoftmaxCrossEntropyLoss", [(4, 3), zeros((5,))], {}, 1),
    ("SoftmaxCrossEntropyLoss", [(4, 3), zeros((4,))], {"reduction": "prod"}, 1),
    ("NegativeLogLikelihoodLoss", [(4, 3), zeros((4, 2))], {}, 1),
    ("NegativeLogLikelihoodLoss", [(4, 3), zeros((4,)), (2,)], {}, 1),
    ("Attention", [(1, 2, 4, 3), (1, 2, 4, 5), (1, 2, 4, 3)], {}, 1, 23),
    ("Attention", [(1, 4, 6), (1, 4, 6), (1, 4, 6)], {}, 1, 23),
    ("RotaryEmbedding", [(1, 2, 4, 5), (1, 4, 2), (1, 4, 2)], {}, 1, 23),
    ("LSTM", [(3, 2, 4), (1, 8, 4), (1, 8, 3)], {"hidden_size": 2}, 1),
    ("LSTM", [(3, 2, 4), (1, 8, 4), (1, 8, 2)], {"hidden_size": 2, "direction": "sideways"}, 1),
    ("GRU", [(3, 2, 4), (1, 8, 4), (1, 8, 2)], {"hidden_size": 2}, 1),
    ("RNN", [(3, 2, 4), (2, 2, 4), (2, 2, 2)], {"hidden_size": 2}, 1),
    ("Compress", [X, np.array([True, False])], {"axis": 3}, 1),
    ("OneHot", [ints(0, 1), ints(3)[0], (3,)], {}, 1),
    ("OneHot", [ints(0, 1), ints(3)[0], (2,)], {"axis": 3}, 1),
    ("Trilu", [(3,)], {}, 1),
    ("ReverseSequence", [(3, 2), ints(1, 2)], {"time_axis": 0, "batch_axis": 0}, 1),
    ("ReverseSequence", [(3, 2), ints(1, 2)], {"time_axis": 2, "batch_axis": 1}, 1),
    ("Cast", [X], {}, 1),
    ("Clip", [X, (2,)], {}, 1),
    ("Det", [(2, 3)], {}, 1),
    ("MaxUnpool", [(1, 1, 2, 2), zeros((1, 1, 2, 3))], {"kernel_shape": [2, 2]}, 1),
    ("Col2Im", [(1, 5, 5), ints(5, 5), ints(2, 2)], {}, 1),
    ("MaxRoiPool", [(1, 1, 4, 4), (1, 4)], {"pooled_shape": [2, 2]}, 1),
    ("RoiAlign", [(1, 1, 4, 4), (1, 3), zeros(1)], {}, 1),
    ("DeformConv", [(1, 1, 3, 3), (1, 1, 2, 2), (1, 7, 2, 2)], {}, 1),
    ("DFT", [(1, 8, 3)], {}, 1, 20),
    ("AffineGrid", [(1, 2, 2), ints(1, 1, 2, 2)], {}, 1, 20),
    ("Softmax", [X], {"foo": 1}, 1),
    ("Softmax", [X], {"axis": 1.5}, 1),
    ("Mod", [(3,), (3,)], {"fmod": 0}, 1),
    ("Dropout", [X, None, np.array([True])], {}, 1),
    ("Shrink", [X], {"lambd": 1}, 1),
    ("TensorScatter", [(2, 3, 4), (2, 1, 4), zeros(2)], {"axis": 3}, 1, 24),
    ("Swish", [X], {"alpha": "a"}, 1, 24),
    ("CenterCropPad", [X, ints(2, 2)], {}, 1),
    ("CenterCropPad", [X, ints(2)], {"axes": [3]}, 1),
    ("CumProd", [X, ints(3)[0]], {}, 1, 26),
]

#: Rows that ONNX Runtime runs although they are not valid: it does not look at the attribute, or reads beyond the end.
LENIENT = frozenset(
    {
        "MeanVarianceNormalization",
        "RotaryEmbedding",
        "NegativeLogLikelihoodLoss",
        "SoftmaxCrossEntropyLoss",
        "ScatterElements",
    }
)


#: Operators of rows that are left to ONNX Runtime.
LEFT_TO_THE_RUN = frozenset(
    {"AffineGrid", "Attention", "AveragePool", "Clip", "Col2Im", "Concat", "Conv", "ConvTranspose", "CumSum", "DFT"}
    | {"DeformConv", "Dropout", "Einsum", "GRU", "Gather", "GatherElements", "Gemm", "GroupNormalization"}
    | {"LSTM", "LayerNormalization", "MaxRoiPool", "MaxUnpool", "MeanVarianceNormalization", "Mod", "OneHot"}
    | {"PRelu", "Pad", "Reshape", "Resize", "ReverseSequence", "RoiAlign", "ScatterElements", "ScatterND"}
    | {"Split", "Tile", "TopK", "Transpose", "Trilu"}
)


def model(op_type, operands, attributes, results=1, opset=21):
    inputs, constants, names = [], [], []
    for i, x in enumerate(operands):
        names.append("" if x is None else f"x{i}")
        if isinstance(x, tuple):
            inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, x))
        elif x is not None:
            constants.append(numpy_helper.from_array(np.asarray(x), f"x{i}"))
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(results)], name="bad", **attributes)
    y = onnx.ValueInfoProto(name="y0")
    y.type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph([node], "invalid", inputs, [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def runs(proto):
    """True if ONNX Runtime loads and runs it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        shapes = {i.name: [d if isinstance(d, int) else 2 for d in i.shape] for i in session.get_inputs()}
        session.run(None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    except Exception:  # its exceptions share no base
        return False
    return True


@pytest.mark.sweep(3)
@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_an_invalid_node_is_one_error_that_names_it(row):
    """Or ONNX Runtime refuses the derivative, as it refuses the model."""
    proto = model(*row)
    wrt = [i.name for i in proto.graph.input]
    for derive in (grad, jvp):
        message = ""
        try:
            derived = derive(proto, wrt=wrt, of="y0")
        except BadInput as e:
            message = str(e)
        if message:
            assert "bad" in message
            assert row[0] in message
        else:
            assert row[0] in LEFT_TO_THE_RUN
            assert not runs(derived)
    assert not runs(proto) or row[0] in LENIENT


def parsed(text):
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>' + text)


@pytest.mark.parametrize("derive", [jacobian, sparse_jacobian])
def test_an_unexpected_failure_over_an_invalid_model_is_told_by_the_runtime(derive):
    proto = model("AveragePool", [(1, 3, 5, 5)], {"kernel_shape": [7, 7]})
    with pytest.raises(BadInput, match=r"the model is not valid: .*'bad'"):
        derive(proto, wrt="x0", of="y0")


def test_operands_that_do_not_fit_are_named_where_no_runtime_can_be_asked():
    proto = model("Conv", [("N", 3, 5, 5), (4, 2, 3, 3)], {})
    with pytest.raises(BadInput, match=r"Conv node 'bad' do not fit each other: 'x0' is \[N,3,5,5\], and .*,2,5,5\]"):
        grad(proto, wrt="x0", of="y0")


def test_a_node_in_a_body_or_branch_is_named_with_where_it_is():
    text = """g (float[2, 3] x, bool c) => (float[2, 3] y) {
        y = If (c) <then_branch = a () => (float[2, 3] p) { p = Softmax <axis = 2> (x) },
                    else_branch = b () => (float[2, 3] q) { q = Identity (x) }>
    }"""
    with pytest.raises(BadInput, match=r"Softmax node 'p' in If node 'y', of \(x \[.*\]\): axis 2 is none of 2 axes"):
        grad(parsed(text), wrt="x")


def test_sizes_in_a_branch_that_need_not_be_taken_are_left_to_the_run():
    """ONNX Runtime refuses them only where the branch is taken."""
    text = """g (float[2, 3] x, bool c) => (float[N, M] z) {
        y = If (c) <then_branch = a () => (float[K, L] p) <int64[2] i = {4, 5}> { p = Reshape (x, i) },
                    else_branch = b () => (float[K, L] q) <int64[2] j = {-1, 2}> { q = Reshape (x, j) }>
        z = Mul (y, y)
    }"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    derived = grad(parsed(text), wrt="x")
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": x, "c": np.array(False)})[0], 2 * x)


def test_what_is_not_known_is_not_refused():
    text = """g (float[N, M] x, float[K, 4] w, int64[2] s) => (float[A, B] y) {
        h = MatMul (x, w)
        y = Reshape (h, s)
    }"""
    assert grad(parsed(text), wrt=["x", "w"]).graph.output


def test_operands_that_should_be_alike_are_named():
    text = "g (float[2] x, double[2] w) => (float[2] y) { y = Mul (x, w) }"
    with pytest.raises(BadInput, match="operands are of float and double, and should be alike"):
        grad(parsed(text), wrt="x")

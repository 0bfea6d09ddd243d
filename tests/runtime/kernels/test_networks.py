"""Steps of small networks by both targets: layers as exporters write them, from the model to the updated weights."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
WIDTH, FEATURES, STEPS, ROWS = 8, 4, 5, 16


def small(*shape):
    return np.float32(0.2 * np.random.default_rng(sum(shape)).standard_normal(shape))


def agree(model, feeds):
    """Two steps by each target have the same losses and weights."""
    step = compile_step(attach(model, loss="cross_entropy", optimizer="sgd", learning_rate=0.1))
    runners = [StepRunner(step, options=Options(threads=1, target=target)) for target in ("portable", "native")]
    for _ in range(2):
        want, found = (runner.step(feeds) for runner in runners)
        np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    want, found = (runner.state() for runner in runners)
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def recurrent(kind, start, layers, rows, directions):
    """Layers one behind the other, a mean over the steps, and scores."""
    gates, arrays = GATES[kind] * WIDTH, {"zero": np.array([0])}
    nodes = [helper.make_node("Transpose", ["x"], ["t0"], perm=[1, 0, 2])]
    for i in range(layers):
        read = WIDTH * directions if i else FEATURES
        arrays |= {
            f"W{i}": small(directions, gates, read),
            f"R{i}": small(directions, gates, WIDTH),
            f"B{i}": small(directions, 2 * gates),
            f"shape{i}": np.array([0, 0, -1]),
        }
        if start:
            arrays[f"h{i}"] = np.zeros((directions, ROWS, WIDTH), np.float32)
        operands = [f"t{i}", f"W{i}", f"R{i}", f"B{i}", *(["", f"h{i}"] if start else [])]
        way = "bidirectional" if directions == 2 else "forward"
        nodes += [
            helper.make_node(kind, operands, [f"Y{i}"], hidden_size=WIDTH, direction=way),
            helper.make_node("Transpose", [f"Y{i}"], [f"rows{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"rows{i}", f"shape{i}"], [f"t{i + 1}"]),
        ]
    arrays["W"] = small(WIDTH * directions, 3)
    nodes += [
        helper.make_node("ReduceMean", [f"t{layers}", "zero"], ["q"], keepdims=0),
        helper.make_node("Gemm", ["q", "W"], ["y"]),
    ]
    return network(nodes, arrays, [rows, STEPS, FEATURES], [rows, 3])


def network(nodes, arrays, of, to):
    ends = (helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in (("x", of), ("y", to)))
    held = [numpy_helper.from_array(a, k) for k, a in arrays.items()]
    x, y = ends
    graph = helper.make_graph(nodes, "network", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


LAYERS = list(itertools.product(GATES, (False, True), (1, 2), ("N", ROWS), (1,)))
LAYERS += list(itertools.product(GATES, (False, True), (1,), ("N", ROWS), (2,)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", LAYERS, ids=lambda c: "-".join(map(str, c)))
def test_recurrent_layers(case):
    """The weights of a layer are read in bodies that a kernel replaces, and updated where they lie."""
    feeds = {"x": small(ROWS, STEPS, FEATURES), "labels": np.arange(ROWS) % 3}
    agree(recurrent(*case), feeds)


#: Shapes of Q, Kᵀ, V; what is added to the scores
PRODUCTS = {
    "two axes": ((4,), (4, 6), (6, 3), None),
    "weights as keys and values": ((5, 4), (4, 6), (6, 3), None),
    "four axes, weights": ((2, 5, 4), (4, 6), (6, 3), None),
    "five axes, weights": ((2, 3, 5, 4), (4, 6), (6, 3), None),
    "keys without a batch": ((2, 5, 4), (2, 4, 6), (2, 6, 3), None),
    "heads of one batch": ((2, 5, 4), (1, 2, 4, 6), (1, 2, 6, 3), None),
    "values alone have a head": ((5, 4), (4, 6), (1, 6, 3), None),
    "a bias with more axes": ((5, 4), (4, 6), (6, 3), (1, 1, 5, 6)),
    "a bias of a row": ((5, 4), (4, 6), (6, 3), (6,)),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_like_attention(case):
    """MatMul → Softmax → MatMul, of operands of any number of axes."""
    q, k, v, bias = PRODUCTS[case]
    arrays = {"K": small(*k), "V": small(*v), "s": np.float32(0.5), "shape": np.array([ROWS, -1, 3])}
    scores = "products" if bias is None else "biased"
    nodes = [helper.make_node("MatMul", ["x", "K"], ["p"]), helper.make_node("Mul", ["p", "s"], ["products"])]
    if bias is not None:
        arrays["bias"] = small(*bias)
        nodes.append(helper.make_node("Add", ["products", "bias"], ["biased"]))
    nodes += [
        helper.make_node("Softmax", [scores], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "V"], ["z"]),
        helper.make_node("Reshape", ["z", "shape"], ["rows"]),
        helper.make_node("ReduceMean", ["rows", "axis"], ["y"], keepdims=0),
    ]
    arrays["axis"] = np.array([1])
    x = small(ROWS, *q)
    agree(network(nodes, arrays, x.shape, [ROWS, 3]), {"x": x, "labels": np.arange(ROWS) % 3})


@pytest.mark.sweep(5)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("group", [1, 2])
def test_convolutions_of_any_axes(axes, strides, group):
    """A second convolution, so that the first one gets a cotangent, and a pooling behind it."""
    arrays = {
        "A": small(4, 4 // group, *[3] * axes),
        "B": small(6, 4 // group, *[3] * axes),
        "b": small(6),
        "W": small(6, 3),
    }
    at = {"strides": [strides] * axes, "pads": [1] * 2 * axes, "group": group}
    nodes = [
        helper.make_node("Conv", ["x", "A"], ["c"], **at),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "B", "b"], ["d"], **at),
        helper.make_node("MaxPool", ["d"], ["m"], kernel_shape=[2] * axes),
        helper.make_node("GlobalAveragePool", ["m"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "W"], ["y"]),
    ]
    x = small(ROWS, 4, *[8] * axes)
    agree(network(nodes, arrays, x.shape, [ROWS, 3]), {"x": x, "labels": np.arange(ROWS) % 3})

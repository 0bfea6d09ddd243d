"""Cotangents of normalization, embedding, pooling and ReLU in C, against the operators and PyTorch."""

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels

pytestmark = needs_kernels

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def normal(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


# --- batch normalization ---------------------------------------------------------------------------


def forward(momentum=0.0):
    """The kernel for the node itself, whose statistics are those of the batch only without momentum."""
    return [] if momentum else ["BatchNorm"]


def normalization(shape, momentum=0.0, after=(), wrt=("x", "scale", "b"), symbolic=False, **attributes):
    channels = shape[1]
    arrays = {"x": normal(*shape) * 2 + 3, "scale": normal(channels, seed=1), "b": normal(channels, seed=2)}
    arrays.update(m=np.zeros(channels, np.float32), v=np.ones(channels, np.float32))
    names = ["y"] if momentum else ["y", "", ""]
    norm = helper.make_node(
        "BatchNormalization", ["x", "scale", "b", "m", "v"], [*names[:1], "m1", "v1"],
        training_mode=1, momentum=momentum, epsilon=1e-3, **attributes,
    )  # fmt: skip
    return Pulled([norm, *after], arrays, wrt, symbolic)


SHAPES = [
    (4, 3, 5, 7),
    (2, 17, 32, 33),
    (1, 1, 1, 2),
    (3, 2, 64),
    (5, 4),
    (2, 3, 4, 5, 6),
    (16, 5, 4, 4),
    (64, 2, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batch_norm(shape, momentum):
    operators = normalization(shape, momentum)
    kernels = [*forward(momentum), "BatchNormGrad"] if len(shape) > 2 else []  # a matrix is left to operators
    operators.compare(normal(*shape, seed=3), kernels, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_forward(shape):
    operators = normalization(shape)
    feeds = {**operators.arrays, operators.seed: normal(*shape, seed=3)}
    expected = Session(operators.model, Options(threads=1, target="portable")).run(feeds)
    for threads in (1, 2):
        found = Session(operators.model, Options(threads=threads, target="native")).run(feeds)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-3, atol=1e-4)
    axes = (0, *range(2, len(shape)))
    wide = operators.arrays["x"].astype(np.float64)
    unit = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-3)
    row = (-1, *[1] * (len(shape) - 2))
    exact = unit * operators.arrays["scale"].reshape(row) + operators.arrays["b"].reshape(row)
    np.testing.assert_allclose(found["y"], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrt", [("x",), ("scale",), ("b",), ("scale", "b")], ids=",".join)
def test_batch_norm_of_some_operands(wrt):
    normalization((4, 3, 5, 7), wrt=wrt).compare(
        normal(4, 3, 5, 7, seed=3), ["BatchNorm", "BatchNormGrad"], rtol=1e-3, atol=1e-4
    )


def test_batch_norm_of_symbolic_sizes():
    operators = normalization((4, 3, 5, 7), symbolic=True)
    operators.compare(normal(4, 3, 5, 7, seed=3), ["BatchNorm", "BatchNormGrad"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_relu_after_batch_norm_is_taken_in(shape):
    operators = normalization(shape, after=[helper.make_node("Relu", ["y"], ["z"])])
    operators.compare(normal(*shape, seed=3), ["BatchNorm", "BatchNormGrad"], rtol=1e-3, atol=1e-4)


def test_relu_that_has_another_reader_is_not():
    after = [
        helper.make_node("Tanh", ["x"], ["u"]),
        helper.make_node("BatchNormalization", ["u", "scale", "b", "m", "v"], ["t", "m2", "v2"], training_mode=1),
        helper.make_node("Add", ["y", "t"], ["s"]),
        helper.make_node("Relu", ["s"], ["out"]),
    ]
    operators = normalization((2, 3, 4, 5), after=after)
    operators.compare(normal(2, 3, 4, 5, seed=3), ["BatchNorm", *["BatchNormGrad"] * 2], rtol=1e-3, atol=1e-4)


def test_a_channel_that_is_not_finite_is_the_only_one():
    operators = normalization((3, 4, 5, 6))
    seed = normal(3, 4, 5, 6, seed=3)
    seed[1, 2, 0, 0] = np.inf
    dx, d_scale, d_b = operators.native(seed)
    assert not np.isfinite(dx[:, 2]).any()
    assert np.isfinite(np.delete(dx, 2, axis=1)).all()
    assert [np.isfinite(v).tolist() for v in (d_scale, d_b)] == [[True, True, False, True]] * 2


# --- picked rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize(
    ("rows", "picked"),
    [((7, 5), (9,)), ((50, 128), (16, 64)), ((3, 33), (200,)), ((5,), (4, 3)), ((6, 2, 3), (2, 2)), ((1, 1), (1,)),
     ((4, 3), ()), ((2000, 1), (300,)), ((500, 8), (3000,)), ((3, 4), (9000,))],
    ids=str,
)  # fmt: skip
def test_gather(rows, picked, kind):
    index = np.asarray(np.random.default_rng(5).integers(-rows[0], rows[0], picked), kind)
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=0)
    operators = Pulled([node], {"x": normal(*rows), "i": index}, ["x"])
    seed = normal(*picked, *rows[1:], seed=3)
    (dx,) = operators.compare(seed, ["GatherGrad"], **CLOSE)
    expected = np.zeros(rows)
    np.add.at(expected, index, seed.astype(np.float64))
    np.testing.assert_allclose(dx, expected, **CLOSE)


def test_gather_of_nothing():
    node = helper.make_node("Gather", ["x", "i"], ["y"])
    operators = Pulled([node], {"x": normal(4, 3), "i": np.zeros(0, np.int64)}, ["x"], symbolic=True)
    (dx,) = operators.compare(np.zeros((0, 3), np.float32), ["GatherGrad"])
    assert not dx.any()


@pytest.mark.parametrize("index", [4, -5, 2**40, -(2**40)])
def test_an_index_out_of_range_is_refused(index):
    operators = Pulled(
        [helper.make_node("Gather", ["x", "i"], ["y"])], {"x": normal(4, 3), "i": np.zeros(2, np.int64)}, ["x"]
    )
    model, seed = operators.model, normal(2, 3)
    operators.arrays["i"][1] = index
    for node in list(model.graph):  # the cotangent alone: the operator itself would complain first
        if node.op_type == "Gather":
            model.graph.outputs[:] = [v for v in model.graph.outputs if v.producer() is not node]
            model.graph.remove(node, safe=True)
    assert operators.kernels == ["GatherGrad"]
    with pytest.raises(OnnxGradError, match="out of range"):
        operators.run(seed, "native")


# --- windows -----------------------------------------------------------------------------


def side_by_side(size, kernel, ceil=0):
    return size, kernel, kernel, (0, 0, 0, 0), (1, 1), ceil


#: (H, W), kernel, strides, pads, dilations, ceil_mode
WINDOWS = {
    "tiles": side_by_side((8, 8), (2, 2)),
    "wide tiles": side_by_side((4, 70), (2, 2)),
    "small tiles": side_by_side((4, 2), (2, 2)),
    "tiles of three": side_by_side((6, 9), (3, 3)),
    "a row and a column left over": side_by_side((9, 35), (2, 2)),
    "hanging over": side_by_side((9, 35), (2, 2), ceil=1),
    "overlapping": ((11, 13), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 0),
    "stride one": ((7, 6), (3, 2), (1, 1), (1, 0, 1, 1), (1, 1), 0),
    "dilated": ((12, 9), (2, 3), (2, 1), (1, 1, 1, 1), (3, 2), 0),
    "apart": ((12, 9), (2, 2), (3, 4), (0, 0, 0, 0), (1, 1), 0),
    "asymmetric": ((8, 8), (3, 3), (2, 2), (0, 1, 2, 0), (1, 1), 0),
    "everything": ((5, 6), (5, 6), (1, 1), (0, 0, 0, 0), (1, 1), 0),
}


def pooling(name, x, before=(), after=()):
    _, kernel, strides, pads, dilations, ceil = WINDOWS[name]
    settings = {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations, "ceil_mode": ceil}
    source = before[-1].output[0] if before else "x"
    pool = helper.make_node("MaxPool", [source], ["y"], **settings)
    return Pulled([*before, pool, *after], {"x": x}, ["x"])


def output_of(name):
    size, kernel, strides, pads, dilations, ceil = WINDOWS[name]
    out = []
    for h, k, s, a, b, d in zip(size, kernel, strides, pads, pads[2:], dilations):
        room = h + a + b - d * (k - 1) - 1
        rows = -(-room // s) + 1 if ceil else room // s + 1
        out.append(rows - 1 if ceil and (rows - 1) * s >= h + a else rows)
    return out


@pytest.mark.parametrize("name", WINDOWS)
def test_max_pool(name):
    rng = np.random.default_rng(2)
    x = rng.integers(-3, 4, (3, 5, *WINDOWS[name][0])).astype(np.float32)  # many are equal
    pooling(name, x).compare(normal(3, 5, *output_of(name), seed=3), ["MaxPoolGrad"], **CLOSE)


@pytest.mark.parametrize("name", ["tiles", "wide tiles", "overlapping", "hanging over"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_relu_beside_max_pool_is_taken_in(name, side):
    x = np.random.default_rng(2).integers(-9, 4, (3, 5, *WINDOWS[name][0])).astype(np.float32)
    relu = {"before": [helper.make_node("Relu", ["x"], ["r"])], "after": [helper.make_node("Relu", ["y"], ["r"])]}
    operators = pooling(name, x, **{side: relu[side]})
    operators.compare(normal(3, 5, *output_of(name), seed=3), ["MaxPoolGrad"], **CLOSE)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["tiles", "wide tiles", "overlapping", "dilated"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_max_pool_of_what_is_not_finite_is_that_of_torch(name, odd):
    torch = pytest.importorskip("torch")
    size, kernel, strides, pads, dilations, _ = WINDOWS[name]
    rng = np.random.default_rng(4)
    x = rng.integers(-3, 4, (2, 3, *size)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = odd
    seed = normal(2, 3, *output_of(name), seed=3)
    leaf = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(leaf, kernel, strides, pads[:2], dilations)
    (expected,) = torch.autograd.grad(y, leaf, torch.tensor(seed))
    np.testing.assert_allclose(pooling(name, x).native(seed)[0], expected.numpy(), **CLOSE)


@pytest.mark.parametrize("name", ["overlapping", "dilated"])
def test_indices_that_nobody_reads_are_not_computed(name):
    operators = pooling(name, normal(3, 5, *WINDOWS[name][0]))
    assert [len(n.outputs) for n in with_kernels(operators.model).graph if n.op_type == "MaxPool"] == [1]
    assert [len(n.outputs) for n in operators.model.graph if n.op_type == "MaxPool"] == [2]


def test_max_pool_of_nothing():
    operators = pooling("tiles", np.zeros((0, 3, 8, 8), np.float32))
    assert operators.native(np.zeros((0, 3, 4, 4), np.float32))[0].shape == (0, 3, 8, 8)


def test_other_types_and_ranks_stay_operators():
    line = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2])
    assert Pulled([line], {"x": normal(1, 2, 6)}, ["x"]).kernels == []
    wide = Pulled([helper.make_node("Relu", ["x"], ["y"])], {"x": normal(3).astype(np.float64)}, ["x"])
    assert wide.kernels == []
    columns = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    assert Pulled([columns], {"x": normal(3, 4), "i": np.zeros(2, np.int64)}, ["x"]).kernels == []

"""Normalizations whose readers compute them from what is normalized: the same numbers, and less memory in between."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.test_forged import called
from tests.runtime.kernels.test_forged import grouped as settings
from tests.runtime.kernels.test_norm_kernels import grouped, normal
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import fused, with_kernels

pytestmark = needs_kernels

SILU = [helper.make_node("Sigmoid", ["n"], ["s"]), helper.make_node("Mul", ["n", "s"], ["y"])]


def normalized(shape, groups, symbolic=False, view=False, after=SILU):
    """An activation of a group normalization, perhaps of a view: as PyTorch exports it."""
    one = grouped(shape, groups)
    arrays = dict(one.arrays)
    if not view:
        node = helper.make_node("GroupNormalization", ["x", "scale", "b"], ["n"], epsilon=1e-3, num_groups=groups)
        return Pulled([node, *after], arrays, ("x", "scale", "b"), symbolic, opset=21)
    sides = [1] * (len(shape) - 2)
    held = {
        "groups": np.int64([0, groups, -1]),
        "ones": np.ones(groups, np.float32),
        "none": np.zeros(groups, np.float32),
        "sizes": np.int64(shape),
    }
    arrays |= {"scale": arrays["scale"].reshape(-1, *sides), "b": arrays["b"].reshape(-1, *sides)}
    nodes = [
        *(helper.make_node("Constant", [], [n], value=numpy_helper.from_array(a, n)) for n, a in held.items()),
        helper.make_node("Reshape", ["x", "groups"], ["v"]),
        helper.make_node("InstanceNormalization", ["v", "ones", "none"], ["i"], epsilon=1e-3),
        helper.make_node("Reshape", ["i", "sizes"], ["r"]),
        helper.make_node("Mul", ["r", "scale"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["n"]),
        *after,
    ]
    return Pulled(nodes, arrays, ("x", "scale", "b"), symbolic, opset=21)


def opened(model):
    """For each normalization, whether its result is left out."""
    graph = fused(with_kernels(model)).graph
    return [not n.outputs[0].name for n in graph if n.domain == DOMAIN and n.op_type in ("GroupNorm", "BatchNorm")]


@pytest.mark.parametrize("view", [False, True], ids=["direct", "view"])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 6, 40, 41), 3), ((3, 8, 33, 64), 8), ((2, 4, 5, 20, 30), 1)], ids=str
)
def test_groups(shape, groups, view):
    operators = normalized(shape, groups, view=view)
    assert opened(operators.model) == [True]
    operators.compare(normal(*shape, seed=3), ["GroupNorm", "GroupNormGrad"], rtol=2e-4, atol=2e-4)


def test_sizes_of_the_run():
    told = {"x": ["N", 6, "H", "W"]}
    operators = normalized((2, 6, 40, 41), 3, symbolic=told)
    assert opened(operators.model) == [True]
    for shape in ((2, 6, 40, 41), (1, 6, 1, 1), (3, 6, 7, 1)):
        operators.arrays["x"] = normal(*shape) * 2 + 3
        operators.compare(normal(*shape, seed=3), ["GroupNorm", "GroupNormGrad"], rtol=2e-4, atol=2e-4)


STAYS = {
    "little": ((2, 6, 5, 7), SILU),
    "one reader, which needs it once": ((2, 6, 40, 41), [helper.make_node("Relu", ["n"], ["y"])]),
    "somebody else reads it": (
        (2, 6, 40, 41),
        [SILU[0], helper.make_node("ReduceSum", ["n"], ["q"]), helper.make_node("Sum", ["n", "s", "q"], ["y"])],
    ),
}


@pytest.mark.parametrize("why", STAYS)
def test_what_stays_as_it_is(why):
    shape, after = STAYS[why]
    assert opened(normalized(shape, 3, after=after).model) == [False]


def test_steps_with_batch_normalization():
    """A depthwise-separable block with SiLU: losses and weights are those of the operators."""
    rng = np.random.default_rng(0)
    held = {"w": (8, 3, 3, 3), "scale": (8,), "bias": (8,), "mean": (8,), "variance": (8,), "v": (8, 4)}
    weights = [
        numpy_helper.from_array((rng.standard_normal(s) * 0.3 + (n in ("scale", "variance"))).astype(np.float32), n)
        for n, s in held.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "variance"], ["n"]),
        *SILU[:1], helper.make_node("Mul", ["n", "s"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["g"]), helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]  # fmt: skip
    ends = [
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3, 24, 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, weights), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    step = compile_step(attach(model, loss="cross_entropy", optimizer="sgd", learning_rate=0.1))
    assert opened(step.model) == [True]
    label = next(n for n in step.batch if n != "x")
    batches = [{"x": normal(4, 3, 24, 24, seed=i), label: rng.integers(0, 4, 4)} for i in range(3)]
    runs = [StepRunner(step, options=Options(threads=1, target=t)) for t in ("portable", "native")]
    for batch in batches:
        found = [run.step(batch)[step.loss].copy() for run in runs]
        np.testing.assert_allclose(*found, rtol=1e-5)
    one, two = (run.state() for run in runs)
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_columns():
    """The columns that make y of x, per image and channel; zeros without anything to normalize."""
    x, scale, bias = normal(2, 4, 15, seed=5), normal(4, seed=6), normal(4, seed=7)
    y, centre, gain, shift = called("GroupNorm", [x, scale, bias], settings(2))
    assert centre.shape == gain.shape == shift.shape == (2, 4, 1)
    np.testing.assert_allclose((x - centre) * gain + shift, y, rtol=1e-5, atol=1e-5)
    by_group = called("GroupNorm", [x, scale[:2], bias[:2]], settings(2))
    by_channel = called("GroupNorm", [x, scale[[0, 0, 1, 1]], bias[[0, 0, 1, 1]]], settings(2))
    for one, other in zip(by_group, by_channel):
        np.testing.assert_array_equal(one, other)
    double = x.astype(np.float64).reshape(2, 2, 2, 15)
    mean, deviation = double.mean((2, 3), keepdims=True), double.std((2, 3), keepdims=True)
    expected = (double - mean) / deviation * scale.reshape(2, 2, 1) + bias.reshape(2, 2, 1)
    np.testing.assert_allclose(y, expected.reshape(y.shape), rtol=1e-4, atol=1e-4)
    empty = called("GroupNorm", [x[:, :, :0], scale, bias], settings(2))
    assert [a.shape for a in empty] == [(2, 4, 0), *[(2, 4, 1)] * 3]
    assert not any(a.any() for a in empty)
    y, mean, _, centre, gain, shift = called("BatchNorm", [x, scale, bias], {"epsilon": 0.5})
    assert centre.shape == gain.shape == shift.shape == (4, 1)
    np.testing.assert_array_equal(centre[:, 0], mean)
    np.testing.assert_allclose((x - centre) * gain + shift, y, rtol=1e-5, atol=1e-5)

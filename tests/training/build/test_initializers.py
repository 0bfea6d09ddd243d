"""Initialization graphs draw what they say: moments, bounds, orthogonality; on both runtimes."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.training import attach, compile_step, initialize, validate
from onnxgrad.training.build import initializers
from onnxgrad.training.spec.reference_training import ReferenceTraining
from tests.training.nets import mlp, model_of, train
from tests.training.spec.test_entries import BATCHES


def net(shape=(60, 40), dtype=np.float32) -> onnx.ModelProto:
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"w": np.zeros(shape, dtype)},
        {"x": ["N", shape[0]]},
        {"y": ["N", shape[1]]},
        dtype=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
    )
    return attach(model, loss="mse", optimizer="sgd")


def drawn(way, shape=(60, 40), dtype=np.float32, runner: bool = False, seed: float | None = 3.0) -> np.ndarray:
    model = initialize(net(shape, dtype), {"w": way}, seed=seed)
    assert validate(model) == []
    if runner:
        training = ReferenceTraining(model)
        training.initialize()
        return training.state["w"]
    return compile_step(model).state["w"].initial.numpy()


def like(sample: np.ndarray, mean: float, deviation: float) -> None:
    """Mean and standard deviation are what they should be, within five standard errors."""
    n = sample.size
    assert abs(sample.mean() - mean) < 5 * deviation / math.sqrt(n)
    assert abs(sample.std() / deviation - 1) < 5 / math.sqrt(n)
    assert len(np.unique(sample)) > n / 2


MOMENTS = {
    "normal": (initializers.normal(0.5, 2.0), 0.5, 2.0, math.inf),
    "uniform": (initializers.uniform(-1, 3), 1.0, 4 / math.sqrt(12), 2.0),
    "glorot_uniform": ("glorot_uniform", 0, math.sqrt(2 / 100), math.sqrt(6 / 100)),
    "glorot_normal": (initializers.glorot_normal(2.0), 0, 2 * math.sqrt(2 / 100), math.inf),
    "he_uniform": ("he_uniform", 0, math.sqrt(2 / 60), math.sqrt(6 / 60)),
    "he_normal": ("he_normal", 0, math.sqrt(2 / 60), math.inf),
    "truncated_normal": (initializers.truncated_normal(0.1, 0.5), 0.1, 0.879626 * 0.5, 1.0),
}


@pytest.mark.parametrize("runner", [False, True])
@pytest.mark.parametrize("name", MOMENTS)
def test_moments_and_bounds(name, runner):
    way, mean, deviation, bound = MOMENTS[name]
    sample = drawn(way, runner=runner)
    like(sample, mean, deviation)
    assert np.abs(sample - mean).max() <= bound * (1 + 1e-6)


def test_truncated_normal_is_one():
    """Its quantiles are those of the normal distribution between -2 and 2."""
    sample = np.sort(drawn(initializers.truncated_normal(0.0, 1.0), (200, 200)).reshape(-1)).astype(np.float64)
    assert np.abs(sample).max() > 1.99
    erf = np.vectorize(math.erf)
    cdf = (erf(sample / math.sqrt(2)) / math.erf(math.sqrt(2)) + 1) / 2
    ranks = (np.arange(sample.size) + 0.5) / sample.size
    assert np.abs(cdf - ranks).max() < 1.95 / math.sqrt(sample.size)  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.parametrize("shape", [(7, 7), (5, 9), (9, 5), (1, 4), (64, 64)])
@pytest.mark.parametrize("runner", [False, True])
def test_orthogonal(shape, runner):
    q = drawn(initializers.orthogonal(3.0), shape, runner=runner) / 3
    gram = q @ q.T if shape[0] <= shape[1] else q.T @ q
    np.testing.assert_allclose(gram, np.eye(min(shape)), atol=2e-6)


def test_orthogonal_is_uniform():
    """No direction is preferred: the elements of 3×3 rotations have mean 0 and variance 1/3."""
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(200)]
    weights = {f"w{i}": np.zeros((3, 3), np.float32) for i in range(200)}
    model = attach(model_of(nodes, weights, {"x0": ["N", 3]}, {"x200": ["N", 3]}), loss="mse", optimizer="sgd")
    state = compile_step(initialize(model, {"w*": "orthogonal"}, seed=0.0)).state
    sample = np.stack([state[name].initial.numpy() for name in weights])
    assert np.abs(sample.mean(0)).max() < 5 * math.sqrt(1 / 3 / 200)
    np.testing.assert_allclose((sample**2).mean(0), np.full((3, 3), 1 / 3), atol=0.12)
    assert 40 < sum(np.linalg.det(s) > 0 for s in sample) < 160


def test_constants():
    np.testing.assert_array_equal(drawn("zeros"), np.zeros((60, 40)))
    np.testing.assert_array_equal(drawn("ones"), np.ones((60, 40)))
    np.testing.assert_array_equal(drawn(initializers.constant(0.25)), np.full((60, 40), 0.25))


def test_seed():
    """The same seed gives the same numbers; without one, it is the runtime's to choose."""
    np.testing.assert_array_equal(drawn("he_normal"), drawn("he_normal"))
    assert np.abs(drawn("he_normal") - drawn("he_normal", seed=4.0)).max() > 0
    model = initialize(net(), {"w": "he_normal"})
    assert "seed" not in {a.name for n in model.training_info[0].initialization.node for a in n.attribute}
    like(drawn("he_normal", seed=None), 0, math.sqrt(2 / 60))
    two = initialize(attach(mlp(), loss="mse"), {"w1": "he_normal", "w2": "he_normal"}, seed=3)
    seeds = [a.f for n in two.training_info[0].initialization.node for a in n.attribute if a.name == "seed"]
    assert seeds == [3.0, 4.0]


def test_other_types():
    sample = drawn("he_normal", dtype=np.float64)
    assert sample.dtype == np.float64
    like(sample, 0, math.sqrt(2 / 60))


def test_fans_of_layers():
    """Who reads a weight says which axis is which."""
    weights = {
        "k": np.zeros((8, 4, 3, 3)),
        "t": np.zeros((8, 4, 3, 3)),
        "g": np.zeros((20, 10)),
        "m": np.zeros((20, 10)),
        "b": np.zeros(5),
    }
    model = onnx.ModelProto()
    model.graph.node.extend(
        [
            helper.make_node("Conv", ["a", "k"], ["1"]),
            helper.make_node("ConvTranspose", ["b0", "t"], ["2"]),
            helper.make_node("Gemm", ["c", "g"], ["3"], transB=1),
            helper.make_node("MatMul", ["d", "m"], ["4"]),
        ]
    )
    found = {n: initializers._fans(model, n, w.shape) for n, w in weights.items()}
    assert found == {"k": (36, 72), "t": (72, 36), "g": (10, 20), "m": (20, 10), "b": (5, 5)}


def test_patterns_and_training():
    """The first rule that fits counts; training starts from what was drawn, and steps go on from there."""
    model = attach(mlp(), loss="mse", optimizer="adam")
    model = initialize(model, {"*": "ones"})
    model = initialize(model, {"b1": "ones", "b*": "zeros", "w*": "glorot_uniform", "w1_mean": "zeros"}, seed=1)
    assert len(model.training_info[0].initialization_binding) == 5
    step = compile_step(model)
    start = {n: t.initial.numpy() for n, t in step.state.items()}
    np.testing.assert_array_equal(start["b1"], np.ones(8))
    np.testing.assert_array_equal(start["b2"], np.zeros(3))
    assert np.abs(start["w1"]).max() <= math.sqrt(6 / 12)
    assert len(np.unique(start["w1"])) == 32
    _, history = train(step, BATCHES[:1] * 40, rate=0.05)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    for tensor in model.graph.initializer:
        before = next(t for t in mlp().graph.initializer if t.name == tensor.name)
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(before))


def test_what_is_refused():
    model = attach(mlp(), loss="mse", optimizer="adam")
    with pytest.raises(BadInput, match=r"no initializer is called 'v\*'"):
        initialize(model, {"v*": "zeros"})
    with pytest.raises(BadInput, match="there is no initialization 'lecun'"):
        initialize(model, {"w1": "lecun"})
    with pytest.raises(BadInput, match="'steps' is a tensor of INT64"):
        initialize(model, {"steps": "zeros"})
    with pytest.raises(BadInput, match="takes a matrix"):
        initialize(model, {"b1": "orthogonal"})
    with pytest.raises(BadInput, match="there is no training entry 1"):
        initialize(model, {"b1": "zeros"}, entry=1)
    with pytest.raises(BadInput, match="there is no training entry 0: the model has 0"):
        initialize(mlp(), {"b1": "zeros"})

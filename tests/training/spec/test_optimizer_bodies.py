"""The optimizers as functions: any runtime executes them, and they give what the specification says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnxgrad.errors import BadInput
from onnxgrad.training import attach, lower_gradients, optimizer_function, with_optimizer_functions
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.onnx_cases import NODE_CASES
from tests.training.nets import mlp, run
from tests.training.spec.test_optimizer_operators import (
    STANDARD,
    agree,
    drawn,
    every_case,
    optimizer_model,
)


def ramp(model: onnx.ModelProto, dtype=np.float32) -> dict[str, np.ndarray]:
    """Something positive for every input of an optimizer at its fourth step."""
    feeds = {"R": np.array(0.1, dtype), "T": np.array(3, np.int64)}
    for value in model.graph.input[2:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.linspace(0.1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)
    return feeds


@pytest.mark.parametrize("name", STANDARD)
def test_backend_node_test(name):
    """ONNX Runtime runs the node as it is: it takes the function for it."""
    case = next(c for c in NODE_CASES if c.name == name)
    model = with_optimizer_functions(case.model)
    assert model.graph.node[0].op_type == case.model.graph.node[0].op_type
    onnx.checker.check_model(model, full_check=True)
    for inputs, outputs in case.data_sets:
        found = run(model, {i.name: np.asarray(a) for i, a in zip(model.graph.input, inputs)})
        for out, want in zip(model.graph.output, outputs):
            np.testing.assert_allclose(found[out.name], want, rtol=1e-5, atol=1e-7, err_msg=out.name)


@every_case
def test_formula(op, states, attrs, t, dtype):
    model, feeds = drawn(op, states, attrs, t, dtype)
    found = run(with_optimizer_functions(model), feeds)
    exact = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in attrs.items()}  # what the file holds
    agree(found, feeds, op, float(feeds["R"]), t, exact, rtol=2e-6 if dtype == np.float32 else 1e-13)


def test_defaults():
    """A node that leaves an attribute out gets the default of the operator."""
    for op in ("Adam", "Adagrad"):
        states = 2 if op == "Adam" else 1
        schema = onnx.defs.get_schema(op, 1, DOMAIN)
        said = {n: a.default_value.f for n, a in schema.attributes.items()}
        plain, given = optimizer_model(op, states), optimizer_model(op, states, **said)
        feeds = ramp(plain)
        one, other = run(with_optimizer_functions(plain), feeds), run(with_optimizer_functions(given), feeds)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_functions_of_several_sizes_in_one_model():
    """One for each number of tensors, told apart by the overload; algorithms bring theirs along."""
    model = attach(mlp(), loss="mse", optimizer="adam", convention="onnx")
    with_functions = with_optimizer_functions(model)
    assert [(f.name, f.overload) for f in with_functions.functions] == [("Adam", "4")]
    node = next(n for n in with_functions.training_info[0].algorithm.node if n.op_type == "Adam")
    assert node.overload == "4"
    assert len(with_optimizer_functions(with_functions).functions) == 1
    one, two = optimizer_model("Adagrad", 1, shapes=((2,),)), optimizer_model("Adagrad", 1)
    one.graph.node[0].name = "one"
    one.graph.node[0].output[:] = [f"{o}_one" for o in one.graph.node[0].output]
    two.graph.node.append(one.graph.node[0])
    two.graph.node[1].input[2:] = ["X1", "G1", "V1"]
    two.graph.output.append(helper.make_tensor_value_info("YX0_one", TensorProto.FLOAT, [4]))
    both = with_optimizer_functions(two)
    assert sorted(f.overload for f in both.functions) == ["1", "2"]
    found = run(both, ramp(two))
    np.testing.assert_array_equal(found["YX0_one"], found["YX1"])


def test_reference_evaluator_runs_the_function():
    attributes = {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"}
    model = optimizer_model("Momentum", 1, **attributes)
    feeds = ramp(model)
    evaluator = ReferenceEvaluator(optimizer_function("Momentum", 2))
    named = dict(zip(evaluator.input_names, feeds.values()))
    found = evaluator.run(None, named, attributes=attributes)
    for value, want in zip(found, run(with_optimizer_functions(model), feeds).values()):
        np.testing.assert_allclose(value, want, rtol=1e-6)


def test_old_opset():
    model = optimizer_model("Momentum", 1, alpha=0.9, beta=0.5, norm_coefficient=0.1, mode="nesterov")
    model.opset_import[0].version = 18
    with pytest.raises(BadInput, match="needs opset 19; the model has 18"):
        with_optimizer_functions(model)


def test_wrong_counts_and_names():
    with pytest.raises(BadInput, match="there is no optimizer 'Lion'"):
        optimizer_function("Lion")
    model = optimizer_model("Adam", 2)
    del model.graph.node[0].input[-1]
    with pytest.raises(BadInput, match="9 inputs; it takes R, T and 4 per tensor"):
        with_optimizer_functions(model)


@pytest.mark.parametrize(
    ("op", "states", "attrs"),
    [
        ("Adam", 2, {}),
        ("Adagrad", 1, {"decay_factor": 0.1}),
        ("Momentum", 1, {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"}),
    ],
)
def test_rate_and_count_of_one_element(op, states, attrs):
    """R and T of shape [1] are as good as scalars, and leave the shapes of the tensors alone."""
    plain, other = optimizer_model(op, states, **attrs), optimizer_model(op, states, **attrs)
    for value in other.graph.input[:2]:
        value.type.tensor_type.shape.dim.add().dim_value = 1
    feeds = ramp(plain)
    wide = feeds | {name: feeds[name].reshape(1) for name in "RT"}
    want = run(lower_gradients(plain), feeds)
    for made in (lower_gradients(other), with_optimizer_functions(other)):
        for name, value in run(made, wide).items():
            assert value.shape == want[name].shape
            np.testing.assert_allclose(value, want[name], rtol=2e-6)

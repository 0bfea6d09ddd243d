"""The backend tests of the onnx package that are about training, through onnxgrad.backend and ONNX Runtime."""

from __future__ import annotations

import re
import unittest
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnx.backend.test
import pytest

import onnxgrad.backend
from onnxgrad.training import lower_gradients
from tests.onnx_cases import NODE_CASES
from tests.training.nets import run
from tests.training.spec.test_gradient_node import HEAD
from tests.training.spec.test_optimizer_bodies import ramp
from tests.training.spec.test_optimizer_operators import STANDARD, optimizer_model

MODELS = ["test_gradient_of_add", "test_gradient_of_add_and_mul"]
PATTERN = r"^test_(gradient_of_add|adagrad|adam|momentum|nesterov|nllloss|sce|negative_log|softmax_cross).*_cpu$"


def _suite() -> dict[str, type[unittest.TestCase]]:
    """The test cases of the onnx package, less those that are not about training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = onnx.backend.test.BackendTest(onnxgrad.backend, __name__).test_cases
    for case in cases.values():
        for name in [n for n in vars(case) if n.startswith("test_") and not re.match(PATTERN, n)]:
            delattr(case, name)
    return cases


globals().update(_suite())


def test_there_is_something_to_run():
    """All nine of training, and the losses in all their forms."""
    cases = {n for held in _suite().values() for n in dir(held) if n.startswith("test_") and n.endswith("_cpu")}
    names = {n.removesuffix("_cpu") for n in cases}
    included = {n for n in names if n in {*STANDARD, *MODELS} or n.startswith(("test_nllloss", "test_sce"))}
    assert {*STANDARD, *MODELS} <= included
    assert len(included) > 70


LOSSES = [c for c in NODE_CASES if c.name.startswith(("test_nllloss", "test_sce"))]


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.name.endswith("_expanded")], ids=lambda c: c.name)
def test_losses_survive_the_door(case):
    """The nodes, and the function bodies that the onnx package writes for them, in a model that was lowered."""
    expanded = next(c for c in LOSSES if c.name == f"{case.name}_expanded")
    for found in (case, expanded):
        lowered = lower_gradients(found.model)
        for inputs, outputs in found.data_sets:
            feeds = {i.name: np.asarray(a) for i, a in zip(found.model.graph.input, inputs)}
            for value, want in zip(run(lowered, feeds).values(), outputs):
                np.testing.assert_allclose(value, want, rtol=1e-3, atol=1e-7)


def test_one_node():
    a, b = np.float32([1, 2]), np.float32([3, 5])
    (total,) = onnxgrad.backend.run_node(onnx.helper.make_node("Add", ["a", "b"], ["c"]), [a, b])
    np.testing.assert_array_equal(total, a + b)
    model = optimizer_model("Adagrad", 1, shapes=((2,),), decay_factor=0.5)
    feeds = ramp(model)
    found = onnxgrad.backend.run_node(model.graph.node[0], feeds)
    for value, want in zip(found, run(lower_gradients(model), feeds).values()):
        np.testing.assert_array_equal(value, want)


def test_reference_evaluator():
    model = onnx.parser.parse_model(
        HEAD
        + """g (float[2] a, float[2] b) => (float[2] d, float[2] e) {
            y = Mul (a, b)
            z = Mul (y, y)
            d, e = ai.onnx.preview.training.Gradient <xs = ["a", "b"], y = "z"> (a, b)
        }"""
    )
    a, b = np.float32([1, 2]), np.float32([3, 5])
    d, e = onnxgrad.backend.ReferenceEvaluator(model).run(None, {"a": a, "b": b})
    np.testing.assert_allclose(d, 2 * a * b * b)
    np.testing.assert_allclose(e, 2 * a * a * b)
    plain = onnxgrad.backend.ReferenceEvaluator(onnxgrad.training.lower_gradients(model))
    np.testing.assert_allclose(plain.run(None, {"a": a, "b": b})[0], d)


def test_reference_evaluator_of_everything(tmp_path):
    """Inside a branch and a function; every optimizer; from a file, from bytes; whatever the training information."""
    nested = onnx.parser.parse_model(
        HEAD
        + """g (bool c, float[2] a, float[2] b) => (float[2] d) {
            d = If (c) <then_branch = t () => (float[2] dt) { dt = local.slope (a, b) },
                        else_branch = e () => (float[2] de) { de = Neg (a) }>
        }
        <domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]> slope (u, v) => (w) {
            y = Mul (u, v)
            z = Mul (y, u)
            w = ai.onnx.preview.training.Gradient <xs = ["u"], zs = ["v"], y = "z"> (u, v)
        }"""
    )
    nested.training_info.add().update_binding.add(key="no such", value="thing")
    onnx.save(nested, tmp_path / "m.onnx")
    a, b = np.float32([1, 2]), np.float32([3, 5])
    for given in (nested, tmp_path / "m.onnx", str(tmp_path / "m.onnx"), nested.SerializeToString()):
        evaluator = onnxgrad.backend.ReferenceEvaluator(given)
        for c, want in ((True, 2 * a * b), (False, -a)):
            np.testing.assert_allclose(evaluator.run(None, {"c": np.array(c), "a": a, "b": b})[0], want)
    for kind, states, attributes in (
        ("Adagrad", 1, {"decay_factor": 0.5}),
        ("Adam", 2, {"norm_coefficient": 0.1, "norm_coefficient_post": 0.2}),
        ("Momentum", 1, {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"}),
    ):
        model = optimizer_model(kind, states, shapes=((2,), (3, 1)), **attributes)
        feeds = ramp(model)
        found = onnxgrad.backend.ReferenceEvaluator(model).run(None, feeds)
        for value, want in zip(found, onnx.reference.ReferenceEvaluator(model).run(None, feeds)):
            np.testing.assert_allclose(value, want, rtol=1e-5)
    function = onnxgrad.training.optimizer_function("Adagrad")
    x = np.float32([1, 2])
    given = dict(zip(function.input, (np.float32(0.1), np.int64(0), x, x, x)))
    new, _ = onnxgrad.backend.ReferenceEvaluator(function).run(
        None, given, {"epsilon": 1e-6, "decay_factor": 0.0, "norm_coefficient": 0.0}
    )
    np.testing.assert_allclose(new, x - 0.1 * x / (np.sqrt(x + x * x) + 1e-6), rtol=1e-6)


def test_devices():
    assert onnxgrad.backend.supports_device("CPU")
    assert not onnxgrad.backend.supports_device("CUDA")
    new = onnx.helper.make_model(optimizer_model("Adam", 2).graph, opset_imports=[onnx.helper.make_opsetid("", 99)])
    del new.graph.node[:]
    new.graph.node.append(onnx.helper.make_node("Identity", ["X0"], ["YX0"]))
    assert not onnxgrad.backend.is_compatible(new)
    with pytest.raises(unittest.SkipTest):
        onnxgrad.backend.prepare(new)
    with pytest.raises(ValueError, match="not on CUDA"):
        onnxgrad.backend.prepare(optimizer_model("Adam", 2), "CUDA")
    broken = optimizer_model("Adam", 1)
    assert not onnxgrad.backend.is_compatible(broken)
    assert onnxgrad.backend.is_compatible(optimizer_model("Adam", 2))


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "float8_e5m2", "float8_e4m3fn", "bfloat16"])
def test_types_that_numpy_lacks(name):
    """In and out by their bits, of odd sizes as well: several of four or two bits share a byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = np.array([[1, 0, 1], [-2, 1, -1]] if "u" not in name else [[1, 0, 3], [2, 1, 3]]).astype(dtype)
    element = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    for array in (values, values[0], values[0, 0].reshape(())):
        graph = onnx.helper.make_graph(
            [
                onnx.helper.make_node("Cast", ["a"], ["number"], to=onnx.TensorProto.FLOAT),
                onnx.helper.make_node("Neg", ["number"], ["b"]),
                onnx.helper.make_node("Cast", ["number"], ["c"], to=element),
            ],
            "g",
            [onnx.helper.make_tensor_value_info("a", element, array.shape)],
            [onnx.helper.make_tensor_value_info(n, t, array.shape) for n, t in (("b", 1), ("c", element))],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 25)], ir_version=13)
        negative, found = onnxgrad.backend.prepare(model).run([array])
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, array)
        np.testing.assert_array_equal(negative, -array.astype(np.float32))

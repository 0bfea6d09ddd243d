"""Optimizers as pairs of ONNX functions: a graph that calls them trains as the step that `attach` compiles."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.training import attach, compile_step
from onnxgrad.training.optim.as_functions import OWN_DOMAIN, optimizer_functions
from onnxgrad.training.optim.optimizers import OPTIMIZERS
from tests.training.nets import model_of, train


def _typed(name, array):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def called(function, inputs, outputs):
    """A session of a model that does nothing but call `function`."""
    graph = helper.make_graph(
        [helper.make_node(function.name, list(function.input), list(function.output), domain=OWN_DOMAIN)],
        "call",
        [_typed(n, a) for n, a in inputs.items()],
        [onnx.ValueInfoProto(name=n) for n in function.output],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(OWN_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=["vector", "matrix"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_of_calls_trains_as_the_step(name, shape):
    """y = x·w (or x + w), mse; gradients by formula, everything else by init and update."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    op, width = ("MatMul", 4) if len(shape) == 2 else ("Add", 3)
    model = model_of([helper.make_node(op, ["x", "w"], ["y"])], {"w": w}, {"x": ["N", width]}, {"y": ["N", 3]})
    step = compile_step(attach(model, loss="mse", optimizer=name, learning_rate=0.02))
    x, t = rng.standard_normal((5, width)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    wanted, _ = train(step, [{"x": x, "labels": t}] * 12)

    pair = optimizer_functions(name, shape)
    states = {}
    if pair.states:
        states = dict(zip(pair.states, called(pair.init, {"X": w}, pair.states).run(None, {"X": w})))
    made = None
    for count in range(1, 13):
        d = 2 * ((x @ w if op == "MatMul" else x + w) - t) / t.size
        g = (x.T @ d if op == "MatMul" else d.sum(0)).astype(np.float32)
        feeds = {"R": np.array(0.02, np.float32), "T": np.array(count), "X": w, "G": g, **states}
        made = made or called(pair.update, feeds, None)
        used = {i.name for i in made.get_inputs()}
        w, *new = made.run(None, {n: a for n, a in feeds.items() if n in used})
        states = dict(zip(pair.states, new))
    np.testing.assert_allclose(w, wanted["w"], rtol=2e-4, atol=2e-5)
    for suffix in OPTIMIZERS[name].states(OPTIMIZERS[name].settings, shape):
        np.testing.assert_allclose(states[suffix], wanted[f"w_{suffix}"], rtol=2e-3, atol=1e-5)


def test_settings_and_documentation():
    pair = optimizer_functions("lion:betas=0.5,0.75,decay=0.1", (2,))
    assert "sign" in pair.update.doc_string
    assert "betas (0.5, 0.75)" in pair.update.doc_string
    assert pair.states == ("momentum",)
    assert list(pair.update.input) == ["R", "T", "X", "G", "momentum"]
    assert list(pair.update.output) == ["X_new", "momentum_new"]


def test_half_precision():
    """The state is float, the tensor what it was."""
    x = np.ones(3, np.float16)
    pair = optimizer_functions("lion", (3,), dtype=np.float16)
    feeds = {"R": np.array(0.5, np.float32), "T": np.array(1), "X": x, "G": x, "momentum": np.zeros(3, np.float32)}
    made = called(pair.update, feeds, None)
    new, momentum = made.run(None, {i.name: feeds[i.name] for i in made.get_inputs()})
    assert (new.dtype, momentum.dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(new, 0.5)


def test_bad_requests():
    with pytest.raises(BadInput, match="there is no optimizer 'adamm'"):
        optimizer_functions("adamm", (2,))
    with pytest.raises(BadInput, match="an optimizer updates floats, not INT64"):
        optimizer_functions("sgd", (2,), dtype=np.int64)
    with pytest.raises(BadInput, match="adam does not update FLOAT16"):
        optimizer_functions("adam:convention=onnx", (2,), dtype=np.float16)

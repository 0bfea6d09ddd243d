"""Losses: values and gradients against formulas in float64 and against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.training.attach import attach
from onnxgrad.training.step import compile_step
from tests.training.nets import initial, mlp, model_of, session

node = helper.make_node


def linear(shape=("N", 3), last=(), dtype=np.float32):
    """y = x + w, so that the gradient of a loss with respect to w is that to y, summed over N."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape[1:]).astype(dtype)
    nodes = [node("Add", ["x", "w"], ["y"], name="add"), *last]
    out = {"z" if last else "y": shape}
    return model_of(nodes, {"w": w}, {"x": shape}, out, dtype=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def loss_and_gradient(model, x, labels, **options):
    """The loss, and the gradient with respect to w read off a step of plain gradient descent at rate 1."""
    step = compile_step(attach(model, optimizer="sgd", learning_rate=1.0, **options))
    made = session(step.model)
    feeds = {"x": x, step.batch[1]: labels, "learning_rate": np.array(1, np.float32)}
    feeds |= {t.input: a for n, a in initial(step).items() for t in [step.state[n]]}
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    return found["loss"], initial(step)["w"] - found[step.state["w"].output]


CASES = {
    "mse": ("mse", {}, lambda f, y, t, r: f.mse_loss(y, t, reduction=r)),
    "l1": ("l1", {}, lambda f, y, t, r: f.l1_loss(y, t, reduction=r)),
    "huber": ("huber", {"delta": 0.7}, lambda f, y, t, r: f.huber_loss(y, t, delta=0.7, reduction=r)),
    "bce": ("bce_with_logits", {}, lambda f, y, t, r: f.binary_cross_entropy_with_logits(y, t, reduction=r)),
}


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_elementwise_losses_are_those_of_torch(case, reduction):
    torch = pytest.importorskip("torch")
    name, options, reference = CASES[case]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 3)).astype(np.float32)
    t = rng.uniform(0, 1, (5, 3)).astype(np.float32) if case == "bce" else rng.standard_normal((5, 3)).astype("f")
    model = linear()
    loss, gradient = loss_and_gradient(model, x, t, loss=name, loss_options={"reduction": reduction, **options})
    w = torch.tensor(np.frombuffer(model.graph.initializer[0].raw_data, np.float32).copy(), requires_grad=True)
    expected = reference(torch.nn.functional, torch.tensor(x) + w, torch.tensor(t), reduction)
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, [0.2, 1.0, 3.0]])
@pytest.mark.parametrize("ignore", [None, 1, -100])
@pytest.mark.parametrize("shape", [("N", 3), ("N", 3, 4)])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_class_losses_are_those_of_torch(name, shape, ignore, weight, reduction):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, *shape[1:])).astype(np.float32)
    t = rng.integers(0, 3, (6, *shape[2:]))
    if ignore == -100:
        t.flat[::3] = -100
    options = {"reduction": reduction, "weight": weight, "ignore_index": ignore}
    model = linear(shape)
    loss, gradient = loss_and_gradient(model, x, t, loss=name, loss_options=options)
    w = np.frombuffer(model.graph.initializer[0].raw_data, np.float32).reshape(shape[1:]).copy()
    w = torch.tensor(w, requires_grad=True)
    reference = getattr(torch.nn.functional, f"{name}_loss" if name == "nll" else name)
    expected = reference(
        torch.tensor(x) + w,
        torch.tensor(t),
        weight=None if weight is None else torch.tensor(weight),
        ignore_index=-100 if ignore is None else ignore,
        reduction=reduction,
    )
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-4, atol=1e-6)


def test_classes_last():
    """Scores [N, T, C] with `axis` -1 meet labels [N, T], as the transposed scores do."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    t = rng.integers(0, 3, (2, 5))
    last, _ = loss_and_gradient(linear(("N", 5, 3)), x, t, loss="cross_entropy", loss_options={"axis": -1})
    w = np.frombuffer(linear(("N", 5, 3)).graph.initializer[0].raw_data, np.float32).reshape(5, 3)
    scores = (x + w).astype(np.float64).reshape(-1, 3)
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    np.testing.assert_allclose(last, -log_p[np.arange(10), t.reshape(-1)].mean(), rtol=1e-5)


@pytest.mark.parametrize(("name", "op"), [("cross_entropy", "Softmax"), ("bce_with_logits", "Sigmoid")])
def test_activation_that_the_loss_contains_is_stripped(name, op):
    """The loss of a model that ends in the activation is that of the model without it: no overflow."""
    x = np.float32([[200, -200, 0], [-200, 200, 1]])
    t = np.int64([1, 1]) if op == "Softmax" else np.float32([[0, 1, 0], [1, 0, 1]])
    bare, g0 = loss_and_gradient(linear(), x, t, loss=name)
    ended, g1 = loss_and_gradient(linear(last=[node(op, ["y"], ["z"])]), x, t, loss=name)
    assert np.isfinite(bare)
    assert bare > 50
    np.testing.assert_array_equal(bare, ended)
    np.testing.assert_array_equal(g0, g1)


def test_softmax_along_another_axis_is_kept():
    """Softmax over axis 2, classes on axis 1: not the one that the loss contains."""
    model = linear(("N", 3, 4), [node("Softmax", ["y"], ["z"], axis=2)])
    info = attach(model, loss="cross_entropy").training_info[0]
    (loss,) = [n for n in info.algorithm.node if n.op_type == "SoftmaxCrossEntropyLoss"]
    assert loss.input[0] == "z"


def test_labels_fit_the_prediction():
    def label(**options):
        (value,) = attach(**options).training_info[0].algorithm.input
        held = value.type.tensor_type
        return value.name, held.elem_type, [d.dim_param or d.dim_value for d in held.shape.dim]

    assert label(model=mlp(), loss="mse") == ("labels", 1, ["N", 3])
    assert label(model=mlp(dtype=np.float64), loss="mse") == ("labels", 11, ["N", 3])
    assert label(model=mlp(), loss="cross_entropy", labels="digit") == ("digit", 7, ["N"])
    assert label(model=linear(("N", 5, 3)), loss="nll", loss_options={"axis": -1}) == ("labels", 7, ["N", 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mae"}, "there is no loss 'mae'; there are: cross_entropy"),
        ({"loss": "mse", "loss_options": {"delta": 1}}, "the loss 'mse' has no option 'delta'"),
        ({"loss": "mse", "loss_options": {"reduction": "none"}}, "a loss is a scalar"),
        ({"loss": "huber", "loss_options": {"delta": 0}}, "delta must be positive"),
        ({"optimizer": "lyon", "loss": "mse"}, "there is no optimizer 'lyon'"),
        ({"optimizer": "sgd", "momentum": 0.9, "loss": "mse"}, "'sgd' has no setting 'momentum'"),
        ({"learning_rate": -1, "loss": "mse"}, "learning_rate must be a number"),
        ({"betas": (0.9, 1.0), "loss": "mse"}, "betas must be in"),
        ({"learning_rate": float("nan"), "loss": "mse"}, "learning_rate must be a number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        attach(mlp(), **options)


def test_classes_need_an_axis():
    model = model_of([node("Add", ["x", "w"], ["y"])], {"w": np.float32([1])}, {"x": ["N"]}, {"y": ["N"]})
    with pytest.raises(BadInput, match="classes need an axis"):
        attach(model, loss="cross_entropy")

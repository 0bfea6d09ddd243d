"""Losses of one's own against PyTorch: random formulas, and PyTorch's functions and modules trained by onnxgrad."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import train
from onnxgrad.errors import BadInput
from onnxgrad.training.loss.expression import Expression
from tests.training.nets import mlp

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
F = torch.nn.functional
pytestmark = pytest.mark.torch

_UNARY = ["abs({})", "tanh({})", "exp(-abs({}))", "sqrt(abs({}) + 1)", "log1p(abs({}))", "sin({})", "({})**2",
          "maximum({}, 0.1)", "sigmoid({})", "softplus({})", "log_softmax({}, axis=1)", "clip({}, -1, 1)"]  # fmt: skip
_BINARY = ["({} + {})", "({} - {})", "({} * {})", "maximum({}, {})", "minimum({}, {})", "({} / (1 + abs({})))"]


def _formula(rng: np.random.Generator, depth: int) -> str:
    if not depth:
        return str(rng.choice(["scores", "y"]))
    if rng.random() < 0.5:
        return str(rng.choice(_UNARY)).format(_formula(rng, depth - 1))
    return str(rng.choice(_BINARY)).format(_formula(rng, depth - 1), _formula(rng, depth - 1))


class _Torch:
    """The functions of formulas, in PyTorch."""

    abs, tanh, exp, sqrt, log1p, sin, sigmoid, mean = (
        torch.abs, torch.tanh, torch.exp, torch.sqrt, torch.log1p, torch.sin, torch.sigmoid, torch.mean,
    )  # fmt: skip
    softplus, clip = staticmethod(F.softplus), torch.clip
    minimum = torch.minimum

    @staticmethod
    def maximum(a, b):
        return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype))

    @staticmethod
    def log_softmax(x, axis):
        return F.log_softmax(x, axis)


def _torch_steps(loss, x, labels, count):
    """Weights after `count` steps of plain descent in PyTorch."""
    tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in mlp().graph.initializer}
    for t in tensors.values():
        t.requires_grad_()
    x, labels = torch.tensor(x), torch.tensor(labels)
    for _ in range(count):
        y = torch.tanh(x @ tensors["w1"] + tensors["b1"]) @ tensors["w2"] + tensors["b2"]
        for t, g in zip(tensors.values(), torch.autograd.grad(loss(y, labels), list(tensors.values()))):
            t.data -= 0.05 * g
    return {n: t.detach().numpy() for n, t in tensors.items()}


def _compare(loss, reference, labels):
    x = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)
    trainer = train(mlp(), {"x": x, "labels": labels}, loss=loss, optimizer="sgd", learning_rate=0.05, epochs=3,
                    batch_size=16, shuffle=False)  # fmt: skip
    for name, array in _torch_steps(reference, x, labels, 3).items():
        np.testing.assert_allclose(trainer.state()[name], array, rtol=2e-4, atol=2e-6)


NUMBERS = np.random.default_rng(2).standard_normal((16, 3)).astype(np.float32)
CLASSES = np.random.default_rng(3).integers(0, 3, 16)


@pytest.mark.parametrize("seed", range(12))
def test_random_formulas(seed):
    rng = np.random.default_rng(seed)
    body = _formula(rng, 4)
    text = f"mean({body} + 0.1 * scores**2)"
    names = {n: getattr(_Torch, n) for n in dir(_Torch) if not n.startswith("_")}
    assert set(Expression(text).names) <= {"scores", "y"}
    _compare(text, lambda scores, y: eval(text, {**names, "scores": scores, "y": y}), NUMBERS)  # written right here


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (torch.nn.SmoothL1Loss(beta=0.5), NUMBERS),
        (F.mse_loss, NUMBERS),
        (lambda scores, labels: F.huber_loss(scores, labels) + 0.1 * scores.abs().mean(), NUMBERS),
        (torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1), CLASSES),
        (torch.nn.BCEWithLogitsLoss(), (NUMBERS > 0).astype(np.float32)),
    ],
    ids=["SmoothL1Loss", "mse_loss", "function", "CrossEntropyLoss", "BCEWithLogitsLoss"],
)
def test_losses_of_pytorch(loss, labels):
    _compare(loss, loss, labels)


ONE_SCORE = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 1] z)'
    " <float[4, 1] w = {1, 2, 3, 4}> { z = MatMul (x, w) }"
)


@pytest.mark.parametrize(
    ("loss", "of_rows"),
    [
        (lambda scores, goal, weight: (weight * F.mse_loss(scores, goal, reduction="none")).mean(), np.square),
        (lambda scores, goal, weight: (weight * F.l1_loss(scores[:, 0], goal, reduction="none")).mean(), np.abs),
        (lambda scores, goal, weight: (weight * F.l1_loss(scores, goal, reduction="none")).mean(), np.abs),
        (lambda scores, goal, weight: torch.mean(weight * (scores.squeeze(-1) - goal) ** 2), np.square),
    ],
)
def test_numbers_of_rows_meet_the_score_of_their_row(loss, of_rows):
    """PyTorch spreads goals [N] beside scores [N, 1] over all pairs of rows, with a warning."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((9, 4)).astype(np.float32)
    goal, weight = rng.standard_normal(9).astype(np.float32), rng.uniform(0, 2, 9).astype(np.float32)
    trainer = train(
        onnx.parser.parse_model(ONE_SCORE), {"x": x, "goal": goal, "weight": weight}, loss=loss, optimizer="sgd",
        learning_rate=1e-9, epochs=1, batch_size=9,
    )  # fmt: skip
    expected = np.mean(weight * of_rows((x @ [1.0, 2.0, 3.0, 4.0]) - goal))
    np.testing.assert_allclose(trainer.history.epochs[0]["loss"], expected, rtol=1e-5)


def test_a_loss_that_checks_its_numbers_is_refused_with_a_formula():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 4] x) => (float[N, 1] mu, float[N, 1] sigma2) <float[4, 1] w = {1, 2, 3, 4}> {
            mu = MatMul (x, w)
            sigma2 = Softplus (mu)
        }""")
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((9, n)).astype(np.float32) for n in (4, 1))
    loss = torch.nn.GaussianNLLLoss()
    with pytest.raises(BadInput, match="decides by the numbers in its arrays") as refusal:
        train(model, {"x": x, "y": y}, loss=lambda mu, y, sigma2: loss(mu, y, sigma2))
    formula = str(refusal.value).split("mu and sigma2: ")[1]
    trainer = train(model, {"x": x, "y": y}, loss=formula, optimizer="sgd", learning_rate=1e-9, epochs=1, batch_size=9)
    mu = torch.tensor(x) @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    expected = float(loss(mu, torch.tensor(y), F.softplus(mu)))
    np.testing.assert_allclose(trainer.history.epochs[0]["loss"], expected, rtol=1e-5)

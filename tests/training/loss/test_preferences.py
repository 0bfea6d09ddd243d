"""Losses of pairs: values and gradients against their formulas in float64, and against PyTorch."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import Loss, attach
from onnxgrad.training.step.compile import compile_step
from tests.training.models import classifier
from tests.training.nets import initial, session

PAIRS, PLACES, CLASSES = 3, 4, 5
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2 * PAIRS, PLACES, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, (2 * PAIRS, PLACES))
LABELS[0, :2] = LABELS[3, 3:] = -100
REFERENCE = RNG.standard_normal(2 * PAIRS).astype(np.float32) - 5


def model():
    """y = x + w, so that the gradient with respect to w is that to y, summed over rows."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        m (float[N, T, {CLASSES}] x) => (float[N, T, {CLASSES}] y) {{ y = Add (x, w) }}""")
    w = RNG.standard_normal((PLACES, CLASSES)).astype(np.float32) * 0
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return proto


def loss_and_gradient(name, **options):
    step = compile_step(attach(model(), loss=Loss(name, **options), optimizer="sgd", learning_rate=1.0))
    made = session(step.model)
    feeds = {"x": X, "labels": LABELS, "learning_rate": np.array(1, np.float32)}
    if name == "dpo":
        feeds["labels_reference"] = REFERENCE
    feeds |= {t.input: a for n, a in initial(step).items() for t in [step.state[n]]}
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    return found["loss"], initial(step)["w"] - found[step.state["w"].output]


def rows(x):
    """Σ log p of each row, and the number of its labels, in float64."""
    x = x.astype(np.float64)
    logs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    counts = LABELS >= 0
    own = np.take_along_axis(logs, np.where(counts, LABELS, 0)[..., None], -1)[..., 0]
    return (own * counts).sum(1), counts.sum(1)


def softplus(x):
    return np.log1p(np.exp(x))


def formula(name, x, beta=0.1, label_smoothing=0.0):
    sums, counts = rows(x)
    if name == "dpo":
        z = sums - REFERENCE
        z = beta * (z[0::2] - z[1::2])
        return ((1 - label_smoothing) * softplus(-z) + label_smoothing * softplus(z)).mean()
    p = sums / counts
    odds = p - np.log1p(-np.exp(p))
    return (-p[0::2] + beta * softplus(odds[1::2] - odds[0::2])).mean()


CASES = [("dpo", {}), ("dpo", {"beta": 0.5}), ("dpo", {"beta": 2.0, "label_smoothing": 0.2}),
         ("orpo", {}), ("orpo", {"beta": 0.7})]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_formula_and_its_differences(name, options):
    loss, gradient = loss_and_gradient(name, **options)
    np.testing.assert_allclose(loss, formula(name, X, **options), rtol=1e-5)
    for place in [(0, 1), (2, 4), (3, 0)]:
        step = np.zeros((PLACES, CLASSES))
        step[place] = 1e-5
        both = [formula(name, X + s * step, **options) for s in (1, -1)]
        np.testing.assert_allclose(gradient[place], (both[0] - both[1]) / 2e-5, rtol=1e-3, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "options"), CASES)
def test_pytorch(name, options):
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    w = torch.zeros(PLACES, CLASSES, requires_grad=True)
    labels, beta = torch.tensor(LABELS), options.get("beta", 0.1)
    own = f.log_softmax(torch.tensor(X) + w, -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    own = own * (labels != -100)
    sums, counts = own.sum(1), (labels != -100).sum(1)
    if name == "dpo":
        ratios = sums[0::2] - sums[1::2] - torch.tensor(REFERENCE[0::2] - REFERENCE[1::2])
        share = options.get("label_smoothing", 0.0)
        each = -f.logsigmoid(beta * ratios) * (1 - share) - f.logsigmoid(-beta * ratios) * share
    else:
        p = sums / counts
        odds = (p[0::2] - p[1::2]) - (torch.log1p(-p[0::2].exp()) - torch.log1p(-p[1::2].exp()))
        each = -p[0::2] - beta * f.logsigmoid(odds)
    each.mean().backward()
    loss, gradient = loss_and_gradient(name, **options)
    np.testing.assert_allclose(loss, each.mean().item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_beta_is_positive_and_batches_are_whole(name):
    with pytest.raises(BadInput, match="beta must be positive"):
        loss_and_gradient(name, beta=0)
    with pytest.raises(BadInput, match="compares the examples of a batch"):
        attach(model(), loss=Loss(name), optimizer="sgd", learning_rate=1.0, accumulate=True)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_scores_are_of_tokens(name):
    with pytest.raises(BadInput, match=r"scores .rows, tokens, classes., and 'y' has 2 axes$"):
        attach(classifier(), loss=Loss(name), optimizer="sgd", learning_rate=1.0)

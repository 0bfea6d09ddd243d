"""CTC: values and gradients against PyTorch, where alignments are many, few, one or none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.training import Loss
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests.training.nets import initial, model_of, session

node = helper.make_node

CLASSES = 6


def scores(time: int = 1, steps: int | str = "T", last=()):
    """y = x + w with w[T, 1, C] or [1, T, C]: the gradient with respect to w is that to y, summed over N."""
    shape = ["N", steps, CLASSES] if time == 1 else [steps, "N", CLASSES]
    w = np.zeros((CLASSES,), np.float32)
    return model_of([node("Add", ["x", "w"], ["y"]), *last], {"w": w}, {"x": shape}, {"z" if last else "y": shape})


def ctc_step(x, labels, lengths=None, time=1, last=(), **options):
    """The loss, and its gradient with respect to the sum of all scores of a class."""
    given = {"input_lengths": True} if lengths is not None else {}
    model = attach(
        scores(time, last=last), loss=Loss("ctc", time=time, **given, **options), optimizer="sgd",
        learning_rate=1.0, metrics=["gradient_norm"],
    )  # fmt: skip
    step = compile_step(model)
    feeds = {"x": x, "labels": labels, "learning_rate": np.array(1, np.float32)}
    if lengths is not None:
        feeds["labels_input_lengths"] = lengths
    feeds |= {step.state[n].input: a for n, a in initial(step).items()}
    made = session(step.model, threads=2)
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    return found["loss"], initial(step)["w"] - found[step.state["w"].output]


def of_torch(x, labels, lengths, reduction="mean", zero_infinity=False, blank=0):
    torch = pytest.importorskip("torch")
    y = torch.tensor(x, requires_grad=True)
    counts = torch.tensor(((labels >= 0) & (labels != blank)).sum(1))
    loss = torch.nn.functional.ctc_loss(
        torch.log_softmax(y, -1).transpose(0, 1),
        torch.tensor(np.where(labels < 0, blank, labels)),
        torch.tensor(np.full(len(x), x.shape[1]) if lengths is None else lengths),
        counts,
        blank=blank,
        reduction=reduction,
        zero_infinity=zero_infinity,
    )
    loss.backward()
    return loss.item(), y.grad.numpy().sum((0, 1))


def padded(*rows, width=None, by=-1):
    width = max([width or 1, *map(len, rows)])
    return np.array([[*row, *[by] * (width - len(row))] for row in rows], np.int64)


CASES = {
    "different labels": padded([1, 2, 3], [4, 5]),
    "repeated labels": padded([1, 1, 1], [2, 2, 3, 3], [5, 5, 4]),
    "empty targets": padded([], [1, 2], []),
    "one label": padded([3]),
    "padded with blanks": padded([1, 2], [3], by=0),
}


@pytest.mark.sweep(3)
@pytest.mark.torch
@pytest.mark.parametrize(("reduction", "lengths"), [("mean", False), ("sum", True)])
@pytest.mark.parametrize("case", CASES)
def test_ctc_is_that_of_torch(case, lengths, reduction):
    labels = CASES[case]
    rng = np.random.default_rng(len(case))
    x = rng.standard_normal((len(labels), 11, CLASSES)).astype(np.float32) * 3
    given = rng.integers(8, 12, len(labels)) if lengths else None
    loss, gradient = ctc_step(x, labels, given, reduction=reduction)
    expected, wanted = of_torch(x, labels, given, reduction)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.torch
def test_two_thousand_steps_do_not_underflow():
    """The probability of any one alignment is around e⁻⁵⁰⁰⁰; float32 is closer to float64 than PyTorch's float32 is."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2000, CLASSES)).astype(np.float32) * 4
    labels = padded(rng.integers(1, CLASSES, 300), rng.integers(1, CLASSES, 20))
    loss, gradient = ctc_step(x, labels, reduction="sum")
    expected, wanted = of_torch(x.astype(np.float64), labels, None, "sum")
    assert expected > 3000
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-3)
    _, single = of_torch(x, labels, None, "sum")
    assert np.abs(gradient - wanted).max() < np.abs(single - wanted).max()


def _all_alignments(log_p, label):
    """-log of the sum over every path of classes that collapses to `label`, one by one."""
    total = -np.inf
    for path in itertools.product(range(log_p.shape[1]), repeat=len(log_p)):
        collapsed = [c for c, before in zip(path, (None, *path)) if c != before and c != 0]
        if collapsed == list(label):
            total = np.logaddexp(total, log_p[np.arange(len(path)), path].sum())
    return -total


@pytest.mark.parametrize("label", [[], [1], [1, 2], [1, 1], [2, 1, 2], [1, 1, 2]])
def test_sum_over_all_alignments(label):
    """By enumeration, in float64: an oracle that shares nothing with a forward algorithm."""
    x = np.random.default_rng(3).standard_normal((1, 5, CLASSES)).astype(np.float32)
    x[:, :, 3:] = -50  # three classes, so that enumeration ends
    log_p = np.float64(x[0]) - np.log(np.exp(np.float64(x[0])).sum(-1, keepdims=True))
    loss, _ = ctc_step(x, padded(label), reduction="sum")
    np.testing.assert_allclose(loss, _all_alignments(log_p[:, :3], label), rtol=1e-5)


@pytest.mark.torch
def test_too_short_an_input():
    """Infinite, as in PyTorch; 0 with a gradient of 0 where that is asked for. A repeated label needs a step more."""
    x = np.random.default_rng(4).standard_normal((3, 4, CLASSES)).astype(np.float32)
    labels = padded([1, 2, 3, 4, 5], [1, 1, 1], [1, 2])
    assert ctc_step(x, labels)[0] == of_torch(x, labels, None)[0] == np.inf
    loss, gradient = ctc_step(x, labels, zero_infinity=True)
    expected, wanted = of_torch(x, labels, None, zero_infinity=True)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    alone, none = ctc_step(x[:2], labels[:2], zero_infinity=True)
    assert alone == 0
    np.testing.assert_array_equal(none, 0)


@pytest.mark.torch
def test_time_first_and_another_blank():
    x = np.random.default_rng(5).standard_normal((2, 9, CLASSES)).astype(np.float32)
    labels = padded([0, 1, 1], [2])
    loss, gradient = ctc_step(x.transpose(1, 0, 2), labels, time=0, blank=5)
    expected, wanted = of_torch(x, labels, None, blank=5)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_final_softmax_is_stripped(op):
    """Scores beyond the range of exp: with the activation of the model as without it."""
    x = np.random.default_rng(6).standard_normal((2, 9, CLASSES)).astype(np.float32) * 300
    labels = padded([1, 2], [3])
    bare = ctc_step(x, labels)
    ended = ctc_step(x, labels, last=[node(op, ["y"], ["z"], axis=2)])
    assert np.isfinite(bare[0])
    np.testing.assert_array_equal(bare[0], ended[0])
    np.testing.assert_array_equal(bare[1], ended[1])


def test_label_lengths_may_be_fed():
    """Then what is behind them is not looked at."""
    x = np.random.default_rng(7).standard_normal((2, 9, CLASSES)).astype(np.float32)
    step = compile_step(attach(scores(), loss=Loss("ctc", label_lengths=True), optimizer="sgd"))
    assert step.batch == ["x", "labels", "labels_label_lengths"]
    feeds = {t.input: t.initial.numpy() for t in step.state.values()} | {n: t.numpy() for n, t in step.rates.items()}
    feeds |= {"x": x, "labels": np.int64([[1, 2, 4], [3, 5, 5]]), "labels_label_lengths": np.int64([2, 1])}
    made = session(step.model)
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    np.testing.assert_allclose(found["loss"], ctc_step(x, padded([1, 2], [3]))[0], rtol=1e-6)


def test_one_scan_forward_and_one_backward():
    """All states at once: one Scan forward and one backward, each of a few small operators."""
    step = compile_step(attach(scores(), loss="ctc", optimizer="sgd"))
    scans = [n for n in step.model.graph if n.op_type == "Scan"]
    assert [len(n.attributes["body"].as_graph()) <= most for n, most in zip(scans, (20, 32), strict=True)] == [True] * 2


def test_scores_need_three_axes():
    flat = model_of([node("Add", ["x", "w"], ["y"])], {"w": np.float32([1, 2])}, {"x": ["N", 2]}, {"y": ["N", 2]})
    with pytest.raises(BadInput, match=r"ctc takes scores \[batch, time, classes\]"):
        attach(flat, loss="ctc")
    with pytest.raises(BadInput, match="ctc: time must be 0 or 1, not 2"):
        attach(scores(), loss=Loss("ctc", time=2))

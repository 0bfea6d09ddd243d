"""Losses of dense predictions: values against plain NumPy in float64, gradients against central differences."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Loss, Trainer
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests.training.loss.test_losses import linear
from tests.training.nets import initial, session

RNG = np.random.default_rng(3)


def softmax(y):
    e = np.exp(y - y.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def sigmoid(y):
    return 1 / (1 + np.exp(-y))


def hot(t, count):
    return np.moveaxis(np.eye(count)[np.where(t < 0, 0, t)], -1, 1)


def dice(y, t, smooth=1e-5, batch=False, ignored=None):
    p, h = softmax(y), hot(t, y.shape[1])
    if ignored is not None:
        p, h = (x * (t != ignored)[:, None] for x in (p, h))
    axes = (0, 2, 3) if batch else (2, 3)
    return (1 - (2 * (p * h).sum(axes) + smooth) / (p.sum(axes) + h.sum(axes) + smooth)).mean()


def binary_dice(y, t, batch=False):
    axes = None if batch else (1, 2, 3)
    p = sigmoid(y)
    return np.mean(1 - (2 * (p * t).sum(axes) + 1e-5) / (p.sum(axes) + t.sum(axes) + 1e-5))


def lovasz_gradient(sorted_targets):
    """As in the authors' implementation (Berman et al. 2018)."""
    targets = sorted_targets.sum()
    jaccard = 1 - (targets - sorted_targets.cumsum()) / (targets + (1 - sorted_targets).cumsum())
    return np.diff(jaccard, prepend=0)


def lovasz(y, t, batch=True, ignored=None):
    def of(p, t):
        p, t = np.moveaxis(p, 1, -1).reshape(-1, p.shape[1]), t.ravel()
        if ignored is not None:
            p, t = p[t != ignored], t[t != ignored]
        found = []
        for c in np.unique(t):
            errors = abs((t == c) - p[:, c])
            order = np.argsort(-errors, kind="stable")
            found.append(errors[order] @ lovasz_gradient((t == c)[order].astype(float)))
        return np.mean(found)

    p = softmax(y)
    return of(p, t) if batch else np.mean([of(p[k : k + 1], t[k : k + 1]) for k in range(len(t))])


def binary_lovasz(y, t, batch=False):
    def of(y, t):
        errors = 1 - y * (2 * t - 1)
        order = np.argsort(-errors, kind="stable")
        return np.maximum(errors[order], 0) @ lovasz_gradient(t[order])

    return of(y.ravel(), t.ravel()) if batch else np.mean([of(a.ravel(), b.ravel()) for a, b in zip(y, t)])


def widened(x, size):
    r = size // 2
    around = np.pad(x, ((0, 0), (0, 0), (r, r), (r, r)), constant_values=-np.inf)
    h, w = x.shape[2:]
    return np.max([around[:, :, i : i + h, j : j + w] for i in range(size) for j in range(size)], axis=0)


def boundary(y, t, width=3, tolerance=5):
    p, h = softmax(y), hot(t, y.shape[1])
    edge_p, edge_t = (widened(1 - x, width) - (1 - x) for x in (p, h))
    near_p, near_t = widened(edge_p, tolerance), widened(edge_t, tolerance)
    precision = (edge_p * near_t).sum((2, 3)) / (edge_p.sum((2, 3)) + 1e-7)
    recall = (near_p * edge_t).sum((2, 3)) / (edge_t.sum((2, 3)) + 1e-7)
    return (1 - 2 * precision * recall / (precision + recall + 1e-7)).mean()


def heatmap(y, t, sigma=2.0):
    i, j = np.mgrid[: y.shape[2], : y.shape[3]]
    total = 0
    for n in range(len(y)):
        for k, (a, b, seen) in enumerate(t[n]):
            if seen > 0:
                target = np.exp(-((j - a) ** 2 + (i - b) ** 2) / (2 * sigma**2))
                total += ((y[n, k] - target) ** 2).sum()
    return total / y.size


def oks(y, t, area, sigmas=(0.25,) * 4):
    rows = []
    for points, labels, size in zip(y, t, area):
        kept = [k for k in range(len(labels)) if labels[k, 2] > 0]
        e = [np.exp(-((points[k] - labels[k, :2]) ** 2).sum() / (2 * size * (2 * sigmas[k]) ** 2)) for k in kept]
        rows.append(1 - np.mean(e) if kept else 0)
    return np.mean(rows)


def silog(y, t, variance=0.85, root=True):
    rows = []
    for a, b in zip(y, t):
        d = np.log(a[b > 0]) - np.log(b[b > 0])
        rows.append((d**2).mean() - variance * d.mean() ** 2)
    return np.mean(np.sqrt(rows) if root else rows)


def db(y, t, mask, threshold=None, threshold_mask=None):
    """The formula of Liao et al. 2020: balanced cross entropy, dice of the binary map, distance of thresholds."""
    p = sigmoid(y[:, 0])
    each = -(t * np.log(p) + (1 - t) * np.log(1 - p))
    positive = (t * mask).sum()
    count = int(min(((1 - t) * mask).sum(), positive * 3))
    hardest = np.sort((each * (1 - t) * mask).ravel())[::-1][:count]
    loss = 5 * ((each * t * mask).sum() + hardest.sum()) / (positive + count + 1e-6)
    binary = p
    if threshold is not None:
        limit = sigmoid(y[:, 1])
        binary = sigmoid(50 * (p - limit))
        loss += 10 * (abs(limit - threshold) * threshold_mask).sum() / threshold_mask.sum()
    return loss + 1 - 2 * (binary * t * mask).sum() / ((binary * mask).sum() + (t * mask).sum() + 1e-6)


def ssim(y, t, window=5, sigma=1.5):
    line = np.exp(-0.5 * ((np.arange(window) - window // 2) / sigma) ** 2)
    weights = np.outer(line, line) / line.sum() ** 2
    found = np.zeros((*y.shape[:2], y.shape[2] - window + 1, y.shape[3] - window + 1))
    for place in np.ndindex(found.shape):
        n, c, i, j = place
        a, b = (x[n, c, i : i + window, j : j + window] for x in (y, t))
        m, v = (weights * a).sum(), (weights * b).sum()
        mm, vv, mv = (weights * (a - m) ** 2).sum(), (weights * (b - v) ** 2).sum(), (weights * (a - m) * (b - v)).sum()
        found[place] = (2 * m * v + 1e-4) * (2 * mv + 9e-4) / ((m * m + v * v + 1e-4) * (mm + vv + 9e-4))
    return 1 - found.mean()


CLASSES = RNG.integers(0, 4, (2, 5, 6))
CLASSES[:, :2] = 3  # a region, so that there are boundaries; the class 0 does not occur in the second picture
CLASSES[1][CLASSES[1] == 0] = 1
SOME = np.where(RNG.random((2, 5, 6)) < 0.2, -1, CLASSES)
BINARY = (RNG.random((2, 1, 5, 6)) < 0.4).astype(float)
POINTS = np.concatenate([RNG.uniform(0, 6, (2, 4, 2)), RNG.integers(0, 3, (2, 4, 1))], axis=2).astype(float)
AREA = np.array([20.0, 60.0])
DEPTH = np.where(RNG.random((2, 1, 5, 6)) < 0.3, 0, RNG.uniform(1, 9, (2, 1, 5, 6)))
MAPS = [(RNG.random((2, 5, 6)) < share).astype(float) for share in (0.2, 0.8)]
LIMITS = [RNG.uniform(0.3, 0.7, (2, 5, 6)), (RNG.random((2, 5, 6)) < 0.5).astype(float)]
SCENE = RNG.uniform(0, 1, (2, 3, 7, 8))

#: Name: the loss, its options, the shape of a row, the labels, the formula.
CASES = {
    "dice": ("dice", {}, (4, 5, 6), [CLASSES], dice),
    "dice_of_a_batch": ("dice", {"batch": True, "smooth": 1.0}, (4, 5, 6), [CLASSES],
                        lambda y, t: dice(y, t, 1.0, batch=True)),
    "dice_ignoring": ("dice", {"ignore_index": -1}, (4, 5, 6), [SOME], lambda y, t: dice(y, t, ignored=-1)),
    "dice_last_axis": ("dice", {"axis": -1}, (5, 6, 4), [CLASSES], lambda y, t: dice(np.moveaxis(y, -1, 1), t)),
    "binary_dice": ("binary_dice", {}, (1, 5, 6), [BINARY], binary_dice),
    "binary_dice_of_a_batch": ("binary_dice", {"batch": True}, (1, 5, 6), [BINARY],
                               lambda y, t: binary_dice(y, t, True)),
    "lovasz": ("lovasz", {}, (4, 5, 6), [CLASSES], lovasz),
    "lovasz_of_pictures": ("lovasz", {"batch": False}, (4, 5, 6), [CLASSES], lambda y, t: lovasz(y, t, False)),
    "lovasz_ignoring": ("lovasz", {"ignore_index": -1}, (4, 5, 6), [SOME], lambda y, t: lovasz(y, t, ignored=-1)),
    "lovasz_of_pictures_ignoring": ("lovasz", {"ignore_index": -1, "batch": False}, (4, 5, 6), [SOME],
                                    lambda y, t: lovasz(y, t, False, -1)),
    "binary_lovasz": ("binary_lovasz", {}, (1, 5, 6), [BINARY], binary_lovasz),
    "binary_lovasz_of_a_batch": ("binary_lovasz", {"batch": True}, (1, 5, 6), [BINARY],
                                 lambda y, t: binary_lovasz(y, t, True)),
    "boundary": ("boundary", {}, (4, 5, 6), [CLASSES], boundary),
    "boundary_wide": ("boundary", {"width": 5, "tolerance": 3}, (4, 5, 6), [CLASSES],
                      lambda y, t: boundary(y, t, 5, 3)),
    "heatmap": ("heatmap", {}, (4, 5, 6), [POINTS], heatmap),
    "heatmap_sharp": ("heatmap", {"sigma": 0.7}, (4, 5, 6), [POINTS], lambda y, t: heatmap(y, t, 0.7)),
    "oks": ("oks", {}, (4, 2), [POINTS, AREA], oks),
    "oks_sigmas": ("oks", {"sigmas": (0.1, 0.2, 0.3, 0.4)}, (4, 2), [POINTS, AREA],
                   lambda y, t, a: oks(y, t, a, (0.1, 0.2, 0.3, 0.4))),
    "silog": ("silog", {}, (1, 5, 6), [DEPTH], silog),
    "silog_squared": ("silog", {"root": False, "variance": 0.5}, (1, 5, 6), [DEPTH],
                      lambda y, t: silog(y, t, 0.5, False)),
    "db": ("db", {}, (1, 5, 6), MAPS[:1], lambda y, t: db(y, t, np.ones_like(t))),
    "db_where_it_counts": ("db", {"mask": True}, (1, 5, 6), MAPS, db),
    "db_thresholds": ("db", {"mask": True}, (2, 5, 6), [*MAPS, *LIMITS], db),
    "db_thresholds_everywhere": ("db", {}, (3, 5, 6), [MAPS[0], *LIMITS],
                                 lambda y, t, *limits: db(y, t, np.ones_like(t), *limits)),
    "ssim": ("ssim", {"window": 5}, (3, 7, 8), [SCENE], ssim),
}  # fmt: skip


def measured(name, options, x, labels):
    """The loss of y = x + w, and its gradient with respect to w; in float64 where ONNX Runtime has the operators."""
    dtype = np.float32 if name in SINGLE else np.float64
    model = linear(("N", *x.shape[1:]), dtype=dtype)
    w = np.frombuffer(model.graph.initializer[0].raw_data, dtype).reshape(x.shape[1:])
    x = x.astype(dtype)
    labels = [a if a.dtype.kind == "i" else a.astype(dtype) for a in labels]
    step = compile_step(attach(model, optimizer="sgd", learning_rate=1.0, loss=Loss(name, **options)))
    inputs = [n for n in step.batch if n != "x"]
    assert len(inputs) == len(labels)
    feeds = {"x": x - w, **dict(zip(inputs, labels)), "learning_rate": np.array(1, np.float32)}
    feeds |= {t.input: a for n, a in initial(step).items() for t in [step.state[n]]}
    made = session(step.model)
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    return float(found["loss"]), initial(step)["w"] - found[step.state["w"].output]


#: Losses with operators that ONNX Runtime has in float32 only: Softplus, Conv.
SINGLE = ("db", "ssim")


def prediction(name, shape):
    rng = np.random.default_rng(5)
    if name == "silog":
        return rng.uniform(1, 9, (2, *shape))
    if name == "oks":
        return POINTS[..., :2] + rng.normal(0, 2, (2, *shape))
    return rng.uniform(0, 1, (2, *shape)) if name == "ssim" else rng.standard_normal((2, *shape))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    name, options, shape, labels, formula = CASES[case]
    y = prediction(name, shape)
    loss, gradient = measured(name, options, y, labels)
    assert loss == pytest.approx(formula(y, *labels), rel=1e-5 if name in SINGLE else 1e-9)
    expected = np.zeros(shape)
    for place in np.ndindex(shape):
        d = np.zeros(shape)
        d[place] = 1e-6
        expected[place] = (formula(y + d, *labels) - formula(y - d, *labels)) / 2e-6
    assert abs(expected).max() > 1e-5
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if name in SINGLE else {"rtol": 1e-5, "atol": 1e-8}
    np.testing.assert_allclose(gradient, expected, **tolerance)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", CASES)
def test_sums(case):
    """A sum is of rows, or of the elements of heat maps; a loss of a batch as a whole is one number."""
    name, options, shape, labels, _ = CASES[case]
    y = prediction(name, shape)
    total, _ = measured(name, {**options, "reduction": "sum"}, y, labels)
    mean, _ = measured(name, options, y, labels)
    function, chosen = Loss(name, **options).function()
    count = {"elements": y.size, "batch": 2}.get(function.mean, 1 if chosen.get("batch") else 2)
    assert total == pytest.approx(mean * count, rel=1e-5)


def test_activations_are_taken_off():
    """A model that ends in a Softmax or a Sigmoid has the loss of the scores before it."""
    for name, op, labels in (("dice", "Softmax", CLASSES), ("binary_lovasz", "Sigmoid", BINARY)):
        shape = ("N", 4, 5, 6) if op == "Softmax" else ("N", 1, 5, 6)
        x = np.random.default_rng(0).standard_normal((2, *shape[1:])).astype(np.float32)
        options = {"axis": 1} if op == "Softmax" else {}
        losses = []
        for last in ([], [helper.make_node(op, ["y"], ["z"], **options)]):
            step = compile_step(attach(linear(shape, last), optimizer="sgd", loss=name))
            feeds = {"x": x, step.batch[1]: labels.astype(np.int64 if op == "Softmax" else np.float32)}
            feeds |= {t.input: a for n, a in initial(step).items() for t in [step.state[n]]}
            made = session(step.model)
            feeds |= {"learning_rate": np.array(1, np.float32)}
            losses.append(made.run(["loss"], feeds)[0])
        np.testing.assert_allclose(*losses)


def test_nothing_to_learn_is_finite():
    nothing = [
        ("lovasz", {"ignore_index": -1}, (4, 5, 6), [np.full((2, 5, 6), -1)]),
        ("silog", {}, (1, 5, 6), [np.zeros((2, 1, 5, 6))]),
        ("oks", {}, (4, 2), [np.zeros((2, 4, 3)), AREA]),
        ("db", {"mask": True}, (2, 5, 6), [np.zeros((2, 5, 6))] * 4),
        ("binary_dice", {}, (1, 5, 6), [np.zeros((2, 1, 5, 6))]),
    ]
    for name, options, shape, labels in nothing:
        loss, gradient = measured(name, options, prediction(name, shape), labels)
        assert np.isfinite(loss), name
        assert np.isfinite(gradient).all(), name


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        ("boundary:width=4", ("N", 4, 5, 6), "odd numbers of pixels, not 4 and 5"),
        ("boundary", ("N", 4, 5), "it takes scores"),
        ("heatmap:sigma=0", ("N", 4, 5, 6), "sigma must be positive"),
        ("heatmap", ("N", 4, 2), "takes heat maps"),
        ("oks", ("N", 4, 5, 6), "takes points"),
        ("silog:variance=2", ("N", 5, 6), "variance lies between 0 and 1"),
        ("db", ("N", 4, 5, 6), "db takes maps"),
        ("ssim", ("N", 5, 6), "ssim takes pictures"),
        ("ssim:window=0", ("N", 1, 5, 6), "window is a number of pixels"),
    ],
)
def test_refusals(loss, shape, message):
    with pytest.raises(BadInput, match=message):
        attach(linear(shape), optimizer="sgd", loss=loss)


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("loss", ["dice:ignore_index=9", "lovasz:ignore_index=9", "boundary", "binary_dice", "silog"])
def test_metrics_of_a_run(loss, ends):
    """The losses show what they compare: metrics of a run are those of the trained model."""
    name = loss.partition(":")[0]
    op = {"binary_dice": "Sigmoid", "silog": "Softplus"}.get(name, "Softmax")
    shape = ("N", 4 if op == "Softmax" else 1, 5, 6)
    last = [helper.make_node(op, ["y"], ["z"], **({"axis": 1} if op == "Softmax" else {}))] if ends else []
    x = np.random.default_rng(0).uniform(1, 2, (4, *shape[1:])).astype(np.float32)
    labels = {"Softmax": np.where(SOME < 0, 9, SOME) if "=9" in loss else CLASSES, "Sigmoid": BINARY}
    t = np.concatenate([labels.get(op, DEPTH + 0.5)] * 2)
    t = t if t.dtype == np.int64 else t.astype(np.float32)
    metrics = {"Softmax": "miou,accuracy", "Sigmoid": "miou,auc"}.get(op, "abs_rel,delta1,rmse")
    trainer = Trainer(linear(shape, last), loss=loss, optimizer="sgd", learning_rate=1e-3)
    trainer.fit({"x": x, "labels": t}, epochs=1, validation={"x": x, "labels": t}, metrics=metrics)
    ignored = {"ignore_index": 9} if "=9" in loss else {}
    found = onnxgrad.evaluate(trainer.inference_model(), {"x": x, "labels": t}, metrics=metrics, **ignored).metrics
    for key, value in found.items():
        assert trainer.history.epochs[-1][f"validation_{key}"] == pytest.approx(value, rel=1e-5), key


def test_labels_that_are_no_class_are_refused():
    x = np.zeros((2, 4, 5, 6), np.float32)
    t = CLASSES.copy()
    t[1, 0, 0] = 7
    trainer = Trainer(linear(("N", 4, 5, 6)), loss="dice")
    with pytest.raises(BadInput, match="has the label 7 in row 1; the model tells 4 classes apart"):
        trainer.fit({"x": x, "labels": t})

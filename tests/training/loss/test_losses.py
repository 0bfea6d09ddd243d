"""Losses: values and gradients against formulas in float64 and against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.training import Loss
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
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
    "smooth_l1": ("smooth_l1", {"beta": 0.7}, lambda f, y, t, r: f.smooth_l1_loss(y, t, beta=0.7, reduction=r)),
    "bce": ("bce_with_logits", {}, lambda f, y, t, r: f.binary_cross_entropy_with_logits(y, t, reduction=r)),
    "binary_focal": ("binary_focal", {}, lambda f, y, t, r: _reduced(_binary_focal(f, y, t, 0.25, 2.0), r)),
    "binary_focal_even": (
        "binary_focal",
        {"alpha": -1, "gamma": 0.5},
        lambda f, y, t, r: _reduced(_binary_focal(f, y, t, -1, 0.5), r),
    ),
    "cosine": ("cosine", {}, lambda f, y, t, r: _reduced(1 - f.cosine_similarity(y, t, dim=-1), r)),
    "kl": ("kl", {}, lambda f, y, t, r: _kl(f, y, t.softmax(-1), 1.0, r)),
    "kl_warm": ("kl", {"temperature": 3.0}, lambda f, y, t, r: _kl(f, y, (t / 3).softmax(-1), 3.0, r)),
}


def same(loss, gradient, expected, w):
    """`loss` and its gradient by the weights are PyTorch's."""
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-4, atol=1e-6)


def _reduced(x, reduction):
    return x.mean() if reduction == "mean" else x.sum()


def _binary_focal(f, y, t, alpha, gamma):
    """Equal to torchvision.ops.sigmoid_focal_loss."""
    p = y.sigmoid()
    p_t = p * t + (1 - p) * (1 - t)
    loss = f.binary_cross_entropy_with_logits(y, t, reduction="none") * (1 - p_t) ** gamma
    return loss if alpha < 0 else (alpha * t + (1 - alpha) * (1 - t)) * loss


def _kl(f, y, p, heat, reduction):
    over = "batchmean" if reduction == "mean" else "sum"
    return heat**2 * f.kl_div((y / heat).log_softmax(-1), p, reduction=over)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_elementwise_losses_are_those_of_torch(case, reduction):
    torch = pytest.importorskip("torch")
    name, options, reference = CASES[case]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 3)).astype(np.float32)
    t = (
        rng.uniform(0, 1, (5, 3)).astype(np.float32)
        if name.startswith("b")
        else rng.standard_normal((5, 3)).astype("f")
    )
    model = linear()
    loss, gradient = loss_and_gradient(model, x, t, loss=Loss(name, **{"reduction": reduction, **options}))
    w = torch.tensor(np.frombuffer(model.graph.initializer[0].raw_data, np.float32).copy(), requires_grad=True)
    expected = reference(torch.nn.functional, torch.tensor(x) + w, torch.tensor(t), reduction)
    same(loss, gradient, expected, w)


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
    loss, gradient = loss_and_gradient(model, x, t, loss=Loss(name, **options))
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
    same(loss, gradient, expected, w)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, [0.2, 1.0, 3.0]])
@pytest.mark.parametrize("ignore", [None, 1])
@pytest.mark.parametrize("name", ["smoothed", "focal", "focal_root"])
def test_smoothed_and_focal_losses_are_those_of_torch(name, ignore, weight, reduction):
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    rng = np.random.default_rng(2)
    x, t = rng.standard_normal((6, 3, 4)).astype(np.float32), rng.integers(0, 3, (6, 4))
    options = {"reduction": reduction, "weight": weight, "ignore_index": ignore}
    own = {"smoothed": {"label_smoothing": 0.2}, "focal": {}, "focal_root": {"gamma": 0.5}}[name]
    loss = "cross_entropy" if name == "smoothed" else "focal"
    model = linear(("N", 3, 4))
    found, gradient = loss_and_gradient(model, x, t, loss=Loss(loss, **{**options, **own}))
    w = np.frombuffer(model.graph.initializer[0].raw_data, np.float32).reshape(3, 4).copy()
    w = torch.tensor(w, requires_grad=True)
    y, target = torch.tensor(x) + w, torch.tensor(t)
    classes = None if weight is None else torch.tensor(weight)
    counts = torch.ones_like(target, dtype=torch.bool) if ignore is None else target != ignore
    if loss == "cross_entropy":
        kept = -100 if ignore is None else ignore
        expected = f.cross_entropy(y, target, classes, ignore_index=kept, reduction=reduction, label_smoothing=0.2)
    else:
        nll = f.cross_entropy(y, target, reduction="none")
        rows = (1 - (-nll).exp()) ** own.get("gamma", 2.0) * nll
        rows = rows if classes is None else rows * classes[target]
        expected = rows[counts].mean() if reduction == "mean" else rows[counts].sum()
    same(found, gradient, expected, w)


IDS = np.int64([0, 1, 0, 2, 1, 0])


@pytest.mark.torch
@pytest.mark.parametrize("mining", ["all", "hard"])
def test_triplets_are_those_of_torch(mining):
    """PyTorch's loss of the triplets, one by one."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(5).standard_normal((6, 3)).astype(np.float32)
    model = linear()
    options = {"margin": 0.6, "mining": mining}
    loss, gradient = loss_and_gradient(model, x, IDS, loss=Loss("triplet", **options))
    w = torch.tensor(np.frombuffer(model.graph.initializer[0].raw_data, np.float32).copy(), requires_grad=True)
    y = torch.tensor(x) * (1 + 0 * w) + w
    apart = torch.pairwise_distance(y[:, None], y[None])
    rows = []
    for a in range(6):
        same = [p for p in range(6) if p != a and IDS[p] == IDS[a]]
        others = [n for n in range(6) if IDS[n] != IDS[a]]
        if same and mining == "hard":
            same, others = [max(same, key=lambda p: apart[a, p])], [min(others, key=lambda n: apart[a, n])]
        rows += [torch.nn.functional.triplet_margin_loss(y[a], y[p], y[n], margin=0.6) for p in same for n in others]
    expected = torch.stack(rows).mean()
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("ids", [IDS, np.int64([0, 0, 1, 1, 2, 2])], ids=["several", "pairs"])
def test_info_nce_is_that_of_torch(ids):
    """Cross entropy of the cosines to all others, at each row with the same label (in pairs: NT-Xent)."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(6).standard_normal((6, 3)).astype(np.float32)
    model = linear()
    loss, gradient = loss_and_gradient(model, x, ids, loss=Loss("info_nce", temperature=0.5))
    w = torch.tensor(np.frombuffer(model.graph.initializer[0].raw_data, np.float32).copy(), requires_grad=True)
    z = torch.nn.functional.normalize(torch.tensor(x) + w, dim=1)
    cosines = (z @ z.T / 0.5).masked_fill(torch.eye(6, dtype=torch.bool), float("-inf"))
    rows = []
    for a in range(6):
        same = [p for p in range(6) if p != a and ids[p] == ids[a]]
        if same:
            targets = torch.tensor(same)
            rows.append(torch.nn.functional.cross_entropy(cosines[a].expand(len(same), 6), targets))
    expected = torch.stack(rows).mean()
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad, rtol=1e-3, atol=1e-6)


def test_nothing_to_compare_is_no_loss():
    """A batch of one class, or of different ones: 0, with a derivative of 0, and not 0/0."""
    x = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
    for ids in (np.zeros(4, np.int64), np.arange(4)):
        for options in ({"mining": "all"}, {"mining": "hard"}):
            loss, gradient = loss_and_gradient(linear(), x, ids, loss=Loss("triplet", **options))
            assert loss == 0
            np.testing.assert_array_equal(gradient, 0)
    loss, gradient = loss_and_gradient(linear(), x, np.arange(4), loss="info_nce")
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)


def test_rows_of_zeros_have_a_finite_derivative():
    model = model_of([node("Mul", ["x", "w"], ["y"])], {"w": np.float32([0, 0, 0])}, {"x": ["N", 3]}, {"y": ["N", 3]})
    x, t = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    for options in ({"loss": "cosine", "x": (x, t)}, {"loss": "triplet", "x": (x, np.int64([0, 0]))}):
        (a, b), name = options["x"], options["loss"]
        assert np.isfinite(loss_and_gradient(model, a, b, loss=name)[1]).all()


def test_classes_last():
    """Scores [N, T, C] with `axis` -1 meet labels [N, T], as the transposed scores do."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    t = rng.integers(0, 3, (2, 5))
    last, _ = loss_and_gradient(linear(("N", 5, 3)), x, t, loss=Loss("cross_entropy", axis=-1))
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


def test_labels_fit_the_prediction():
    def label(**options):
        (value,) = attach(**options).training_info[0].algorithm.input
        held = value.type.tensor_type
        return value.name, held.elem_type, [d.dim_param or d.dim_value for d in held.shape.dim]

    assert label(model=mlp(), loss="mse") == ("labels", 1, ["N", 3])
    assert label(model=mlp(dtype=np.float64), loss="mse") == ("labels", 11, ["N", 3])
    assert label(model=mlp(), loss="cross_entropy", labels="digit") == ("digit", 7, ["N"])
    assert label(model=linear(("N", 5, 3)), loss=Loss("nll", axis=-1)) == ("labels", 7, ["N", 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mae"}, "there is no loss 'mae'; there are: cross_entropy"),
        ({"loss": Loss("mse", delta=1)}, "the loss 'mse' has no option 'delta'"),
        ({"loss": Loss("mse", reduction="none")}, "a loss is a scalar"),
        ({"loss": Loss("huber", delta=0)}, "delta must be positive"),
        ({"loss": Loss("focal", gamma=-1)}, "gamma must not be negative"),
        ({"loss": Loss("kl", temperature=0)}, "temperature must be positive"),
        ({"loss": Loss("kl", targets="words")}, "targets must be 'logits' or 'probabilities'"),
        ({"loss": Loss("triplet", mining="soft")}, "mining must be 'all' or 'hard'"),
        ({"loss": "cross_entropy:label_smoothing=2"}, "label_smoothing must be between 0 and 1"),
        ({"loss": "huber:delta=big"}, "delta must be a number, not 'big'"),
        ({"loss": "half*mse"}, "begins with 'half', which is no number"),
        ({"loss": []}, "there is no loss to minimize"),
        ({"loss": 3}, "a loss is a name, a model or a function, not a int"),
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


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 1}, {"weight": [0.5, 2.0, 1.0, 3.0], "ignore_index": 2}, {"reduction": "sum"}]
)
def test_scores_whose_classes_were_last_are_taken_as_rows(rank, options):
    """The same loss and gradient as where an Identity hides the Transpose; and no Transpose is left."""
    places = (5, 2)[: rank - 2]
    perm = [0, rank - 1, *range(1, rank - 1)]
    moved = node("Transpose", ["y"], ["z"], perm=perm)
    hidden = [node("Transpose", ["y"], ["t"], perm=perm), node("Identity", ["t"], ["z"])]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, *places, 4)).astype(np.float32)
    labels = rng.integers(0, 4, (3, *places))
    transposes, found = [], []
    for last in ([moved], hidden):
        w = np.zeros((*places, 4), np.float32)
        nodes = [node("Add", ["x", "w"], ["y"]), *last]
        model = model_of(nodes, {"w": w}, {"x": ("N", *places, 4)}, {"z": ("N", 4, *places)})
        step = compile_step(attach(model, optimizer="sgd", loss=Loss("cross_entropy", **options)))
        transposes.append(any(n.op_type == "Transpose" for n in step.model.graph))
        found.append(loss_and_gradient(model, x, labels, loss=Loss("cross_entropy", **options)))
    assert transposes == [False, True]
    (loss, gradient), (expected_loss, expected) = found
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3

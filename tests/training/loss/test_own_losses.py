"""Losses of one's own: functions of arrays, formulas, weights of rows, and a curve for each term."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

import onnxgrad.eager.numpy as xp
from onnxgrad import train
from onnxgrad.eager.numpy import stop_gradient
from onnxgrad.eager.scipy.special import log_softmax
from onnxgrad.errors import BadInput
from onnxgrad.training import Loss, Trainer, attach, compile_step
from onnxgrad.training.loss.expression import Expression
from onnxgrad.training.loss.recorded import Recorded
from tests.training.nets import mlp

RNG = np.random.default_rng(0)
X, T, C = RNG.standard_normal((48, 4)).astype(np.float32), RNG.standard_normal((48, 3)), RNG.integers(0, 3, 48)


def losses_of(loss, labels, **settings):
    trainer = train(mlp(), {"x": X, **labels}, loss=loss, optimizer="sgd", learning_rate=0.1, epochs=3, **settings)
    return [record["loss"] for record in trainer.history.epochs]


def _cross_entropy(scores, labels):
    return -xp.mean(xp.take_along_axis(log_softmax(scores, axis=1), labels[:, None], axis=1))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("loss", "named", "labels"),
    [
        (lambda scores, labels: xp.mean((scores - labels) ** 2), "mse", T),
        (lambda y, labels: ((y - labels) ** 2).mean(), "mse", T),  # y is the model's output
        ("mean((scores - y)**2)", "mse", T),  # y is the labels, as scores is the prediction
        ("np.mean(np.abs(y - labels))", "l1", T),
        (_cross_entropy, "cross_entropy", C),
        ("mean(logsumexp(scores, axis=1) - take_along_axis(scores, t[:, None], axis=1)[:, 0])", "cross_entropy", C),
        ("sum((y - labels)**2)", "mse:reduction=sum", T / 100),
    ],
)
def test_a_loss_of_ones_own_trains_as_the_named_one(loss, named, labels):
    np.testing.assert_allclose(losses_of(loss, {"labels": labels}), losses_of(named, {"labels": labels}), rtol=1e-4)


HEAD = '<ir_version: 10, opset_import: ["": 21]> '
ONE = HEAD + "g (float[N, 4] x) => (float[N, 1] z) <float[4, 1] w = {1, 2, 3, 4}> { z = MatMul (x, w) }"
FLAT = HEAD + "g (float[N, 4] x) => (float[N] z) <float[4] w = {1, 2, 3, 4}> { z = MatMul (x, w) }"
BOTH = (
    HEAD
    + """g (float[N, 4] x) => (float[N, 1] z, float[N] u)
    <float[4, 1] w = {1, 2, 3, 4}, float[4] v = {1, 1, -1, 2}> { z = MatMul (x, w) u = MatMul (x, v) }"""
)
SQUARES = (
    HEAD
    + "l (float[N] a, float[N] goal) => (float c) { d = Sub (a, goal) e = Mul (d, d) c = ReduceMean<keepdims=0> (e) }"
)
GOAL, WEIGHT = RNG.standard_normal(48), RNG.uniform(0, 2, 48)
ERRORS = (X.astype(float) @ [1, 2, 3, 4] - GOAL) ** 2
OTHERS = (X.astype(float) @ [1, 1, -1, 2] - GOAL) ** 2


def first_loss(text, data, loss):
    trainer = train(onnx.parser.parse_model(text), {"x": X, **data}, loss=loss, batch_size=48, learning_rate=1e-9)
    return trainer.history.epochs[0]["loss"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("columns", [False, True], ids=["[N]", "[N, 1]"])
@pytest.mark.parametrize("text", [ONE, FLAT], ids=["scores [N, 1]", "scores [N]"])
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("mean((scores - goal)**2)", ERRORS.mean()),
        ("mean(weight * (scores - goal)**2)", (WEIGHT * ERRORS).mean()),
        ("mean(weight * mean((scores - goal)**2, axis=-1))", None),
        ("mse:labels=goal,row_weights=weight", (WEIGHT * ERRORS).sum() / WEIGHT.sum()),
        (["mse:labels=goal", "mean(weight * (scores - goal)**2)"], ERRORS.mean() + (WEIGHT * ERRORS).mean()),
        (Loss(onnx.parser.parse_model(SQUARES)), ERRORS.mean()),
    ],
)
def test_numbers_of_rows_meet_the_scores_of_their_own_row(text, loss, wanted, columns):
    """[N] beside [N, 1] would be [N, N] in a difference or a product: the mean over all pairs of rows."""
    data = {"goal": GOAL, "weight": WEIGHT}
    data = {n: a[:, None] if columns else a for n, a in data.items()}
    if wanted is None:  # of one score [N, 1] each row has a mean of its own; of [N] there is one
        wanted = (WEIGHT * ERRORS).mean() if text == ONE else WEIGHT.mean() * ERRORS.mean()
    assert np.isclose(first_loss(text, data, loss), wanted, rtol=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "loss",
    [
        "mean((scores[:, 0] - y)**2)",
        "mean((scores - y[:, None])**2)",
        lambda scores, y: xp.mean((xp.reshape(scores, (-1,)) - y) ** 2),
        ["mean((scores[:, 0] - y)**2)", "0*mse:labels=y"],
        ["0*mse:labels=y", "mean((scores[:, 0] - y)**2)"],
    ],
)
@pytest.mark.parametrize("integers", [False, True])
def test_a_loss_that_shapes_its_labels_itself(loss, integers):
    goal = (GOAL * 3).astype(int) if integers else GOAL
    wanted = ((X.astype(float) @ [1, 2, 3, 4] - goal) ** 2).mean()
    assert np.isclose(first_loss(ONE, {"y": goal}, loss), wanted, rtol=1e-4)


def test_terms_of_outputs_of_other_shapes_share_labels():
    for names in ("zu", "uz"):
        found = first_loss(BOTH, {"labels": GOAL}, [Loss("mse", output=n) for n in names])
        assert np.isclose(found, ERRORS.mean() + OTHERS.mean(), rtol=1e-4)


@pytest.mark.parametrize(("text", "other"), [(ONE, FLAT), (FLAT, ONE)])
def test_a_teacher_with_another_last_axis(text, other):
    assert abs(first_loss(text, {}, Loss("mse", teacher=onnx.parser.parse_model(other)))) < 1e-9


def test_pairs_that_a_loss_writes_itself():
    scores = X.astype(float) @ [1, 2, 3, 4]
    for loss in ("mean((scores[:, None] - y)**2)", "mean((2*scores[:, None] - 2*y[None])**2) / 4"):
        assert np.isclose(first_loss(FLAT, {"y": GOAL}, loss), ((scores[:, None] - GOAL) ** 2).mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "loss", "message"),
    [
        (BOTH, "mean((z - u)**2)", r"Sub of \[N, 1\] and \[N\] is \[N, N\]: each row meets all rows"),
        (ONE, onnx.parser.parse_model(SQUARES.replace("float[N] a", "float[N, 1] a")), "each row meets all rows"),
        (ONE, Loss("mse", labels="x"), r"the labels 'x' has shape \[N, 4\], and \[N, 1\] is expected"),
        (ONE, Loss("mse", teacher=mlp()), r"the teacher's output 'y.*' has shape \[N, 3\], and \[N, 1\] is expected"),
    ],
)
def test_rows_that_would_meet_all_rows_are_refused(text, loss, message):
    with pytest.raises(BadInput, match=message):
        first_loss(text, {"goal": GOAL}, loss)


@pytest.mark.parametrize(("loss", "labels"), [("mse", T), ("cross_entropy", C), ("focal", C)])
def test_labels_of_one_place_do_not_count_for_all_places(loss, labels):
    text = HEAD + "g (float[N, T, 4] x) => (float[N, T, 3] z) { z = MatMul (x, w) }"
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(RNG.standard_normal((4, 3)).astype(np.float32), "w"))
    rows = {"x": np.stack([X, X], 1), "labels": labels[:, None]}
    with pytest.raises(BadInput, match="have size 1 along axis 1, 'T', and 'x' has 2: each would count 2 times"):
        train(model, rows, loss=loss)


def test_scipy_is_needed_by_its_functions_alone():
    program = """if True:
        import sys
        sys.modules["scipy"] = None  # as if it were not installed
        import numpy as np
        from onnxgrad import train
        from onnxgrad.errors import BadInput
        from tests.training.nets import mlp
        data = {"x": np.ones((8, 4), np.float32), "labels": np.zeros((8, 3), np.float32)}
        train(mlp(), data, loss="mean((scores - y)**2)", learning_rate=0.1, epochs=1)
        try:
            train(mlp(), data, loss="mean(expit(scores) - y)", learning_rate=0.1, epochs=1)
        except BadInput as error:
            assert "onnxgrad[scipy]" in str(error), error
        else:
            raise AssertionError("it trained")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_labels_of_a_function_are_known_without_data_and_checked():
    step = compile_step(attach(mlp(), loss=_cross_entropy))
    assert step.batch == ["x", "labels"]
    trainer = Trainer(mlp(), loss=_cross_entropy)
    with pytest.raises(BadInput, match="the label 3 in row 0; the model tells 3 classes apart"):
        trainer.fit({"x": X, "labels": C * 0 + 3})


def test_values_of_the_model_and_further_columns_by_name():
    """A penalty on a hidden value, and a weight for each row: the names of the parameters say what they read."""

    def loss(y, h3, goal, weight):
        return xp.mean(weight[:, None] * (y - goal) ** 2) + 0.1 * xp.mean(xp.abs(h3))

    weight = RNG.uniform(0.5, 2, 48)
    trainer = train(mlp(), {"x": X, "goal": T, "weight": weight}, loss=loss, optimizer="sgd", batch_size=48)
    w = {n: t.numpy() for n, t in ((k, v.initial) for k, v in trainer.step.state.items())}
    hidden = np.tanh(X @ w["w1"] + w["b1"])
    y = hidden @ w["w2"] + w["b2"]
    wanted = (weight[:, None] * (y - T) ** 2).mean() + 0.1 * np.abs(hidden).mean()
    assert np.isclose(trainer.history.epochs[0]["loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("labels", [T, C], ids=["numbers", "classes"])
def test_terms_have_a_curve_each(labels, tmp_path):
    name = "mse" if labels is T else "cross_entropy"
    trainer = train(
        mlp(), {"x": X, "labels": labels}, loss=[name, "0.5 * mean(abs(y))"], optimizer="sgd", epochs=2, batch_size=16,
        history=tmp_path / "history.json", checkpoint=tmp_path / "kept",
    )  # fmt: skip
    history = trainer.history
    terms = [f"loss_{name}", "loss_formula"]
    assert list(history.terms) == terms
    for record in history.epochs:
        assert np.isclose(sum(record[t] for t in terms), record["loss"], rtol=1e-5)
    total = np.sum([history.terms[t].means for t in terms], axis=0)
    np.testing.assert_allclose(total, history.curve.means, rtol=1e-5)
    more = Trainer(mlp(), loss=[name, "0.5 * mean(abs(y))"], optimizer="sgd")
    more.fit({"x": X, "labels": labels}, epochs=3, batch_size=16, checkpoint=tmp_path / "kept", resume=True)
    assert len(more.history.terms[terms[0]].means) == 9


def test_terms_of_parts_of_a_batch():
    one, other = (
        train(mlp(), {"x": X, "labels": T}, loss=["mse", "0.1*l1"], optimizer="sgd", accumulate=n, batch_size=24)
        for n in (1, 3)
    )
    for term in ("loss", "loss_mse", "loss_l1"):
        assert np.isclose(one.history.epochs[0][term], other.history.epochs[0][term], rtol=1e-5)


# --- weights of rows ---------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("mse", T), ("l1", T), ("huber", T), ("smooth_l1", T), ("cosine", T), ("kl", T),
        ("bce_with_logits", (T > 0).astype(np.float32)), ("binary_focal", (T > 0).astype(np.float32)),
        ("cross_entropy", C), ("cross_entropy:label_smoothing=0.1", C), ("cross_entropy:ignore_index=1", C),
        ("cross_entropy:weight=1,2,3", C), ("focal", C), ("focal:ignore_index=1", C),
    ],
)  # fmt: skip
def test_whole_weights_are_repeated_rows(loss, labels):
    """A row of weight 2 counts as two rows, and one of weight 0 is not there."""
    weights = RNG.integers(0, 3, 48)
    named, _, options = loss.partition(":")
    text = f"{named}:row_weights=importance{',' + options if options else ''}"
    again = np.repeat(np.arange(48), weights)
    found = Trainer(mlp(), loss=text, optimizer="sgd")
    wanted = Trainer(mlp(), loss=loss, optimizer="sgd")
    found.fit({"x": X, "labels": labels, "importance": weights}, batch_size=200)
    wanted.fit({"x": X[again], "labels": labels[again]}, batch_size=200)
    assert np.isclose(found.history.epochs[0]["loss"], wanted.history.epochs[0]["loss"], rtol=1e-5)
    for name, array in wanted.state().items():
        np.testing.assert_allclose(found.state()[name], array, rtol=1e-4, atol=1e-6)
    measured = found.evaluate({"x": X, "labels": labels, "importance": weights}, batch_size=5)["loss"]
    assert np.isclose(measured, wanted.evaluate({"x": X[again], "labels": labels[again]}, batch_size=7)["loss"])


def test_the_loss_of_rows_does_not_depend_on_their_batches():
    rows = {"x": X, "labels": C, "goal": T}
    smooth = Loss("cross_entropy", weight=[1, 2, 9], ignore_index=1, label_smoothing=0.2)
    trainer = Trainer(mlp(), loss=[smooth, "0.3*mse:labels=goal", "sum(scores**2 * (goal > 0)) / sum(goal > 0.0)"])
    one, other = (trainer.evaluate(rows, batch_size=n)["loss"] for n in (48, 5))
    assert np.isclose(one, other)


def test_weights_of_rows_in_parts_and_in_evaluation():
    rows = {"x": X, "labels": T, "importance": np.r_[np.zeros(24), RNG.uniform(0, 2, 24)]}  # a batch without weight
    one, other = (Trainer(mlp(), loss="mse:row_weights=importance", optimizer="sgd", accumulate=n) for n in (1, 3))
    assert np.isclose(one.evaluate(rows, batch_size=48)["loss"], one.evaluate(rows, batch_size=5)["loss"], rtol=1e-5)
    for trainer in (one, other):
        trainer.fit(rows, batch_size=24, shuffle=False)
    for name, array in one.state().items():
        np.testing.assert_allclose(other.state()[name], array, rtol=1e-4, atol=1e-6)


# --- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda scores, labels: scores - labels, r"gives float32\[N, 3\]; a loss is a float scalar"),
        (lambda scores: scores.unknown, "cannot be recorded: AttributeError"),
        (lambda *arrays: arrays[0], "is a function of arrays by position"),
        (Loss(lambda y: xp.mean(y), delta=1), "is a function, which takes no options"),
        (Loss("mean(y)", row_weights="w"), "let it read 'w' itself"),
        ("triplet:row_weights=w", "for losses of single rows"),
        ("mean(a*b)", "names no value of the model, so its prediction is not known"),
        (int, "not the class int"),
    ],
)
def test_losses_that_are_refused(loss, message):
    with pytest.raises(BadInput, match=message):
        attach(mlp(), loss=loss)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('ls')", "y.mean()", "(lambda: 1)()", "sum(i for i in y)", "mean(f'{y}')",
        "mean(y) if y else 0", "exec(y)", "np.load(y)", "mean('a')", "mean(y, **y)", "zeros(9)(y)", "mean(y[y])",
        "getattr(y, 'x')", "y.__class__(1)", "np.__dict__(y)", "mean(y := 1)", "mean(1j*y)", "mean(*y)",
    ],
)  # fmt: skip
def test_texts_that_are_no_formulas(text):
    """A text from elsewhere runs nothing: each construct that is not arithmetic is refused when it is read."""
    with pytest.raises(BadInput):
        Expression(text)


def test_formulas_that_would_take_long():
    for text in ("mean(9**9**9**9 * y)", "mean(10**400 * y)", "mean(1e999 * y)"):
        with pytest.raises(BadInput, match=r"no finite number|no number"):
            attach(mlp(), loss=text)
    for text in ("-" * 200 + "mean(y)", "mean(" * 300 + "y" + ")" * 300, "mean(y)" + "+mean(y)" * 1000):
        with pytest.raises(BadInput, match="formula"):
            Expression(text)


def test_a_branch_of_python_is_found_on_the_first_batch():
    """The recording follows the branch of its own example, and another batch would take the other branch."""

    def loss(scores, labels):
        large = float(stop_gradient(xp.max(labels))) > 2
        return xp.mean(xp.abs(scores - labels)) if large else xp.mean((scores - labels) ** 2)

    trainer = Trainer(mlp(), loss=loss)
    with pytest.raises(BadInput, match=r"of the first batch, and its recorded graph gives[^\n]*\n  hint: Python's"):
        trainer.fit({"x": X, "labels": T * 10})


def test_a_wrong_derivative_is_found_on_the_first_batch():
    from onnxgrad.eager import export

    graph = export(lambda y: xp.mean(y**2) + xp.mean(xp.floor(y) - y), np.ones((2, 3), np.float32))
    recorded = Recorded("own", graph, lambda y: float((y**2).mean()), ("y",), frozenset({"y"}))
    with pytest.raises(BadInput, match="first batch"):
        recorded.check({"y": np.float32([[1.2, 2.1, 3.3], [0.4, 5.2, 1.7]])})

"""The objective: sums of losses, teachers, losses that are graphs, and further measures of a step."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.training import Loss, attach, compile_step
from onnxgrad.training.spec.validation import validate
from tests.training.nets import initial, mlp, model_of, run, session

node = helper.make_node


def results(model, batch, *outputs, rate=1.0):
    """The results of one step of plain descent, and how far each weight moved (its gradient, at rate 1)."""
    step = compile_step(model, outputs=list(outputs))
    onnx.checker.check_model(onnx.load_from_string(_bytes(step)), full_check=True)
    feeds = {n: batch[n] for n in step.batch} | {n: np.array(rate, np.float32) for n in step.rates}
    feeds |= {t.input: a for n, a in initial(step).items() for t in [step.state[n]]}
    made = session(step.model)
    found = dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))
    moved = {n: a - found[step.state[n].output] for n, a in initial(step).items() if step.state[n].kind == "parameter"}
    return {n: found[n] for n in step.results}, moved


def _bytes(step):
    return ir.to_proto(step.model).SerializeToString()


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 4)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 3, 5), "target": rng.standard_normal((5, 3)).astype(np.float32)}


def test_a_weighted_sum_is_the_sum():
    """Value and gradient of ce + mse/2 are those of the two, added; each term can be looked at."""
    two = ["cross_entropy", "0.5*mse:labels=target"]
    model = attach(mlp(), loss=two, optimizer="sgd", metrics=["gradient_norm"])
    assert not validate(model)
    found, moved = results(model, batch(), "loss_cross_entropy", "loss_mse", "gradient_norm")
    ce, one = results(attach(mlp(), loss="cross_entropy", optimizer="sgd"), batch())
    mse, other = results(attach(mlp(), loss="mse", labels="target", optimizer="sgd"), batch())
    np.testing.assert_allclose(found["loss"], ce["loss"] + 0.5 * mse["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["loss_cross_entropy"], ce["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["loss_mse"], 0.5 * mse["loss"], rtol=1e-6)
    for name, array in moved.items():
        np.testing.assert_allclose(array, one[name] + 0.5 * other[name], rtol=1e-4, atol=1e-6)
    norm = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in moved.values()))
    np.testing.assert_allclose(found["gradient_norm"], norm, rtol=1e-4)


def test_terms_share_labels_by_name_and_say_when_they_cannot():
    step = compile_step(attach(mlp(), loss=["cross_entropy", "0.1*focal"], optimizer="sgd"))
    assert step.batch == ["x", "labels"]
    with pytest.raises(BadInput, match="'labels' is a tensor of int64, not of float32\n  hint: give the labels"):
        attach(mlp(), loss=["cross_entropy", "mse"], optimizer="sgd")


def test_a_teacher_is_a_part_of_the_step():
    """The loss of distillation is that against the teacher's logits as data; its weights stay as they are."""
    teacher = mlp([node("Softmax", ["y"], ["z"])], seed=7)
    model = attach(mlp(), loss=Loss("kl", temperature=2.0, teacher=teacher), optimizer="sgd")
    assert not validate(model)
    step = compile_step(model)
    assert step.batch == ["x"]
    assert set(step.state) == {"w1", "b1", "w2", "b2"}
    found, moved = results(model, batch())
    logits = run(mlp(seed=7), {"x": batch()["x"]})["y"]
    fed = attach(mlp(), loss="kl:temperature=2", optimizer="sgd")
    wanted, by = results(fed, {**batch(), "labels": logits})
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for name in by:
        np.testing.assert_allclose(moved[name], by[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_a_teacher_among_the_options(last):
    """A file name at the end of the options is not one of a loss."""
    text = "0.5*kl:temperature=2,teacher=t.onnx" if last else "0.5*kl:teacher=t.onnx,temperature=2"
    assert Loss.of(text) == Loss("kl", factor=0.5, temperature=2, teacher="t.onnx")
    assert Loss.of("2*losses/kl:v2.onnx") == Loss("losses/kl:v2.onnx", factor=2.0)


def test_probabilities_of_a_teacher():
    """kl of probabilities is kl of their logarithms as logits."""
    logits = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    one, _ = results(attach(mlp(), loss="kl", optimizer="sgd"), {**batch(), "labels": logits})
    other, _ = results(attach(mlp(), loss="kl:targets=probabilities", optimizer="sgd"), {**batch(), "labels": p})
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("teacher", "loss", "message"),
    [
        (lambda: mlp(seed=1), "cross_entropy", "takes class numbers, which a teacher does not give"),
        (lambda: _two_inputs(), "kl", "the teacher has the input 'a', which the model has not; it has: 'x'"),
    ],
)
def test_teachers_that_do_not_fit(teacher, loss, message):
    with pytest.raises(BadInput, match=message):
        attach(mlp(), loss=Loss(loss, teacher=teacher()), optimizer="sgd")


def _two_inputs():
    return model_of([node("Add", ["a", "b"], ["c"])], {}, {"a": ["N", 3], "b": ["N", 3]}, {"c": ["N", 3]})


def _scaled_mse(opset=21):
    """A loss of one's own: y, the labels and a weight per row, all with names of their own; and the largest error."""
    graph = onnx.parser.parse_graph("""
        own (float[N, 3] scores, float[N, 3] goal, float[N] importance) => (float loss, float worst) {
            d = Sub (scores, goal)  dd = Mul (d, d)  rows = ReduceSum (dd, axis)
            weighted = Mul (rows, importance)
            loss = ReduceMean <keepdims = 0> (weighted)
            worst = ReduceMax <keepdims = 0> (dd)
        }""")
    graph.initializer.append(numpy_helper.from_array(np.int64([1]), "axis"))
    for n in graph.node:
        if n.op_type == "ReduceSum":
            n.attribute.append(helper.make_attribute("keepdims", 0))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _check_scaled(model):
    data = {**batch(), "goal": batch()["target"], "importance": np.float32([1, 2, 3, 4, 5])}
    found, moved = results(model, data)
    y = run(mlp(), {"x": data["x"]})["y"].astype(np.float64)
    wanted = (((y - data["goal"]) ** 2).sum(1) * data["importance"]).mean()
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)
    gradient = (2 * (y - data["goal"]) * data["importance"][:, None] / 5).sum(0)
    np.testing.assert_allclose(moved["b2"], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 21])
def test_a_loss_that_is_a_model(opset, tmp_path):
    """Its first input takes the prediction, the others become data; from memory and from a file."""
    loss = _scaled_mse(opset)
    onnx.save(loss, tmp_path / "own.onnx")
    for given in (loss, str(tmp_path / "own.onnx")):
        _check_scaled(attach(mlp(), loss=given, optimizer="sgd"))
    found, _ = results(
        attach(mlp(), loss=loss, optimizer="sgd"),
        {**batch(), "goal": batch()["target"], "importance": np.ones(5, np.float32)},
        "worst",
    )
    y = run(mlp(), {"x": batch()["x"]})["y"]
    np.testing.assert_allclose(found["worst"], ((y - batch()["target"]) ** 2).max(), rtol=1e-5)


def test_a_loss_that_is_a_function():
    """A FunctionProto; inputs that have the name of a value of the model take that value: here a hidden layer."""
    function = onnx.parser.parse_function("""
        <opset_import: ["": 21], domain: "own">
        sparse (scores, goal, h3) => (loss) {
            d = Sub (scores, goal)
            dd = Mul (d, d)
            a = ReduceMean <keepdims = 0> (dd)
            h = Abs (h3)
            b = ReduceMean <keepdims = 0> (h)
            loss = Add (a, b)
        }""")
    model = attach(mlp(), loss=function, optimizer="sgd")
    assert compile_step(model).batch == ["x", "goal"]
    found, _ = results(model, {**batch(), "goal": batch()["target"]})
    w = {t.name: numpy_helper.to_array(t) for t in mlp().graph.initializer}
    h = np.tanh(batch()["x"] @ w["w1"] + w["b1"])
    wanted = ((h @ w["w2"] + w["b2"] - batch()["target"]) ** 2).mean() + np.abs(h).mean()
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def test_a_loss_written_with_onnxscript():
    pytest.importorskip("onnxscript")
    from tests.training.scripted import margin

    data = {**batch(), "goal": np.sign(batch()["target"])}
    found, _ = results(attach(mlp(), loss=["0.5*mse:labels=target", Loss(margin)], optimizer="sgd"), data)
    y = run(mlp(), {"x": data["x"]})["y"]
    wanted = 0.5 * ((y - data["target"]) ** 2).mean() + np.maximum(1 - y * data["goal"], 0).mean()
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def test_a_graph_that_is_no_loss():
    with pytest.raises(BadInput, match=r"gives float32\[.*\]; a loss is a float scalar"):
        attach(mlp(), loss=_two_inputs(), optimizer="sgd")
    double = model_of([node("ReduceMean", ["a"], ["c"], keepdims=0)], {}, {"a": ["N", 3]}, {"c": []}, dtype=11)
    with pytest.raises(BadInput, match="takes 'a' as a tensor of float64, and 'y' is one of float32"):
        attach(mlp(), loss=double, optimizer="sgd")
    with pytest.raises(BadInput, match="is a graph, which takes no options"):
        attach(mlp(), loss=Loss(_scaled_mse(), delta=1), optimizer="sgd")


def test_metrics_are_those_of_numpy():
    data = batch()
    data["labels"][0] = 1
    y = run(mlp(), {"x": data["x"]})["y"]
    hit = y.argmax(1) == data["labels"]
    found, _ = results(attach(mlp(), loss="cross_entropy", metrics=["accuracy", "top5"]), data, "accuracy", "top5")
    np.testing.assert_allclose(found["accuracy"], hit.mean(), rtol=1e-6)
    assert found["top5"] == 1, "of three classes, the label is always among the best five"
    ignoring = attach(mlp(), loss="focal:ignore_index=1", metrics=["accuracy"])
    found, _ = results(ignoring, data, "accuracy")
    np.testing.assert_allclose(found["accuracy"], hit[data["labels"] != 1].mean(), rtol=1e-6)
    found, _ = results(
        attach(mlp(), loss="mse", metrics=["mse", "mae"]), {**data, "labels": data["target"]}, "mse", "mae"
    )
    np.testing.assert_allclose(found["mae"], np.abs(y - data["target"]).mean(), rtol=1e-5)
    np.testing.assert_array_equal(found["mse"], found["loss"])
    binary = (data["target"] > 0).astype(np.float32)
    model = attach(mlp(), loss="bce_with_logits", metrics="accuracy, gradient_norm")
    found, _ = results(model, {**data, "labels": binary}, "accuracy")
    np.testing.assert_allclose(found["accuracy"], ((y > 0) == (binary > 0.5)).mean(), rtol=1e-6)


def test_metrics_that_do_not_fit():
    with pytest.raises(BadInput, match="there is no metric 'f1'; there are: accuracy, top5"):
        attach(mlp(), loss="mse", metrics=["f1"])
    with pytest.raises(BadInput, match="accuracy does not fit the labels of this loss; these do: mae, mse"):
        attach(mlp(), loss="mse", metrics=["accuracy"])


def test_what_nobody_reads_is_not_written():
    """The Softmax of a teacher that is stripped, and copies that no loss reads, are not left in the algorithm."""
    teacher = mlp([node("Softmax", ["y"], ["z"])], seed=7)
    algorithm = attach(mlp(), loss=Loss("kl", teacher=teacher)).training_info[0].algorithm
    assert "Softmax" not in {n.op_type for n in algorithm.node}

"""Predictions whose rows do not lie along the first axis, against labels with the rows first."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, attach, evaluate, predict


def tagger(inputs="N,T,4", outputs="T,N,3", perm="1,0,2", after="y = Identity (z)"):
    """Scores [time, rows, classes] of rows [rows, time, 4], as recurrent networks are exported."""
    proto = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        tagger (float[{inputs}] x) => (float[{outputs}] y) {{
          turned = Transpose <perm = [{perm}]> (x)
          z = MatMul (turned, w)
          {after}
        }}""")
    weight = np.zeros((4, 3), np.float32)
    weight[:3] = 4 * np.eye(3)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return proto, weight


def rows(n, t, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, (n, t))
    x = np.eye(4)[labels] + 0.1 * rng.standard_normal((n, t, 4))
    return {"x": x.astype(np.float32), "labels": labels}


def wanted(data, weight):
    """Cross entropy and accuracy, by their definitions."""
    scores = data["x"].astype(np.float64) @ weight
    surprise = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, data["labels"][..., None], -1)[..., 0]
    return surprise.mean(), (scores.argmax(-1) == data["labels"]).mean()


SHAPES = {
    "named": ("N,T,4", "T,N,3"),
    "open": ("?,?,4", "?,?,3"),
    "named otherwise": ("N,T,4", "a,b,3"),
    "of sizes": ("{n},{t},4", "{t},{n},3"),
    "named wrongly": ("N,T,4", "N,T,3"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("n", "t"), [(6, 5), (5, 5), (6, 1), (1, 4)])
def test_scores_with_time_first_meet_the_labels_of_their_rows(shapes, n, t):
    proto, weight = tagger(*(text.format(n=n, t=t) for text in SHAPES[shapes]))
    data = rows(n, t)
    loss, accuracy = wanted(data, weight)
    trainer = Trainer(proto, loss="cross_entropy")
    trained = trainer.evaluate(data, batch_size=n)
    np.testing.assert_allclose([trained["loss"], trained["accuracy"]], [loss, accuracy], rtol=1e-5)
    np.testing.assert_allclose(trainer.machine.step(data)["loss"], loss, rtol=1e-5)
    measured = evaluate(proto, data, metrics="log_loss,accuracy", batch_size=n).metrics
    np.testing.assert_allclose([measured["log_loss"], measured["accuracy"]], [loss, accuracy], rtol=1e-5)
    np.testing.assert_allclose(predict(proto, {"x": data["x"]}, batch_size=n)["y"], data["x"] @ weight, rtol=1e-5)


@pytest.mark.parametrize("outputs", ["T,3,N", "3,T,N"])
def test_classes_between_or_before_time_and_rows(outputs):
    perm = "0,2,1" if outputs.startswith("T") else "2,0,1"
    proto, weight = tagger(outputs=outputs, after=f"y = Transpose <perm = [{perm}]> (z)")
    data = rows(3, 3)
    loss, accuracy = wanted(data, weight)
    trained = Trainer(proto, loss="cross_entropy").evaluate(data)
    np.testing.assert_allclose([trained["loss"], trained["accuracy"]], [loss, accuracy], rtol=1e-5)
    measured = evaluate(proto, data, metrics="log_loss,accuracy").metrics
    np.testing.assert_allclose([measured["log_loss"], measured["accuracy"]], [loss, accuracy], rtol=1e-5)


def test_training_on_them_leaves_a_right_model_right():
    proto, weight = tagger()
    data = rows(40, 7)
    history = Trainer(proto, loss="cross_entropy").fit(data, epochs=3, batch_size=8)
    assert history.epochs[-1]["loss"] < wanted(data, weight)[0] < 0.1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("loss", ["mse", "l1", "cosine", "kl", "focal", "nll"])
def test_other_losses_of_them_are_those_of_the_model_with_rows_first(loss):
    data = rows(5, 5)
    if loss in ("mse", "l1", "cosine", "kl"):
        data["labels"] = np.random.default_rng(1).standard_normal((5, 5, 3)).astype(np.float32)
    found = [
        Trainer(m, loss=loss).machine.step(data)["loss"] for m in (tagger()[0], tagger("N,T,4", "N,T,3", "0,1,2")[0])
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_ctc_reads_them_without_being_told():
    data = rows(5, 5)
    data["labels"] = data["labels"][:, :2] + 1
    data["labels"] %= 3
    found = [
        Trainer(m, loss="ctc").machine.step(data)["loss"] for m in (tagger()[0], tagger("N,T,4", "N,T,3", "0,1,2")[0])
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_ctc_told_that_the_rows_are_time_is_refused():
    data = {"x": np.ones((5, 5, 4), np.float32), "labels": np.ones((5, 2), np.int64)}
    proto = tagger("N,T,4", "N,T,3", "0,1,2")[0]
    with pytest.raises(
        BadInput, match=r"'x' lie along its first axis 'N', and those of the labels 'labels' along 'T'.*\n.*time=0"
    ):
        Trainer(proto, loss="ctc:time=0").fit(data)


def test_the_axis_of_the_rows_is_not_that_of_the_classes():
    with pytest.raises(BadInput, match=r"axis=1 .* is that of the rows"):
        attach(tagger()[0], loss="cross_entropy:axis=1")


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy:axis=-1,block_rows=4"])
def test_labels_in_another_order_of_axes_are_refused(loss):
    """Labels with as many elements and rows as scores, but [rows, width, height] for [rows, height, width]."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        pixels (float[N,H,W,4] x) => (float[N,H,W,3] y) { y = MatMul (x, w) }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    trainer = Trainer(proto, loss=loss)
    x = np.ones((2, 3, 5, 4), np.float32)
    trainer.machine.step({"x": x, "labels": np.zeros((2, 3, 5), np.int64)})
    with pytest.raises(BadInput):
        trainer.machine.step({"x": x, "labels": np.zeros((2, 5, 3), np.int64)})


@pytest.mark.parametrize(("perm", "axis"), [("0,1,2", -1), ("0,2,1", 1)])
def test_the_class_axis_of_a_square_is_that_of_the_model(perm, axis):
    """Equally many classes and time steps: sizes do not identify the axis."""
    proto, weight = tagger("N,T,4", "N,a,b", "0,1,2", f"y = Transpose <perm = [{perm}]> (z)")
    data = rows(6, 3)
    if axis == 1:
        del proto.graph.output[0].type.tensor_type.shape.dim[:]
        proto.graph.output[0].type.CopyFrom(tagger("N,T,4", "N,3,b")[0].graph.output[0].type)
    else:
        proto.graph.output[0].type.CopyFrom(tagger("N,T,4", "N,a,3")[0].graph.output[0].type)
    measured = evaluate(proto, data, metrics="log_loss,accuracy").metrics
    np.testing.assert_allclose([measured["log_loss"], measured["accuracy"]], wanted(data, weight), rtol=1e-5)


def test_the_classes_of_a_square_of_which_nothing_is_known_lie_along_the_axis_that_is_named():
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        square (float[N,T,S] x) => (float[N,a,b] y) { y = Relu (x) }""")
    rng = np.random.default_rng(0)
    data = {"x": rng.random((4, 3, 3), np.float32), "labels": rng.integers(0, 3, (4, 3))}
    with pytest.raises(BadInput, match=r"along which axis are the classes.*\n.*--class-axis 1 or -1"):
        evaluate(proto, data)
    for axis in (1, 2, -1):
        right = (data["x"].argmax(axis) == data["labels"]).mean()
        assert evaluate(proto, data, class_axis=axis).metrics["accuracy"] == pytest.approx(right)
    for axis in (0, 3, -3, -4):
        with pytest.raises(BadInput, match=r"labels 'labels' are \[4, 3\] and the predictions 'y' \[4, 3, 3\]"):
            evaluate(proto, data, class_axis=axis)


@pytest.mark.parametrize("axis", [1, -1])
def test_a_trained_square_notes_the_axis_of_its_loss(axis):
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        square (float[N,3,3] x) => (float[N,3,3] y) <float[1] w = {1}> { y = Mul (x, w) }""")
    rng = np.random.default_rng(0)
    data = {"x": rng.random((4, 3, 3), np.float32), "labels": rng.integers(0, 3, (4, 3))}
    trainer = Trainer(proto, loss=f"cross_entropy:axis={axis}", trainable=["w"])
    trainer.fit(data)
    right = (data["x"].argmax(axis) == data["labels"]).mean()
    assert evaluate(trainer.inference_model(), data).metrics["accuracy"] == pytest.approx(right)


def test_the_classes_of_a_matrix_product_without_declared_sizes_are_last():
    """Evaluation infers the shapes that the file does not declare, as training does."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        square (float[N,5,4] x) => (float[N,5,5] y) { z = MatMul (x, w)
            y = Add (b, z) }""")
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 5)).astype(np.float32)
    proto.graph.initializer.extend([numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight[0], "b")])
    data = {"x": rng.random((6, 5, 4), np.float32), "labels": rng.integers(0, 5, (6, 5))}
    right = ((data["x"] @ weight + weight[0]).argmax(2) == data["labels"]).mean()
    assert evaluate(proto, data, metrics="accuracy").metrics["accuracy"] == pytest.approx(right)

"""Mistakes of a new user: each is one clear error with its subject and a remedy, never a traceback."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.keywords import UnknownKeyword, check_keywords
from onnxgrad.training import Optimizer, Trainer, attach, evaluate, predict
from onnxgrad.training.loop.callbacks import KeepBest
from tests.training.models import blobs, classifier

B = blobs()
C = classifier()


def trainer(**settings):
    return Trainer(C, **{"loss": "cross_entropy", **settings})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trainer(batchsize=3), r"Trainer has no argument 'batchsize'; did you mean 'batch_size'"),
        (lambda: trainer(learning_rat=0.1), "did you mean 'learning_rate'"),
        (
            lambda: trainer().fit(B, batchsize=3),
            r"Trainer.fit has no argument 'batchsize'; did you mean 'batch_size'\?",
        ),
        (lambda: trainer().fit(B, num_epochs=3), "did you mean 'epochs'"),
        (lambda: onnxgrad.train(C, B, loss="mse", row_weights="w"), r"option of the loss: loss='mse:row_weights=…'$"),
        (lambda: trainer(sample_weight="w"), r"option of the loss: loss='mse:row_weights=…'$"),
        (lambda: onnxgrad.train(C, B, loss="mse", weight=2), r"'\w+:weight=…'; or do you mean 'weight_decay'\?"),
        (lambda: attach(C, label_smoothing=0.1), r"loss='cross_entropy:label_smoothing=…'"),
        (lambda: onnxgrad.train(C, B, loss="mse", warmup=9), r"option of the schedule: schedule='linear:warmup=…'"),
        (lambda: trainer().fit(B, validation_data=B), "did you mean 'validation'"),
        (lambda: trainer().fit(B["x"], B["labels"], 3), "takes data, y without a name, and 1 more are given"),
        (lambda: trainer().evaluate(B, metric="auc"), "did you mean 'metrics'"),
        (lambda: trainer().predict(B, output="y"), "did you mean 'outputs'"),
        (lambda: onnxgrad.train(C, B, loss="cross_entropy", epoch=3), "train has no argument 'epoch'; did you mean"),
        (lambda: evaluate(C, B, metric=["accuracy"]), "evaluate has no argument 'metric'; did you mean 'metrics'"),
        (lambda: predict(C, B, batchsize=3), "predict has no argument 'batchsize'"),
        (lambda: attach(C, optimzer="adam"), "attach has no argument 'optimzer'; did you mean 'optimizer'"),
        (lambda: onnxgrad.grad(C, wtr=["x"]), "grad has no argument 'wtr'; did you mean 'wrt'"),
        (lambda: onnxgrad.LoRA(rnk=3), "LoRA has no argument 'rnk'; did you mean 'rank'"),
        (lambda: onnxgrad.Options(thread=1), "Options has no argument 'thread'; did you mean 'threads'"),
        (lambda: onnxgrad.Function(C, output="y"), "Function has no argument 'output'; did you mean 'outputs'"),
        (lambda: onnxgrad.sparse_jacobian(C, wrt="x", off="y"), "did you mean 'of'"),
        (lambda: onnxgrad.jacobian(C, argnums=["x"]), "did you mean 'wrt'"),
    ],
)
def test_arguments_that_there_are_not(call, words):
    with pytest.raises(UnknownKeyword, match=words) as found:
        call()
    assert isinstance(found.value, TypeError), "as Python's own"


def test_a_function_that_takes_any_name_is_left_alone():
    def anything(model, *, rows=1, **settings):
        return settings

    assert check_keywords(anything)(3, loss="mse") == {"loss": "mse"}


def test_short_names_are_settings_too():
    assert Optimizer("adam", lr=0.1).settings == {"learning_rate": 0.1}
    assert next(iter(trainer(lr=0.25).step.rates.values())).numpy() == 0.25


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Optimizer("momentum", momentm=0.1), "no setting 'momentm'.*\n  hint: did you mean 'momentum'"),
        (lambda: trainer(optimizer="adm"), "there is no optimizer 'adm'.*\n  hint: did you mean 'adam'"),
        (lambda: trainer(loss="crossentropy"), "did you mean 'cross_entropy'"),
        (lambda: trainer(loss="cross_entropy:label_smothing=1"), "did you mean 'label_smoothing'"),
        (lambda: trainer(loss="bce"), "did you mean 'bce_with_logits'"),
        (lambda: trainer(loss="MSELoss"), "did you mean 'mse'"),
        (lambda: trainer(loss="mae"), "did you mean 'l1'"),
        (lambda: trainer(epochs=3), "Trainer has no argument 'epochs'; its method fit has"),
        (
            lambda: trainer(loss="mse", labels="y"),
            r"value of the model.*\n  hint: .*--inputs labels=y .*'y'\}",
        ),
        (lambda: trainer(optimizer=3), "a name is wanted"),
        (lambda: trainer(accumulate=2.5), "accumulate is a whole number, not 2.5"),
        (lambda: trainer().fit(B, schedule="cosin"), "did you mean 'cosine'"),
        (lambda: trainer().fit(B, schedule=3), "a schedule is a name, a Schedule or a function, not a int"),
        (lambda: trainer().fit(B, epochs=2.5), "epochs is a whole number, not 2.5"),
        (lambda: trainer().fit(B, batch_size="32"), "batch_size is a whole number, not '32'"),
        (lambda: trainer().fit(B, monitor="loss", patience="3"), "patience is a whole number"),
        (lambda: trainer().fit(B, callbacks=KeepBest("loss")), "callbacks are a list of Callback"),
        (lambda: trainer(options={"threads": 1}), r"options is an Options\(…\), not {'threads': 1}"),
        (lambda: trainer(adapter="lora"), r"adapter is a LoRA\(…\), VeRA\(…\), .* or IA3\(…\), not 'lora'"),
        (lambda: trainer(dropout=0.1), "dropout is a dict"),
        (lambda: trainer(dims=["N"]), "dims is a dict"),
        (lambda: trainer().fit(B, augment=3), "augment is a text"),
        (lambda: trainer().fit(B, images="x"), "images is an Images"),
        (lambda: trainer().fit(B, validation_split="0.2"), "validation_split is a number between 0 and 1, not '0.2'"),
        (lambda: trainer().fit(B, monitor=3, patience=1), "monitor is a name"),
        (lambda: trainer().fit(B, checkpoint=3), "checkpoint is a path, not 3"),
        (lambda: trainer().evaluate(B, batch_size=0), "batch_size must be at least 1, not 0"),
        (lambda: evaluate(C, B, batch_size=0), "batch_size must be at least 1, not 0"),
        (lambda: predict(C, B, batch_size=-1), "batch_size must be at least 1, not -1"),
        (lambda: predict(C, B, batch_size="8"), "batch_size is a whole number, not '8'"),
        (lambda: evaluate(C, B, batch_size=2.5), "batch_size is a whole number, not 2.5"),
        (lambda: trainer().fit(B["x"], "labels"), r"labels, not 'labels'\n  hint: Trainer\(…, labels='labels'\)"),
        (lambda: trainer().fit(B, callbacks=[3]), "callbacks are a list of Callback"),
        (lambda: trainer().fit(B, metrics=3), "metrics are names"),
        (lambda: trainer().fit(B, metrics="auc"), "metrics are of validation data, and there are none"),
        (lambda: trainer(metrics=["auc"]), r"no metric 'auc'.*\n  hint: fit\(metrics=…\) measures validation data"),
        (lambda: trainer().fit(B, inputs={"z": "x"}), "no input named 'z'; there are: labels, x"),
        (lambda: trainer().fit(B, inputs=["x"]), "inputs are written as"),
        (lambda: evaluate(C, B, inputs={"z": "x"}), "no input named 'z'"),
    ],
)
def test_values_that_cannot_be(call, words):
    with pytest.raises(BadInput, match=words):
        call()


NAN = B["x"].copy()
NAN[3, 2] = np.nan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": B["x"][:, :4]}, r"array 'x' of the training data is float32\[90, 4\]; expected float32\[N, 6\]"),
        ({"x": B["x"].astype(str)}, "holds text .*, not numbers"),
        ({"x": B["x"].astype(object)}, "holds Python objects, not numbers"),
        ({"x": B["x"] + 1j}, "holds complex64, not numbers"),
        ({"x": NAN}, "'x' of the training data is not finite: nan in row 3"),
        ({"labels": B["labels"] + 1}, "has the label 3 in row .*3 classes apart, 0 to 2"),
        ({"labels": B["labels"] - 1}, "has the label -1"),
        ({"labels": B["labels"] + 0.5}, "holds float64 that int64 cannot"),
        ({"labels": np.eye(3)[B["labels"]]}, "class indices, not one-hot rows"),
        ({"labels": B["labels"][:5]}, "'x' has 90, 'labels' has 5"),
        ({"labels": None}, "no labels for the input 'labels'"),
        ({"x": None}, "no array for the input 'x'"),
        ({"x": B["x"][:0], "labels": B["labels"][:0]}, "the training data is empty"),
        ({"labels": np.array(list("abcdef"))[np.arange(90) % 6]}, "has 6 classes: .* the model has 3 scores"),
    ],
)
def test_data_that_do_not_fit(changes, words):
    data = {name: array for name, array in {**B, **changes}.items() if array is not None}
    with pytest.raises(BadInput, match=words):
        trainer().fit(data)


def test_a_single_row_is_trained_and_not_split():
    row = {name: array[:1] for name, array in B.items()}
    assert trainer().fit(row).epochs[0]["loss"] > 0
    with pytest.raises(BadInput, match="leaves nothing on one side"):
        trainer().fit(row, validation_split=0.2)


def test_a_class_that_only_validation_data_have():
    names = np.array(["a", "b", "c"])[B["labels"]]
    with pytest.raises(BadInput, match="the validation data has the class 'z'"):
        trainer().fit({"x": B["x"], "labels": names}, validation={"x": B["x"], "labels": ["z"] * 90})


def small(text, **weights):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    for name, shape in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    return model


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (small("(int64[N] x) => (float[N, 4] y) { y = Gather (w, x) }", w=(5, 4)), np.full(4, 9),
         "Gather.*: the index 9 is outside of the table that it looks up, whose rows are 0 to 4"),
        (small("(float[N, A] x) => (float[N, 3] y) <int64[2] s = {-1, 6}> { r = Reshape (x, s) y = MatMul (r, w) }",
               w=(6, 3)), np.ones((4, 5), np.float32),
         r"Reshape.*an array \[4, 5\] does not fill the shape \[-1, 6\]; an export may have fixed a size"),
        (small("(float[N, A] x) => (float[N, B] y) { y = Add (x, w) }", w=(6,)), np.ones((4, 5), np.float32),
         "Add.*: the sizes 5 and 6 fit neither each other nor 1"),
    ],
)  # fmt: skip
def test_what_only_the_runtime_sees_is_said_in_plain_words(model, x, words):
    for call in (
        lambda: predict(model, {"x": x}),
        lambda: Trainer(model, loss="mse", trainable=["w"]).fit({"x": x, "labels": np.ones((4, 3), np.float32)}),
        lambda: onnxgrad.Function(model)(x),
    ):
        with pytest.raises(OnnxGradError) as found:
            call()
        assert not any(raw in str(found.value) for raw in ("onnxruntime", "ONNXRuntimeError", ".cc", ".h:", "Status"))
    with pytest.raises(BadInput, match=words):
        predict(model, {"x": x})


def test_a_function_says_which_size_is_wrong():
    with pytest.raises(BadInput, match="the input 'x' has size 4 along axis 1, and the model takes 6"):
        onnxgrad.Function(C)(x=np.zeros((3, 4), np.float32))

"""Labels that no loss can mean are refused before the first step: by row, and with a remedy."""

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.training import Trainer, evaluate
from onnxgrad.training.data import Data, Field
from tests.training.loop.test_trainer import ONE

X = np.random.default_rng(0).standard_normal((8, 3), np.float32)
GOOD = np.arange(8) % 3


def model(scores=3):
    found = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> m (float[N, 3] x) => (float[N, {scores}] y) {{ y = MatMul (x, w) }}'
    )
    w = np.random.default_rng(1).standard_normal((3, scores)).astype(np.float32)
    found.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return found


def as_arrays(labels, folder):
    return {"x": X, "labels": labels}


def as_rows(labels, folder):
    return [{"x": x, "labels": t} for x, t in zip(X, labels)]


def as_stream(labels, folder):
    return iter(as_rows(labels, folder))


def as_folder(labels, folder):
    for name, array in (("x", X), ("labels", labels)):
        np.save(folder / f"{name}.npy", array)
    return folder


def as_table(labels, folder):
    pytest.importorskip("pyarrow")
    lines = [",".join(map(str, [*x, t])) for x, t in zip(X, labels)]
    (folder / "d.csv").write_text("\n".join(["a,b,c,labels", *lines]) + "\n")
    return folder / "d.csv"


def test_a_missing_label_is_refused_by_evaluate_too(tmp_path):
    pytest.importorskip("pyarrow")
    for cells in (changed(GOOD.astype(object), 4, ""), changed(GOOD.astype(object), 4, "nan")):
        with pytest.raises(BadInput, match=r"array 'labels' of .*: missing values: 1, the first in row 4"):
            evaluate(model(), as_table(cells, tmp_path), inputs={"x": "a..c"})


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.eye(3)[GOOD] * 100, "label 100 in row 0; .* from 0 to 1\n  hint: divide by 100"),
        (-np.eye(3)[GOOD], "label -1"),
    ],
)
def test_probabilities_as_targets_lie_between_0_and_1(labels, words):
    with pytest.raises(BadInput, match=words):
        Trainer(model(), loss="kl:targets=probabilities", options=ONE).fit({"x": X, "labels": labels})
    Trainer(model(), loss="kl", options=ONE).fit({"x": X, "labels": labels}, epochs=1)  # logits


def test_labels_none_of_which_counts():
    trainer = Trainer(model(), loss="cross_entropy:ignore_index=-100", options=ONE)
    with pytest.raises(BadInput, match="no label that counts: all are -100"):
        trainer.fit({"x": X, "labels": np.full(8, -100)})
    labels = np.array([0, 1, 2, 0, -100, -100, -100, -100])
    with pytest.raises(
        TrainingError, match=r"nan at step 2 .*all labels of the batch are -100, which the loss ignores"
    ):
        trainer.fit({"x": X, "labels": labels}, batch_size=4, shuffle=False)


WAYS = [as_arrays, as_rows, as_stream, as_folder, as_table]


def changed(labels, row, value):
    found = np.array(labels)
    found[row] = value
    return found


def refused(proto, data, loss, words):
    """No step is taken before the label is refused."""
    trainer = Trainer(proto, loss=loss, options=ONE)
    before = trainer.state()
    inputs = {"x": "a..c"} if str(data).endswith(".csv") else None
    with pytest.raises(BadInput, match=words):
        trainer.fit(data, inputs=inputs, batch_size=8, shuffle=False)
    after = trainer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (changed(GOOD, 5, 3), r"label 3 in row 5; the model tells 3 classes apart, 0 to 2$"),
        (changed(GOOD, 4, -100), r"label -100 in row 4; .*\n  hint: .*ignore_index=-100"),
        (changed(GOOD, 4, -1), r"label -1 in row 4; .*\n  hint: .*ignore_index=-1,"),
        (changed(GOOD, 2, 255), r"label 255 in row 2; .*\n  hint: .*ignore_index=255"),
        (GOOD + 1, r"label 3 in row 2; .*\n  hint: labels start at 0: subtract 1"),
        (
            GOOD * 7 + 3,
            r"label 3 in row 0; .*\n  hint: if the numbers are names of classes, say so: --classes 3,10,17 ",
        ),
    ],
)
def test_class_numbers_that_no_score_has(way, labels, words, tmp_path):
    refused(model(), way(labels, tmp_path), "cross_entropy", words)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (changed(GOOD > 1, 3, True) * np.uint8(255), r"label 255 in row 2; .*from 0 to 1\n  hint: divide by 255"),
        (changed(GOOD > 1, 3, True) * 2.0 - 1, r"label -1.* in row 0; .*from 0 to 1\n  hint: use 0 and 1"),
        (changed(GOOD * 0.5, 6, np.nan), r"in row 6\n  hint: .*leaves? the"),
    ],
)
@pytest.mark.parametrize("loss", ["bce_with_logits", "binary_focal"])
def test_labels_that_are_no_probabilities(way, labels, words, loss, tmp_path):
    refused(model(scores=1), way(labels, tmp_path), loss, words)


def test_soft_labels_are_probabilities():
    trainer = Trainer(model(scores=1), loss="bce_with_logits", options=ONE)
    trainer.fit({"x": X, "labels": GOOD * 0.5})


def test_negative_labels_of_an_unknown_number_of_classes():
    field = Field("labels", np.dtype(np.int64), (), label=True, indices=True)
    with pytest.raises(BadInput, match=r"label -1 in row 0; classes are numbered from 0"):
        Data({"labels": GOOD - 1}, [field])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_labels_of_16_bits_that_are_no_probabilities(dtype):
    field = Field("labels", np.dtype(dtype), (), label=True, binary=True)
    with pytest.raises(BadInput, match=r"label 2 in row 2; .*from 0 to 1\n  hint: divide by 2"):
        Data({"labels": GOOD}, [field])


def test_the_ignored_label_counts_as_none():
    labels = changed(GOOD, 4, -100)
    Trainer(model(), loss="cross_entropy:ignore_index=-100", options=ONE).fit({"x": X, "labels": labels})
    assert evaluate(model(), {"x": X, "labels": labels}, ignore_index=-100).rows == 7
    with pytest.raises(BadInput, match=r"label -100 in row 4; .*\n  hint: .*ignore_index=-100"):
        evaluate(model(), {"x": X, "labels": labels})


@pytest.mark.parametrize("loss", ["cross_entropy", "focal", "nll"])
def test_one_score_for_each_row_is_no_choice(loss):
    with pytest.raises(BadInput, match=r"'y' has one score for each row.*\n  hint: bce_with_logits"):
        Trainer(model(scores=1), loss=loss, options=ONE)


@pytest.mark.parametrize("labels", [["a", "", "b"], ["a", " ", "b"], np.array(["a", None, "b"], object)])
def test_an_empty_cell_is_no_class(labels):
    data = {"x": X[:3], "labels": np.array(labels)}
    words = r"'labels'.* has no (label|value) in row 1.*\n  hint: fill it in"
    with pytest.raises(BadInput, match=words):
        Trainer(model(), loss="cross_entropy", options=ONE).fit(data)
    with pytest.raises(BadInput, match=words):
        evaluate(model(), data)


def test_an_empty_cell_of_a_table(tmp_path):
    path = as_table(np.array([*"abcabca", ""]), tmp_path)
    refused(model(), path, "cross_entropy", "has no label in row 7: the cell is empty")
    path = as_table(np.array([*"0120120", ""]), tmp_path)
    refused(model(), path, "cross_entropy", r"missing values: 1, the first in row 7\n  hint: fill the cells in")


def test_two_names_for_one_score():
    names = np.where(GOOD == 1, "yes", "no")
    trainer = Trainer(model(scores=1), loss="bce_with_logits", options=ONE)
    trainer.fit({"x": X, "labels": names})
    assert trainer.evaluate({"x": X, "labels": names}) == trainer.evaluate({"x": X, "labels": 1.0 * (GOOD == 1)})
    assert evaluate(trainer.inference_model(), {"x": X[:2], "labels": names[:2]}).task == "binary"
    data = Data({"x": X, "labels": names}, trainer.fields)
    np.testing.assert_array_equal(data.labels, GOOD == 1)
    with pytest.raises(BadInput, match="has 3 names of classes, 'a', 'b', 'c'; one score tells 2 apart"):
        Trainer(model(scores=1), loss="bce_with_logits", options=ONE).fit({"x": X, "labels": np.array([*"abc"])[GOOD]})


def test_names_in_rows_that_are_dicts():
    rows = [{"x": x, "labels": name} for x, name in zip(X, np.array(["ant", "bee", "cat"])[GOOD])]
    trainer = Trainer(model(), loss="cross_entropy", options=ONE)
    trainer.fit(rows)
    assert trainer.evaluate(rows) == trainer.evaluate({"x": X, "labels": GOOD})

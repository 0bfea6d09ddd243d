"""Students learn from the outputs of a teacher that are kept in files, as from one inside the step."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import Loss, Trainer, teach
from tests.training.models import blobs, classifier

ROWS = {"x": blobs()["x"]}
SETTINGS = {"epochs": 3, "batch_size": 30, "progress": False}


def other(seed=5):
    model = classifier(hidden=12)
    draw = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        array = draw.standard_normal(tuple(tensor.dims)).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def losses(loss, rows):
    trainer = Trainer(classifier(), loss=loss, learning_rate=0.02)
    return [e["loss"] for e in trainer.fit(rows, **SETTINGS).epochs]


def test_kept_outputs_teach_as_the_teacher_does(tmp_path):
    taught = teach(other(), ROWS, tmp_path / "soft")
    assert list(taught) == ["teacher_y"]
    assert isinstance(taught["teacher_y"], np.memmap)
    found = losses(Loss("kl", labels="teacher_y", temperature=2.0), {**ROWS, **taught})
    wanted = losses(Loss("kl", teacher=other(), temperature=2.0), ROWS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("name", "top_k"), [("kl", None), ("kl_top_k", 3)])
def test_probabilities_of_a_teacher(name, top_k, tmp_path):
    teacher = other()
    teacher.graph.node.append(onnx.helper.make_node("Softmax", ["y"], ["p"]))
    teacher.graph.output[0].name = "p"
    taught = teach(teacher, ROWS, tmp_path / "p", top_k=top_k)
    found = losses(Loss(name, labels="teacher_p", temperature=2.0, targets="probabilities"), {**ROWS, **taught})
    wanted = losses(Loss("kl", teacher=other(), temperature=2.0), ROWS)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    with pytest.raises(BadInput, match=r"teacher_p.* has probabilities[^$]*hint: write targets=probabilities"):
        losses(Loss(name, labels="teacher_p", temperature=2.0), {**ROWS, **taught})


def test_all_classes_kept_are_the_whole_distribution(tmp_path):
    taught = teach(other(), ROWS, tmp_path / "k", top_k=3)
    assert {k: v.shape for k, v in taught.items()} == {"teacher_y": (90, 3), "teacher_y_classes": (90, 3)}
    found = losses(Loss("kl_top_k", labels="teacher_y", temperature=2.0), {**ROWS, **taught})
    wanted = losses(Loss("kl", teacher=other(), temperature=2.0), ROWS)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.torch
def test_the_likeliest_classes_are_compared_as_in_torch(tmp_path):
    torch = pytest.importorskip("torch")
    taught = teach(other(), ROWS, tmp_path / "k", top_k=2)
    trainer = Trainer(classifier(), loss=Loss("kl_top_k", labels="teacher_y", temperature=3.0), optimizer="sgd")
    loss = trainer.fit({**ROWS, **taught}, epochs=1, batch_size=90, progress=False).epochs[0]["loss"]
    y, t = (torch.tensor(onnxgrad.predict(m, ROWS)["y"]).double() / 3 for m in (classifier(), other()))
    values, classes = t.topk(2)
    log_q = torch.log_softmax(y, 1).gather(1, classes)
    wanted = 9 * torch.nn.functional.kl_div(log_q, torch.softmax(values, 1), reduction="none").sum(1).mean()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_features_of_a_layer_and_inputs_of_its_own(tmp_path):
    teacher = classifier(hidden=8)
    teacher.graph.input[0].name = teacher.graph.node[0].input[0] = "wide"
    rows = {"x": ROWS["x"], "wide": 2 * ROWS["x"]}
    taught = teach(teacher, rows, tmp_path / "f", outputs=["a", "y"])
    assert set(taught) == {"teacher_a", "teacher_y"}
    np.testing.assert_allclose(taught["teacher_y"], onnxgrad.predict(classifier(), {"x": rows["wide"]})["y"], rtol=1e-5)
    both = [Loss("kl", labels="teacher_y"), Loss("mse", output="a", labels="teacher_a", factor=0.5)]
    found = losses(both, {**ROWS, **taught})
    assert found[-1] < found[0]


def test_soft_labels_from_a_file(tmp_path):
    odds = np.random.default_rng(0).dirichlet(np.ones(3), 90).astype(np.float32)
    np.savez(tmp_path / "soft.npz", x=ROWS["x"], odds=odds)
    found = losses("kl:targets=probabilities,labels=odds", tmp_path / "soft.npz")
    y = onnxgrad.predict(classifier(), ROWS)["y"].astype(float)
    log_q = y - np.log(np.exp(y).sum(1, keepdims=True))
    first = (odds * (np.log(odds) - log_q)).sum(1).mean()
    assert found[-1] < found[0]
    assert found[0] == pytest.approx(first, rel=0.25)


def test_what_is_kept_is_not_computed_again(tmp_path, monkeypatch):
    first = teach(other(), ROWS, tmp_path / "soft")
    monkeypatch.setattr("onnxgrad.training.measure.teacher.batches_of", None)
    again = teach(other(), ROWS, tmp_path / "soft")
    np.testing.assert_array_equal(first["teacher_y"], again["teacher_y"])
    with pytest.raises(BadInput, match="outputs of a teacher for other teacher"):
        teach(other(6), ROWS, tmp_path / "soft")
    with pytest.raises(BadInput, match="outputs of a teacher for other rows"):
        teach(other(), {"x": ROWS["x"][:50]}, tmp_path / "soft")
    with pytest.raises(UnknownName, match="'zz'"):
        teach(other(), ROWS, tmp_path / "z", outputs=["zz"])


def test_more_classes_than_there_are(tmp_path):
    with pytest.raises(BadInput, match="no 4 scores to keep"):
        teach(other(), ROWS, tmp_path / "soft", top_k=4)

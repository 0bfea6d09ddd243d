"""Training of detectors by the task: every kind of head learns, and the file keeps its ending."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from PIL import Image
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, open_model, save_model
from onnxgrad.training import compile_step, export_step
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.probe import noise, picture_size, run_values, stored_names
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.detection.task import DetectionTask
from onnxgrad.training.detection.unfold import unfold
from onnxgrad.training.export.host import Host
from onnxgrad.training.measure.readiness import readiness
from tests.training.detection.detectors import KINDS, SIDE, detector


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """A COCO file of bright and dark squares on noise."""
    folder, random = tmp_path_factory.mktemp("boxes"), np.random.RandomState(0)
    found = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "fox"}]}
    for k in range(12):
        pixels = random.randint(90, 160, (SIDE, SIDE, 3)).astype(np.uint8)
        for part in range(2):
            size, kind = random.randint(14, 26), random.randint(2)
            x, y = np.minimum(random.randint(0, 32 - size // 2, 2) + np.array([32, 16]) * part, SIDE - size)
            pixels[y : y + size, x : x + size] = 250 * kind
            box = {"image_id": k, "category_id": int(kind) + 1, "bbox": [int(x), int(y), size, size]}
            found["annotations"].append({"id": len(found["annotations"]), "area": size**2, "iscrowd": 0, **box})
        Image.fromarray(pixels).save(folder / f"{k}.png")
        found["images"].append({"id": k, "file_name": f"{k}.png", "width": SIDE, "height": SIDE})
    (folder / "boxes.json").write_text(json.dumps(found))
    return folder / "boxes.json"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_trains(kind, boxes, tmp_path):
    model = detector(kind, ["ant", "bee", "cat"])
    before = {v.name: v.shape for v in model.graph.outputs}
    output = tmp_path / "mine.onnx"
    trainer = onnxgrad.train(
        model, boxes, task="detection", output=output, epochs=8, batch_size=4, optimizer="adam", learning_rate=3e-3,
        image_mean=0.0, image_std=1.0,
    )  # fmt: skip
    assert json.loads(trainer.inference_ir().metadata_props["onnxgrad.detector"])["letterbox"]["std"] == [1.0]
    losses = [epoch["loss"] for epoch in trainer.history.epochs]
    assert losses[-1] < 0.9 * losses[0]
    assert all(epoch["box_loss"] > 0 for epoch in trainer.history.epochs)  # objects are paired with predictions
    plain = onnxruntime.InferenceSession(output)
    assert [v.name for v in plain.get_outputs()] == list(before)
    saved = load_model(output)
    head = find_head(open_model(saved).model)
    assert (head.kind, head.classes) == (find_head(open_model(model).model).kind, 2)
    assert stored_names(saved, 2) == ("cat", "fox")
    assert all(v.uses() for v in saved.graph.initializers.values())
    plain.run(None, noise(saved, 1, head.size))


def test_objects_that_no_prediction_overlaps(boxes):
    """TaskAligned pairs them with none: the loss falls to zero, and a warning says that nothing is learned."""
    model = detector("yolov8", ["ant"])
    for value in model.graph.initializers.values():  # distances of zero: boxes are points
        array = value.const_value.numpy()
        if array.shape[:1] == (64,):
            spread = np.zeros_like(array) if array.ndim > 1 else np.tile(np.float32([1e4] + [0] * 15), 4)
            value.const_value = ir.tensor(spread, name=value.name)
    with pytest.warns(UserWarning, match=r"epoch 1: no prediction was paired with an object") as warned:
        trainer = onnxgrad.train(model, boxes, task="detection", epochs=2, batch_size=4, optimizer="adam")
    assert len(warned) == 1
    assert [epoch["box_loss"] for epoch in trainer.history.epochs] == [0, 0]


def test_weights_in_constants_are_trained(boxes):
    """Paddle's exporter stores weights in Constant nodes; new layers of classes are initializers beside them."""
    model = detector("yolov8", ["ant"])
    for name, value in list(model.graph.initializers.items()):
        node = ir.node("Constant", [], attributes={"value": value.const_value})
        node.outputs[0].name = f"{name}_constant"
        model.graph.insert_before(model.graph[0], node)
        value.replace_all_uses_with(node.outputs[0])
        del model.graph.initializers[name]
    layers = [n.inputs[1].name for n in model.graph if n.op_type == "Conv" and "constant" in n.inputs[1].name][:4]
    task = DetectionTask.of(model, read_detection(boxes), DetectionRecipe(), PreparationRecipe())
    training = onnxgrad.training.attach(task.model, loss=task.loss, optimizer="sgd").training_info[0]
    assert set(layers) <= {binding.key for binding in training.update_binding}


def test_pictures_that_are_no_squares(boxes):
    model = detector("yolox", ["cat", "fox"])
    model.graph.inputs[0].shape = ir.Shape([1, 3, SIDE, 2 * SIDE])
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    trainer = onnxgrad.train(
        model, boxes, task="detection", validation=boxes, epochs=1, batch_size=4, image_mean=0, image_std=1
    )
    assert "validation_map50" in trainer.history.epochs[-1]


def test_classes_are_chosen(boxes, capsys):
    trainer = onnxgrad.train(
        *(detector("yolov8", ["ant", "bee", "cat"]), boxes),
        task="detection", classes="fox", epochs=1, batch_size=4, progress=True,
    )  # fmt: skip
    assert "a head like YOLOv8's on maps of 8x8" in capsys.readouterr().err
    assert trainer.inference_ir().graph.outputs[0].shape[1] == 5
    with pytest.raises(onnxgrad.UnknownName, match="owl"):
        onnxgrad.train(detector("yolov8", ["ant"]), boxes, task="detection", classes=["owl"])


def test_size_of_pictures():
    model = detector("yolov8", ["ant"])
    assert picture_size(model) == (SIDE, SIDE)
    with pytest.raises(BadInput, match="takes pictures of 64 by 64"):
        picture_size(model, 96)
    model.graph.inputs[0].shape = type(model.graph.inputs[0].shape)(["N", 3, "H", "W"])
    assert picture_size(model) == (640, 640)
    assert picture_size(model, 96) == (96, 96)
    assert picture_size(model, (96, 128)) == (96, 128)
    model.metadata_props["imgsz"] = "[320, 352]"
    assert picture_size(model) == (320, 352)
    model.metadata_props["onnxgrad.detector"] = json.dumps({"letterbox": {"height": 160, "width": 192}})
    assert picture_size(model) == (160, 192)
    model.metadata_props["onnxgrad.detector"] = "{}"
    with pytest.raises(BadInput, match="damaged"):
        picture_size(model)


def test_normalization_is_written_out(boxes):
    model = open_model(detector("yolov8", ["cat", "fox"])).model
    head = find_head(model)
    feeds = noise(model, 1, head.size)
    before = run_values(model, head.values, feeds)
    note = unfold(model, np.concatenate(list(feeds.values())), head.image)
    assert note == "BatchNormalization stands behind 4 convolutions, with the statistics of 1 pictures"
    after = run_values(model, head.values, feeds)
    for name, array in before.items():  # nothing changes at first
        np.testing.assert_allclose(after[name], array, atol=1e-4)
    normal = next(n for n in model.graph if n.op_type == "BatchNormalization")
    values = run_values(model, [normal.inputs[0].name], feeds)[normal.inputs[0].name]
    np.testing.assert_allclose(normal.inputs[3].const_value.numpy(), values.mean((0, 2, 3)), atol=1e-5)
    np.testing.assert_allclose(normal.inputs[4].const_value.numpy(), values.var((0, 2, 3)), atol=1e-4)
    with pytest.raises(BadInput, match="unfold_bn"):
        unfold(model, np.concatenate(list(feeds.values())), head.image)
    trainer = onnxgrad.train(
        detector("yolov8", ["cat", "fox"]), boxes, task="detection", unfold_bn=True, epochs=1, batch_size=4
    )
    assert any(n.op_type == "BatchNormalization" for n in trainer.inference_ir().graph)


def test_settings():
    assert DetectionRecipe(classes="cat, fox").names == ["cat", "fox"]
    for settings in ({"classes": "cat,cat"}, {"classes": ""}, {"box_loss": "l1"}, {"image_size": 8}):
        with pytest.raises(BadInput):
            DetectionRecipe(**settings)


def test_a_loss_is_refused(boxes):
    with pytest.raises(BadInput, match="drop loss"):
        onnxgrad.train(detector("yolov8", ["ant"]), boxes, task="detection", loss="mse")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["yolov8", "yolox", "ssd", "detr"])
def test_step_for_browsers(kind, boxes, tmp_path):
    """The step of a detector runs on a host without onnxgrad, in the operators of the web."""
    data = read_detection(boxes)
    task = DetectionTask.of(
        detector(kind, ["ant"]), data, DetectionRecipe(), PreparationRecipe(image_mean=0, image_std=1)
    )
    training = onnxgrad.training.attach(task.model, loss=task.loss, optimizer="sgd", learning_rate=1e-3)
    export_step(training, tmp_path / "step", target="web")
    columns = task.columns(data)
    host = Host(tmp_path / "step")
    inputs = {v.name: v for v in compile_step(training).model.graph.inputs}
    batch = {n: c.take(np.arange(4), Field.of(inputs[n])) for n, c in columns.items()}
    losses = [float(host.step(batch)["loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_boxes_that_are_not_learned(boxes, tmp_path):
    """Boxes that are left out are counted; without any, nothing is trained."""
    found = json.loads(boxes.read_text())
    for image in found["images"]:
        image["file_name"] = str(boxes.parent / image["file_name"])
    for k, annotation in enumerate(found["annotations"]):
        annotation["bbox"][2:] = [20, 20] if k < 3 else [0.5, 0.5]
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps(found))
    data = read_detection(path, ["cat"])
    task = DetectionTask.of(detector("yolov8", ["ant"]), data, DetectionRecipe(), PreparationRecipe())
    assert any("boxes are of other classes than 'cat'" in line for line in task.notes)
    assert not any("no boxes of" in line for line in task.notes)
    assert any(
        re.search(r"\d+ of \d+ boxes are smaller than a pixel of 64x64, not learned", line) for line in task.notes
    )
    for annotation in found["annotations"]:
        annotation["bbox"][2:] = [0.5, 0.5]
    for left, message in (
        (found["annotations"], "no boxes to learn, of 'cat', 'fox'; 24 are smaller"),
        ([], "no boxes to learn, of 'cat', 'fox'$"),
    ):
        path.write_text(json.dumps({**found, "annotations": left}))
        with pytest.raises(BadInput, match=message):
            onnxgrad.train(detector("yolov8", ["ant"]), path, task="detection", epochs=1)


def test_inputs_of_the_ending_are_not_asked_for(boxes, tmp_path):
    """Sizes of pictures, with which RT-DETR scales the boxes that it chooses."""
    output = tmp_path / "mine.onnx"
    onnxgrad.train(detector("detr_post", ["ant"]), boxes, task="detection", validation=boxes, output=output, epochs=1)
    assert "map50" in onnxgrad.evaluate(output, boxes, task="detection").metrics
    found = onnxruntime.InferenceSession(output).run(None, noise(load_model(output), 1, (SIDE, SIDE)))
    assert [a.shape for a in found] == [(1, 5), (1, 5, 4), (1, 5)]


def test_other_calls_refuse_the_task(boxes):
    for call in (onnxgrad.training.Trainer, lambda m, task: onnxgrad.predict(m, np.zeros((1, 3, 64, 64)), task=task)):
        with pytest.raises(BadInput, match="the task detection is of"):
            call(detector("yolov8", ["ant"]), task="detection")


def test_other_tasks_refuse_its_settings(boxes, tmp_path):
    model = detector("yolov8", ["ant"])
    with pytest.raises(BadInput, match="image_size is a setting of the task detection"):
        onnxgrad.train(model, boxes, loss="mse", image_size=64)
    with pytest.raises(BadInput, match="classes are chosen of boxes, and of outlines of objects"):
        onnxgrad.evaluate(model, {"images": np.zeros((1, 3, 64, 64), np.float32)}, classes="cat")


def test_parts_of_a_batch(boxes):
    """The loss is that of the whole batch, which assigns as many boxes."""
    for first, *others in zip(*(
        onnxgrad.train(
            detector("yolov8", ["ant"]), boxes, task="detection", accumulate=parts, epochs=2, batch_size=4,
            optimizer="sgd", learning_rate=1e-5,
        ).history.epochs
        for parts in (1, 2)
    )):  # fmt: skip
        for other in others:
            for name in ("loss", "box_loss", "classes_loss", "distances_loss"):
                assert other[name] == pytest.approx(first[name], rel=1e-5)


def test_classes_and_size_of_an_evaluation(boxes):
    model = detector("yolov8", ["ant", "bee"])
    model.metadata_props.clear()
    found = onnxgrad.evaluate(model, boxes, task="detection", classes="fox,cat", image_size=SIDE)
    assert found.names[:2] == ["fox", "cat"]
    named = detector("yolov8", ["ant", "bee"])
    with pytest.raises(BadInput, match="the model names its classes"):
        onnxgrad.evaluate(named, boxes, task="detection", classes="fox,cat")


def test_check_names_the_command(tmp_path):
    model = detector("yolov8", ["ant", "bee"])
    found = [f.text for f in readiness(model)]
    assert any("--task detection" in text for text in found)
    assert found[0] == "with loss detection; labels: labels float32[N, M, 5]"


def test_command(boxes, tmp_path):
    save_model(detector("yolov8", ["ant", "bee", "cat"]), tmp_path / "yolo.onnx")
    output = tmp_path / "mine.onnx"
    asked = ["train", str(tmp_path / "yolo.onnx"), "--task", "detection", "--data", str(boxes), "-o", str(output)]
    result = CliRunner().invoke(build(), [*asked, "--epochs", "1", "--classes", "cat,fox", "--batch-size", "4"])
    assert result.exit_code == 0, result.output
    assert "its batch is now dynamic" in result.output
    assert "2 classes in the place of 3; 1 of the same names keep their weights" in result.output
    onnx.checker.check_model(onnx.load(output), full_check=True)

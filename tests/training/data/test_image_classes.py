"""Folders of pictures number their classes by name: one numbering, that of training."""

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.model_io import save_model
from onnxgrad.training import Trainer, evaluate, with_head
from onnxgrad.training.data import Data, Field, Images, open_data
from onnxgrad.training.data.annotations.samples import read_pixels
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from tests.cli.said import said
from tests.training.loop.test_trainer import ONE

image = pytest.importorskip("PIL.Image")
KINDS = ("ant", "bee", "cat")


def model():
    found = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        colours (float[N, 3, 2, 2] images) => (float[N, 3] y) {
            flat = Flatten (images)
            y = MatMul (flat, w)
        }""")
    w = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32) * 0.1
    found.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return found


def pictures(place, kinds, rows=8):
    """Each kind has a colour of its own, whatever its number."""
    for kind in kinds:
        (place / kind).mkdir(parents=True)
        for i in range(rows):
            pixels = np.zeros((2, 2, 3), np.uint8)
            pixels[..., "abcdefgh".index(kind[0]) % 3] = 200 + i
            image.fromarray(pixels).save(place / kind / f"{i}.png")
    return place


@pytest.fixture
def trained(tmp_path):
    trainer = Trainer(model(), loss="cross_entropy", learning_rate=0.1, options=ONE)
    trainer.fit(pictures(tmp_path / "train", KINDS), epochs=30, checkpoint=tmp_path / "run")
    return trainer


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kinds", [("bee",), ("bee", "cat"), ("ant", "cat"), KINDS])
def test_a_missing_class_moves_no_other(trained, tmp_path, kinds):
    held_out = pictures(tmp_path / "test", kinds)
    assert trained.evaluate(held_out)["accuracy"] == 1
    assert trained.evaluate(Data(held_out, trained.fields))["accuracy"] == 1
    history = trained.fit(tmp_path / "train", validation=held_out)
    assert history.epochs[-1]["validation_accuracy"] == 1


def test_an_unknown_class_is_refused(trained, tmp_path):
    for kinds in (("ant", "dog"), (*KINDS, "dog")):
        held_out = pictures(tmp_path / "-".join(kinds), kinds)
        with pytest.raises(BadInput, match=r"has the class 'dog' in row \d+, which is none of .* 'ant', 'bee', 'cat'"):
            trained.evaluate(held_out)
        with pytest.raises(BadInput, match="has the class 'dog'"):
            trained.fit(tmp_path / "train", validation=held_out)


def test_the_saved_model_says_what_its_outputs_mean(trained, tmp_path):
    save_model(trained.inference_model(), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    said = session.get_modelmeta().custom_metadata_map["onnxgrad.classes"]
    assert json.loads(said) == list(KINDS)
    again = Trainer(tmp_path / "m.onnx", loss="cross_entropy", options=ONE)
    assert again.evaluate(pictures(tmp_path / "one", ["cat"]))["accuracy"] == 1
    again.fit(tmp_path / "one", epochs=1)
    assert again.classes == KINDS
    props = {p.key: p.value for p in again.training_model().metadata_props}
    assert props["onnxgrad.classes"] == said
    with pytest.raises(BadInput, match="has the class 'dog'"):
        again.fit(pictures(tmp_path / "other", ["ant", "dog"]))
    other = Trainer(with_head(tmp_path / "m.onnx", 2), loss="cross_entropy", options=ONE)
    other.fit(tmp_path / "other")
    assert other.classes == ("ant", "dog")


def test_a_run_goes_on_with_its_classes(trained, tmp_path):
    settings = Checkpoint.load(tmp_path / "run" / FILE).run["settings"]
    assert settings["classes"] == list(KINDS)
    shutil.rmtree(tmp_path / "train" / "ant")
    options = {"epochs": 31, "checkpoint": tmp_path / "run", "resume": True}

    def trainer():
        return Trainer(model(), loss="cross_entropy", learning_rate=0.1, options=ONE)

    with pytest.raises(BadInput, match="rows 24, not 16"):
        trainer().fit(tmp_path / "train", **options)
    again = trainer()
    history = again.fit(tmp_path / "train", accept_changes=True, **options)
    assert history.epochs[-1]["loss"] < 0.5
    assert again.classes == KINDS
    pictures(tmp_path / "train", ["dog"])
    with pytest.raises(BadInput, match="has the class 'dog'"):
        trainer().fit(tmp_path / "train", accept_changes=True, **options)


def parts(place):
    for part in ("train", "val"):
        pictures(place / part, KINDS[:2])
    return place


def test_folders_of_class_folders_are_no_classes(tmp_path):
    place = parts(tmp_path / "pics")
    words = rf"train' holds only folders.* 'ant', 'bee'\n  hint: --data {place}/train --validation {place}/val"
    with pytest.raises(BadInput, match=words):
        Trainer(model(), loss="cross_entropy", options=ONE).fit(place)
    (place / "train" / "readme.txt").write_text("about these")
    with pytest.raises(BadInput, match=words):
        evaluate(model(), place)
    with pytest.raises(BadInput, match=rf"'pics' is no class.* 'train', 'val'\n  hint: --data {place}$"):
        evaluate(model(), tmp_path)


def test_pictures_deeper_in_the_folder_of_their_class(tmp_path):
    for kind in KINDS:
        pictures(tmp_path / kind, ["a"], rows=2)
        (tmp_path / kind / "boxes.txt").write_text("")
    data = Data(tmp_path, Trainer(model(), loss="cross_entropy", options=ONE).fields)
    assert data.classes == KINDS


def test_metadata_that_are_no_names():
    broken = model()
    broken.metadata_props.add(key="onnxgrad.classes", value='["a", "a"]')
    with pytest.raises(BadInput, match="are no list of names"):
        _ = Trainer(broken, loss="cross_entropy").classes


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    pictures(tmp_path / "train", KINDS)
    pictures(tmp_path / "test", ["bee", "cat"])
    pictures(tmp_path / "bad", ["bee", "dog"])
    args = ["train", "m.onnx", "--data", "train", "--loss", "cross_entropy", "--optimizer", "adam", "--lr", "0.1"]
    args += ["--epochs", "30", "-o", "out.onnx", "--history", "m.json"]
    found = CliRunner().invoke(build(), [*args, "--validation", "test"])
    assert found.exit_code == 0, found.output
    assert "classes 3: ant 8, bee 8, cat 8" in found.stderr
    measured = json.loads((tmp_path / "m.json").read_text())
    assert measured["after"]["accuracy"] == 1
    found = CliRunner().invoke(build(), [*args, "--restart", "--validation", "bad"])
    assert found.exit_code == 2
    assert "has the class 'dog'" in found.output


def test_pictures_of_16_bits_keep_their_numbers(tmp_path):
    """Pillow's own conversion makes all that is above 255 white."""
    (tmp_path / "a").mkdir()
    deep = np.random.default_rng(0).integers(0, 65536, (6, 5)).astype(np.uint16)
    image.fromarray(deep).save(tmp_path / "a" / "deep.png")
    for channels in (1, 3):
        field = Field("x", np.dtype(np.float32), (channels, 6, 5))
        (found,) = open_data(tmp_path)["images"].take(np.arange(1), field)
        np.testing.assert_allclose(found, np.broadcast_to(deep / 65535, (channels, 6, 5)), rtol=1e-5, atol=1e-7)
    image.fromarray(np.full((6, 5), 0.5, np.float32)).save(tmp_path / "a" / "deep.tiff")
    with pytest.raises(BadInput, match=r"deep\.tiff.*no known range"):
        open_data(tmp_path)["images"].take(np.arange(2), field)
    assert abs(read_pixels(tmp_path / "a" / "deep.png", (5, 6)).mean() - deep.mean() / 257) < 1


def test_pictures_that_a_table_names(tmp_path):
    """A column of paths, from the folder of the table on, beside several labels or names of classes."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 1, 4, 4] x) => (float[N, 2] y) '
        "{ f = Flatten (x)  y = MatMul (f, w) }"
    )
    weights = np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    (tmp_path / "pics").mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (6, 4, 4), np.uint8)
    for k, picture in enumerate(pixels):
        image.fromarray(picture).save(tmp_path / "pics" / f"{k}.png")
    rows = [f"pics/{k}.png,{k % 2},{k // 3},{'ab'[k % 2] if k else ''}" for k in range(6)]
    (tmp_path / "d.csv").write_text("\n".join(["file,s,t,kind", *rows]) + "\n")
    x = pixels[:, None].astype(np.float32) / 255
    labels = np.array([[k % 2, k // 3] for k in range(6)])
    settings = {"loss": "bce_with_logits", "shuffle": False, "learning_rate": 0.1, "batch_size": 2}
    wanted = onnxgrad.train(proto, {"x": x, "labels": labels.astype(np.float32)}, **settings)
    inputs = {"x": "file", "labels": "s,t"}
    found = onnxgrad.train(proto, tmp_path / "d.csv", inputs=inputs, **settings)
    np.testing.assert_allclose(found.state()["w"], wanted.state()["w"], rtol=1e-6)
    found.save(tmp_path / "o.onnx")
    predicted = onnxgrad.predict(tmp_path / "o.onnx", tmp_path / "d.csv")
    assert predicted["file"].tolist() == [f"pics/{k}.png" for k in range(6)]
    np.testing.assert_array_equal(
        predicted["y"], onnxgrad.predict(tmp_path / "o.onnx", tmp_path / "pics", images=Images())["y"]
    )
    settings = {"loss": "cross_entropy", "inputs": {"x": "file"}, "labels": "kind", "missing": "drop"}
    trainer = onnxgrad.train(proto, tmp_path / "d.csv", **settings)
    assert trainer.classes == ("a", "b")
    assert trainer.preprocessing.images == Images()
    trainer.save(tmp_path / "o.onnx")
    assert onnxgrad.evaluate(tmp_path / "o.onnx", tmp_path / "d.csv", labels="kind", missing="drop").rows == 5
    (tmp_path / "pics" / "5.png").rename(tmp_path / "5.png")
    (tmp_path / "pics" / "5.png").symlink_to(tmp_path / "5.png")
    (tmp_path / "pics" / "d.csv").write_text((tmp_path / "d.csv").read_text().replace("pics/", ""))
    assert onnxgrad.train(proto, tmp_path / "d.csv", loss="bce_with_logits", inputs=inputs)
    with pytest.raises(BadInput, match=r"5.png' leads out of the folder of the table that names it"):
        onnxgrad.train(proto, tmp_path / "pics" / "d.csv", loss="bce_with_logits", inputs=inputs)
    (tmp_path / "pics" / "0.png").unlink()
    with pytest.raises(BadInput, match=r"text \('pics/0.png'\), not numbers.*\n  hint: paths of pictures"):
        onnxgrad.train(proto, tmp_path / "d.csv", loss="bce_with_logits", inputs=inputs)


def test_pictures_beside_columns_that_are_prepared(tmp_path):
    """The saved file trains on, and predicts what its parts do."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 1, 4, 4] images, float[N, 3] x) => (float[N, 1] y) '
        "{ p = GlobalAveragePool (images)  f = Flatten (p)  c = Concat <axis = 1> (f, x)  y = MatMul (c, w) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([[1], [2], [3], [4]]), "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    pixels = np.random.default_rng(1).integers(0, 256, (4, 4, 4), np.uint8)
    for k, picture in enumerate(pixels):
        image.fromarray(picture).save(tmp_path / f"{k}.png")
    rows = ["0.png,1,a,0", "1.png,,b,1", "2.png,3,a,2", "3.png,5,b,3"]
    (tmp_path / "d.csv").write_text("\n".join(["file,age,plan,price", *rows]) + "\n")
    line = "train PLACE/{}.onnx --data PLACE/d.csv --labels price --loss mse --optimizer sgd --lr 0 --epochs 1"
    fed = "--input images=file --input x=age,plan --missing mean"
    said(tmp_path, f"{line.format('m')} {fed} -o PLACE/o.onnx --validation PLACE/d.csv")
    text = said(tmp_path, f"{line.format('o')} -o PLACE/p.onnx --validation PLACE/d.csv")
    assert "data    4 rows, 4 held out" in text
    x = np.array([[1, 1, 0], [3, 0, 1], [3, 1, 0], [5, 0, 1]])
    wanted = np.column_stack([pixels.mean((1, 2)) / 255, x]) @ [1, 2, 3, 4]
    for name in ("o", "p"):
        found = onnxgrad.predict(tmp_path / f"{name}.onnx", tmp_path / "d.csv")["y"]
        np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-6)

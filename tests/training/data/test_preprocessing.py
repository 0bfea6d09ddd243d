"""Preprocessing of training travels with the model: columns by name, pictures, tokenizers."""

import json
import shutil
import subprocess

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, save_model
from onnxgrad.training import LoRA, Trainer, evaluate, export_step, load_adapter, predict, quantize
from onnxgrad.training.data import Data, Images
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.export.host import Host
from tests.training.loop.test_trainer import ONE

pillow = pytest.importorskip("PIL.Image")

COLUMNS = "abcdefghijklm"
ROWS = np.random.default_rng(0).standard_normal((60, 13)).astype(np.float32)
LABELS = np.digitize(ROWS @ np.linspace(-2, 3, 13), [-2, 2])


def table(path, order=COLUMNS, skip=""):
    """The same rows, with the columns in this order."""
    names = [n for n in order if n not in skip]
    lines = [",".join([*(str(row[COLUMNS.index(n)]) for n in names), str(t)]) for row, t in zip(ROWS, LABELS)]
    path.write_text("\n".join([",".join([*names, "labels"]), *lines]) + "\n")
    return path


def linear(shape="13", size=13, scores=3):
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> m (float[N, {shape}] X) => (float[N, {scores}] y) '
        "{ flat = Flatten (X)  y = MatMul (flat, w) }"
    )
    w = np.random.default_rng(1).standard_normal((size, scores)).astype(np.float32) * 0.1
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return proto


@pytest.fixture
def place(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "train.csv")
    table(tmp_path / "other.csv", "mcabdlefkghji")
    table(tmp_path / "ends.csv", "abcdefghjiklm"[::-1])
    table(tmp_path / "less.csv", skip="g")
    return tmp_path


def fitted(**options):
    trainer = Trainer(linear(), loss="cross_entropy", learning_rate=0.1, options=ONE)
    trainer.fit("train.csv", inputs={"X": "a..m"}, epochs=20, **options)
    return trainer


def test_columns_are_matched_by_name(place):
    trainer = fitted(validation="other.csv")
    right = trainer.evaluate({"X": ROWS, "labels": LABELS})["accuracy"]
    assert right > 0.9
    assert trainer.history.epochs[-1]["validation_accuracy"] == right
    trainer.save("m.onnx")
    expected = predict("m.onnx", {"X": ROWS})["y"]
    for inputs in (None, {"X": "a..m"}, {"X": "m,l,k,j,i,h,g,f,e,d,c,b,a"}):
        for name in ("train.csv", "other.csv", "ends.csv"):
            assert evaluate("m.onnx", name, inputs=inputs).metrics["accuracy"] == pytest.approx(right)
            assert trainer.evaluate(name, inputs=inputs)["accuracy"] == pytest.approx(right)
            np.testing.assert_array_equal(predict("m.onnx", name, inputs=inputs)["y"], expected)
    again = Trainer("m.onnx", loss="cross_entropy", learning_rate=0.0, options=ONE)
    again.fit("other.csv")
    assert again.preprocessing.inputs["X"].names == tuple(COLUMNS)


@pytest.mark.parametrize("inputs", [None, {"X": "a..m"}])
def test_a_missing_column_is_refused_by_name(place, inputs):
    fitted().save("m.onnx")
    for call in (evaluate, predict):
        with pytest.raises(BadInput, match=r"no column 'g', .*trained on\n  hint: 'a', .* fed 'X'; --inputs X=… names"):
            call("m.onnx", "less.csv", inputs=inputs)


def test_flags_come_first(place):
    fitted().save("m.onnx")
    columns = {f"f{i}": ROWS[:, i] for i in range(13)}
    found = predict("m.onnx", columns, inputs={"X": "f0..f12"})["y"]
    np.testing.assert_array_equal(found, predict("m.onnx", {"X": ROWS})["y"])
    np.testing.assert_array_equal(found, predict("m.onnx", ROWS)["y"])


def command(*args):
    found = CliRunner().invoke(build(), [str(a) for a in args])
    assert found.exit_code == 0, found.output
    return found


def test_the_command_says_it_in_one_line(place):
    onnx.save(linear(), "m.onnx")
    args = ["train", "m.onnx", "--data", "train.csv", "--input", "X=a..m", "--validation", "ends.csv"]
    args += ["--loss", "cross_entropy", "--optimizer", "adam", "--lr", "0.1", "--epochs", "20", "-o", "out.onnx"]
    found = command(*args, "--history", "h.json")
    assert "keeps   X from a, b, c, d, … (13 columns)" in found.stderr
    right = evaluate("out.onnx", {"X": ROWS, "labels": LABELS}).metrics["accuracy"]
    assert json.loads((place / "h.json").read_text())["after"]["accuracy"] == pytest.approx(right)
    found = command("evaluate", "out.onnx", "--data", "other.csv", "--json")
    assert "as trained     X from a, b, c, d, … (13 columns)\n" in found.stderr
    assert json.loads(found.stdout)["metrics"]["accuracy"] == pytest.approx(right)
    command("predict", "out.onnx", "--data", "other.csv", "-o", "p.npz")
    with np.load("p.npz") as file:
        np.testing.assert_array_equal(file["y"], predict("out.onnx", {"X": ROWS})["y"])
    for name in ("train.csv", "other.csv"):
        command("explain", "out.onnx", name, "-o", f"{name}.npz", "--row", "3", "--class", "1")
    with np.load("train.csv.npz") as first, np.load("other.csv.npz") as other:
        np.testing.assert_array_equal(first["attribution"], other["attribution"])
    command("quantize", "out.onnx", "--data", "other.csv", "-o", "q.onnx")
    assert Preprocessing.of(load_model("q.onnx")).inputs["X"].names == tuple(COLUMNS)


def pictures(folder):
    random = np.random.default_rng(0)
    for kind, level in (("dark", 60), ("light", 180)):
        (folder / kind).mkdir(parents=True)
        for i in range(4):
            pixels = random.integers(level, level + 60, (5, 4, 3)).astype(np.uint8)
            pillow.fromarray(pixels).save(folder / kind / f"{i}.png")
    return folder


def test_pictures_are_prepared_as_in_training(tmp_path):
    folder = pictures(tmp_path / "pics")
    how = Images((0.5, 0.4, 0.3), (0.25, 0.2, 0.1), (2, 3))
    proto = linear("3, H, W", 18, 2)
    trainer = Trainer(proto, loss="cross_entropy", learning_rate=0.01, options=ONE)
    trainer.fit(folder, images=how, epochs=5)
    expected = trainer.predict(folder, images=how)["y"]
    assert not np.allclose(expected, trainer.predict(folder, images=Images(size=(2, 3)))["y"])
    trainer.save(tmp_path / "m.onnx")
    np.testing.assert_array_equal(predict(tmp_path / "m.onnx", folder)["y"], expected)
    np.testing.assert_array_equal(trainer.predict(folder)["y"], expected)
    loss = trainer.evaluate(folder, images=how)["loss"]
    assert trainer.evaluate(folder)["loss"] == loss
    assert evaluate(tmp_path / "m.onnx", folder, metrics="log_loss").metrics["log_loss"] == pytest.approx(
        loss, rel=1e-5
    )
    # of the command, one flag takes the place of one number
    args = ["predict", tmp_path / "m.onnx", "--data", folder, "-o", tmp_path / "p.npz"]
    assert "as trained     pictures less 0.5, 0.4, 0.3, divided by" in command(*args).stderr
    with np.load(tmp_path / "p.npz") as file:
        np.testing.assert_array_equal(file["y"], expected)
    command(*args, "--image-mean", "0")
    with np.load(tmp_path / "p.npz") as file:
        other = predict(tmp_path / "m.onnx", folder, images=Images(0.0, how.std))["y"]
        np.testing.assert_array_equal(file["y"], other)
    trainer.save_training_model(tmp_path / "t.onnx")
    again = Trainer(tmp_path / "t.onnx", options=ONE)
    assert again.evaluate(folder)["loss"] == pytest.approx(loss)


def test_a_tokenizer_travels_with_the_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "film": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (int64[N, T] input_ids) => (float[N, 2] y) '
        "<float[5, 2] w = {0, 0, 0, 0, 1, 0, 0, 1, 0.5, 0.5}, int64[1] one = {1}> "
        "{ e = Gather (w, input_ids)  y = ReduceSum <keepdims = 0> (e, one) }"
    )
    rows = {"review": np.array(["good film", "bad film film", "film bad good"]), "labels": np.array([0, 1, 1])}
    trainer = Trainer(proto, loss="cross_entropy", learning_rate=0.01, options=ONE)
    trainer.fit(rows, tokenizer=tmp_path / "tokenizer.json", max_length=2)
    trainer.save(tmp_path / "m.onnx")
    (tmp_path / "tokenizer.json").unlink()
    tokens = {"input_ids": np.array([[2, 4], [3, 4], [4, 3]]), "labels": rows["labels"]}
    expected = predict(tmp_path / "m.onnx", tokens)["y"]
    np.testing.assert_array_equal(predict(tmp_path / "m.onnx", rows)["y"], expected)
    np.testing.assert_array_equal(trainer.predict(rows)["y"], expected)
    assert evaluate(tmp_path / "m.onnx", rows).metrics == evaluate(tmp_path / "m.onnx", tokens).metrics
    whole = {"input_ids": np.array([[2, 4, 0], [3, 4, 4], [4, 3, 2]])}
    longer = predict(tmp_path / "m.onnx", rows, max_length=3)["y"]
    np.testing.assert_array_equal(longer, predict(tmp_path / "m.onnx", whole)["y"])


HOST = """
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
const [host, contract, batch] = process.argv.slice(2);
const { Host } = await import(pathToFileURL(host).href);
const made = new Host({}, null, JSON.parse(readFileSync(contract)), 1, "cpu", () => {});
const found = made.prepared(JSON.parse(readFileSync(batch)));
console.log(JSON.stringify(Object.entries(found).map(([name, { dims, data }]) => [name, dims, [...data]])));
"""


def in_node(folder, batch):
    """The arrays that host.mjs prepares."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    (folder / "host-test.mjs").write_text(HOST)
    plain = {n: {"type": str(a.dtype), "dims": a.shape, "data": a.ravel().tolist()} for n, a in batch.items()}
    (folder / "batch.json").write_text(json.dumps(plain))
    command = [node, "host-test.mjs", folder / "host.mjs", folder / "contract.json", "batch.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(done.stderr)
    return {name: np.array(data, np.float32).reshape(dims) for name, dims, data in json.loads(done.stdout)}


def in_python(folder, batch):
    return Host(folder).prepared(batch)


@pytest.mark.parametrize("prepared", [in_python, in_node])
def test_hosts_prepare_batches_as_in_training(place, prepared):
    trainer = fitted()
    export_step(trainer.training_model(), place / "device")
    batch = {name: ROWS[:, COLUMNS.index(name)] for name in "mcabdlefkghji"}
    np.testing.assert_array_equal(prepared(place / "device", batch)["X"], ROWS)
    found = Host(place / "device").run("infer", Host(place / "device").prepared(batch))
    np.testing.assert_allclose(found["y"], trainer.predict({"X": ROWS})["y"], rtol=1e-5)
    del batch["g"]
    with pytest.raises(ValueError, match=r"the data have no column '?g'?, which the model was trained on"):
        prepared(place / "device", batch)
    how = Images((0.5, 0.4, 0.3), (0.25, 0.2, 0.1), (5, 4))
    trainer = Trainer(linear("3, 5, 4", 60, 2), loss="cross_entropy", options=ONE)
    folder = pictures(place / "pics")
    trainer.fit(folder, images=how)
    contract = export_step(trainer.training_model(), place / "shown")
    assert contract["classes"] == ["dark", "light"]
    pixels = np.stack([np.asarray(pillow.open(p)) for p in sorted(folder.rglob("*.png"))]).transpose(0, 3, 1, 2)
    (fed,) = Data(folder, trainer.fields, images=how).batches(8)
    np.testing.assert_array_equal(prepared(place / "shown", {"X": pixels})["X"], fed["X"])


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"images": {}}', '{"images": {"mean": [0], "std": [0], "size": null, "inputs": []}}',
     '{"inputs": {"X": 3}}', '{"tokenizer": "%%%"}', '{"tokenizer": "AAAA"}', '{"max_length": "x"}'],
)  # fmt: skip
def test_damaged_metadata_are_refused(text):
    proto = linear()
    proto.metadata_props.add(key="onnxgrad.preprocessing", value=text)
    with pytest.raises(BadInput, match=r"metadata 'onnxgrad.preprocessing' are damaged"):
        predict(proto, ROWS)


def test_a_quantized_model_keeps_it(place):
    fitted().save("m.onnx")
    found = quantize("m.onnx", "other.csv")
    assert [p.key for p in found.metadata_props].count("onnxgrad.preprocessing") == 1


def test_an_adapter_keeps_it(place):
    trainer = Trainer(linear(), loss="cross_entropy", adapter=LoRA(2, targets=["w"]), options=ONE)
    trainer.fit("train.csv", inputs={"X": "a..m"})
    trainer.save_adapter("adapter", switchable=True)
    trainer.save("merged.onnx")
    save_model(load_adapter(linear(), "adapter"), "again.onnx")
    for name in ("adapter/model.onnx", "merged.onnx", "again.onnx"):
        assert Preprocessing.of(load_model(name)).inputs["X"].names == tuple(COLUMNS)

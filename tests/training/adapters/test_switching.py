"""adapters.mjs switches adapters over one session, on both packages of ONNX Runtime for JavaScript."""

import json
import shutil

import numpy as np
import onnx
import pytest

from onnxgrad import IA3, LoHa, LoKr, LoRA, Trainer, VeRA, load_adapter
from onnxgrad.errors import BadInput
from onnxgrad.model_io import save as saving
from tests.npm import RUNTIMES, script
from tests.training.adapters.models import every_kind
from tests.training.adapters.test_lora import DATA, FEEDS, scores

TARGETS = ["wq", "fc", "table", "spatial", "body"]
FORMS = {
    "lora": (LoRA(rank=2, alpha=4, targets=[*TARGETS, "head"], train_also=["fc_bias"]), LoRA(2, 3, targets=TARGETS)),
    "dora": (LoRA(rank=2, targets=TARGETS, dora=True), LoRA(rank=2, alpha=3, targets=["wq", "spatial"], dora=True)),
    "loha": (LoHa(rank=2, alpha=4, targets=["wq", "fc"]), LoHa(rank=2, alpha=3, targets=["fc"])),
    "lokr": (LoKr(rank=2, alpha=4, targets=["wq", "fc"]), LoKr(rank=2, alpha=3, targets=["fc"])),
    "ia3": (IA3(targets=["wq", "fc"]), IA3(targets=["wq"])),
}
RUN = """
import { readFileSync } from "node:fs";
const [folder, runtime] = process.argv.slice(1);
const ort = await import(runtime);
const { AdaptedModel } = await import(`file://${folder}/one/adapters.mjs`);
const { readNpz } = await import(`file://${folder}/one/host.mjs`);
let sessions = 0;
const create = ort.InferenceSession.create;
ort.InferenceSession.create = (...given) => { sessions++; return create.apply(ort.InferenceSession, given); };
const arrays = [...await readNpz(readFileSync(`${folder}/feeds.npz`))];
const tensors = arrays.map(([name, { type, data, dims }]) => [name, new ort.Tensor(type, data, dims)]);
const model = await AdaptedModel.load(`${folder}/one`, { ort, threads: 1 });
for (const name of ["one", "two"]) await model.add(name, `${folder}/${name}`);
const runs = ["one", "two", null, "one"].map((name) => model.run(Object.fromEntries(tensors), name));
const found = await Promise.all(runs);
console.log(JSON.stringify([sessions, model.names, found.map(({ scores }) => [...scores.data])]));
await model.release();
"""
REFUSALS = """
import { pathToFileURL } from "node:url";
const [folder, ...others] = process.argv.slice(1);
const ort = await import("onnxruntime-node");
const { AdaptedModel } = await import(`file://${folder}/adapters.mjs`);
const model = await AdaptedModel.load(folder, { ort, threads: 1 });
await model.add("one", pathToFileURL(folder));
const said = [];
const note = (error) => said.push(`${error.constructor.name} ${error.message}`);
for (const other of others) await model.add("x", other).catch(note);
await model.run({}, "two").catch(note);
await model.run({}, "one").catch(note);
await AdaptedModel.load(others[0], { ort }).catch(note);
console.log(JSON.stringify([said, model.names]));
"""


def save(base, asked, folder, data=DATA, **settings):
    trainer = Trainer(base, loss="cross_entropy", optimizer="adam", learning_rate=0.05, adapter=asked)
    trainer.fit(data, epochs=2, batch_size=8)
    trainer.save_adapter(folder, **settings)


@pytest.fixture(scope="module")
def base():
    return every_kind()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_those_of_merged_models(node, modules, base, tmp_path, form, runtime):
    for name, asked in zip(("one", "two"), FORMS[form], strict=True):
        save(base, asked, tmp_path / name, switchable=name == "one")
    check_switching(node, modules, base, FEEDS, tmp_path, runtime)


def check_switching(node, modules, base, feeds, folder, runtime):
    np.savez(folder / "feeds.npz", **feeds)
    sessions, names, found = json.loads(script(node, modules, RUN, folder, runtime))
    assert (sessions, names) == (1, ["one", "two"])
    one, two = (scores(load_adapter(base, folder / name, merge=True), feeds) for name in ("one", "two"))
    without = scores(base, feeds)
    assert min(np.abs(one - without).max(), np.abs(two - without).max(), np.abs(one - two).max()) > 5e-3
    for got, expected in zip(found, (one, two, without, one), strict=True):
        np.testing.assert_allclose(np.reshape(got, expected.shape), expected, rtol=0, atol=1e-5)


def test_defaults_in_external_data(node, modules, tmp_path, monkeypatch):
    """Initializers of 1 KB and more lie beside a large model."""
    monkeypatch.setattr(saving, "EXTERNAL_FROM", 0)
    text = '<ir_version: 10, opset_import: ["": 21]> m (float[N, 40] x) => (float[N, 40] scores)'
    model = onnx.parser.parse_model(f"{text} {{ h = MatMul (x, one)\n r = Tanh (h)\n scores = MatMul (r, two) }}")
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.2, (40, 40)).astype(np.float32) for name in ("one", "two")}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    data = {"x": rng.standard_normal((24, 40)).astype(np.float32), "labels": np.arange(24) % 40}
    save(model, LoRA(rank=8, targets=["one", "two"]), tmp_path / "one", data, switchable=True)
    save(model, LoRA(rank=8, targets=["two"]), tmp_path / "two", data)
    assert (tmp_path / "one" / "model.onnx.data").stat().st_size > 4 * 40 * 40 * 2
    check_switching(node, modules, model, {"x": data["x"]}, tmp_path, "onnxruntime-web")


def test_vera_is_refused(node, modules, base, tmp_path):
    """Projections are constants of the model."""
    save(base, VeRA(rank=2, targets=["wq"]), tmp_path / "one", switchable=True)
    text = """
        const { AdaptedModel } = await import(`file://${process.argv[1]}/adapters.mjs`);
        await AdaptedModel.load(process.argv[1], { ort: {} }).catch((error) => console.log(error.message));"""
    assert "an adapter of VeRA, which is not switched here" in script(node, modules, text, tmp_path / "one")


def test_refusals(node, modules, base, tmp_path):
    save(base, LoRA(rank=2, targets=["wq"]), tmp_path / "one", switchable=True)
    other = every_kind()
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    others = {
        "it was trained beside other weights": (other, LoRA(rank=2, targets=["wq"])),
        "wq.lora_A is float32[8,3], and the model takes float32[8,2]": (base, LoRA(rank=3, targets=["wq"])),
        "the model takes no adapter of wk": (base, LoRA(rank=2, targets=["wk"])),
        "it is dora, and the model takes lora": (base, LoRA(rank=2, targets=["wq"], dora=True)),
    }
    folders = []
    for at, (model, asked) in enumerate(others.values()):
        folders.append(tmp_path / str(at))
        save(model, asked, folders[-1])
    damage = {
        "is damaged: adapter.onnx_adapter: it is no adapter": lambda place: place.write_bytes(b"none at all"),
        "is damaged: adapter.onnx_adapter: ": lambda place: place.write_bytes(place.read_bytes()[:-40]),
    }
    for at, harm in enumerate(damage.values()):
        folders.append(shutil.copytree(tmp_path / "one", tmp_path / f"damaged {at}"))
        harm(folders[-1] / "adapter.onnx_adapter")
    said, names = json.loads(script(node, modules, REFUSALS, tmp_path / "one", *folders))
    expected = [*others, *damage, "there is no adapter two, but one", "the model does not run: ", "cannot read "]
    assert len(said) == len(expected), said
    for message, part in zip(said, expected, strict=True):
        assert message.startswith("HostError ")
        assert part in message
    assert names == ["one"]


@pytest.mark.parametrize("asked", [LoHa, LoKr])
def test_another_scale_in_python(base, tmp_path, asked):
    save(base, asked(rank=2, alpha=4, targets=["fc"]), tmp_path / "one", switchable=True)
    save(base, asked(rank=2, alpha=3, targets=["fc"]), tmp_path / "two")
    found = load_adapter(tmp_path / "one" / "model.onnx", tmp_path / "two", merge=True)
    expected = scores(load_adapter(base, tmp_path / "two", merge=True))
    np.testing.assert_allclose(scores(found), expected, rtol=0, atol=1e-6)


def test_a_weight_that_the_adapter_before_has_trained_does_not_stay(base, tmp_path):
    save(base, LoRA(rank=2, targets=["wq"], train_also=["fc_bias"]), tmp_path / "one", switchable=True)
    save(base, LoRA(rank=2, targets=["wq"]), tmp_path / "two")
    with pytest.raises(BadInput, match=r"has trained 'fc_bias' as a whole, which that in .*two' has not\n  hint: load"):
        load_adapter(load_adapter(base, tmp_path / "one"), tmp_path / "two")
    expected = scores(load_adapter(base, tmp_path / "two"))
    np.testing.assert_array_equal(scores(load_adapter(tmp_path / "one" / "model.onnx", tmp_path / "two")), expected)

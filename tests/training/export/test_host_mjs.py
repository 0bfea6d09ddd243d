"""The host for Node and browsers takes the steps of the host in Python, on both packages of ONNX Runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.model_io import save
from onnxgrad.training import attach, export_step
from onnxgrad.training.export.host import Host
from tests.npm import RUNTIMES, run, script
from tests.training.export.ten_steps import ROWS, compare, exported_step, rows
from tests.training.loop.test_trainer import NORMED
from tests.training.models import blobs, classifier


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return exported_step(tmp_path_factory.mktemp("device"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("parts", "threads"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_ten_steps(node, modules, exported, tmp_path, runtime, parts, threads):
    asked = ["--batch-size", ROWS, "--parts", parts, "--threads", threads, "--runtime", runtime]
    saved = ["--save", tmp_path / "end.npz", "--save-model", tmp_path / "end.onnx"]
    done = run(node, modules, exported / "host.mjs", exported / "data.npz", *asked, *saved)
    assert done.returncode == 0, done.stderr
    host = compare(exported, parts, done.stdout, tmp_path / "end.npz")
    onnx.checker.check_model(onnx.load(tmp_path / "end.onnx"), full_check=True)
    assert [v.name for v in onnx.load(tmp_path / "end.onnx").graph.input] == ["x"]
    session = onnxruntime.InferenceSession(tmp_path / "end.onnx", providers=["CPUExecutionProvider"])
    test = {"x": blobs(seed=1)["x"]}
    np.testing.assert_allclose(session.run(None, test)[0], host.run("infer", test)["y"], rtol=1e-6, atol=1e-6)


def test_packages_in_the_working_directory_are_not_imported(node, exported, tmp_path):
    for name in RUNTIMES:
        (tmp_path / "node_modules" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / name / "index.js").write_text("require('fs').writeFileSync('executed', '')")
    done = subprocess.run(
        [node, exported / "host.mjs", exported / "data.npz"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 2
    assert "cannot import onnxruntime-node (npm install onnxruntime-node)" in done.stderr


EVALUATE = """
import { readFileSync } from "node:fs";
const [folder, runtime] = process.argv.slice(1);
const ort = await import(runtime);
const { Host, readNpz, scalar } = await import(`file://${folder}/host.mjs`);
let disposed = 0;
const dispose = ort.Tensor.prototype.dispose;
ort.Tensor.prototype.dispose = function () { disposed++; dispose.call(this); };
const host = await Host.load(folder, { ort, threads: 1 });
const data = Object.fromEntries(await readNpz(readFileSync(`${folder}/data.npz`)));
const first = await host.saveState();
const [a, b] = await Promise.all([host.step(data), host.step(data)]);  // two at once take their turns
const replaced = disposed;
const { loss, y } = await host.evaluate(data);
const same = (await host.infer({ x: data.x })).y.data.every((v, i) => Math.abs(v - y.data[i]) < 1e-5);
await host.loadState(first);
const again = await host.step(data);
await host.release();
console.log(JSON.stringify([[a, b, { loss }, again].map((found) => scalar(found.loss)), same, replaced]));
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_evaluation_and_the_state(node, modules, tmp_path, runtime):
    contract = export_step(attach(onnx.parser.parse_model(NORMED), optimizer="sgd", learning_rate=0.1), tmp_path)
    np.savez(tmp_path / "data.npz", **blobs())
    losses, same, replaced = json.loads(script(node, modules, EVALUATE, tmp_path, runtime))
    host = Host(tmp_path, 1)
    expected = [float(host.step(blobs())["loss"]) for _ in range(2)]
    expected += [float(host.run("evaluate", blobs())["loss"]), expected[0]]
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert same
    assert replaced == 2 * len(contract["models"]["train"]["state"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_weights_in_a_file_of_their_own(node, modules, tmp_path, runtime, monkeypatch):
    monkeypatch.setattr(save, "EXTERNAL_FROM", 0)
    model = attach(classifier(hidden=64), loss="cross_entropy", optimizer="sgd", freeze=["w1"])
    export_step(model, tmp_path / "device")
    assert (tmp_path / "device" / "train.onnx.data").exists()
    np.savez(tmp_path / "data.npz", **blobs())
    command = [tmp_path / "device" / "host.mjs", tmp_path / "data.npz", "--batch-size", 90, "--threads", 1]
    done = run(node, modules, *command, "--runtime", runtime, "--save-model", tmp_path / "end.onnx")
    loss = float(Host(tmp_path / "device", 1).step(blobs())["loss"])
    assert float(done.stdout.split()[-1]) == pytest.approx(loss, abs=1e-5)
    assert "infer.onnx keeps weights in infer.onnx.data" in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "end.onnx").exists()


PAGE = """
const [folder, served] = process.argv.slice(1);
const ort = await import("onnxruntime-web");
const kept = globalThis.process;
globalThis.process = undefined;  // so that it takes this for a page
const { Host, readNpz, scalar } = await import(`file://${folder}/host.mjs`);
globalThis.process = kept;
const host = await Host.load(served, { ort, threads: 1 });
const bytes = await (await fetch(`${served}/data.npz`)).arrayBuffer();
const { loss } = await host.step(Object.fromEntries(await readNpz(new Uint8Array(bytes))));
const missing = await Host.load(`${served}/none`, { ort }).catch((error) => error.message);
console.log(JSON.stringify([scalar(loss), (await host.trainedModel()).length, missing]));
"""


def test_from_a_static_server(node, modules, exported):
    handler = partial(SimpleHTTPRequestHandler, directory=exported)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            served = f"http://127.0.0.1:{server.server_port}"
            loss, size, missing = json.loads(script(node, modules, PAGE, exported, served))
        finally:
            server.shutdown()
    assert loss == pytest.approx(float(Host(exported, 1).step(rows())["loss"]), abs=1e-5)
    assert size > (exported / "infer.onnx").stat().st_size
    assert missing == f"cannot read {served}/none/contract.json: 404 File not found"


def test_arrays_of_all_types_there_and_back(node, exported, tmp_path):
    rng = np.random.default_rng(0)
    types = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
    types += ["float16", "float32", "float64"]
    arrays = {f"groß/{t}": (rng.random((2, 3, 4)) * 100 - (0 if t[0] in "ub" else 50)).astype(t) for t in types}
    arrays |= {
        "scalar": np.float32(3),
        "row": np.arange(3),
        "empty": np.zeros((0, 5), np.float32),
        "__proto__": np.ones(1),
    }
    arrays["fortran"] = np.asfortranarray(rng.random((3, 4, 5)))
    copy = """
        import { readFileSync, writeFileSync } from "node:fs";
        const [folder, from, to] = process.argv.slice(1);
        const { readNpz, writeNpz } = await import(`file://${folder}/host.mjs`);
        writeFileSync(to, writeNpz(await readNpz(readFileSync(from))));"""
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "in.npz", **arrays)
        script(node, tmp_path, copy, exported, tmp_path / "in.npz", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as out:
            assert list(out.files) == list(arrays)
            for name, array in arrays.items():
                assert (out[name].dtype, out[name].shape) == (array.dtype, array.shape)
                np.testing.assert_array_equal(out[name], array)


def other_version(folder):
    path = folder / "contract.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))


def contract_is(text):
    return lambda folder: (folder / "contract.json").write_text(text)


def other_export(folder):
    """The models of another export beside the contract and the state of this one."""
    export_step(attach(classifier(hidden=5), optimizer="sgd"), folder / "other")
    shutil.copyfile(folder / "other" / "train.onnx", folder / "train.onnx")


def other_state(change):
    def spoil(folder):
        with np.load(folder / "state.npz") as file:
            state = dict(file)
        change(state)
        np.savez(folder / "state.npz", **state)

    return spoil


def unknown_operator(folder):
    text = (
        '<ir_version: 10, opset_import: ["": 21, "far": 1]> g (float[N] x) => (float[N] loss) { loss = far.Away (x) }'
    )
    onnx.save(onnx.parser.parse_model(text), folder / "train.onnx")


def newer_opset(folder):
    model = onnx.load(folder / "train.onnx")
    model.opset_import[0].version = 99
    onnx.save(model, folder / "train.onnx")


def cut(folder):
    (folder / "data.npz").write_bytes((folder / "data.npz").read_bytes()[:-40])


def flipped(folder):
    spoilt = bytearray((folder / "data.npz").read_bytes())
    spoilt[300] ^= 1
    (folder / "data.npz").write_bytes(spoilt)


def data(**arrays):
    return lambda folder: np.savez(folder / "data.npz", **arrays)


def widen(state):
    state["w1"] = state["w1"].astype(np.float64)


REFUSALS = {
    "version": (other_version, "contract.json has version 2; this host reads version 1"),
    "cut contract": (contract_is('{"version": 1, '), "contract.json is damaged: "),
    "no contract": (contract_is("[]"), "contract.json is no contract: it has no version"),
    "no object": (contract_is("null"), "contract.json is no contract: it has no version"),
    "half a contract": (contract_is('{"version": 1, "loss": "loss"}'), "contract.json is damaged: it has no state"),
    "another export": (other_export, "train.onnx does not run: "),
    "type": (
        other_state(widen),
        "the state is of another model: contract.json has float32[6,8] w1, the state has float64",
    ),
    "lacks": (other_state(lambda s: s.pop("w2")), "the state is of another model: contract.json has float32[8,3] w2"),
    "more": (other_state(lambda s: s.update(w9=s["w1"])), "the state is of another model: it has w9"),
    "operator": (unknown_operator, "1.30.0 lacks an operator of train.onnx: Fatal error: far:Away(-1) is not a reg"),
    "opset": (
        newer_opset,
        "1.30.0 lacks an operator of train.onnx: Current official support for domain ai.onnx is till",
    ),
    "model": (lambda f: (f / "train.onnx").write_text("?"), "cannot load train.onnx"),
    "file": (lambda f: (f / "train.onnx").unlink(), "train.onnx"),
    "input": (data(x=blobs()["x"]), "train.onnx takes labels, which the batch does not have"),
    "labels": (data(**blobs() | {"labels": np.zeros(90, np.int32)}), "takes int64 for labels, and the batch has int32"),
    "rows": (data(**blobs() | {"labels": np.zeros(9, np.int64)}), "must have rows, all as many"),
    "width": (data(**blobs() | {"x": np.zeros((90, 7), np.float32)}), "train.onnx does not run: "),
    "strings": (data(**blobs() | {"x": np.array(["a"] * 90)}), "the array x has the numpy type <U1"),
    "cut": (cut, "is no .npz file of less than 4 GB, or is damaged"),
    "flipped": (flipped, "x has another checksum"),
}


#: Those in which a runtime speaks.
SAID = {"operator", "opset", "model", "file", "width", "another export"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("runtime", "case"), [(r, c) for r in RUNTIMES for c in REFUSALS if r == RUNTIMES[0] or c in SAID]
)
def test_one_clear_message(node, modules, exported, tmp_path, case, runtime):
    folder = tmp_path / "device"
    shutil.copytree(exported, folder)
    spoil, message = REFUSALS[case]
    spoil(folder)
    command = [folder / "host.mjs", folder / "data.npz", "--threads", 1, "--runtime", runtime]
    done = run(node, modules, *command, "--save", tmp_path / "end.npz")
    said = [line for line in done.stderr.splitlines() if not line.startswith("  hint: ")]
    ours = [line for line in said if line.startswith("host.mjs: ")]
    assert (done.returncode, len(ours)) == (2, 1), done.stderr
    assert message in ours[0]
    assert "    at " not in done.stderr, "no stack"
    assert not (tmp_path / "end.npz").exists()


def test_providers(node, modules, exported):
    """A missing provider, and WebGPU where there is none."""
    text = """
        const [folder] = process.argv.slice(1);
        const ort = await import("onnxruntime-node");
        const { Host, readNpz, scalar } = await import(`file://${folder}/host.mjs`);
        const { readFileSync } = await import("node:fs");
        const refused = await Host.load(folder, { ort, provider: "wasm" }).catch((error) => error.message);
        const said = [];
        const host = await Host.load(folder, { ort, threads: 1, provider: "webgpu", say: (line) => said.push(line) });
        const data = Object.fromEntries(await readNpz(readFileSync(`${folder}/data.npz`)));
        console.log(JSON.stringify([refused, said, host.provider, scalar((await host.step(data)).loss)]));"""
    refused, said, provider, loss = json.loads(script(node, modules, text, exported))
    assert refused == 'provider is "cpu" or "webgpu", not "wasm"'
    assert (said, provider) == (["there is no WebGPU adapter here: all runs on the processor"], "cpu")
    assert loss == pytest.approx(float(Host(exported, 1).step(rows())["loss"]), abs=1e-5)


def test_without_a_runtime_or_threads(node, exported, tmp_path):
    for asked, message in [
        ([], "say which .npz file"),
        (["data.npz", "--parts", "x"], "--parts takes a whole number, not x"),
        (["data.npz", "--nothing"], "--nothing"),
        (["none.npz"], "cannot read file://"),
        (
            ["data.npz", "--runtime", "onnxruntime-none"],
            "cannot import onnxruntime-none (npm install onnxruntime-none)",
        ),
    ]:
        done = run(node, exported, exported / "host.mjs", *asked)
        assert (done.returncode, done.stderr.count("host.mjs: ")) == (2, 1), done.stderr
        assert message in done.stderr
    page = """
        globalThis.crossOriginIsolated = false;
        const { Host } = await import(`file://${process.argv[1]}/host.mjs`);
        await Host.load(process.argv[1], { ort: {}, threads: 4 }).catch((error) => console.log(error.message));"""
    assert "Cross-Origin-Embedder-Policy: require-corp" in script(node, tmp_path, page, exported)

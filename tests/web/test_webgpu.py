"""host.mjs on WebGPU, in a headless Chromium: the steps of host.py, the state on the device, what runs beside it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.demo import MODEL
from onnxgrad.training import attach, export_step, web_report
from onnxgrad.training.export.host import Host
from tests.training.models import blobs, classifier
from tests.web import browser
from tests.web.browser import Page

WAIT = 240  # shaders are compiled on the processor


@pytest.fixture(scope="module")
def site(modules, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    source = attach(classifier(), optimizer="adam", learning_rate=0.02, accumulate=True)
    for target in ("web", "any"):
        export_step(source, out / target, target=target)
    (out / "index.html").write_text("<!doctype html><link rel=icon href='data:,'>")
    shutil.copytree(modules / "node_modules" / "onnxruntime-web" / "dist", out / "ort")
    np.savez(out / "data.npz", **blobs())
    return out


@pytest.fixture(scope="module")
def page(site) -> Iterator[Page]:
    found = browser.find()
    if found is None:
        pytest.skip(f"no Chromium; {browser.VARIABLE} names one")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)) as server,
        browser.page(found) as made,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            made.open(f"http://127.0.0.1:{server.server_port}/index.html")
            made.wait("document.readyState == 'complete'")
            if not made.run("navigator.gpu?.requestAdapter().then(Boolean) ?? false"):
                pytest.skip("this Chromium has no adapter for WebGPU")
            yield made
        finally:
            server.shutdown()


def script(page: Page, text: str) -> list:
    """The result of a function body with these names in scope."""
    head = """
        const ort = (window.ort ??= await import("/ort/ort.webgpu.min.mjs"));
        ort.env.wasm.numThreads = 1;
        const { Host, readNpz, scalar } = await import("/web/host.mjs");
        const data = await readNpz(new Uint8Array(await (await fetch("/data.npz")).arrayBuffer()));
        const rows = (low, high) => Object.fromEntries([...data].map(([name, { type, dims, data }]) => {
          const size = data.length / dims[0];
          return [name, { type, dims: [high - low, ...dims.slice(1)], data: data.slice(low * size, high * size) }];
        }));
        const said = [];
        const load = (folder, more) =>
          Host.load(new URL(folder, location.href), { ort, provider: "webgpu", say: (l) => said.push(l), ...more });
    """
    return page.run(f"(async () => {{ {head} {text} }})()", within=WAIT)


def test_the_steps_of_the_host_in_python(page, site):
    losses, places, disposed, said, end, ran = script(
        page,
        """
        const host = await load("/web/");
        let disposed = 0;
        const dispose = ort.Tensor.prototype.dispose;
        const losses = [];
        for (let low = 0; low < 90; low += 9) {
          if (low === 81) ort.Tensor.prototype.dispose = function () { disposed++; dispose.call(this); };
          losses.push(scalar((await host.step(rows(low, low + 9))).loss));
        }
        ort.Tensor.prototype.dispose = dispose;
        losses.push(scalar((await host.stepInParts(rows(0, 9), 2)).loss));
        losses.push(scalar((await host.evaluate(rows(0, 90))).loss));
        const places = [...host.state].map(([name, t]) => [name, t.location, t.type]);
        const bytes = await host.saveState();
        const model = await host.trainedModel();
        await host.loadState(bytes);
        losses.push(scalar((await host.evaluate(rows(0, 90))).loss));
        const text = (bytes) => btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(""));
        const out = [losses, places, disposed, said, [text(bytes), text(model)], host.provider];
        await host.release();
        return out;
        """,
    )
    host, data, expected = Host(site / "web", 1), blobs(), []
    for low in range(0, 90, 9):
        expected.append(float(host.step({n: a[low : low + 9] for n, a in data.items()})["loss"]))
    expected.append(float(host.step_in_parts({n: a[:9] for n, a in data.items()}, 2)["loss"]))
    expected += [float(host.run("evaluate", data)["loss"])] * 2
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert ran == "webgpu"
    contract = json.loads((site / "web" / "contract.json").read_text())
    assert disposed == len(contract["models"]["train"]["state"])  # of the two sets, the one that the step read
    trained = set(contract["models"]["train"]["state"])
    assert {(place, kind) for name, place, kind in places if name in trained} == {
        ("gpu-buffer", "float32"),
        ("cpu", "int64"),
    }
    off = contract["models"]["train"]["off_webgpu"]
    assert f"train.onnx: not on WebGPU, so on the processor: {', '.join(f'{n} ×{c}' for n, c in off.items())}" in said
    (site / "end.npz").write_bytes(base64.b64decode(end[0]))
    with np.load(site / "end.npz") as state:
        for name in state.files:
            np.testing.assert_allclose(state[name], host.state[name], rtol=1e-4, atol=1e-5, err_msg=name)
    onnx.checker.check_model(onnx.load_model_from_string(base64.b64decode(end[1])), full_check=True)


def test_a_step_for_any_runtime_is_refused_with_a_hint(page):
    message, said, provider = script(
        page,
        """
        const host = await load("/any/");
        const message = await host.step(rows(0, 9)).catch((error) => error.message);
        return [message, said, host.provider];
        """,
    )
    assert "1.30.0 lacks an operator of train.onnx: Could not find an implementation for" in message
    assert "or export the step with --target web" in message
    assert [line.partition(":")[0] for line in said] == [
        "train.onnx does not load on WebGPU, so all runs on the processor"
    ]
    assert provider == "cpu"


def test_without_an_adapter_it_runs_on_the_processor(page, site):
    loss, said, provider = script(
        page,
        """
        const { gpu } = navigator;
        Object.defineProperty(navigator, "gpu", { value: undefined, configurable: true });
        const host = await load("/web/");
        Object.defineProperty(navigator, "gpu", { value: gpu, configurable: true });
        return [scalar((await host.step(rows(0, 9))).loss), said, host.provider];
        """,
    )
    assert loss == pytest.approx(
        float(Host(site / "web", 1).step({n: a[:9] for n, a in blobs().items()})["loss"]), abs=1e-5
    )
    assert said == ["there is no WebGPU adapter here: all runs on the processor"]
    assert provider == "cpu"


def placed(page: Page, model: Path) -> Counter[str]:
    """The operators that ONNX Runtime places on the processor, as its log says."""
    page.said.clear()
    script(
        page,
        f"""
        const options = {{ executionProviders: ["webgpu"], logSeverityLevel: 0, graphOptimizationLevel: "disabled" }};
        ort.env.logLevel = "verbose";
        const bytes = Uint8Array.from(atob("{base64.b64encode(model.read_bytes()).decode()}"), (c) => c.charCodeAt(0));
        await (await ort.InferenceSession.create(bytes, options)).release();
        ort.env.logLevel = "warning";
        """,
    )
    found, here = Counter[str](), False
    for line in page.said:
        if "odes placed on [" in line or "ode(s) placed on [" in line:
            here = "[CPUExecutionProvider]" in line
        elif here and (node := re.search(r"VerifyEachNodeIsAssignedToAnEp\]\s+(\w+) \(", line)):
            found[node[1]] += 1
    return found


def test_the_report_is_what_the_runtime_does(page, site, tmp_path):
    """But for the operators on shapes that ONNX Runtime moves to the processor of its own accord."""
    source = attach(MODEL, loss="cross_entropy", optimizer="adam")
    export_step(source, tmp_path, target="web")
    for model in (*(tmp_path / f"{n}.onnx" for n in ("train", "evaluate", "infer")), site / "web" / "train.onnx"):
        told, done = Counter(web_report(model).off_webgpu), placed(page, model)
        assert not told - done, (model, told, done)
        assert set(done - told) <= {"Shape", "Gather", "Slice", "Unsqueeze", "Squeeze"}, (model, told, done)
    assert told

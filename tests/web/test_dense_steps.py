"""Steps of a detector and of a segmentation network in a headless Chromium: ten losses equal to those of Python."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.training import attach, export_step
from onnxgrad.training.data import Field
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.detection.task import DetectionTask
from onnxgrad.training.export.host import Host
from onnxgrad.training.step.compile import compile_step
from tests.training.detection.detectors import SIDE, detector
from tests.training.detection.pictures import write_coco
from tests.web import browser

RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
STEPS = """
(async () => {
    const ort = await import("/ort/ort.wasm.min.mjs");
    const { Host, readNpz, scalar } = await import("/device/host.mjs");
    const host = await Host.load(new URL("/device/", location.href), { ort, threads: 1 });
    const bytes = await (await fetch("/batch.npz")).arrayBuffer();
    const batch = Object.fromEntries(await readNpz(new Uint8Array(bytes)));
    const losses = [];
    for (let k = 0; k < 10; k++) losses.push(scalar((await host.step(batch)).loss));
    return losses;
})()
"""


class Handler(SimpleHTTPRequestHandler):
    """Static files, of the types that a browser asks for."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *args: object) -> None:
        """Nothing."""


def of_detector(folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    scenes = [((SIDE, SIDE), [((4, 6, 20, 30), "cat"), ((30, 10, 60, 40), "dog")]), ((SIDE, SIDE), [])]
    data = read_detection(write_coco(folder, scenes))
    preparation = PreparationRecipe(image_mean=0, image_std=1)
    task = DetectionTask.of(detector("yolov8", ["ant"]), data, DetectionRecipe(), preparation)
    training = attach(task.model, loss=task.loss, optimizer="adam", learning_rate=1e-3)
    inputs = {v.name: v for v in compile_step(training).model.graph.inputs}
    return training, {n: c.take(np.arange(2), Field.of(inputs[n])) for n, c in task.columns(data).items()}


def of_masks(folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        masks (float[N, 3, 24, 24] x) => (float[N, 3, 24, 24] y) {
            a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1)
            b = Relu (a)
            c = ConvTranspose <kernel_shape = [2, 2], strides = [2, 2]> (b, w2)
            y = Softmax <axis = 1> (c)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (8, 3, 3, 3), "w2": (8, 3, 2, 2)}.items():
        weights = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    loss = ["cross_entropy:ignore_index=255", "dice:ignore_index=255", "lovasz:ignore_index=255"]
    labels = rng.integers(0, 3, (2, 24, 24))
    labels[:, :2] = 255
    x = (rng.standard_normal((2, 3, 24, 24)) + (labels[:, None] == np.arange(3)[:, None, None])).astype(np.float32)
    return attach(model, loss=loss, optimizer="adam", learning_rate=1e-2), {"x": x, "labels": labels}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("made", [of_detector, of_masks])
def test_ten_steps(made, modules, tmp_path):
    found = browser.find()
    if found is None:
        pytest.skip(f"no Chromium; {browser.VARIABLE} names one")
    training, batch = made(tmp_path)
    export_step(training, tmp_path / "device", target="web")
    np.savez(tmp_path / "batch.npz", **batch)
    (tmp_path / "ort").mkdir()
    for name in RUNTIME:
        place = modules / "node_modules" / "onnxruntime-web" / "dist" / name
        try:
            os.link(place, tmp_path / "ort" / name)
        except OSError:  # of another file system
            shutil.copyfile(place, tmp_path / "ort" / name)
    (tmp_path / "index.html").write_text("<!doctype html><title>steps</title>")
    host = Host(tmp_path / "device", 1)
    expected = [float(host.step(batch)["loss"]) for _ in range(10)]
    handler = functools.partial(Handler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.page(found) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            page.wait("document.title == 'steps'")
            losses = page.run(STEPS, within=120)
        finally:
            server.shutdown()
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert abs(expected[-1] - expected[0]) > 0.05  # up for the detector, whose targets grow with its overlaps

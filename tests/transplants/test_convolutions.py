"""`onnxgrad.transplant` into convolutional networks: folded normalizations, integer kernels with int32 biases."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime import quantization

import onnxgrad
from onnxgrad.training import Trainer

GRAPH = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[N, 2, 8, 8] x) => (float[N, 3] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, first)
        n = BatchNormalization (c, scale, shift, mean, var)
        r = Relu (n)
        d = Conv <pads = [1, 1, 1, 1]> (r, second, bias)
        m = BatchNormalization (d, scale2, shift2, mean2, var2)
        s = Relu (m)
        p = GlobalAveragePool (s)
        f = Flatten (p)
        y = Gemm <transB = 1> (f, head, offset)
    }"""


def _net():
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(GRAPH)
    shapes = {"first": (6, 2, 3, 3), "second": (5, 6, 3, 3), "bias": (5,), "head": (3, 5), "offset": (3,)}
    held = {n: 0.4 * rng.standard_normal(s) for n, s in shapes.items()}
    for end, size in (("", 6), ("2", 5)):
        held |= {f"{n}{end}": 0.3 * rng.standard_normal(size) for n in ("shift", "mean")}
        held |= {f"{n}{end}": 1 + 0.3 * rng.random(size) for n in ("scale", "var")}
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items())
    return model


def _images(rows, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 2, 8, 8)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 3, rows)}


class _Reader(quantization.CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": _images(64, 2)["x"]}])

    def get_next(self):
        return next(self.left, None)


def _folded(model, path):
    """As ONNX Runtime writes it: each normalization in the convolution before it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return onnx.load(path)


def _static(kind, per_channel):
    def quantize(model, path):
        quantization.quantize_static(
            _folded(model, path), path, _Reader(), quant_format=kind, per_channel=per_channel,
            weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip
        return onnx.load(path)

    return quantize


@pytest.fixture(scope="module")
def pair():
    trainer = Trainer(_net(), loss="cross_entropy", learning_rate=0.02)
    trainer.fit(_images(48), epochs=3, progress=False)
    return _net(), trainer.inference_model()


def _run(model):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": _images(9, 4)["x"]})[0]


def test_folded(tmp_path, pair):
    """Trained scales, shifts and running statistics are folded into the layer."""
    before, after = pair
    into = _folded(before, tmp_path / "folded.onnx")
    assert all(n.op_type != "BatchNormalization" for n in into.graph.node)
    done = onnxgrad.transplant(after, into, base=before, output=tmp_path / "out.onnx")
    np.testing.assert_allclose(_run(onnx.load(tmp_path / "out.onnx")), _run(after), rtol=1e-3, atol=1e-4)
    assert len(done.changed) == 6


@pytest.mark.parametrize("kind", [quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator])
@pytest.mark.parametrize("per_channel", [False, True])
def test_integer_kernels(tmp_path, pair, kind, per_channel):
    """Biases are int32 in steps of the product of scales, also of layers whose bias did not change."""
    before, after = pair
    into = _static(kind, per_channel)(before, tmp_path / "q.onnx")
    done = onnxgrad.transplant(after, into, base=before, output=tmp_path / "out.onnx")
    made = onnx.load(tmp_path / "out.onnx")
    assert done.difference < 2 * done.scheme + 0.03
    got, want = _run(made), _run(after)
    assert np.abs(got - want).max() < 0.1 * np.abs(want - _run(before)).max() + 0.05
    weights = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    old = {t.name: numpy_helper.to_array(t) for t in into.graph.initializer}
    biases = [n for n, a in weights.items() if a.dtype == np.int32 and a.ndim == 1 and len(a) > 1 and a.any()]
    assert len(biases) == 3
    assert all(not np.array_equal(weights[n], old[n]) for n in biases)

"""Two classifiers of handwritten digits in integers: what calibration alone loses, and what training gets back.

    pip install onnxgrad[demo]
    python examples/quantize.py

A convolutional network and an encoder (attention over the rows of an image) are trained in floats, then quantized by
ONNX Runtime's own quantizer, with weights rounded to the nearest number and as their layer gives most exactly, then
trained as quantized models. Every number is the accuracy of a saved file in plain
ONNX Runtime, on digits that no training has seen.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from onnxgrad import quantize, train
from onnxgrad.demo import digits

CNN = """
    <ir_version: 10, opset_import: ["": 21]>
    cnn (float[N, 1, 8, 8] images) => (float[N, 10] scores) {
        a = Conv <pads = [1, 1, 1, 1]> (images, conv1, bias1)
        b = Relu (a)
        c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (b, conv2, bias2)
        d = Relu (c)
        e = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (d, conv3, bias3)
        f = Relu (e)
        g = Flatten (f)
        scores = Gemm (g, head, head_bias)
    }"""
CNN_SHAPES = {
    "conv1": (8, 1, 3, 3), "bias1": (8,), "conv2": (12, 8, 3, 3), "bias2": (12,), "conv3": (16, 12, 3, 3),
    "bias3": (16,), "head": (64, 10), "head_bias": (10,),
}  # fmt: skip
ENCODER = """
    <ir_version: 10, opset_import: ["": 21]>
    encoder (float[N, 1, 8, 8] images) => (float[N, 10] scores) {
        rows = Reshape (images, as_rows)
        embedded = MatMul (rows, embed)
        x = Add (embedded, positions)
        normal = LayerNormalization (x, scale1, shift1)
        q = MatMul (normal, query)
        k = MatMul (normal, key)
        v = MatMul (normal, value)
        turned = Transpose <perm = [0, 2, 1]> (k)
        raw = MatMul (q, turned)
        weighed = Mul (raw, temperature)
        attention = Softmax (weighed)
        mixed = MatMul (attention, v)
        out = MatMul (mixed, output)
        y = Add (x, out)
        normal2 = LayerNormalization (y, scale2, shift2)
        up = MatMul (normal2, widen)
        biased = Add (up, widen_bias)
        gate = Relu (biased)
        down = MatMul (gate, narrow)
        z = Add (y, down)
        flat = Flatten (z)
        scores = Gemm (flat, head, head_bias)
    }"""
WIDTH = 24
ENCODER_SHAPES = {
    "embed": (8, WIDTH), "positions": (8, WIDTH), "scale1": (WIDTH,), "shift1": (WIDTH,), "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "output": (WIDTH, WIDTH), "scale2": (WIDTH,), "shift2": (WIDTH,),
    "widen": (WIDTH, 2 * WIDTH), "widen_bias": (2 * WIDTH,), "narrow": (2 * WIDTH, WIDTH), "head": (8 * WIDTH, 10),
    "head_bias": (10,),
}  # fmt: skip
#: One scale serves a whole weight of 16 numbers: that is where calibration alone loses most.
SCHEME = {"weights": "int4", "per_channel": False, "rows": 512}


def network(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The model with fresh weights."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        fan = int(np.prod(shape[1:])) if name.startswith("conv") else shape[0]
        array = rng.standard_normal(shape) / np.sqrt(fan)
        if name.startswith("scale"):
            array = np.ones(shape)
        elif len(shape) == 1:
            array = np.zeros(shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    if "encoder" in text:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 8, 8]), "as_rows"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(WIDTH**-0.5), "temperature"))
    return model


def accuracy(path: Path, rows: dict[str, np.ndarray]) -> float:
    """The share of `rows` that the file gets right."""
    scores = onnxruntime.InferenceSession(path).run(None, {"images": rows["images"]})[0]
    return float((scores.argmax(1) == rows["labels"]).mean())


def main(epochs: int = 25, more: int = 12) -> dict[str, tuple[float, ...]]:
    """By model: the accuracy in floats, quantized by calibration alone, with learned rounding, and trained."""
    training, test = digits()
    recipe = {"loss": "cross_entropy", "optimizer": "adam", "batch_size": 32, "schedule": "cosine", "progress": False}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text, shapes in (("cnn", CNN, CNN_SHAPES), ("encoder", ENCODER, ENCODER_SHAPES)):
            files = [Path(folder, f"{name}-{what}.onnx") for what in ("float", "int", "rounded", "trained")]
            floats, calibrated, rounded, trained = files
            train(network(text, shapes), training, output=floats, learning_rate=3e-3, epochs=epochs, **recipe)
            quantize(floats, training, output=calibrated, **SCHEME)
            quantize(floats, training, output=rounded, rounding="learned", **SCHEME)
            quantize(floats, training, output=trained, qat=True, learning_rate=1e-3, epochs=more, **SCHEME, **recipe)
            found[name] = tuple(accuracy(path, test) for path in files)
            sizes = [path.stat().st_size / 1000 for path in (floats, trained)]
            print(f"{name}: {sizes[0]:.0f} kB of floats, {sizes[1]:.0f} kB quantized")
    return found


if __name__ == "__main__":
    for model, found in main().items():
        told = zip(("floats", "calibrated", "rounded", "trained"), found)
        print(f"{model}: {', '.join(f'{what} {share:.1%}' for what, share in told)}")

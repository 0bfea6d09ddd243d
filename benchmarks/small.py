"""Small models: pruned, quantized, distilled, and all three; six models, in a table and pictures of the fronts.

    python -m benchmarks.small                # all, and the table of docs/small.md
    python -m benchmarks.small CNN LSTM       # only these
    python -m benchmarks.small --seeds 3      # the mean and the spread of three runs

Models and data are made here: networks of torch's usual kinds written as ONNX, and tasks of pictures and sequences that
they learn in a minute. Accuracy is of held-out rows in plain ONNX Runtime, milliseconds are of one row on one thread,
and the peak is what a process grows by in training with batches of 32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxgrad
from benchmarks.pages import write_table
from onnxgrad.demo.digits import digits
from onnxgrad.training.loop.peak import _measured
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.pruning.costs import milliseconds

ROOT = Path(__file__).parent.parent
PAGE, PICTURES = ROOT / "docs" / "small.md", ROOT / "docs" / "images"
Rows = dict[str, np.ndarray]


def written(
    text: str, inputs: str, outputs: str, weights: dict[str, tuple[int, ...]], seed: int = 0
) -> onnx.ModelProto:
    """A model of nodes; weights are random, of the scale that their layers want; ints are constants."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> net ({inputs}) => ({outputs}) {{ {text} }}'
    )
    rng = np.random.default_rng(seed)
    for name, shape in weights.items():
        if name.startswith("to_"):
            array: np.ndarray = np.array(shape, np.int64)
        elif name.startswith("one_"):
            array = np.ones(shape, np.float32)
        elif len(shape) < 2:
            array = np.zeros(shape, np.float32)
        else:
            terms = np.prod(shape[1:]) if len(shape) > 2 and not name.startswith("g_") else shape[0]
            terms = shape[2] if name.startswith("g_") else terms
            array = (rng.standard_normal(shape) * np.sqrt(1.5 / terms)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def cnn() -> tuple[onnx.ModelProto, Rows, Rows]:
    """Three convolutions with BatchNormalization over handwritten digits."""
    text, weights, last = "", {}, "images"
    for k, (a, b) in enumerate(((1, 32), (32, 64), (64, 64))):
        text += (
            f"c{k} = Conv <pads = [1, 1, 1, 1]> ({last}, w{k})  n{k} = BatchNormalization (c{k}, one_g{k}, b{k}, m{k}, "
        )
        text += f"one_v{k})  r{k} = Relu (n{k})  "
        weights |= {f"w{k}": (b, a, 3, 3), f"one_g{k}": (b,), f"b{k}": (b,), f"m{k}": (b,), f"one_v{k}": (b,)}
        last = f"r{k}"
        if k < 2:
            text += f"p{k} = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r{k})  "
            last = f"p{k}"
    text += f"f = GlobalAveragePool ({last})  g = Flatten (f)  y = Gemm (g, head, bias)"
    train, test = digits()
    model = written(text, "float[N, 1, 8, 8] images", "float[N, 10] y", weights | {"head": (64, 10), "bias": (10,)})
    return model, train, test


def mobile() -> tuple[onnx.ModelProto, Rows, Rows]:
    """Inverted residuals with depthwise convolutions (MobileNet v2) over handwritten digits."""
    text, weights, last, width = (
        "c = Conv <pads = [1, 1, 1, 1]> (images, w)  s = HardSwish (c)  ",
        {"w": (16, 1, 3, 3)},
        "s",
        16,
    )
    for k, out in enumerate((16, 32, 32)):
        wide = 4 * width
        text += f"e{k} = Conv ({last}, we{k}, be{k})  a{k} = Clip (e{k}, zero, six)  "
        stride = 2 if out != width else 1
        text += (
            f"d{k} = Conv <group = {wide}, pads = [1, 1, 1, 1], strides = [{stride}, {stride}]> (a{k}, wd{k}, bd{k})  "
        )
        text += f"q{k} = Clip (d{k}, zero, six)  l{k} = Conv (q{k}, wl{k}, bl{k})  "
        weights |= {f"we{k}": (wide, width, 1, 1), f"be{k}": (wide,), f"wd{k}": (wide, 1, 3, 3), f"bd{k}": (wide,)}
        weights |= {f"wl{k}": (out, wide, 1, 1), f"bl{k}": (out,)}
        if out == width:
            text += f"z{k} = Add (l{k}, {last})  "
        last, width = (f"z{k}" if out == width else f"l{k}"), out
    text += f"p = GlobalAveragePool ({last})  f = Flatten (p)  y = Gemm (f, head, bias)"
    model = written(text, "float[N, 1, 8, 8] images", "float[N, 10] y", weights | {"head": (32, 10), "bias": (10,)})
    for name, number in (("zero", 0.0), ("six", 6.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(number), name))
    train, test = digits()
    return model, train, test


def detector() -> tuple[onnx.ModelProto, Rows, Rows]:
    """Blocks that split, convolve and join (C2f of YOLOv8), and one cell of a grid that has the object."""
    text, weights = (
        "s = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (images, ws, bs)  u = Sigmoid (s)  x0 = Mul (s, u)  ",
        {},
    )
    weights |= {"ws": (32, 1, 3, 3), "bs": (32,)}
    for k in range(2):
        text += f"c{k} = Conv (x{k}, wc{k}, bc{k})  l{k}, r{k} = Split <axis = 1, num_outputs = 2> (c{k})  "
        text += (
            f"h{k} = Conv <pads = [1, 1, 1, 1]> (r{k}, wh{k}, bh{k})  g{k} = Sigmoid (h{k})  i{k} = Mul (h{k}, g{k})  "
        )
        text += f"j{k} = Concat <axis = 1> (l{k}, r{k}, i{k})  o{k} = Conv (j{k}, wo{k}, bo{k})  "
        text += f"t{k} = Sigmoid (o{k})  x{k + 1} = Mul (o{k}, t{k})  "
        weights |= {f"wc{k}": (32, 32, 1, 1), f"bc{k}": (32,), f"wh{k}": (16, 16, 3, 3), f"bh{k}": (16,)}
        weights |= {f"wo{k}": (32, 48, 1, 1), f"bo{k}": (32,)}
    text += "m = Conv (x2, wm, bm)  y = Flatten (m)"
    weights |= {"wm": (1, 32, 1, 1), "bm": (1,)}
    model = written(text, "float[N, 1, 16, 16] images", "float[N, 64] y", weights)

    def rows(count: int, seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        images = 0.4 * rng.standard_normal((count, 1, 16, 16)).astype(np.float32)
        cells = rng.integers(0, 64, count)
        cross = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], np.float32)
        for image, cell in zip(images, cells):
            for place, sign in ((cell, 1), (rng.integers(0, 64), -1)):
                i, j = 2 * (int(place) // 8), 2 * (int(place) % 8)
                shape = image[0, i : i + 3, j : j + 3].shape
                image[0, i : i + 3, j : j + 3] += sign * cross[: shape[0], : shape[1]]
        return {"images": images, "labels": cells}

    return model, rows(2000, 0), rows(500, 1)


def keywords() -> tuple[onnx.ModelProto, Rows, Rows]:
    """Depthwise separable convolutions in time (DS-CNN of keyword spotting) over chirps in noise."""
    text, weights = (
        "s = Conv <pads = [4, 4], strides = [2]> (sound, ws, bs)  x0 = Relu (s)  ",
        {"ws": (48, 8, 9), "bs": (48,)},
    )
    for k in range(3):
        text += f"d{k} = Conv <group = 48, pads = [2, 2]> (x{k}, wd{k}, bd{k})  a{k} = Relu (d{k})  "
        text += f"p{k} = Conv (a{k}, wp{k}, bp{k})  x{k + 1} = Relu (p{k})  "
        weights |= {f"wd{k}": (48, 1, 5), f"bd{k}": (48,), f"wp{k}": (48, 48, 1), f"bp{k}": (48,)}
    text += "m = GlobalAveragePool (x3)  f = Flatten (m)  y = Gemm (f, head, bias)"
    model = written(text, "float[N, 8, 64] sound", "float[N, 8] y", weights | {"head": (48, 8), "bias": (8,)})
    return model, chirps("sound", 1600, 0), chirps("sound", 500, 1)


def chirps(name: str, count: int, seed: int, turned: bool = False) -> Rows:
    """Eight bands over time with a chirp that rises or falls, in noise; labels are its speed and direction."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, count)
    time, band = np.arange(64)[None, None], np.arange(8)[None, :, None]
    centre = 3.5 + (labels[:, None, None] - 3.5) * 0.03 * (time - 32 - rng.integers(-8, 8, (count, 1, 1)))
    x = np.exp(-((band - centre) ** 2)) + 0.35 * rng.standard_normal((count, 8, 64))
    return {name: (x.swapaxes(1, 2) if turned else x).astype(np.float32), "labels": labels}


def encoder() -> tuple[onnx.ModelProto, Rows, Rows]:
    """Two layers of attention with eight heads over bands of sound in time."""
    text, weights = "e = MatMul (sound, wi)  x0 = Add (e, position)  ", {"wi": (8, 32), "position": (64, 32)}
    for k in range(2):
        text += f"n{k} = LayerNormalization (x{k}, one_g{k}, b{k})  "
        for part, order in (("q", "0, 2, 1, 3"), ("k", "0, 2, 3, 1"), ("v", "0, 2, 1, 3")):
            text += f"{part}a{k} = MatMul (n{k}, w{part}{k})  {part}b{k} = Reshape ({part}a{k}, to_heads)  "
            text += f"{part}{k} = Transpose <perm = [{order}]> ({part}b{k})  "
            weights[f"w{part}{k}"] = (32, 32)
        text += (
            f"z{k} = MatMul (q{k}, k{k})  h{k} = Mul (z{k}, half)  s{k} = Softmax (h{k})  a{k} = MatMul (s{k}, v{k})  "
        )
        text += f"t{k} = Transpose <perm = [0, 2, 1, 3]> (a{k})  f{k} = Reshape (t{k}, to_rows)  "
        text += f"o{k} = MatMul (f{k}, wo{k})  "
        text += (
            f"r{k} = Add (x{k}, o{k})  l{k} = LayerNormalization (r{k}, one_h{k}, c{k})  u{k} = MatMul (l{k}, wu{k})  "
        )
        text += f"g{k} = Relu (u{k})  d{k} = MatMul (g{k}, wd{k})  x{k + 1} = Add (r{k}, d{k})  "
        weights |= {f"one_g{k}": (32,), f"b{k}": (32,), f"one_h{k}": (32,), f"c{k}": (32,), f"wo{k}": (32, 32)}
        weights |= {f"wu{k}": (32, 128), f"wd{k}": (128, 32)}
    text += "p = ReduceMean <keepdims = 0> (x2, to_mean)  y = MatMul (p, head)"
    weights |= {"to_heads": (0, 64, 8, 4), "to_rows": (0, 64, 32), "to_mean": (1,), "head": (32, 8)}
    model = written(text, "float[N, 64, 8] sound", "float[N, 8] y", weights)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    return model, chirps("sound", 1600, 0, turned=True), chirps("sound", 500, 1, turned=True)


def recurrent() -> tuple[onnx.ModelProto, Rows, Rows]:
    """A long short-term memory of 64 units over bands of sound in time."""
    text = """t = Transpose <perm = [1, 0, 2]> (sound)  s, h = LSTM <hidden_size = 64> (t, g_w, g_r, b)
        q = Squeeze (h, to_first)  y = MatMul (q, head)"""
    weights = {"g_w": (1, 256, 8), "g_r": (1, 256, 64), "b": (1, 512), "to_first": (0,), "head": (64, 8)}
    model = written(text, "float[N, 64, 8] sound", "float[N, 8] y", weights)
    return model, chirps("sound", 1600, 0, turned=True), chirps("sound", 500, 1, turned=True)


#: The models with the rows that they learn, the budget of operations, and the epochs.
MODELS: dict[str, tuple[Callable[[], tuple[onnx.ModelProto, Rows, Rows]], float, int]] = {
    "CNN": (cnn, 0.35, 8),
    "MobileNet": (mobile, 0.4, 12),
    "YOLO": (detector, 0.5, 10),
    "KWS": (keywords, 0.4, 12),
    "encoder": (encoder, 0.6, 10),
    "LSTM": (recurrent, 0.35, 12),
}


def accuracy(model: onnx.ModelProto, rows: Rows) -> float:
    """The share of right classes in plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    name = session.get_inputs()[0].name
    return float((session.run(None, {name: rows[name]})[0].argmax(1) == rows["labels"]).mean())


def size(model: onnx.ModelProto) -> int:
    """The bytes of the file."""
    return len(model.SerializeToString())


def row(model: onnx.ModelProto, held_out: Rows) -> dict[str, float]:
    """What the table has of a model."""
    name = next(iter(held_out))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        settings = {"loss": "cross_entropy", "optimizer": "adam", "distributed": "none", "threads": 1}
        grown = _measured(path, Recipe.of("train", settings, (*TRAINER, *FIT)), 32)["grown"]
    return {
        "accuracy": accuracy(model, held_out),
        "size": size(model),
        "milliseconds": milliseconds(model, {name: held_out[name][:1]}),
        "peak": grown,
    }


def measure(name: str, seed: int = 0) -> dict[str, Any]:
    """Every variant of a model; the seed decides the order of the rows."""
    build, budget, epochs = MODELS[name]
    model, rows, held_out = build()
    settings: dict[str, Any] = {
        "loss": "cross_entropy", "optimizer": "adam", "learning_rate": 3e-3, "epochs": epochs, "batch_size": 32,
        "schedule": "cosine", "threads": 1, "progress": False, "seed": seed,
    }  # fmt: skip
    again = {**settings, "learning_rate": 2e-3}
    before = onnxgrad.train(model, rows, **settings).inference_model()
    teacher = [*("cross_entropy",), onnxgrad.Loss("kl", factor=1.0, temperature=4.0, teacher=before)]
    narrow = onnxgrad.prune(before, rows, flops=budget, multiple=4, score="wanda")
    found = {"before": row(before, held_out)}
    found["pruned"] = row(onnxgrad.train(narrow, rows, **again).inference_model(), held_out)
    found["quantized"] = row(onnxgrad.quantize(before, rows), held_out)
    student = onnxgrad.train(narrow, rows, **{**again, "loss": teacher}).inference_model()
    found["distilled"] = row(student, held_out)
    found["all three"] = row(onnxgrad.quantize(student, rows, qat=True, **{**again, "loss": teacher}), held_out)
    front = []
    for share in (0.8, 0.6, 0.4, 0.25, 0.15):
        small = onnxgrad.prune(before, rows, flops=share, score="wanda")
        trained = onnxgrad.train(small, rows, **{**again, "loss": teacher}).inference_model()
        front.append([size(trained), accuracy(trained, held_out), accuracy(small, held_out)])
    return {"name": name, "variants": found, "front": front}


def mean_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The means over the runs of a model, and the deviation of the accuracies; the front of the first run."""
    variants = {}
    for variant, first in runs[0]["variants"].items():
        every = {key: [run["variants"][variant][key] for run in runs] for key in first}
        variants[variant] = {key: float(np.mean(numbers)) for key, numbers in every.items()}
        variants[variant]["spread"] = float(np.std(every["accuracy"])) if len(runs) > 1 else 0.0
    return {**runs[0], "variants": variants, "runs": len(runs)}


def table(results: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | | accuracy | file | one row | peak in training |", "|---|---|---|---|---|---|"]
    for result in results:
        for k, (variant, numbers) in enumerate(result["variants"].items()):
            lines.append(
                f"| {result['name'] if k == 0 else ''} | {variant} | {100 * numbers['accuracy']:.1f}"
                f"{_spread(numbers)} % | "
                f"{numbers['size'] / 1e3:.1f} KB | {numbers['milliseconds']:.3f} ms | {numbers['peak'] / 1e6:.1f} MB |"
            )
    return "\n".join(lines)


def _spread(numbers: dict[str, float]) -> str:
    return f" ± {100 * numbers['spread']:.1f}" if numbers.get("spread") else ""


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against the size of the file, for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, result in zip(figure.subplots(2, 3).ravel(), results):
        sizes, distilled, bare = zip(*result["front"])
        axes.plot([s / 1e3 for s in sizes], distilled, "o-", label="pruned and distilled")
        axes.plot([s / 1e3 for s in sizes], bare, "s:", label="pruned only")
        for variant, marker in (("before", "k*"), ("quantized", "g^"), ("all three", "r*")):
            numbers = result["variants"][variant]
            axes.plot(numbers["size"] / 1e3, numbers["accuracy"], marker, label=variant, markersize=9)
        axes.set_title(result["name"])
        axes.set_xlabel("KB")
        axes.set_ylabel("accuracy")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Measure the models that are named, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--seeds", type=int, default=1, help="so many runs of each model")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "small.json")
    asked = parser.parse_args()
    known = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    for name in asked.models:
        known[name] = mean_of([measure(name, seed) for seed in range(asked.seeds)])
        print(table([known[name]]), flush=True)
        asked.results.write_text(json.dumps(known, indent=1))
    results = [known[name] for name in MODELS if name in known]
    if len(results) == len(MODELS):
        write_table(PAGE, "small", table(results))
        draw(results, PICTURES / "small.svg")


if __name__ == "__main__":
    main()

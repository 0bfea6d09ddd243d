"""Images that a classifier likes best: one for every digit.

    pip install onnxgrad[demo]
    python examples/input_optimization.py [picture.png]

Gradient ascent on the input (Simonyan et al. 2014): the score of a class, less a penalty for rough images, by plain
Adam. All ten images are one batch, and one pullback gives all ten gradients.
"""

import sys

import numpy as np
from digits import classifier


def roughness_gradient(x: np.ndarray) -> np.ndarray:
    """The gradient of ½ Σ (difference of neighbours)²."""
    found = np.zeros_like(x)
    for axis in (2, 3):
        d = np.diff(x, axis=axis)
        pad = [(0, 0)] * 4
        pad[axis] = (1, 1)
        found -= np.diff(np.pad(d, pad), axis=axis)
    return found


def main(picture: str | None = "input_optimization.png", epochs: int = 4, steps: int = 200) -> np.ndarray:
    """Ten images, and how sure the classifier is of them."""
    net, _, _ = classifier(epochs)
    pull = net.vjp(wrt="images")
    x = np.random.default_rng(0).uniform(0.4, 0.6, (10, 1, 8, 8)).astype(np.float32)
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, steps + 1):
        g = pull(x, np.eye(10, dtype=np.float32)) - 2.0 * roughness_gradient(x)
        mean, square = 0.9 * mean + 0.1 * g, 0.99 * square + 0.01 * g * g
        step = 0.02 * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.99**t)) + 1e-8)
        x = np.clip(x + step, 0, 1).astype(np.float32)
    scores = net(x)
    odds = np.exp(scores - scores.max(1, keepdims=True))
    sure = np.diag(odds / odds.sum(1, keepdims=True))
    print("how sure of 0 to 9:", *(f"{p:.1%}" for p in sure))
    if picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(2, 5, figsize=(6, 2.8))
        for digit, axis in enumerate(axes.flat):
            axis.imshow(x[digit, 0], cmap="gray", interpolation="bicubic")
            axis.set(xticks=[], yticks=[], title=str(digit))
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return sure


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The packaged model, and scikit-learn's 1,797 handwritten digits in a split that never changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnxgrad.errors import needs_package

#: The untrained classifier (written by ``python -m tools.demo_model``).
MODEL = Path(__file__).with_name("digits-cnn.onnx")
#: Images held out for the test, one in five of every digit.
TEST_SHARE = 0.2
SPLIT_SEED = 0


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test arrays: ``images`` float32[N, 1, 8, 8] from 0 to 1, ``labels`` int64[N].

    Raises:
        BadInput: scikit-learn is not installed.
    """
    with needs_package("the demo needs the digits of scikit-learn", "demo"):
        from sklearn.datasets import load_digits
    found = load_digits()
    images = (found.images[:, None] / 16).astype(np.float32)
    labels = found.target.astype(np.int64)
    rng = np.random.default_rng(SPLIT_SEED)
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        rows = np.flatnonzero(labels == digit)
        test[rng.permutation(rows)[: round(len(rows) * TEST_SHARE)]] = True
    return (
        {"images": images[~test], "labels": labels[~test]},
        {"images": images[test], "labels": labels[test]},
    )


def shifted(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every image five times: unchanged, and shifted by one pixel to each side."""
    images = arrays["images"]
    wide = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moves = [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)]
    return {
        "images": np.concatenate([wide[:, :, i : i + 8, j : j + 8] for i, j in moves]),
        "labels": np.tile(arrays["labels"], len(moves)),
    }

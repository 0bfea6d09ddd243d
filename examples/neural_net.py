"""A small neural network and its training, written out in the eager API: no layers, no optimizer, no magic.

    pip install onnxgrad[demo]
    python examples/neural_net.py [picture.png]

The parameters are a list of pairs; `grad` gives a list of pairs. Two half moons are told apart by two hidden layers.
"""

import sys
from itertools import pairwise

import numpy as onp
from sklearn.datasets import make_moons

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np


def predict(parameters, x):
    """The log-odds of every row."""
    for weights, bias in parameters[:-1]:
        x = np.tanh(x @ weights + bias)
    weights, bias = parameters[-1]
    return (x @ weights + bias)[:, 0]


def loss(parameters, x, signs):
    """The mean of log(1 + exp(-margin))."""
    return np.mean(np.logaddexp(0.0, -signs * predict(parameters, x)))


def main(picture: str | None = "neural_net.png", steps: int = 300) -> tuple[list, list[float], float]:
    """The parameters, the losses, and the accuracy on points that training has not seen."""
    rng = onp.random.default_rng(0)
    x, y = make_moons(600, noise=0.15, random_state=0)
    signs = 2.0 * y - 1
    train, test = slice(0, 400), slice(400, None)
    sizes = [2, 16, 16, 1]
    parameters = [(rng.normal(0, n**-0.5, (n, m)), onp.zeros(m)) for n, m in pairwise(sizes)]
    speeds = [(onp.zeros_like(w), onp.zeros_like(b)) for w, b in parameters]
    step, losses = og.value_and_grad(loss), []
    for _ in range(steps):
        value, slopes = step(parameters, x[train], signs[train])
        speeds = [tuple(0.9 * v - 0.2 * onp.asarray(g) for v, g in zip(*pair)) for pair in zip(speeds, slopes)]
        parameters = [tuple(p + v for p, v in zip(*pair)) for pair in zip(parameters, speeds)]
        losses.append(float(value))
    right = float(((onp.asarray(predict(parameters, x[test])) > 0) == (signs[test] > 0)).mean())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.4f}; {right:.1%} of the unseen points right")
    if picture:
        import matplotlib.pyplot as plt

        a, b = onp.meshgrid(onp.linspace(-1.6, 2.6, 120), onp.linspace(-1.1, 1.6, 90))
        odds = onp.asarray(predict(parameters, onp.stack([a.ravel(), b.ravel()], 1))).reshape(a.shape)
        figure, axis = plt.subplots(figsize=(5, 3.2))
        axis.contourf(a, b, odds, levels=[-50, 0, 50], colors=["#fddbc7", "#d1e5f0"])
        axis.scatter(*x[test].T, c=y[test], cmap="coolwarm_r", s=8)
        axis.set(xticks=[], yticks=[])
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return parameters, losses, right


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Fool a classifier with noise that nobody sees: FGSM (Goodfellow et al. 2015) and PGD (Madry et al. 2018).

    pip install onnxgrad[demo]
    python examples/adversarial.py [picture.png]

Both climb the loss along the gradient with respect to the *input*. The cotangent of the cross-entropy with respect to
the scores is softmax(scores) - onehot(label), so the pullback of the classifier is all they need.
"""

import sys
from collections.abc import Callable

import numpy as np
from digits import classifier

from onnxgrad import Function


def gradient_of(net: Function) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The gradient of the cross-entropy of each image with respect to that image."""
    pull = net.vjp(wrt="images")

    def gradient(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
        scores = net(x)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return pull(x, odds / odds.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[labels])

    return gradient


def fgsm(net: Function, x: np.ndarray, labels: np.ndarray, size: float) -> np.ndarray:
    """One step of `size` along the sign of the gradient."""
    return np.clip(x + size * np.sign(gradient_of(net)(x, labels)), 0, 1).astype(np.float32)


def pgd(net: Function, x: np.ndarray, labels: np.ndarray, size: float, steps: int = 20) -> np.ndarray:
    """Many small steps, each followed by a projection onto the cube of `size` around `x`."""
    gradient, attacked = gradient_of(net), x
    for _ in range(steps):
        moved = attacked + 2.5 * size / steps * np.sign(gradient(attacked, labels))
        attacked = np.clip(np.clip(moved, x - size, x + size), 0, 1).astype(np.float32)
    return attacked


def main(picture: str | None = "adversarial.png", epochs: int = 4) -> dict[str, list[float]]:
    """The accuracy under attacks of growing size."""
    net, x, labels = classifier(epochs)
    sizes = [0.0, 0.05, 0.1, 0.15, 0.2]
    noise = np.random.default_rng(0).choice([-1.0, 1.0], x.shape)
    attacks = {
        "random noise": lambda size: np.clip(x + size * noise, 0, 1).astype(np.float32),
        "FGSM": lambda size: fgsm(net, x, labels, size),
        "PGD": lambda size: pgd(net, x, labels, size),
    }
    found = {n: [float((net(attack(s)).argmax(1) == labels).mean()) for s in sizes] for n, attack in attacks.items()}
    print("size of the change", *(f"{s:6.2f}" for s in sizes))
    for name, accuracies in found.items():
        print(f"{name:18}", *(f"{a:6.1%}" for a in accuracies))
    if picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(3, 8, figsize=(8, 3.6))
        attacked = pgd(net, x, labels, 0.15)
        fooled = np.flatnonzero((net(x).argmax(1) == labels) & (net(attacked).argmax(1) != labels))[:8]
        for axis, before, after, i in zip(axes.T, x[fooled, 0], attacked[fooled, 0], fooled):
            for a, shown, bounds in zip(axis, (before, after - before, after), ((0, 1), (-0.3, 0.3), (0, 1))):
                a.imshow(shown, cmap="gray" if bounds[0] == 0 else "coolwarm", vmin=bounds[0], vmax=bounds[1])
                a.set(xticks=[], yticks=[])
            axis[0].set_title(f"{labels[i]}")
            axis[2].set_title(f"“{net(attacked[i : i + 1]).argmax()}”", color="crimson")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Parts of losses of detectors: entropies of logits, and the rows of predictions that have a label."""

from __future__ import annotations

from onnxgrad.ir import Builder, Var
from onnxgrad.training.detection.boxes import at


def cross_entropies(b: Builder, logits: Var, targets: Var) -> Var:
    """Binary cross entropy of each element: max(x, 0) - x·t + log(1 + exp(-|x|))."""
    return b.Relu(logits) - logits * targets + b.Log(1.0 + b.Exp(b.Neg(b.Abs(logits))))


def focal(b: Builder, logits: Var, targets: Var, alpha: float = 0.25, gamma: float = 2.0) -> Var:
    """Focal loss of each element (Lin et al. 2017)."""
    p = b.Sigmoid(logits)
    right = p * targets + (1.0 - p) * (1.0 - targets)
    share = targets * alpha + (1.0 - targets) * (1.0 - alpha)
    return cross_entropies(b, logits, targets) * (1.0 - right) ** gamma * share


def smooth(b: Builder, x: Var) -> Var:
    """x²/2 below 1, and |x| - 1/2 above."""
    size = b.Abs(x)
    return b.Where(size < 1.0, b.Mul(x * x, 0.5), size - 0.5)


class Positives:
    """Rows of the predictions that have a label, of all pictures.

    Args:
        b: the builder.
        positive: [N, A] of 1 and 0.
    """

    def __init__(self, b: Builder, positive: Var) -> None:
        self.b = b
        self.at = b.Transpose(b.NonZero(positive), perm=[1, 0])

    def __call__(self, x: Var) -> Var:
        """The rows of `x` [N, A, …]."""
        return self.b.GatherND(x, self.at)

    def places(self, x: Var) -> Var:
        """The rows of `x` [A, …]."""
        return self.b.Gather(x, self.b.Squeeze(at(self.b, self.at, 1, 2), [1]), axis=0)

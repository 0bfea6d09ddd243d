"""The settings of pruning: how much goes, by which score, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_whole
from onnxgrad.remat import amount
from onnxgrad.settings import setting
from onnxgrad.training.option_strings import looked_up

#: Scores of elements of weights; a channel has the sum over its elements.
SCORES = {
    "magnitude": "|w|",
    "wanda": "|w|·‖x‖, x being what the layer reads",
    "gradient": "|w·∂L/∂w|",
    "movement": "-w·∂L/∂w: away from zero",
}
#: Scores that need a loss.
OF_GRADIENTS = ("gradient", "movement")


def check_share(name: str, share: float | None) -> None:
    """Raise BadInput for a share that is not between 0 and 1."""
    if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1):
        raise BadInput(f"{name} is the share that is removed, between 0 and 1, not {share!r}")


def pattern_of(text: str | float) -> tuple[int, int] | float:
    """``"2:4"`` as how many of how many weights stay; ``0.8`` as the share that goes.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(text, str) and ":" in text:
        kept, _, block = text.partition(":")
        if not (kept.isdigit() and block.isdigit() and 0 < int(kept) < int(block)):
            raise BadInput(f"N:M keeps N of M weights in a row, as 2:4, not {text!r}")
        return int(kept), int(block)
    try:
        share = float(text)
    except (TypeError, ValueError):
        raise BadInput(f"weights are pruned by a share, 0.8, or by a pattern, 2:4, not {text!r}") from None
    check_share("weights", share)
    return share


@dataclass(frozen=True)
class PruneRecipe:
    """The channels, heads and weights to remove from a model."""

    panel: ClassVar[str] = "Model"

    channels: float | None = setting(None, "Remove this share of the channels of every layer: 0.5.")
    heads: float | None = setting(None, "Remove this share of the heads of every attention: 0.25.")
    weights: str | float | None = setting(
        None, "Set this share of the weights to zero, 0.8; or all but N of M in a row, 2:4.", kind=str
    )
    flops: float | None = setting(
        None, "Find widths with at most so many operations for a row; up to 1, a share of those before."
    )
    bytes: str | int | float | None = setting(
        None, "Find widths with weights of at most this size, 200KB; up to 1, a share of the size before.", kind=str
    )
    milliseconds: float | None = setting(
        None, "Find widths that take at most so long for a batch of `latency_rows`, in ONNX Runtime on one thread."
    )
    score: str = setting("magnitude", f"What is removed first is small in {', '.join(SCORES)}.")
    multiple: int = setting(1, "Keep multiples of so many channels where a layer has more; kernels like 8 or 16.")
    exclude: Sequence[str] = setting((), "Not these weights: names or globs.", metavar="PATTERN", many=True)
    latency_rows: int = setting(1, "Rows of the batch that `milliseconds` is measured on.")

    def __post_init__(self) -> None:
        looked_up("score", self.score, SCORES)
        check_whole(1, multiple=self.multiple, latency_rows=self.latency_rows)
        check_share("channels", self.channels)
        check_share("heads", self.heads)
        if self.weights is not None:
            pattern_of(self.weights)
        budgets = [n for n in ("flops", "bytes", "milliseconds") if getattr(self, n) is not None]
        if budgets and (self.channels is not None or self.heads is not None):
            raise BadInput(f"{budgets[0]} finds the widths; leave channels and heads out")
        if len(budgets) > 1:
            raise BadInput(f"{' and '.join(budgets)} are several budgets; give one")
        if not budgets and self.channels is None and self.heads is None and self.weights is None:
            raise BadInput("say what to remove: channels, heads, weights, or a budget of flops, bytes or milliseconds")
        for name in ("flops", "milliseconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name} must be positive, not {value}")
        if self.bytes is not None:
            self.most_bytes(1)

    def most_bytes(self, before: float) -> float:
        """The budget of bytes, for weights that have `before`."""
        text = str(self.bytes)
        try:
            share = float(text)
        except ValueError:
            return float(amount(text))
        if share <= 0:
            raise BadInput(f"bytes must be positive, not {text}")
        return share * before if share <= 1 else share

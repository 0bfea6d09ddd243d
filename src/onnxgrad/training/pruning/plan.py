"""The spelling of pruning during training: ``channels=0.5:schedule=cubic,score=movement``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxgrad.errors import BadInput
from onnxgrad.training.option_strings import completed, looked_up, spelled
from onnxgrad.training.pruning.recipe import SCORES, check_share, pattern_of

#: The share that has gone after a part p of the way, in units of what goes in the end (cubic: Zhu and Gupta 2017).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cubic": lambda p: 1 - (1 - p) ** 3,
    "linear": lambda p: p,
    "constant": lambda p: 1.0,
}
KINDS = ("channels", "heads", "weights")
#: Scores that a run can sum up, or read off the weights.
_IN_TRAINING = {name: SCORES[name] for name in ("magnitude", "gradient", "movement")}


@dataclass(frozen=True)
class PrunePlan:
    """The pruning of a run: its kind, its amount and its schedule.

    Attributes:
        text: as it is spelled.
        kind: channels, heads or weights.
        amount: the share that goes in the end, or how many of how many weights stay.
        schedule: how the share grows between `begin` and `end`, which are shares of the steps of the run.
        score: the measure of importance: small ones go first.
        times: the number of times that pruning takes place in between.
    """

    text: str
    kind: str
    amount: tuple[int, int] | float
    schedule: str = "cubic"
    score: str = "magnitude"
    begin: float = 0.0
    end: float = 0.7
    times: int = 30

    @classmethod
    def of(cls, text: str) -> PrunePlan:
        """The plan spelled ``kind=amount:key=value,…``.

        Raises:
            BadInput: it is not spelled so, or a value is out of its range.
        """
        if not isinstance(text, str) or "=" not in text:
            raise BadInput(f"pruning is spelled channels=0.5, heads=0.25 or weights=0.8, not {text!r}")
        kind, _, rest = text.partition("=")
        if kind not in KINDS:
            raise BadInput(f"{kind!r} cannot be pruned; {', '.join(KINDS)} can")
        pieces = rest.split(":")
        size = 2 if kind == "weights" and len(pieces) > 1 and pieces[1].isdigit() else 1
        amount = pattern_of(":".join(pieces[:size]))
        if kind != "weights":
            check_share(kind, amount if isinstance(amount, float) else None)
        defaults = {"schedule": "cubic", "score": "magnitude", "begin": 0.0, "end": 0.7, "times": 30}
        options = completed(f"prune {kind}", defaults, spelled(f"{kind}:{':'.join(pieces[size:])}".rstrip(":"))[1])
        looked_up("schedule of pruning", options["schedule"], SCHEDULES)
        looked_up("score in training", options["score"], _IN_TRAINING)
        if not 0 <= options["begin"] <= options["end"] <= 1 or options["times"] < 1:
            raise BadInput(f"prune {text!r}: 0 ≤ begin ≤ end ≤ 1 are shares of the run, and times is 1 or more")
        return cls(text, kind, amount, **options)

    def is_due(self, step: int, steps: int) -> bool:
        """True if weights are pruned after so many of the steps of a run."""
        first, last = self._range(steps)
        every = max(1, (last - first) // self.times)
        return step == last or (first <= step < last and (step - first) % every == 0)

    def part(self, step: int, steps: int) -> float:
        """The part of what goes in the end that is gone after so many steps."""
        first, last = self._range(steps)
        progress = 1.0 if last <= first else min(1.0, max(0.0, (step - first) / (last - first)))
        return SCHEDULES[self.schedule](progress)

    def _range(self, steps: int) -> tuple[int, int]:
        first = max(1, round(self.begin * steps))
        return first, max(first, round(self.end * steps))

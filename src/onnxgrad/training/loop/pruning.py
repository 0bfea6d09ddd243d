"""The callback that prunes during a run: at some steps, masks are set anew by the scores that weights have then."""

from __future__ import annotations

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.loop.run import Callback, Run
from onnxgrad.training.metadata import MASK, SALIENCY
from onnxgrad.training.pruning.in_training import channels_of, noted, widths_of
from onnxgrad.training.pruning.masks import prunable_weights, smallest_go
from onnxgrad.training.pruning.plan import PrunePlan
from onnxgrad.training.pruning.record import record_in
from onnxgrad.training.pruning.scores import Scores, channel_scores
from onnxgrad.training.pruning.shrink import weight_masks
from onnxgrad.training.step.step import Step


class PruningSchedule(Callback):
    """Sets the masks of weights as the plans of a model say.

    A function of the number of steps and of the state, so that a resumed run prunes the same.
    """

    def __init__(self, step: Step, plans: list[PrunePlan]) -> None:
        assert step.source is not None
        self.plans = plans
        self.masks, self.sums = noted(step.source, MASK), noted(step.source, SALIENCY)
        self.channels = channels_of(step.source.model)

    def step(self, run: Run, loss: float) -> None:
        """Prune, if it is time."""
        if run.steps is None:
            raise BadInput("pruning follows the number of steps of a run, which a stream does not have")
        due = [p for p in self.plans if p.is_due(run.step_count, run.steps)]
        if not due:
            return
        state = run.state()
        for plan in due:
            self._prune(plan, plan.part(run.step_count, run.steps), state)
        run.load_state(state)

    def _prune(self, plan: PrunePlan, part: float, state: dict[str, np.ndarray]) -> None:
        scores = self._scores(plan, state)
        if plan.kind == "weights":
            axes = {n: a for n, a in prunable_weights(self.channels, ()).items() if n in scores}
            amount = plan.amount if isinstance(plan.amount, tuple) else plan.amount * part
            found = smallest_go(scores, axes, amount)
        else:
            assert isinstance(plan.amount, float)
            removed: list[int] = []
            totals = channel_scores(self.channels, scores)
            for width in widths_of(self.channels, plan.kind, self.masks):
                by_score = width.channels[np.argsort(totals[width.channels], kind="stable")]
                order, least = self.channels.protect(width, by_score)
                count = min(round(plan.amount * part * len(order)), len(order) - least)
                removed += order[:count].tolist()
            found = weight_masks(self.channels, removed)
        for name, mask in found.items():
            if name in self.masks:
                both = mask & state[self.masks[name]]
                state[self.masks[name]] = both
                state[name] = np.where(both, state[name], np.zeros((), state[name].dtype))

    def _scores(self, plan: PrunePlan, state: dict[str, np.ndarray]) -> Scores:
        """The scores of all elements; those that are masked go before all others."""
        found = {}
        for name, mask in self.masks.items():
            if plan.score == "magnitude":
                score = np.abs(state[name].astype(np.float32))
            else:
                score = state[self.sums[name]].astype(np.float32)
                score = score - min(float(score.min()), 0.0) + 1e-30  # of movement, which has both signs
            found[name] = np.where(state[mask], score, np.float32(0))
        return found


def pruning_of(step: Step) -> list[Callback]:
    """The callback of a step whose model says how it is pruned; none for others."""
    if step.source is None:
        return []
    plans = [PrunePlan.of(text) for text in record_in(step.source.model).plan]
    return [PruningSchedule(step, plans)] if plans else []

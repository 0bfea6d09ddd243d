"""The beginning of a training run of the command: its settings in lines, and the scores of the model before it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from onnxgrad.cli.console import print_lines
from onnxgrad.cli.train_summary import summary
from onnxgrad.errors import BadInput
from onnxgrad.training.adapters.folder import check_adapter
from onnxgrad.training.data import Data
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run
from onnxgrad.training.spec.training_info import training_notes


class Beginning(Callback):
    """Measures the model and prints the settings of the run when it begins: only the error of a run precedes them.

    Args:
        file: the model before the run.
        notes: lines to print.
        schedule: of the learning rate, as text.
        quiet: print nothing.

    Attributes:
        saves_adapter: the run is to save an adapter, which the model must have.
        measures_twice: also measure the state before the first step, where that is not in `file`.
        run: the run; None on all processes but the first.
        scores, first: loss and metrics of validation data, of `file` and before the first step.
    """

    is_told_once = True

    def __init__(self, file: Path, notes: Sequence[str], schedule: str, quiet: bool) -> None:
        self.file, self.notes, self.schedule, self.quiet = file, notes, schedule, quiet
        self.saves_adapter = self.measures_twice = False
        self.run: Run | None = None
        self.scores: dict[str, float] = {}
        self.first: dict[str, float] = {}

    def start(self, run: Run) -> None:
        """Measure, then print."""
        self.run, source = run, run.step.source
        if self.saves_adapter and source is not None:
            check_adapter(source.model)
        if run.validation is not None:
            self.scores = self._of_file(run, run.validation)
            if self.measures_twice:
                self.first = run.trainer.evaluation(run.trainer.initial, run.validation, metrics=run.metrics)
        plan = run.trainer.plan
        lines = [*([] if plan is None else [f"memory: {plan}"]), *self.notes]
        lines += [f"peak: {run.trainer.peak}"] if run.trainer.peak else []
        lines += dict.fromkeys(n for rows in (run.data, run.validation) if rows is not None for n in rows.notes)
        lines += [*([] if source is None else training_notes(source.model)), *summary(run, self.schedule)]
        if not self.quiet:
            print_lines(*lines, stream=sys.stderr)

    def _of_file(self, run: Run, held_out: Data) -> dict[str, float]:
        """Scores of the file in plain ONNX Runtime, or of the first state, where that does not run the file."""
        try:
            return run.trainer.evaluation.file(self.file, held_out, metrics=run.metrics)
        except BadInput:
            return run.trainer.evaluation(run.trainer.initial, held_out, metrics=run.metrics)

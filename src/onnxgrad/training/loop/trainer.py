"""The trainer: a step with its state, measured and run over data.

The parts that measure data and run over them are imported when a method needs them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from onnxgrad._later import without_collection
from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_keywords, check_whole
from onnxgrad.model_io import AnyModel, save_model
from onnxgrad.settings import takes
from onnxgrad.training.data import Augment, Data, split
from onnxgrad.training.data.by_position import with_labels
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.data.sampling import check_sample
from onnxgrad.training.data.split import split_rows
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.language.recipe import METRICS_OF_TASKS
from onnxgrad.training.language.shift import warn_of_own_input
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.recipe import FIT, TRAINER, DataRecipe, Recipe
from onnxgrad.training.loop.run import Position, Run
from onnxgrad.training.loop.trained import AnyData, Trained
from onnxgrad.training.loop.trainer_setup import set_up
from onnxgrad.training.metrics.registry import names_of
from onnxgrad.training.parallel.joining import on_all_ranks
from onnxgrad.training.step.step import Step

if TYPE_CHECKING:
    from onnxgrad.training.data.keywords import PreparationKeywords
    from onnxgrad.training.loop.keywords import DataKeywords, FitKeywords, TrainerKeywords
    from onnxgrad.training.loop.rate_finder import RateTest


class Trainer(Trained):
    """Trains a model: with a loss and an optimizer, or by the training information in the model.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, bare or with a TrainingInfoProto (see `attach`);
            or a compiled `Step`.
        recipe: all settings as one value, in place of the keywords.
        batch_size: the most rows of a batch that `memory` is for.
        settings:

    Further settings of `attach`, such as ``betas``, are arguments as well. A target "auto" is resolved here, for the
    whole run. With several processes, each trains on its part of every batch; `fit`, `evaluate` and `find_rate` are
    called on all of them, and only the first one writes files.

    Raises:
        BadInput: a bare model without a loss, a loss for a model that carries training information, or what
            `attach`, `compile_step` and `within_memory` refuse.

    Attributes:
        machine: the step with its state.
        initial: the state before the first step.
        fingerprint: a digest of what the step computes.
        accumulate: into how many parts a batch is cut.
        strategy: how the processes of the run share its work.
        ranks: the processes, if there are several.
        classes: the names of the classes in the order of their numbers, where the model or its training data say them.
        preprocessing: how data are prepared: as the model says, or the data that it is trained on.
        plan: what is kept and what is computed anew, with `memory`.
        peak: the plan that `peak` has chosen, and what it was measured to take, in words.
    """

    @takes(*TRAINER, others=True)
    def __init__(
        self,
        model: AnyModel | Step,
        *,
        recipe: Recipe | None = None,
        batch_size: int | None = None,
        **settings: Unpack[TrainerKeywords],
    ) -> None:
        is_validated = recipe is None or recipe.data.measures  # of a trainer, fit decides later
        recipe = Recipe.of("Trainer", settings, TRAINER, ["model", "batch_size"], recipe)
        self.peak = ""
        if recipe.step.peak is not None:
            from onnxgrad.training.loop.peak import check_platform, within_peak

            if isinstance(model, Step):
                raise BadInput("peak chooses how a model is trained, not a compiled step")
            check_platform()
            recipe, self.peak = within_peak(model, recipe, batch_size or 32, is_validated)
        with without_collection():
            setup = set_up(model, recipe, batch_size)
            warn_of_own_input(recipe.loss.labels, [] if recipe.task.name else setup.step.batch)
            super().__init__(setup, recipe.step.evaluation, recipe.task)
        if self.peak and self._evaluation is not None:
            from onnxgrad.training.loop.peak import held_out_rows

            self._evaluation.most_rows = held_out_rows(batch_size or 32, recipe)
        self.path = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
        self._position = Position()

    @property
    def step_count(self) -> int:
        """Steps taken by the last run so far."""
        return self._position.step

    @property
    def history(self) -> History:
        """The measurements of the last run so far."""
        return self._position.history

    @check_keywords
    @takes(PreparationRecipe)
    def predict(
        self,
        data: AnyData,
        *,
        outputs: Sequence[str] | None = None,
        batch_size: int = 256,
        **settings: Unpack[PreparationKeywords],
    ) -> dict[str, np.ndarray]:
        """Run the inference model, with the current weights, on every row of `data`.

        Returns:
            Arrays [rows, …] by the names of the outputs (see `onnxgrad.training.predict`, also for the arguments).
        """
        from onnxgrad.training.measure.predict import predict

        task: dict[str, Any] = {"task": self.task.name, "documents": self.task.documents} if self.task.name else {}
        return predict(
            self.inference_ir(), data, outputs=outputs, batch_size=batch_size, options=self.options, **task, **settings
        )

    @check_keywords
    def save(self, path: str | os.PathLike) -> None:
        """Write `inference_model` to `path`, a plain ``.onnx`` file.

        Raises:
            BadInput: it cannot be written there.
        """
        model = self.strategy.on_writer(lambda: self._finished(self.step.inference_model(self._present())))
        if model is not None:
            save_model(model, path)

    def __repr__(self) -> str:
        return f"<Trainer at step {self.step_count} of {self.step!r}>"

    @check_keywords
    @takes(PreparationRecipe)
    def evaluate(
        self,
        data: AnyData,
        y: Any = None,
        *,
        batch_size: int = 256,
        metrics: Sequence[str] | str | None = None,
        **settings: Unpack[PreparationKeywords],
    ) -> dict[str, float]:
        """Loss and metrics of the inference model, with the current weights, over the data (see `fit`)."""
        with self.strategy.ranks.agreeing():
            check_whole(1, batch_size=batch_size)
        rows = self.data(with_labels(data, y), "the validation data", PreparationRecipe(**settings))
        self.check_classes(rows)
        strategy = self.strategy
        asked = names_of(metrics) or (METRICS_OF_TASKS if self.task.name else None)
        return self.evaluation(strategy.inference_state(), rows, batch_size, asked, strategy.ranks.collective)

    @check_keywords
    @on_all_ranks
    @takes(DataRecipe)
    def find_rate(
        self,
        data: AnyData,
        y: Any = None,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        batch_size: int = 32,
        seed: int = 0,
        sample: str = "each",
        **settings: Unpack[DataKeywords],
    ) -> RateTest:
        """A learning rate to begin with: raise it from `lowest` to `highest` until the loss grows (Smith 2017).

        The weights, the rate and the preparation of data are afterwards as they were before.

        Args:
            data, y: see `fit`.
            lowest: the rate of the first step.
            highest: the rate of the last step.
            steps: at most so many steps are taken, 10 or more.
            batch_size: rows per step.
            seed: decides the order of the rows, and which are held out.
            sample: see `fit`.
            settings:

        Returns:
            Rates and losses, and the suggestion: where the loss fell fastest.

        Raises:
            BadInput: as `fit`; the model has several learning rates or none, or the loss falls at none.
        """
        from onnxgrad.training.loop.rate_finder import range_test

        if self.strategy.exchange.sync_every > 1:
            raise BadInput("ranks that exchange weights seldom find no common rate; leave sync_every out for this")
        before = self.preprocessing, self.classes
        try:
            rows, _ = self._training_rows(with_labels(data, y), DataRecipe(**settings), seed, sample)
            self.check_classes(rows)
            self.strategy.ranks.agree(
                lambda: {
                    "model": self.fingerprint,
                    "training data": rows.fingerprint,
                    "steps": [steps, batch_size, seed, sample],
                    "rates": [lowest, highest],
                }
            )
            return range_test(
                self.machine, self.step.loss, rows,
                lowest=lowest, highest=highest, steps=steps, batch_size=batch_size, seed=seed, sample=sample,
                part=self.strategy.part,
            )  # fmt: skip
        finally:
            self.preprocessing, self.classes = before

    @check_keywords
    @on_all_ranks
    @takes(*FIT)
    def fit(
        self, data: AnyData, y: Any = None, *, recipe: Recipe | None = None, **settings: Unpack[FitKeywords]
    ) -> History:
        """Train for `epochs` epochs.

        Args:
            data: arrays by name, rows that are dicts, or a path (see `onnxgrad.training.data.sources`); or arrays by
                position: a model's input, or a tuple of them.
            y: labels for arrays by position; a pair ``(x, y)`` as `data` or `validation` is the same.
            recipe: all settings as one value, in place of the keywords.
            settings:

        Raises:
            BadInput: data, options or a checkpoint that do not fit.
            TrainingError: the loss or the weights are no longer finite; the last checkpoint is good.
            Interrupted: Ctrl-C, SIGTERM or SIGHUP; the state was kept.
        """
        from onnxgrad.training.loop.fit import open_run, take_epochs
        from onnxgrad.training.loop.listeners import loggers, rate_plan, watched, watchers, writers
        from onnxgrad.training.loop.pruning import pruning_of
        from onnxgrad.training.loop.resume import is_restarted

        recipe = Recipe.of("Trainer.fit", settings, FIT, recipe=recipe)
        asked = self._check_recipe(recipe)
        prepared, loop, log = recipe.data, recipe.loop, recipe.log
        planned, lowering = rate_plan(loop.schedule, prepared.measures)
        watching = watchers(recipe.watch, prepared.measures)
        listening = [*pruning_of(self.step), *log.callbacks, *lowering, *watching, *loggers(log), *writers(log)]
        listening = [c for c in listening if self.is_writer or not c.is_told_once]
        if prepared.measures:
            asked = self.evaluation.metrics(asked, watched(listening))
            self.evaluation.meters(asked)  # undefined metrics are refused before data are read
        rows, held_out = self._training_rows(with_labels(data, y), prepared, loop.seed, loop.sample, loop.shuffle)
        if isinstance(rows, Stream):
            rows.steps_per_epoch = loop.steps_per_epoch
        elif loop.steps_per_epoch is not None:
            raise BadInput("steps_per_epoch is of a stream; an epoch of rows by number takes all of them")
        if prepared.validation is not None:
            held_out = self.data(prepared.validation, "the validation data", prepared)
        run = Run(self, rows, held_out, replace(loop, schedule=planned), callbacks=listening, metrics=asked)
        self._position = run.position
        resuming = loop.resume or is_restarted(run)
        if not resuming:
            self.check_classes(rows, held_out)
        with open_run(run, resuming, loop.accept_changes):
            if resuming:  # a checkpoint may number them otherwise
                self.check_classes(rows, held_out)
            self.classes = rows.classes or self.classes
            with self.strategy.ranks.running():
                take_epochs(run)
        return self.history

    def _training_rows(
        self, data: AnyData, recipe: DataRecipe, seed: int, sample: str, shuffle: bool = True
    ) -> tuple[Data | Stream, Data | None]:
        """The rows to train on, and those of them that are held out. Raises BadInput if they do not fit."""
        before, name = self.preprocessing, "the training data"
        rows, held_out = self.training_data(data, name, recipe), None
        if recipe.validation_split is not None and isinstance(rows, Data):
            if recipe.tables is not None:
                kept, _ = split_rows(rows, recipe.validation_split, seed)  # nothing is fitted on the others
                self.preprocessing = before
                rows = self.training_data(data, name, recipe, kept)
                assert isinstance(rows, Data)
            rows, held_out = split(rows, recipe.validation_split, seed)
        check_sample(sample, rows.labels, shuffle, rows.name)
        if recipe.augment is not None:
            rows = rows.augmented(Augment.of(recipe.augment) if isinstance(recipe.augment, str) else recipe.augment)
        return rows, held_out

    def _check_recipe(self, recipe: Recipe) -> Sequence[str] | None:
        """The metrics that `recipe` asks for. Raises BadInput for settings that this trainer does not support."""
        planned, measures = self._setup.planned, recipe.data.measures
        if planned is not None and recipe.loop.batch_size > planned:
            raise BadInput(f"memory was planned for batches of at most {planned} rows, not {recipe.loop.batch_size}")
        if measures and self._evaluation is None:
            raise BadInput(self._why_not)
        if recipe.loop.evaluate_every is not None and not measures:
            raise BadInput("evaluate_every measures validation data, and there are none")
        asked = names_of(recipe.watch.metrics)
        if asked is None and measures and self.task.name:
            asked = METRICS_OF_TASKS
        if asked is not None and not measures:
            raise BadInput(
                "metrics are of validation data, and there are none\n  hint: give validation, or validation_split"
            )
        return asked

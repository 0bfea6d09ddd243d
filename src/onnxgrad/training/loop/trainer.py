"""The trainer: a step with its state, measured and run over data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.distributed import Collective
from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_keyword, check_kind, checked, keywords_of
from onnxgrad.model_io import save_model
from onnxgrad.runtime import Options
from onnxgrad.training.build.attach import known_arguments
from onnxgrad.training.data import Augment, Images, Text, split
from onnxgrad.training.data.sampling import check_sample
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.fit import Fit
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.listeners import loggers, rate_plan, watched, watchers, writers
from onnxgrad.training.loop.rate_finder import RateTest, range_test
from onnxgrad.training.loop.resume import is_restarted
from onnxgrad.training.loop.run import Position, RateSchedule, Run
from onnxgrad.training.loop.trained import AnyData, Trained
from onnxgrad.training.loop.trainer_arguments import check_fit, check_whole
from onnxgrad.training.loop.trainer_setup import set_up
from onnxgrad.training.measure import predict
from onnxgrad.training.measure.metrics import names_of
from onnxgrad.training.optim.config import Optimizer
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.joining import together
from onnxgrad.training.parallel.local_steps import LocalSteps
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.sharded import inference_state
from onnxgrad.training.spec.training_info import AnyTrainingModel
from onnxgrad.training.step.step import Step


class Trainer(Trained):
    """Trains a model: with a loss and an optimizer, or as the training information that it carries says.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, bare or with a TrainingInfoProto (see `attach`);
            or a compiled `Step`.
        loss: what to minimize, attached to a bare model: a name, a `Loss`, a graph, or several of them (see `attach`).
        optimizer: its name, or an `Optimizer` (see `attach`); default: adam.
        entry: which of its training entries, if it has several.
        evaluation: how to measure validation data; default: what the training information says.
        options: how ONNX Runtime runs the step. A target "auto" is decided here, for all of a run; if kernels in C have
            to be built for it, this takes a few seconds.
        accumulate: into how many parts a batch is cut, one after the other (see `accumulate`); the memory is that of a
            part, the step that of the batch. Needs a bare model, or one from ``attach(…, accumulate=True)``.
        memory: how much what a step computes may take at a time, as ``"200MB"``; what does not fit is computed anew
            (see `within_memory`). With `accumulate`, it is what a part may take.
        batch_size: the most rows of a batch that `memory` is for.
        dims: sizes of other symbolic dimensions that it is for, by name.
        distributed: the ranks that train together, of which this process is one: "torch" (torchrun), "mpi" (mpiexec),
            "none", or a `Collective`. Default: what the environment says that their launcher sets. Each rank takes its
            part of every batch. `fit`, `evaluate` and `find_rate` are called on all of them; only the first one writes
            files. Needs what `accumulate` needs.
        sync_every: steps that ranks take on their own between two exchanges (DiLoCo, arXiv 2311.08105); then they move
            on together by an outer step with Nesterov's momentum.
        outer_rate, outer_momentum: of that step. Default: 0.7 and 0.9.
        compress: "fp16" sends gradients, or the ways of weights, as 16-bit numbers with error feedback: half the bytes.
        shard_optimizer: each rank keeps and updates its part of the optimizer's state alone (ZeRO-1, arXiv 1910.02054):
            memory for it is divided by the number of ranks. `save`, `state`, `training_model` and what else asks for
            the model are then called on all ranks, too.
        sync_batch_norm: BatchNormalization takes the statistics of the rows of all ranks, as one process does; they are
            exchanged in the middle of a step, forward and backward. Default: each rank takes those of its rows.
        attention_rows: how many queries attention takes at a time (see `compile_step`); by default "kernel" where
            the target is native.
        precision: "fp16" or "bf16": products in 16 bits, beside weights in float32, on a provider that has them; see
            `Precision`. Default: all in the types that the model has.
        attached: further arguments of `attach`: ``learning_rate``, ``freeze``, ``groups``, ``adapter=LoRA(…)``, …

    Raises:
        BadInput: a bare model without a loss, a loss for a model that carries training information, or what
            `attach`, `compile_step` and `within_memory` refuse.

    Attributes:
        machine: the step with its state.
        initial: the state before the first step.
        fingerprint: a digest of the step graph.
        accumulate: into how many parts a batch is cut.
        ranks: who trains together, where there are several.
        classes: the names of the classes in the order of their numbers, where the model or its training data say them.
        plan: what is kept and what is computed anew, with `memory`.
    """

    def __init__(
        self,
        model: AnyTrainingModel | Step,
        *,
        loss: Any = None,
        optimizer: Optimizer | str | None = None,
        entry: int | None = None,
        evaluation: Evaluation | None = None,
        options: Options | None = None,
        accumulate: int = 1,
        memory: int | str | None = None,
        batch_size: int | None = None,
        dims: Mapping[str, int] | None = None,
        distributed: Ranks | Collective | str | None = None,
        sync_every: int = 1,
        outer_rate: float | None = None,
        outer_momentum: float | None = None,
        compress: str | None = None,
        shard_optimizer: bool = False,
        sync_batch_norm: bool = False,
        attention_rows: int | None = None,
        precision: str | None = None,
        **attached: Any,
    ) -> None:
        for name in attached:
            check_keyword("Trainer", name, [*keywords_of(Trainer.__init__), *known_arguments()])
        check_whole(accumulate=accumulate, sync_every=sync_every)
        check_kind("options", options, Options, "an Options(…)")
        check_kind("dims", dims, Mapping, "a dict, as in {'seq': 128}")
        check_kind("shard_optimizer", shard_optimizer, bool, "true or false")
        check_kind("sync_batch_norm", sync_batch_norm, bool, "true or false")
        for name, number in (("outer_rate", outer_rate), ("outer_momentum", outer_momentum)):
            check_kind(name, number, (int, float), "a number")
        exchange = Exchanges(sync_every, outer_rate, outer_momentum, compress, shard_optimizer, sync_batch_norm)
        setup = set_up(
            model, {"loss": loss, "optimizer": optimizer, **attached}, entry=entry, options=options or Options(),
            accumulate=accumulate, memory=memory, batch_size=batch_size, dims=dims, distributed=distributed,
            exchange=exchange, attention_rows=attention_rows, precision=precision,
        )  # fmt: skip
        super().__init__(setup, evaluation)
        self._position = Position()

    @property
    def step_count(self) -> int:
        """Steps taken by the last run so far."""
        return self._position.step

    @property
    def history(self) -> History:
        """What the last run measured so far."""
        return self._position.history

    @checked
    def predict(
        self,
        data: AnyData,
        *,
        outputs: Sequence[str] | None = None,
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        batch_size: int = 256,
    ) -> dict[str, np.ndarray]:
        """What the inference model gives, with the weights as they are now, for every row of `data`.

        Returns:
            Arrays [rows, …] by the names of the outputs (see `onnxgrad.training.predict`, also for the arguments).
        """
        return predict(
            self.inference_model(), data, outputs=outputs, inputs=inputs, images=images, tokenizer=tokenizer,
            max_length=max_length, batch_size=batch_size, options=self.options,
        )  # fmt: skip

    @checked
    def save(self, path: str | os.PathLike) -> None:
        """Write `inference_model` to `path`, a plain ``.onnx`` file.

        Raises:
            BadInput: it cannot be written there.
        """
        model = self._of_all(lambda: self._finished(self.step.inference_model(self._present())))
        if model is not None:
            save_model(model, path)

    def __repr__(self) -> str:
        return f"<Trainer at step {self.step_count} of {self.step!r}>"

    @checked
    def evaluate(
        self,
        data: AnyData,
        batch_size: int = 256,
        inputs: Mapping[str, str] | None = None,
        metrics: Sequence[str] | str | None = None,
        images: Images | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
    ) -> dict[str, float]:
        """Loss and metrics of the inference model, with the weights as they are now, over `data` (see `fit`)."""
        with nullcontext() if self.ranks is None else self.ranks.agreeing():
            check_whole(batch_size=batch_size)
        if batch_size < 1:
            raise BadInput(f"batch_size must be at least 1, not {batch_size}")
        rows = self.data(data, "the validation data", inputs, images, Text.of(tokenizer, max_length))
        collective = None if self.ranks is None else self.ranks.collective
        return self.evaluation(inference_state(self.machine), rows, batch_size, names_of(metrics), collective)

    @checked
    @together
    def find_rate(
        self,
        data: AnyData,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        batch_size: int = 32,
        seed: int = 0,
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
    ) -> RateTest:
        """A learning rate to begin with: raise it from `lowest` to `highest` until the loss grows (Smith 2017).

        The weights and the rate are afterwards as they were before.

        Args:
            data: see `fit`.
            lowest: the rate of the first step.
            highest: the rate of the last step.
            steps: at most so many steps are taken, 10 or more.
            batch_size: rows per step.
            seed: decides the order of the rows.
            inputs: which columns feed which input (see `fit`).
            images: how pictures become arrays.
            tokenizer: how text becomes tokens (see `fit`).
            max_length: the most tokens of a row.

        Returns:
            Rates and losses, and the suggestion: where the loss fell fastest.

        Raises:
            BadInput: as `fit`; the model has several learning rates or none, or the loss falls at none.
        """
        if isinstance(self.machine, LocalSteps):
            raise BadInput("ranks that exchange weights seldom find no common rate; leave sync_every out for this")
        rows = self.training_data(data, "the training data", inputs, images, Text.of(tokenizer, max_length))
        if self.ranks is not None:
            about = {"model": self.fingerprint, "training data": rows.fingerprint, "steps": [steps, batch_size, seed]}
            self.ranks.agree({**about, "rates": [lowest, highest]})
        return range_test(
            self.machine, self.step.loss, rows,
            lowest=lowest, highest=highest, steps=steps, batch_size=batch_size, seed=seed,
            part=(0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size),
        )  # fmt: skip

    @checked
    @together
    def fit(
        self,
        data: AnyData,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation: AnyData | None = None,
        validation_split: float | None = None,
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        sample: str = "each",
        augment: Augment | str | None = None,
        schedule: RateSchedule | str | None = None,
        checkpoint: str | os.PathLike | None = None,
        resume: bool = False,
        checkpoint_seconds: float = 60.0,
        metrics: Sequence[str] | str | None = None,
        evaluate_every: int | None = None,
        monitor: str = "validation_loss",
        patience: int | None = None,
        keep_best: bool = False,
        keep: int | None = None,
        history: str | os.PathLike | None = None,
        plot: str | os.PathLike | None = None,
        report: str | os.PathLike | None = None,
        log: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
        mlflow: str | None = None,
        callbacks: Sequence[Callback] = (),
        accept_changes: bool = False,
        progress: bool | None = None,
    ) -> History:
        """Train for `epochs` epochs.

        Args:
            data: arrays by name, rows that are dicts, or a path (see `onnxgrad.training.data.sources`).
            epochs: how often every row is seen, counted from the beginning of the run, also when it resumes.
            batch_size: rows per step; the last step of an epoch takes what is left. A model with a fixed
                batch size takes that one, and leaves the rest out (other rows in every epoch).
            validation: held-out data, measured after every epoch.
            validation_split: instead of them, this share of the rows of `data`, which are then not trained on: drawn
                at random, of each class its share where the labels are classes.
            inputs: which columns of the data feed which input, as ``{"X": "f0..f63"}`` (see
                `onnxgrad.training.data.wide`). Default: those of the same names.
            images: how pictures become arrays: mean, deviation and size.
            tokenizer: how text becomes tokens: the path of a ``tokenizer.json``, or a ``tokenizers.Tokenizer`` (see
                `onnxgrad.training.data.text`).
            max_length: the most tokens of a row. Default: what the model fixes, or else what the tokenizer says.
            seed: decides the order of the rows, and which are held out.
            shuffle: whether the rows are drawn in a new random order in every epoch.
            sample: which rows an epoch takes: ``"each"`` row once, or ``"balanced"``, as many rows in all, but of each
                class as many as of the others.
            augment: train on random variants of pictures, ``"flip,crop=4,jitter=0.2,erase"`` (see
                `onnxgrad.training.data.augment`); validation data stay as they are.
            schedule: of the learning rate, as ``"cosine:warmup=100"``, a `Schedule`, or a function of the share of the
                run that is behind it (0 to 1); ``"plateau:patience=2"`` follows what is measured. Default: the same
                rate all the time.
            checkpoint: folder for the checkpoint, which is replaced after every epoch, at every
                `checkpoint_seconds`, and when the run is interrupted.
            resume: go on from the checkpoint in that folder, exactly.
            metrics: what to measure of validation data beside the loss: names of `onnxgrad.training.measure.METRICS`,
                in a list or with commas between them. Default: what is usual for the loss.
            evaluate_every: measure after so many steps, and at the end, instead of after every epoch.
            monitor: which entry of an epoch `patience` and `keep_best` watch: ``loss``, ``validation_loss``,
                ``validation_auc``, … A metric that is watched is measured.
            patience: stop when `monitor` has not become better for so many epochs (or measurements).
            keep_best: in the end, put back the weights with which `monitor` was best.
            keep: the same, and keep so many of the best states beside the checkpoint (see `restore`).
            history: JSON file for losses and metrics, written after every epoch.
            plot: PNG file with the curves, written at the end.
            report: HTML file with settings, metrics and curves, likewise.
            log: file for a JSON line per step and per epoch.
            tensorboard: folder for TensorBoard event files.
            mlflow: name of the MLflow experiment to log to.
            accept_changes: resume although the data, or what decides the numbers, are not those of the checkpoint; if
                the batches are others, the epoch at hand begins anew.
            progress: whether to show how it goes, on standard error. Default: in a terminal or a notebook.
            callbacks: hear what the run does, and may interfere (see `onnxgrad.training.loop.callbacks`).

        Raises:
            BadInput: data, options or a checkpoint that do not fit.
            TrainingError: the loss or the weights are no longer finite; the last checkpoint is good.
            Interrupted: Ctrl-C, SIGTERM or SIGHUP; the state was kept.
        """
        measures = check_fit(
            numbers=(epochs, batch_size, seed), evaluate_every=evaluate_every, patience=patience, keep=keep,
            planned=self._setup.planned, validation=validation, validation_split=validation_split,
            why_not=self._why_not, monitor=monitor, images=images, augment=augment,
            paths={"checkpoint": checkpoint, "history": history, "plot": plot, "log": log}, callbacks=callbacks,
        )  # fmt: skip
        asked = names_of(metrics)
        if asked is not None and not measures:
            raise BadInput(
                "metrics are of validation data, and there are none\n  hint: give validation, or validation_split"
            )
        planned, lowering = rate_plan(schedule, measures)
        watching = watchers(monitor, patience, keep_best, keep, measures)
        listening = [*callbacks, *lowering, *watching, *loggers(log, tensorboard, mlflow)]
        listening += writers(history, plot, report, progress)
        listening = [c for c in listening if self.is_writer or not c.is_told_once]
        if measures:
            asked = self.evaluation.metrics(asked, watched(listening))
            self.evaluation.meters(asked)  # whether they are defined shows now
        text = Text.of(tokenizer, max_length)
        rows = self.training_data(data, "the training data", inputs, images, text)
        held_out = None
        if validation is not None:
            held_out = self.data(validation, "the validation data", inputs, images, text)
        if validation_split is not None:
            rows, held_out = split(rows, validation_split, seed)
        check_sample(sample, rows.labels, shuffle, rows.name)
        if augment is not None:
            rows = rows.augmented(Augment.of(augment) if isinstance(augment, str) else augment)
        run = Run(
            self.step,
            self.machine,
            (self.fingerprint, self._setup.structure),
            rows,
            held_out,
            parts=self.accumulate,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            schedule=planned,
            sample=sample,
            metrics=asked,
            evaluate_every=evaluate_every,
            folder=None if checkpoint is None else Path(checkpoint),
            target=self.options.target,
            follow=self._follow,
            ranks=self.ranks,
        )
        self._position = run.position
        loop = Fit(run, listening, self._evaluation, checkpoint_seconds)
        with loop.opened(resume or is_restarted(run), accept_changes):
            self.classes = rows.classes or self.classes  # a checkpoint may number them otherwise
            with nullcontext() if self.ranks is None else self.ranks.running():
                loop()
        return self.history

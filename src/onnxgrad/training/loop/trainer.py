"""The trainer: a step with its state, measured and run over data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.distributed import Collective
from onnxgrad.errors import BadInput, UnknownName, warn_caller
from onnxgrad.keywords import check_keyword, check_kind, checked, keywords_of
from onnxgrad.model_io import load_model, save_model, training_info
from onnxgrad.remat import Plan
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.on_device import OnDevice, runner
from onnxgrad.training.adapters.folder import save_adapter
from onnxgrad.training.adapters.merge import merged
from onnxgrad.training.build.attach import attached, known_arguments
from onnxgrad.training.data import Augment, Data, Field, Images, Text, split
from onnxgrad.training.data.axes import first_dim
from onnxgrad.training.data.sampling import check_sample
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.checkpoint import Checkpoint, check_state_fits, fingerprint, structure
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.fit import Fit
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.listeners import loggers, rate_plan, watched, watchers, writers
from onnxgrad.training.loop.rate_finder import RateTest, range_test
from onnxgrad.training.loop.resume import is_restarted
from onnxgrad.training.loop.run import Position, RateSchedule, Run
from onnxgrad.training.measure import predict
from onnxgrad.training.measure.metrics import names_of
from onnxgrad.training.metadata import CLASSES, class_names
from onnxgrad.training.optim.averages import averaged
from onnxgrad.training.optim.config import Optimizer
from onnxgrad.training.parallel.joining import machine_of, ranks_of, sharing, together
from onnxgrad.training.parallel.local_steps import LocalSteps
from onnxgrad.training.parallel.machine import COMPRESSIONS
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.spec.training_info import AnyTrainingModel, Source
from onnxgrad.training.step.accumulate import Accumulating, split_step
from onnxgrad.training.step.compile import compile_step
from onnxgrad.training.step.memory_budget import within_memory
from onnxgrad.training.step.precision import precision_for
from onnxgrad.training.step.snapshot import training_model
from onnxgrad.training.step.step import Step

#: What `onnxgrad.training.data.open_data` can open, or data that were opened.
AnyData = Any


def _with_training(
    model: AnyTrainingModel | Step, asked: dict[str, Any], in_halves: bool
) -> AnyTrainingModel | Source | Step:
    """`model` as it is if it carries training information, else with what is `asked` for attached."""
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model)
    if not isinstance(model, (onnx.ModelProto, ir.Model, Step)):
        raise BadInput(f"a model is a path, an onnx.ModelProto or an onnx_ir.Model, not a {type(model).__name__}")
    if isinstance(model, Step):
        carries = "a compiled step carries its training information"
    elif model.training_info if isinstance(model, onnx.ModelProto) else training_info(model):
        carries = "the model carries training information"
    elif "loss" in asked:
        return attached(model, **{"accumulate": in_halves, **asked})
    else:
        raise BadInput("the model carries no training information; say which loss to minimize, as in loss='mse'")
    if asked:
        raise BadInput(f"{carries}, which is used as it is; drop {', '.join(asked)}")
    return model


def _whole(**numbers: Any) -> None:
    """Raise BadInput for an argument that should be a whole number, and is none."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, np.integer))):
            raise BadInput(f"{name} is a whole number, not {number!r}")


class Trainer:
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
        compress: "fp16" sends gradients, or the ways of weights, as 16-bit numbers with error feedback: half the bytes.
        attention_rows: how many queries attention takes at a time (see `compile_step`).
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
        compress: str | None = None,
        attention_rows: int | None = None,
        precision: str | None = None,
        **attached: Any,
    ) -> None:
        for name in attached:
            check_keyword("Trainer", name, [*keywords_of(Trainer.__init__), *known_arguments()])
        _whole(accumulate=accumulate, sync_every=sync_every)
        check_kind("options", options, Options, "an Options(…)")
        check_kind("dims", dims, Mapping, "a dict, as in {'seq': 128}")
        if accumulate < 1:
            raise BadInput(f"a batch is cut into at least 1 part, not {accumulate}")
        if sync_every < 1:
            raise BadInput(f"sync_every must be at least 1, not {sync_every}")
        if compress is not None and compress not in COMPRESSIONS:
            raise UnknownName(compress, COMPRESSIONS, "compression")
        asked = {"loss": loss, "optimizer": optimizer, **attached}
        self.ranks = ranks_of(distributed)
        parts = accumulate if self.ranks is None else accumulate * self.ranks.size
        training = _with_training(model, {k: v for k, v in asked.items() if v is not None}, parts > 1)
        narrow = precision_for(precision, options or Options())
        if narrow is not None and parts > 1:
            raise BadInput("precision does not go with a batch in parts (accumulate, distributed); drop one of them")
        if isinstance(training, Step) and (attention_rows is not None or narrow is not None):
            raise BadInput("a compiled step is used as it is; hand attention_rows and precision to compile_step")
        how: dict[str, Any] = {"attention_rows": attention_rows}
        if not isinstance(training, Step):
            self.step = compile_step(training, entry=entry, precision=narrow, **how)
        else:
            self.step = training
        if not self.step.loss:
            raise BadInput("the training information has no loss: no Gradient, and no output that updates nothing")
        asked_of_runtime = (options or Options()) if self.ranks is None else sharing(options or Options())
        self.options, self.accumulate = asked_of_runtime.settled(), accumulate
        self._is_free = asked_of_runtime.is_free
        self.fingerprint = fingerprint(self.step.model)  # of what is computed, not of the plan for its memory
        self._structure = structure(self.step.model)
        self._run_by: Callable[[Options], StepRunner | OnDevice | Accumulating]
        self.plan: Plan | None = None
        self._planned = batch_size if memory is not None else None
        if parts == 1:
            if memory is not None:
                self.step = within_memory(self.step, memory, batch_size, dims)
            self.plan = self.step.plan
            self._run_by = lambda how: runner(self.step, how)
        elif isinstance(training, Step):
            raise BadInput("a compiled step cannot be cut into parts; hand in the model that it was compiled from")
        else:
            split = split_step(training, **how)
            if memory is not None:
                rows = None if batch_size is None else -(-batch_size // parts)
                split.gradient = within_memory(split.gradient, memory, rows, dims)
            self.plan = split.gradient.plan
            self._run_by = lambda how: machine_of(split, accumulate, self.ranks, how, sync_every, compress)
        self.machine = self._run_by(self.options)
        self._why_not = ""
        self._evaluation = evaluation or self._default_evaluation()
        self._position = Position()
        inputs = {v.name: v for v in self.step.model.graph.inputs}
        field = self._evaluation.field if self._evaluation else Field.of
        fields = [field(inputs[name]) for name in self.step.batch]
        outputs = [] if self.step.source is None else [first_dim(v) for v in self.step.source.model.graph.outputs]
        self.fields = [
            replace(f, batch=f.batch and f.batch * parts, shares=first_dim(inputs[f.name]) in outputs) for f in fields
        ]
        self.classes = None if self.step.source is None else class_names(self.step.source.model)
        self.initial = {name: t.initial.numpy() for name, t in self.step.state.items()}

    def _default_evaluation(self) -> Evaluation | None:
        try:
            return Evaluation.of(self.step, self.options)
        except BadInput as error:  # which matters only to those who want to evaluate
            self._why_not = str(error)
            return None

    @property
    def evaluation(self) -> Evaluation:
        """How validation data are measured. Raises BadInput if they cannot be."""
        if self._evaluation is None:
            raise BadInput(self._why_not)
        return self._evaluation

    def _follow(self, target: str) -> tuple[StepRunner | OnDevice | Accumulating, str]:
        """The machine of a run that was begun on `target`, and its own: another one, if nobody said which to take."""
        if self._is_free and target != self.options.target:
            if target == "portable" or replace(self.options, target="auto").settled().target == target:
                self.options = replace(self.options, target=target)
                self.machine = self._run_by(self.options)
            else:
                warn_caller(
                    "the run was begun with kernels in C, which cannot be had here: it goes on with standard "
                    "operators, whose sums may be rounded differently"
                )
        return self.machine, self.options.target

    # --- what the caller may ask for -----------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files: the first of several ranks does."""
        return self.ranks is None or self.ranks.is_first

    @property
    def step_count(self) -> int:
        """Steps taken by the last run so far."""
        return self._position.step

    @property
    def history(self) -> History:
        """What the last run measured so far."""
        return self._position.history

    def data(
        self,
        data: AnyData,
        what: str = "the data",
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        text: Text | None = None,
    ) -> Data:
        """`data` as rows for this step.

        Args:
            data: see `fit`.
            what: to call them in messages.
            inputs: which columns feed which input (see `fit`).
            images: how pictures become arrays.
            text: how text becomes tokens.

        Raises:
            BadInput: they do not fit.
        """
        if isinstance(data, Data):
            if self.classes:
                data.number(self.classes)
            return data
        name = repr(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else what
        return Data(data, self.fields, name, inputs=inputs, classes=self.classes, images=images, text=text)

    def training_data(
        self,
        data: AnyData,
        what: str = "the training data",
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        text: Text | None = None,
    ) -> Data:
        """The same of data to train on: the names of their classes are those of the model, if it has none yet."""
        rows = self.data(data, what, inputs, images, text)
        self.classes = self.classes or rows.classes
        return rows

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state."""
        return self.machine.state()

    def inference_model(self) -> Any:
        """The inference model with the weights as they are now, an ``onnx_ir.Model``; adapters are merged into them.

        Weights that are stored as integers are rounded to integers again (see `onnxgrad.training.quantization`).
        If the training information keeps averages of weights, with these (``step.inference_model(state())`` has the
        weights themselves).
        """
        return self._named(folded(merged(self.adapted_model())))

    def adapted_model(self) -> Any:
        """The same with adapters beside the weights that they adapt, not merged into them."""
        return self.step.inference_model(averaged(self.step.source, self.machine.state()))

    def _named(self, model: ir.Model) -> ir.Model:
        if self.classes:
            model.metadata_props[CLASSES] = json.dumps(self.classes, ensure_ascii=False)
        return model

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
        if self.is_writer:
            save_model(self.inference_model(), path)

    def save_adapter(self, folder: str | os.PathLike) -> None:
        """Write the adapter into `folder`: for ONNX Runtime, for PEFT and for `load_adapter` (see `adapters.folder`).

        Raises:
            BadInput: the model has no adapter, or the folder cannot be written.
        """
        if self.step.source is None:
            raise BadInput("a step without the model that it was compiled from has no adapter to save")
        if self.is_writer:
            save_adapter(self.adapted_model(), self.step.source.inference(), Path(folder))

    def __repr__(self) -> str:
        return f"<Trainer at step {self.step_count} of {self.step!r}>"

    def training_model(self) -> Any:
        """The training model as it stands, an ``onnx_ir.Model``: present weights, counters, moments and averages.

        ``Trainer(trainer.training_model())`` goes on with the same bits, given the same batches.
        """
        source = self.step.source
        if source is None:
            raise BadInput("a step without the model that it was compiled from cannot be saved as a training model")
        return self._named(training_model(source, self.machine.state()))

    def save_training_model(self, path: str | os.PathLike) -> None:
        """Write `training_model` to `path`, an ``.onnx`` file with a TrainingInfoProto.

        Raises:
            BadInput: it cannot be written there.
        """
        if self.is_writer:
            save_model(self.training_model(), path)

    def restore(self, path: str | os.PathLike) -> None:
        """Take the state in the checkpoint at `path`, such as one of those that ``fit(keep=3)`` leaves.

        Raises:
            BadInput: there is none, it is damaged, or it belongs to another model.
        """
        found = Checkpoint.load(Path(path))
        check_state_fits(found, self.initial, Path(path))
        self.machine.load_state(found.state)

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
            _whole(batch_size=batch_size)
        if batch_size < 1:
            raise BadInput(f"batch_size must be at least 1, not {batch_size}")
        rows = self.data(data, "the validation data", inputs, images, Text.of(tokenizer, max_length))
        collective = None if self.ranks is None else self.ranks.collective
        return self.evaluation(self.machine.state(), rows, batch_size, names_of(metrics), collective)

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
        _whole(epochs=epochs, batch_size=batch_size, seed=seed)
        _whole(evaluate_every=evaluate_every, patience=patience, keep=keep)
        check_kind("validation_split", validation_split, (int, float), "a number between 0 and 1")
        check_kind("monitor", monitor, str, "a name, as 'validation_loss'")
        check_kind("images", images, Images, "an Images(…)")
        check_kind("augment", augment, (str, Augment), "a text, as 'flip,crop=4', or an Augment(…)")
        for name, path in (("checkpoint", checkpoint), ("history", history), ("plot", plot), ("log", log)):
            check_kind(name, path, (str, os.PathLike), "a path")
        if not isinstance(callbacks, Sequence) or not all(isinstance(c, Callback) for c in callbacks):
            raise BadInput(f"callbacks are a list of Callback, not {callbacks!r}")
        for what, n, least in (("epochs", epochs, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if n < least:
                raise BadInput(f"{what} must be at least {least}, not {n}")
        if self._planned is not None and batch_size > self._planned:
            raise BadInput(f"memory was planned for batches of at most {self._planned} rows, not {batch_size}")
        if validation is not None and validation_split is not None:
            raise BadInput("validation and validation_split exclude each other")
        if (validation is not None or validation_split is not None) and self._evaluation is None:
            raise BadInput(self._why_not)
        if evaluate_every is not None and (evaluate_every < 1 or (validation is None and validation_split is None)):
            why = f"evaluate_every must be at least 1, not {evaluate_every}"
            raise BadInput(why if evaluate_every < 1 else "evaluate_every measures validation data, and there are none")
        asked, measures = names_of(metrics), validation is not None or validation_split is not None
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
            (self.fingerprint, self._structure),
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
            folder=Path(checkpoint) if checkpoint is not None and self.is_writer else None,
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

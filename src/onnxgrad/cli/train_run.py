"""A training run of the command, from the first check to the last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import typer

from onnxgrad.cli import train_options
from onnxgrad.cli.console import console, error
from onnxgrad.cli.train_callbacks import Notes
from onnxgrad.cli.train_config import REPLAY
from onnxgrad.cli.train_summary import outcome, summary
from onnxgrad.distributed import launched
from onnxgrad.errors import BadInput
from onnxgrad.files import alone, replacing
from onnxgrad.model_io import load_model
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer
from onnxgrad.training.data import Text, split
from onnxgrad.training.data.wide import check_fed
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.loop.html_report import Picture, write_report
from onnxgrad.training.loop.listeners import rate_plan, watched
from onnxgrad.training.loop.progress import check_plot, measured, reporter
from onnxgrad.training.loop.report_pictures import report_pictures
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.ranks import Ranks

INTERRUPTED = 130


@dataclass
class Job:
    """One training run of the command, from the first check to the last line.

    Attributes:
        model: carries training information.
        before: the file that `model` came from.
        after: where the trained model goes.
        checkpoint: folder.
        save_training: where the training model goes, as it stands at the end.
        save_adapter: the folder for the adapter.
        history: JSON file.
        metrics: names of what is measured.
        evaluate_every: steps between measurements.
        plot: PNG file.
        epochs: how often every row is seen.
        batch_size: rows per step.
        seed: decides the order of the rows.
        validation_split: the share of the rows that is held out, if no validation data are given.
        inputs: which columns feed which input.
        text: how text becomes tokens.
        sample: which rows an epoch takes.
        augment: variants of pictures, as they are spelled.
        schedule: of the learning rate, as it is spelled.
        accumulate: into how many parts a batch is cut.
        exchange: how ranks exchange what they have.
        memory: how much what a step computes may take, as it is written.
        precision: of products.
        attention_rows: how many queries attention takes at a time.
        dims: sizes of dimensions that it is for.
        resume: go on from the checkpoint.
        accept_changes: with other data or settings than before.
        restart: an unfinished run may be discarded.
        threads: of ONNX Runtime.
        target: what it runs (see `onnxgrad.runtime.Options`).
        provider: names of execution providers.
        quiet: without progress.
        find_lr: only look for a learning rate.
        replay: settings that repeat the run, to be kept beside the checkpoint.
        checkpoint_seconds: between checkpoints within an epoch.
        listeners: further callbacks.
        report: HTML file.
        log: what a listener writes.
        pictures: what the report shows of the files before and after.
        ranks: who trains together, of which the first one writes and prints.
        between: what to call the model before the first step, where it is not that of the file `before`.
    """

    model: onnx.ModelProto | ir.Model
    before: Path
    after: Path
    checkpoint: Path
    save_training: Path | None = None
    save_adapter: Path | None = None
    history: Path | None = None
    metrics: Sequence[str] | None = None
    evaluate_every: int | None = None
    plot: Path | None = None
    epochs: int = 10
    batch_size: int = 32
    seed: int = 0
    validation_split: float | None = None
    inputs: Mapping[str, str] | None = None
    text: Text | None = None
    sample: str = "each"
    augment: str | None = None
    schedule: str = "constant"
    accumulate: int = 1
    exchange: Exchanges = field(default_factory=Exchanges)
    memory: str | None = None
    precision: str | None = None
    attention_rows: int | None = None
    dims: Mapping[str, int] | None = None
    resume: bool = False
    accept_changes: bool = False
    restart: bool = False
    threads: int | None = None
    target: str = "auto"
    provider: Sequence[str] | None = None
    quiet: bool = False
    find_lr: bool = False
    replay: str = ""
    checkpoint_seconds: float = 60.0
    listeners: Sequence[Callback] = ()
    report: Path | None = None
    log: Path | None = None
    notes: Sequence[str] = ()
    pictures: Callable[[Path, Path], list[Picture]] | None = None
    between: str = ""
    ranks: Ranks | None = None

    def run(self, data: tuple[Any, str], validation: tuple[Any, str] | None) -> dict[str, Any]:
        """Train, save, measure the saved file; data are arrays and what to call them."""
        self._check_places()
        trainer = Trainer(
            self.model,
            options=Options(threads=self.threads, target=self.target, providers=train_options.providers(self.provider)),
            accumulate=self.accumulate,
            **asdict(self.exchange),
            memory=self.memory,
            precision=self.precision,
            attention_rows=self.attention_rows,
            batch_size=self.batch_size,
            dims=self.dims,
            distributed=self.ranks or "none",
        )
        check_fed(self.inputs or {}, trainer.fields)
        notes = self.notes if trainer.plan is None else [f"memory: {trainer.plan}", *self.notes]
        rows = trainer.training_data(*data, text=self.text)
        held_out = None if validation is None else trainer.data(*validation, text=self.text)
        if self.validation_split is not None:
            rows, held_out = split(rows, self.validation_split, self.seed)
        if self.find_lr:
            return self._find_rate(trainer, rows)
        notes = [*notes, *summary(trainer, rows, held_out, self.epochs, self.batch_size, self.schedule)]
        metrics = self.metrics
        if held_out is not None:
            metrics = trainer.evaluation.metrics(metrics, watched(self.listeners))
        before = began = None
        if held_out is not None and trainer.is_writer:
            before = self._before(trainer, held_out, metrics)
            began = trainer.evaluation(trainer.initial, held_out, metrics=metrics) if self.between else None
        shown = [] if self.quiet else [Notes(notes), reporter(console(sys.stderr))]
        try:
            history = trainer.fit(
                rows,
                epochs=self.epochs,
                batch_size=self.batch_size,
                validation=held_out,
                seed=self.seed,
                sample=self.sample,
                augment=self.augment,
                schedule=self.schedule,
                checkpoint=self.checkpoint,
                resume=self.resume,
                accept_changes=self.accept_changes,
                checkpoint_seconds=self.checkpoint_seconds,
                metrics=metrics,
                evaluate_every=self.evaluate_every,
                history=self.history,
                plot=self.plot,
                callbacks=[*self.listeners, *shown],
                progress=False,
            )
        except Interrupted as e:
            if trainer.is_writer:
                error(f"{e}\n  hint: the same command with --resume goes on from there")
            raise typer.Exit(INTERRUPTED) from e
        trainer.save(self.after)
        if self.save_training is not None:
            trainer.save_training_model(self.save_training)
        if self.save_adapter is not None:
            trainer.save_adapter(self.save_adapter)
        if not trainer.is_writer:
            return history.about
        if self.replay:
            with replacing(self.checkpoint / REPLAY) as file:
                file.write_text(self.replay, encoding="utf-8")
        lines = outcome(history.about)
        if held_out is not None and before is not None:
            after = trainer.evaluation.file(self.after, held_out, metrics=metrics)
            history.about |= {"before": before, "after": after}
            lines.append(_measured("before", before, self.before))
            if began is not None:
                history.about[self.between] = began
                lines.append(_measured(self.between, began, "before the first step"))
            lines.append(_measured("after", after, self.after))
            if self.history:
                history.write(self.history)
        if self.report is not None:
            if self.pictures:
                pictures = self.pictures(self.before, self.after)
            else:
                pictures = report_pictures(load_model(self.after), held_out, trainer.options)
            write_report(history, self.report, f"Training {self.before.name}", pictures)
        for what, path in (
            ("trained model", self.after),
            ("training model", self.save_training),
            ("adapter", self.save_adapter),
            ("checkpoint", self.checkpoint / FILE),
            ("history", self.history),
            ("plot", self.plot),
            ("report", self.report),
            ("log", self.log),
        ):
            if path is not None:
                lines.append(f"{what:<14} {path}")
        out = console()
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        return history.about

    def _find_rate(self, trainer: Trainer, rows: Any) -> dict[str, Any]:
        """Say which learning rate to begin with; nothing is trained and nothing saved but the plot."""
        found = trainer.find_rate(rows, batch_size=self.batch_size, seed=self.seed)
        if self.plot is not None and trainer.is_writer:
            found.plot(self.plot)
        out = console()
        out.print(f"learning rate  {found.suggestion:.2g}", highlight=False)
        out.print(f"  hint: --lr {found.suggestion:.2g}; the loss grows from {found.rates[-1]:.2g} on", highlight=False)
        return {"learning_rate": found.suggestion}

    def _before(self, trainer: Trainer, held_out: Any, metrics: Sequence[str] | None) -> dict[str, float]:
        """The file as it came, run by plain ONNX Runtime; if that cannot, as the trainer holds it."""
        try:
            return trainer.evaluation.file(self.before, held_out, metrics=metrics)
        except BadInput:
            return trainer.evaluation(trainer.initial, held_out, metrics=metrics)

    def _check_places(self) -> None:
        """Everything that could fail at the end of the run, looked at before it begins."""
        rate_plan(self.schedule, False)
        if self.ranks is not None and not self.ranks.is_first:
            return
        if self.plot is not None or self.report is not None:
            check_plot()
            _forget_style()
        file = self.checkpoint / FILE
        if self.checkpoint.is_dir():
            with alone(self.checkpoint):
                pass
        launch = launched()
        if file.exists() and not self.resume and not self.restart and not launch.restarts:
            run = Checkpoint.load(file).run
            if launch.job and run.get("job") == launch.job:  # which goes on
                return
            if not run.get("finished") and run.get("step") and run.get("epoch", 0) < _epochs(run):
                raise BadInput(
                    f"{file} holds an unfinished run, at step {run.get('step')}\n"
                    "  hint: --resume goes on with it, --restart discards it"
                )


def _forget_style() -> None:
    """Drop settings that matplotlib has read in the working directory: they may have it run LaTeX."""
    import matplotlib

    if not os.path.isabs(matplotlib.matplotlib_fname()):
        matplotlib.rcdefaults()


def _epochs(run: dict[str, Any]) -> int:
    """How many epochs a run was to take; 0 if it does not tell."""
    try:
        return int(run["history"]["settings"]["epochs"])
    except (KeyError, TypeError, ValueError):
        return 0


def _measured(when: str, found: dict[str, float], path: Path | str) -> str:
    return f"{when:<14} {measured(found)}  {path}"

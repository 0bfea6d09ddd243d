"""A training run of the command, from the first check to the last line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import onnx
import onnx_ir as ir
import typer

from onnxgrad.cli import panels
from onnxgrad.cli.console import console, error
from onnxgrad.cli.train_callbacks import Notes
from onnxgrad.cli.train_config import REPLAY
from onnxgrad.cli.train_summary import outcome, summary
from onnxgrad.distributed import launched
from onnxgrad.errors import BadInput
from onnxgrad.figures import import_matplotlib
from onnxgrad.files import alone, replacing
from onnxgrad.model_io import load_model
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import setting
from onnxgrad.training import Interrupted, Trainer
from onnxgrad.training.data import split
from onnxgrad.training.data.wide import check_fed
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.loop.html_report import Picture, write_report
from onnxgrad.training.loop.listeners import loggers, rate_plan, watched, watchers
from onnxgrad.training.loop.progress import measured, reporter
from onnxgrad.training.loop.recipe import DataRecipe, Recipe
from onnxgrad.training.loop.report_pictures import report_pictures
from onnxgrad.training.metrics.registry import names_of
from onnxgrad.training.parallel.ranks import Ranks

INTERRUPTED = 130


Quiet = Annotated[bool, panels.run("--quiet", "-q", help="No progress, only results and errors.")]
Restart = Annotated[bool, panels.run("--restart", help="Discard the checkpoint of an unfinished run.")]


@dataclass(frozen=True)
class Outputs:
    """Files that a run leaves beside the trained model."""

    panel: ClassVar[str] = "Output"

    save_training: Path | None = setting(
        None,
        "Where to write the training model as it stands at the end: `train` goes on with it, and needs no --loss and "
        "no --optimizer.",
        kind=Path,
    )
    save_adapter: Path | None = setting(
        None,
        "Folder for the adapter alone: adapter.onnx_adapter and the files of PEFT.",
        kind=Path,
        metavar="DIR",
    )
    switchable: bool = setting(False, "With `save_adapter`: also model.onnx, a copy of MODEL that takes adapters.")


@dataclass
class Job:
    """One training run of the command, from the first check to the last line.

    Attributes:
        model: carries training information.
        recipe: the settings of the run.
        before: the file that `model` came from.
        after: where the trained model goes.
        outputs: where else results go.
        notes: lines to print before the first step.
        restart: an unfinished run may be discarded.
        quiet: without progress.
        find_lr: only look for a learning rate.
        replay: settings that repeat the run, to be kept beside the checkpoint.
        pictures: drawn for the report from the files before and after.
        between: the name of the model before the first step, where it is not that of the file `before`.
    """

    model: onnx.ModelProto | ir.Model
    recipe: Recipe
    before: Path
    after: Path
    outputs: Outputs = Outputs()
    notes: Sequence[str] = ()
    restart: bool = False
    quiet: bool = False
    find_lr: bool = False
    replay: str = ""
    pictures: Callable[[Path, Path], list[Picture]] | None = None
    between: str = ""

    def run(self, data: tuple[Any, str], validation: tuple[Any, str] | None) -> dict[str, Any]:
        """Train, save, measure the saved file; data are arrays and their names in messages."""
        self._check_places()
        recipe, loop, log = self.recipe, self.recipe.loop, self.recipe.log
        trainer = Trainer(self.model, recipe=recipe, batch_size=loop.batch_size)
        check_fed(recipe.data.inputs or {}, trainer.fields)
        notes = self.notes if trainer.plan is None else [f"memory: {trainer.plan}", *self.notes]
        text = trainer.preprocessing.text(recipe.data.tokenizer, recipe.data.max_length)
        rows = trainer.training_data(*data, text=text)
        held_out = None if validation is None else trainer.data(*validation, text=text)
        if recipe.data.validation_split is not None:
            rows, held_out = split(rows, recipe.data.validation_split, loop.seed)
        if not loop.resume:
            trainer.check_classes(rows, held_out)
        if self.find_lr:
            return self._find_rate(trainer, rows)
        notes = [*notes, *summary(trainer, rows, held_out, loop.epochs, loop.batch_size, loop.schedule)]
        metrics: Sequence[str] | None = names_of(recipe.watch.metrics)
        if held_out is not None:
            metrics = trainer.evaluation.metrics(metrics, watched(watchers(recipe.watch, True)))
        before = began = None
        if held_out is not None and trainer.is_writer:
            before = self._before(trainer, held_out, metrics)
            began = trainer.evaluation(trainer.initial, held_out, metrics=metrics) if self.between else None
        shown = [] if self.quiet else [Notes(notes), reporter(console(sys.stderr))]
        opened = DataRecipe(validation=held_out, augment=recipe.data.augment)
        watch = replace(recipe.watch, metrics=metrics)
        log = replace(log, report=None, callbacks=[*log.callbacks, *shown], progress=False)
        try:
            history = trainer.fit(rows, recipe=replace(recipe, data=opened, watch=watch, log=log))
        except Interrupted as e:
            if trainer.is_writer:
                error(f"{e}\n  hint: the same command with --resume goes on from there")
            raise typer.Exit(INTERRUPTED) from e
        trainer.save(self.after)
        if self.outputs.save_training is not None:
            trainer.save_training_model(self.outputs.save_training)
        if self.outputs.save_adapter is not None:
            trainer.save_adapter(self.outputs.save_adapter, switchable=self.outputs.switchable, base=self.before)
        if not trainer.is_writer:
            return history.about
        checkpoint = Path(loop.checkpoint or "")
        for written in (self.after, self.outputs.save_training):
            if written is not None:
                check_runs(written, self.before)
        if self.replay:
            with replacing(checkpoint / REPLAY) as file:
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
            if log.history:
                history.write(Path(log.history))
        report = recipe.log.report
        if report is not None:
            if self.pictures:
                pictures = self.pictures(self.before, self.after)
            else:
                pictures = report_pictures(load_model(self.after), held_out, trainer.options)
            write_report(history, Path(report), f"Training {self.before.name}", pictures)
        for what, path in (
            ("trained model", self.after),
            ("training model", self.outputs.save_training),
            ("adapter", self.outputs.save_adapter),
            ("checkpoint", checkpoint / FILE),
            ("history", log.history),
            ("plot", log.plot),
            ("report", report),
            ("log", log.log),
        ):
            if path is not None:
                lines.append(f"{what:<14} {path}")
        out = console()
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        return history.about

    def _find_rate(self, trainer: Trainer, rows: Any) -> dict[str, Any]:
        """Say which learning rate to begin with; nothing is trained and nothing saved but the plot."""
        found = trainer.find_rate(rows, batch_size=self.recipe.loop.batch_size, seed=self.recipe.loop.seed)
        plot = self.recipe.log.plot
        if plot is not None and trainer.is_writer:
            found.plot(Path(plot))
        out = console()
        out.print(f"learning rate  {found.suggestion:.2g}", highlight=False)
        out.print(
            f"  hint: --learning-rate {found.suggestion:.2g}; the loss grows from {found.rates[-1]:.2g} on",
            highlight=False,
        )
        return {"learning_rate": found.suggestion}

    def _before(self, trainer: Trainer, held_out: Any, metrics: Sequence[str] | None) -> dict[str, float]:
        """The file as it came, run by plain ONNX Runtime; if that cannot, as the trainer holds it."""
        try:
            return trainer.evaluation.file(self.before, held_out, metrics=metrics)
        except BadInput:
            return trainer.evaluation(trainer.initial, held_out, metrics=metrics)

    def _check_places(self) -> None:
        """Everything that could fail at the end of the run, looked at before it begins."""
        recipe = self.recipe
        rate_plan(recipe.loop.schedule, False)
        loggers(recipe.log)
        ranks = recipe.processes.distributed
        if isinstance(ranks, Ranks) and not ranks.is_first:
            return
        if recipe.log.plot is not None or recipe.log.report is not None:
            import_matplotlib()
        checkpoint = Path(recipe.loop.checkpoint or "")
        file = checkpoint / FILE
        if checkpoint.is_dir():
            with alone(checkpoint):
                pass
        launch = launched()
        if file.exists() and not recipe.loop.resume and not self.restart and not launch.restarts:
            run = Checkpoint.load_file(file).run
            if launch.job and run.get("job") == launch.job:  # which goes on
                return
            if not run.get("finished") and run.get("step") and run.get("epoch", 0) < _epochs(run):
                raise BadInput(
                    f"{file} holds an unfinished run, at step {run.get('step')}\n"
                    "  hint: --resume goes on with it, --restart discards it"
                )


def _epochs(run: dict[str, Any]) -> int:
    """The number of epochs that the run was started with; 0 if its record has none."""
    try:
        return int(run["history"]["settings"]["epochs"])
    except (KeyError, TypeError, ValueError):
        return 0


def _measured(when: str, found: dict[str, float], path: Path | str) -> str:
    return f"{when:<14} {measured(found)}  {path}"

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
from onnxgrad.cli.console import console, entry, error, print_lines
from onnxgrad.cli.train_callbacks import Beginning
from onnxgrad.cli.train_config import REPLAY
from onnxgrad.cli.train_siblings import SCHEMES, sibling_paths, write_siblings
from onnxgrad.cli.train_summary import outcome
from onnxgrad.distributed import launched
from onnxgrad.errors import BadInput
from onnxgrad.figures import import_matplotlib
from onnxgrad.files import lock_folder, replacing
from onnxgrad.model_io import load_model
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import changed_settings, setting
from onnxgrad.training import Interrupted, train
from onnxgrad.training.data.columns import Columns
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.loop.html_report import Picture, write_report
from onnxgrad.training.loop.listeners import loggers, rate_plan, watchers
from onnxgrad.training.loop.progress import measured
from onnxgrad.training.loop.progress_bar import reporter
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.loop.report_pictures import report_pictures
from onnxgrad.training.loop.train import trainer_for
from onnxgrad.training.parallel.ranks import Ranks

INTERRUPTED = 130


Quiet = Annotated[bool, panels.run("--quiet", "-q", help="No progress, only results and errors.")]
Restart = Annotated[bool, panels.run("--restart", help="Discard the checkpoint of an unfinished run.")]


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes beside the trained model."""

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
    also: str | None = setting(
        None,
        f"Also write the trained model quantized, with commas between: {', '.join(SCHEMES)}; OUTPUT.int8.onnx is "
        "measured beside OUTPUT.",
    )


@dataclass
class Job:
    """One training run of the command, from the first check to the last line.

    Attributes:
        model: bare, or with training information.
        recipe: the settings of the run.
        before: the file that `model` came from.
        after: the file of the trained model.
        outputs: the files beside it.
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

    def run(self, data: Columns | Path) -> None:
        """Call `onnxgrad.train` and print its results."""
        self._check_places()
        if self.find_lr:
            self._find_rate(data)
            return
        recipe, log, outputs = self.recipe, self.recipe.log, self.outputs
        begin = Beginning(self.before, self.notes, str(recipe.loop.schedule or "constant"), self.quiet)
        begin.saves_adapter, begin.measures_twice = outputs.save_adapter is not None, bool(self.between)
        shown = [begin] if self.quiet else [begin, reporter(console(sys.stderr))]
        quiet_log = replace(log, report=None, callbacks=[*log.callbacks, *shown], progress=False)
        try:
            trainer = train(self.model, data, recipe=replace(recipe, log=quiet_log), output=self.after)
        except Interrupted as e:
            if begin.run is not None:
                error(f"{e}\n  hint: the same command with --resume goes on from there")
            raise typer.Exit(INTERRUPTED) from e
        if outputs.save_training is not None:
            trainer.save_training_model(outputs.save_training)
        if outputs.save_adapter is not None:
            trainer.save_adapter(outputs.save_adapter, switchable=outputs.switchable, base=self.before)
        if begin.run is None:  # another process prints
            return
        checkpoint = Path(recipe.loop.checkpoint or "")
        for written in (self.after, outputs.save_training):
            if written is not None:
                check_runs(written, self.before)
        siblings = sibling_paths(outputs.also, self.after)
        write_siblings(siblings, self.after, data, recipe)
        if self.replay:
            with replacing(checkpoint / REPLAY) as file:
                file.write_text(self.replay, encoding="utf-8")
        history, held_out = trainer.history, begin.run.validation
        lines = outcome(history.about)
        if held_out is not None:
            after = trainer.evaluation.file(self.after, held_out, metrics=begin.run.metrics)
            history.about |= {"before": begin.scores, "after": after}
            lines.append(_measurement_line("before", begin.scores, self.before))
            if self.between:
                history.about[self.between] = begin.first
                lines.append(_measurement_line(self.between, begin.first, "before the first step"))
            lines.append(_measurement_line("after", after, self.after))
            for name, sibling in siblings.items():
                history.about[name] = trainer.evaluation.file(sibling, held_out, metrics=begin.run.metrics)
                lines.append(_measurement_line(name, history.about[name], sibling))
            if log.history:
                history.write(Path(log.history))
        if log.report is not None:
            if self.pictures:
                pictures = self.pictures(self.before, self.after)
            else:
                pictures = report_pictures(load_model(self.after), held_out, trainer.options)
            write_report(history, Path(log.report), f"Training {self.before.name}", pictures)
        for what, path in (
            ("trained model", self.after),
            *(("quantized", sibling) for sibling in siblings.values()),
            ("training model", outputs.save_training),
            ("adapter", outputs.save_adapter),
            ("checkpoint", checkpoint / FILE),
            ("history", log.history),
            ("plot", log.plot),
            ("report", log.report),
            ("log", log.log),
        ):
            if path is not None:
                lines.append(entry(what, path))
        print_lines(*lines)

    def _find_rate(self, data: Columns | Path) -> None:
        """Print the learning rate to begin with; nothing is trained, and nothing is saved but the plot."""
        recipe = self.recipe
        trainer = trainer_for(self.model, data, recipe)
        loop, settings = recipe.loop, changed_settings(recipe.data)
        found = trainer.find_rate(data, batch_size=loop.batch_size, seed=loop.seed, sample=loop.sample, **settings)
        if recipe.log.plot is not None and trainer.is_writer:
            found.plot(Path(recipe.log.plot))
        rate, most = found.suggestion, found.rates[-1]
        print_lines(
            entry("learning rate", f"{rate:.2g}"),
            f"  hint: --learning-rate {rate:.2g}; the loss grows from {most:.2g} on",
        )

    def _check_places(self) -> None:
        """Check everything that could fail at the end of the run, before it begins."""
        recipe = self.recipe
        rate_plan(recipe.loop.schedule, False)
        loggers(recipe.log)
        watchers(recipe.watch, recipe.data.measures)
        ranks = recipe.processes.distributed
        if isinstance(ranks, Ranks) and not ranks.is_first:
            return
        if recipe.log.plot is not None or recipe.log.report is not None:
            import_matplotlib()
        checkpoint = Path(recipe.loop.checkpoint or "")
        file = checkpoint / FILE
        if checkpoint.is_dir():
            with lock_folder(checkpoint):
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


def _measurement_line(when: str, found: dict[str, float], path: Path | str) -> str:
    return entry(when, f"{measured(found)}  {path}")

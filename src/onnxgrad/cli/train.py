"""``onnxgrad train``: train a model file on the arrays of an ``.npz`` file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import onnx_ir as ir
import typer

from onnxgrad.cli import recipe
from onnxgrad.cli.console import console, error
from onnxgrad.cli.derive import check_target
from onnxgrad.door import load_model, save_model
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.runtime import Options
from onnxgrad.training import Interrupted, Trainer, load_npz
from onnxgrad.training.checkpoint import FILE, Checkpoint
from onnxgrad.training.report import check_plot, number, reporter

INTERRUPTED = 130


def train(
    model: Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")],
    data: Annotated[Path, typer.Option(help="Training data: an .npz file, arrays by name.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the trained model.")],
    validation: Annotated[
        Path | None, typer.Option(help="Held-out data: measured after every epoch, and before and after.")
    ] = None,
    loss: recipe.Losses = None,
    optimizer: recipe.Optimizer = None,
    prediction: recipe.Prediction = None,
    labels: recipe.Labels = None,
    lr: recipe.Rate = None,
    weight_decay: recipe.Decay = None,
    momentum: recipe.Momentum = None,
    schedule: recipe.Plan = "constant",
    group: recipe.Groups = None,
    clip_norm: recipe.ClipNorm = None,
    clip_value: recipe.ClipValue = None,
    ema: recipe.Ema = None,
    accumulate: recipe.Accumulate = 1,
    train_: recipe.Trainable = None,
    freeze: recipe.Freeze = None,
    freeze_bn: recipe.FreezeBn = False,
    dropout: recipe.Dropout = None,
    epochs: Annotated[int, typer.Option(help="How often every row is seen.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 32,
    seed: Annotated[int, typer.Option(help="Decides the order of the rows.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Default: one per physical core.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for the checkpoint. Default: OUTPUT with the suffix .checkpoint."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, exactly.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the checkpoint of an unfinished run.")] = False,
    metrics: Annotated[Path | None, typer.Option(help="JSON file for losses and accuracies.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the curves.")] = None,
) -> None:
    """Train MODEL with a loss and an optimizer, or as the training information that it carries says.

    Beside the trained model, which is plain ONNX, it leaves a checkpoint to go on from.
    """
    check_target(output)
    source = load_model(model)
    if accumulate < 1:
        raise BadInput(f"--accumulate must be at least 1, not {accumulate}")
    flags = {
        "--loss": loss,
        "--optimizer": optimizer,
        "--prediction": prediction,
        "--labels": labels,
        "--lr": lr,
        "--weight-decay": weight_decay,
        "--momentum": momentum,
        "--group": group,
        "--clip-norm": clip_norm,
        "--clip-value": clip_value,
        "--ema": ema,
        "--train": train_,
        "--freeze": freeze,
        "--freeze-bn": freeze_bn,
        "--dropout": dropout,
    }
    arrays, held_out = load_npz(data), None if validation is None else load_npz(validation)
    if labels is not None and labels not in arrays:
        raise UnknownName(labels, arrays, f"array in {data}")
    job = Job(
        model=recipe.with_training(source, model, flags, accumulate),
        before=model,
        after=output,
        checkpoint=checkpoint or output.with_suffix(".checkpoint"),
        metrics=metrics,
        plot=plot,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        schedule=schedule,
        accumulate=accumulate,
        resume=resume,
        restart=restart,
        threads=threads,
    )
    job.run((arrays, str(data)), None if held_out is None else (held_out, str(validation)))


@dataclass
class Job:
    """One training run of the command, from the first check to the last line.

    Attributes:
        model: carries training information.
        before: the file that `model` came from.
        after: where the trained model goes.
        checkpoint: folder.
        metrics: JSON file.
        plot: PNG file.
        epochs: how often every row is seen.
        batch_size: rows per step.
        seed: decides the order of the rows.
        schedule: of the learning rate, as it is spelled.
        accumulate: into how many parts a batch is cut.
        resume: go on from the checkpoint.
        restart: an unfinished run may be discarded.
        threads: of ONNX Runtime.
    """

    model: onnx.ModelProto | ir.Model
    before: Path
    after: Path
    checkpoint: Path
    metrics: Path | None = None
    plot: Path | None = None
    epochs: int = 10
    batch_size: int = 32
    seed: int = 0
    schedule: str = "constant"
    accumulate: int = 1
    resume: bool = False
    restart: bool = False
    threads: int | None = None

    def run(self, data: tuple[Any, str], validation: tuple[Any, str] | None) -> dict[str, Any]:
        """Train, save, measure the saved file; data are arrays and what to call them."""
        self._check_places()
        schedule, lowering = recipe.rate_plan(self.schedule, validation is not None)
        trainer = Trainer(self.model, options=Options(threads=self.threads), accumulate=self.accumulate)
        rows = trainer.data(*data)
        held_out = None if validation is None else trainer.data(*validation)
        before = None if held_out is None else self._before(trainer, held_out)
        try:
            history = trainer.fit(
                rows,
                epochs=self.epochs,
                batch_size=self.batch_size,
                validation=held_out,
                seed=self.seed,
                schedule=schedule,
                checkpoint=self.checkpoint,
                resume=self.resume,
                metrics=self.metrics,
                plot=self.plot,
                callbacks=[*lowering, reporter(console(sys.stderr))],
            )
        except Interrupted as e:
            error(f"{e}\n  hint: the same command with --resume goes on from there")
            raise typer.Exit(INTERRUPTED) from e
        save_model(trainer.inference_model(), self.after)
        lines = []
        if held_out is not None and before is not None:
            after = trainer.evaluation.file(self.after, held_out)
            history.about |= {"before": before, "after": after}
            lines = [_measured("before", before, self.before), _measured("after", after, self.after)]
            if self.metrics:
                history.write(self.metrics)
        for what, path in (
            ("trained model", self.after),
            ("checkpoint", self.checkpoint / FILE),
            ("metrics", self.metrics),
            ("plot", self.plot),
        ):
            if path is not None:
                lines.append(f"{what:<14} {path}")
        out = console()
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        return history.about

    def _before(self, trainer: Trainer, held_out: Any) -> dict[str, float]:
        """The file as it came, run by plain ONNX Runtime; if that cannot, as the trainer holds it."""
        try:
            return trainer.evaluation.file(self.before, held_out)
        except BadInput:
            return trainer.evaluate(held_out)

    def _check_places(self) -> None:
        """Everything that could fail at the end of the run, looked at before it begins."""
        recipe.rate_plan(self.schedule, False)
        check_target(self.after)
        for path in (self.metrics, self.plot):
            if path is not None:
                check_target(path)
        if self.plot is not None:
            check_plot()
        parent = next(p for p in (self.checkpoint, *self.checkpoint.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            why = "cannot be written to" if parent.is_dir() else "is not a directory"
            raise BadInput(f"cannot keep a checkpoint in {self.checkpoint}: {parent} {why}")
        file = self.checkpoint / FILE
        if file.exists() and not self.resume and not self.restart:
            run = Checkpoint.load(file).run
            if not run["finished"] and run["epoch"] < run["history"]["settings"]["epochs"]:
                raise BadInput(
                    f"{file} holds an unfinished run, at step {run['step']}\n"
                    "  hint: --resume goes on with it, --restart discards it"
                )


def _measured(when: str, found: dict[str, float], path: Path) -> str:
    accuracy = f"accuracy {found['accuracy']:7.2%}  " if "accuracy" in found else ""
    return f"{when:<14} {accuracy}loss {number(found['loss'])}  {path}"

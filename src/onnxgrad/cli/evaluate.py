"""``onnxgrad evaluate``: a model measured on labelled data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from rich.table import Column, Table
from rich.text import Text

from onnxgrad.cli import data_options, panels
from onnxgrad.cli.console import cell, console, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import MODEL, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.files import replacing
from onnxgrad.model_io import files_of, load_model
from onnxgrad.runtime import Options
from onnxgrad.settings import settings_of
from onnxgrad.training.build.recipe import LossRecipe
from onnxgrad.training.data.recipe import LabelledRowsRecipe, PreparationRecipe
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.measure import evaluate as measured
from onnxgrad.training.measure.misses import confusion_picture, misses_picture
from onnxgrad.training.measure.result import Evaluated, as_json
from onnxgrad.training.metrics.registry import METRICS

#: Classes that are listed one by one.
MOST = 40


_MEASURING = settings_of(PreparationRecipe, TaskRecipe)


@takes_flags(
    PreparationRecipe,
    TaskRecipe,
    DetectionRecipe,
    LossRecipe,
    LabelledRowsRecipe,
    only=("labels", "prediction", "classes", "image_size", "missing", "class_axis", *_MEASURING),
)
def evaluate(
    model: panels.Model,
    data: data_options.DataPath,
    metrics: Annotated[
        str | None,
        panels.output(
            help=f"Names with commas between them, of {', '.join(METRICS)}. Default: those usual for the task."
        ),
    ] = None,
    ignore_index: Annotated[int | None, panels.data(help="The label that does not count.")] = None,
    blank: Annotated[
        int,
        panels.data(help="The symbol that stands for nothing, for exact, cer and wer."),
    ] = 0,
    batch_size: data_options.BatchSize = 256,
    threads: data_options.Threads = None,
    worst: Annotated[int, panels.output(min=0, help="List so many rows with the largest losses.")] = 0,
    picture: Annotated[
        Path | None,
        panels.output(
            help="Draw the confusion matrix into this PNG file; with --worst, those rows where they are pictures.",
            metavar="FILE.png",
        ),
    ] = None,
    as_one_line: Annotated[bool, panels.output("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Compare what MODEL predicts with labels: metrics, and for classes a table of each."""
    opened = load_model(model)
    check_paths(
        {MODEL: files_of(opened, model), "--data": data, "--tokenizer": flags["tokenizer"]}, {"--picture": picture}
    )
    given = read_flags(flags)
    data_options.print_preprocessing(opened, given)
    found = measured(
        opened,
        data,
        metrics=metrics,
        ignore_index=ignore_index,
        blank=blank,
        batch_size=batch_size,
        options=Options(threads=threads),
        worst=worst,
        **given,
    )
    print_lines(*found.notes, stream=sys.stderr)
    if picture is not None:
        _draw(found, picture)
    if as_one_line:
        print(as_json(found))
        return
    _print(found)


def _draw(found: Evaluated, path: Path) -> None:
    drawn = misses_picture(found.worst) if found.worst else None
    if drawn is None:
        if found.confusion is None:
            raise BadInput("there is nothing to draw: the task has no classes, and no --worst row is a picture")
        drawn = confusion_picture(found.confusion, found.names)
    with replacing(path) as file:
        file.write_bytes(drawn)


def _print(found: Evaluated) -> None:
    out = console()
    for name, value in found.metrics.items():
        out.print(Text(f"{name:<20} {value:.6g}"))
    out.print(cell(f"{found.rows} labels {found.labels!r} against the output {found.prediction!r} ({found.task})"))
    if found.classes and len(found.classes) <= MOST:
        columns = list(next(iter(found.classes.values())))
        numbers = [Column(name, justify="right") for name in columns]
        table = Table(Column("class", no_wrap=True), *numbers, box=None, pad_edge=False)
        for name, row in found.classes.items():
            values = [f"{row[k]:.4f}" for k in columns[:-1]]
            table.add_row(cell(name), *values, str(int(row[columns[-1]])))
        out.print(table)
    if found.worst:
        numbers = [Column(name, justify="right") for name in ("row", "loss")]
        table = Table(*numbers, "actual", "predicted", box=None, pad_edge=False)
        for miss in found.worst:
            table.add_row(str(miss.row), f"{miss.loss:.4g}", cell(miss.actual), cell(miss.predicted))
        out.print(table)

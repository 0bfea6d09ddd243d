"""``onnxgrad predict``: what a model gives for every row of some data."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from onnxgrad.cli import data_options, panels, train_options
from onnxgrad.cli.console import console
from onnxgrad.cli.path_clashes import MODEL, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.files import replacing
from onnxgrad.model_io import files_of, load_model
from onnxgrad.runtime import Options
from onnxgrad.training.data import Images
from onnxgrad.training.measure import predict as predicted
from onnxgrad.training.metadata import class_names

SUFFIXES = (".csv", ".tsv", ".npz")


def predict(
    model: Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")],
    data: data_options.DataPath,
    output: Annotated[
        Path,
        panels.output("-o", help="Where to write: .npz, or .csv or .tsv, a line for each row."),
    ],
    outputs: Annotated[
        list[str] | None,
        panels.model("--output", help="Only this output. Repeatable. Default: all."),
    ] = None,
    inputs: train_options.Inputs = None,
    image_mean: train_options.ImageMean = None,
    image_std: train_options.ImageStd = None,
    tokenizer: data_options.TokenizerFile = None,
    max_length: data_options.MaxLength = None,
    batch_size: data_options.BatchSize = 256,
    threads: data_options.Threads = None,
) -> None:
    """Run MODEL over data and write what it gives for each row.

    A model that knows the names of its classes gets a column with the name of the class that it predicts.
    """
    opened = load_model(model)
    if output.suffix.lower() not in SUFFIXES:
        raise BadInput(f"-o {output} is none of {', '.join(SUFFIXES)}")
    check_paths({MODEL: files_of(opened, model), "--data": data, "--tokenizer": tokenizer}, {"-o": output})
    found = predicted(
        opened,
        data,
        outputs=outputs,
        inputs=train_options.inputs_of(inputs or ()),
        images=Images(*train_options.normalization(image_mean, image_std)),
        tokenizer=tokenizer,
        max_length=max_length,
        batch_size=batch_size,
        options=Options(threads=threads),
    )
    names = class_names(opened)
    with replacing(output) as temporary:
        if output.suffix.lower() == ".npz":
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **found)
        else:
            separator = "," if output.suffix.lower() == ".csv" else "\t"
            with temporary.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, delimiter=separator, lineterminator="\n").writerows(_lines(found, names))
    rows = len(next(iter(found.values())))
    console().print(f"predictions    {output}  ({rows} rows of {', '.join(found)})", soft_wrap=True)


def _lines(found: Mapping[str, np.ndarray], names: tuple[str, ...] | None) -> Iterator[list[object]]:
    """A heading, then a line for each row: numbers as they are, arrays spread over columns ``y_0``, ``y_1_2``, …"""
    heading: list[object] = []
    columns = []
    for name, array in found.items():
        shape = array.shape[1:]
        heading += [f"{name}_{'_'.join(map(str, at))}" for at in itertools.product(*map(range, shape))] or []
        heading += [name] if not shape else []
        columns.append(array.reshape(len(array), -1))
        if names and shape == (len(names),):
            heading.append(f"{name}_class")
            columns.append(np.array(names, object)[array.argmax(1)][:, None])
    yield heading
    for row in zip(*columns):
        yield [x.item() if isinstance(x, np.generic) else x for part in row for x in part]

"""``onnxgrad predict``: the outputs of a model for every row of some data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cli import data_options, panels
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import MODEL, check_paths
from onnxgrad.cli.prediction_files import SUFFIXES, write_predictions
from onnxgrad.errors import BadInput
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io import files_of, load_model
from onnxgrad.runtime import Options
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.measure import predict as predicted


@takes_flags(PreparationRecipe, TaskRecipe)
def predict(
    model: panels.Model,
    data: data_options.DataPath,
    output: Annotated[
        Path,
        panels.output("-o", help="Where to write: .npz, or .csv or .tsv, a line for each row."),
    ],
    outputs: Annotated[
        list[str] | None,
        panels.model("--output", help="Only this output. Repeatable. Default: all but single numbers."),
    ] = None,
    batch_size: data_options.BatchSize = 256,
    threads: data_options.Threads = None,
    **flags: Any,
) -> None:
    """Run MODEL over data and write what it gives for each row.

    A model that knows the names of its classes gets a column with the name of the class that it predicts.
    """
    opened = load_model(model)
    if output.suffix.lower() not in SUFFIXES:
        raise BadInput(f"-o {output} is none of {', '.join(SUFFIXES)}")
    check_paths({MODEL: files_of(opened, model), "--data": data, "--tokenizer": flags["tokenizer"]}, {"-o": output})
    settings = read_flags(flags)
    data_options.print_preprocessing(opened, settings)
    found = predicted(
        opened, data, outputs=outputs, batch_size=batch_size, options=Options(threads=threads), **settings
    )
    names = class_names(opened)
    write_predictions(output, found, names, _single_scores(opened, found) if names and len(names) == 2 else None)
    rows = len(next(iter(found.values())))
    print_lines(entry("predictions", f"{output}  ({rows} rows of {', '.join(found)})"))


def _single_scores(model: ir.Model, found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The output of `model` that tells two classes apart by one number, with the number in the middle.

    It is the only output of a single float in a row: a probability, or log-odds.
    """
    outputs = {v.name: v for v in model.graph.outputs}
    single = [n for n, a in found.items() if n in outputs and holds_floats(outputs[n]) and a.size == len(a)]
    shares = {n: bounds(outputs[n]) for n in single}
    return {n: 0.5 if low >= 0 and high <= 1 else 0.0 for n, (low, high) in shares.items()} if len(single) == 1 else {}

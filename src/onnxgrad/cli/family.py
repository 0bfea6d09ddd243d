"""``onnxgrad family``: a model with its derivatives as a set of files."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels
from onnxgrad.cli.console import print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.grad import Dims, dims_of
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.interop import casadi, files
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.settings import settings_of
from onnxgrad.training import attach, export_step
from onnxgrad.training.build.recipe import LossRecipe, OptimizerRecipe
from onnxgrad.training.export.files import files_in


class Reader(enum.StrEnum):
    """The program that reads the exported family: CasADi, or a runtime."""

    casadi = "casadi"
    runtime = "runtime"


@takes_flags(LossRecipe, OptimizerRecipe, only=(*settings_of(LossRecipe), "optimizer", "learning_rate"))
def family(
    model: panels.Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")],
    reader: Annotated[
        Reader,
        typer.Option(
            "--for",
            help="casadi: the files that CasADi 3.8 looks for. runtime: VJP and JVP with a manifest, and with --loss "
            "the training step.",
        ),
    ] = Reader.runtime,
    name: Annotated[str | None, typer.Option(help="Of the function. Default: that of the file.")] = None,
    dims: Dims = None,
    **flags: Any,
) -> None:
    """Write MODEL and its derivatives to a folder, for programs that have no Python.

    With a loss, or for a model that carries training information, the training step is written to the folder `step` in
    it, in the form of export-step.
    """
    attaching = read_flags(flags)
    loss, optimizer = attaching.get("loss"), attaching.get("optimizer")
    opened = load_model(model)
    called = name or model.stem
    if Path(called).name != called:
        raise BadInput(f"--name {called} is not the name of a file")
    steps = reader is Reader.runtime and (bool(loss) or bool(training_info(opened)))
    made = [output / f"{prefix}{called}.onnx" for prefix in ("", "fwd_", "adj_", "fwd_adj_", "vjp_", "jvp_")]
    made += [output / "manifest.json", *(files_in(output / "step") if steps else ())]
    check_paths({MODEL: files_of(opened, model)}, {}, {OUTPUT: (output, made)})
    if reader is Reader.casadi:
        if loss or optimizer:
            raise BadInput("--for casadi writes no training step; drop --loss and --optimizer")
        written = casadi.family(opened, output, called, dims_of(dims))
    else:
        written = files.family(opened, output, called)
        if steps:
            training = opened if training_info(opened) else attach(opened, accumulate=True, **attaching)
            export_step(training, output / "step")
            written.append(output / "step" / "contract.json")
    print_lines(*map(str, written))

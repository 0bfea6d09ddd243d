"""``onnxgrad export-step``: write a training step for a device that has only an ONNX runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import onnx
import onnx_ir as ir
import typer

from onnxgrad.cli import panels, train_options
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import settings_of
from onnxgrad.training import export_step as export
from onnxgrad.training.build.attach import attached
from onnxgrad.training.build.recipe import LossRecipe, OptimizerRecipe, WeightsRecipe
from onnxgrad.training.export.files import BESIDE, files_in
from onnxgrad.training.export.peak import export_within_peak
from onnxgrad.training.loop.loop_recipe import LoopRecipe
from onnxgrad.training.loop.peak import CARRIES
from onnxgrad.training.loop.recipe import Recipe


@takes_flags(
    *(LossRecipe, OptimizerRecipe, WeightsRecipe, LoopRecipe),
    only=(*settings_of(LossRecipe, OptimizerRecipe, WeightsRecipe), "schedule", "batch_size"),
)
def export_step(
    model: panels.Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the models, the state and the contract.")],
    head: train_options.Head = None,
    target: Annotated[
        str, typer.Option(help="web: for browsers, in operators that onnxruntime-web has on WebGPU; any: no such care.")
    ] = "any",
    peak: Annotated[
        str | None,
        typer.Option(
            help="The whole process of a host takes at most so much (64MB): memory before speed, results computed "
            "anew, parts of batches, adapters, fewer layers are tried in turn, measured with batches of --batch-size."
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Write a training step, its halves, evaluation and inference as models, with the first state and a contract.

    A host needs an ONNX runtime and a loop; host.py, host.mjs and host.hpp, which are written beside them, are such
    hosts in Python, in JavaScript for Node and browsers, and in C++. The schedule is a part of the step.
    """
    given = read_flags(flags)
    schedule, rows = given.pop("schedule", None), given.pop("batch_size", 32)
    recipe = Recipe.of("export-step", given, (LossRecipe, OptimizerRecipe, WeightsRecipe))
    source: ir.Model | onnx.ModelProto = load_model(model)
    check_paths(
        {MODEL: files_of(source, model), "--loss": train_options.files(recipe.loss.loss or ())},
        {},
        {OUTPUT: (output, files_in(output))},
    )
    if head is not None:
        source, where = train_options.headed(source, head)
        print_lines(where, stream=sys.stderr)
    assert isinstance(source, ir.Model)
    train_options.check_algorithm(source, model, recipe)
    bare, is_trained = source, bool(training_info(source))

    def attach(recipe: Recipe) -> ir.Model:
        if is_trained:
            return bare
        algorithm = {"schedule": None if schedule == "constant" else schedule, **recipe.algorithm()}
        try:
            return attached(bare, accumulate=True, **algorithm).model
        except BadInput:  # a loss that compares the examples of a batch cannot be had in parts
            return attached(bare, **algorithm).model

    if peak is None:
        contract = export(attach(recipe), output, target=target)
    elif is_trained:
        raise BadInput(CARRIES)
    else:
        contract, note = export_within_peak(bare, attach, output, recipe, peak, rows, target)
        print_lines(f"peak: {note}", stream=sys.stderr)
    for about in contract["models"].values():
        check_runs(output / about["file"], model)
    print_lines(*(entry(name, output / about["file"]) for name, about in contract["models"].items()))
    print_lines(*(entry(name.partition(".")[0], output / name) for name in BESIDE))

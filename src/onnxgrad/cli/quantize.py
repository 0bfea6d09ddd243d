"""``onnxgrad quantize``: a model in integers, and trained to make up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels, train_options
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import GOING, OUTPUT, Force, check_paths, checkpoint_files
from onnxgrad.cli.train_run import Job, Outputs, Quiet, Restart
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, save_model
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import pop_recipe, settings_of
from onnxgrad.training.loop.quantize import ROWS, quantized
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.place import Scheme

#: Settings of language models.
_TASK = ("task", "documents", "pack")
#: Settings of training with --qat.
_TRAINING = (
    *("validation", "validation_split", "loss", "optimizer", "prediction", "labels", "learning_rate", "weight_decay"),
    *("momentum", "schedule", "groups", "clip_norm", "trainable", "freeze", "epochs", "batch_size", "seed", "threads"),
    *("checkpoint", "resume", "save_training", "history"),
)


@takes_flags(
    *(Scheme, *FIT, *TRAINER, Outputs),
    only=(*settings_of(Scheme), "inputs", "image_mean", "image_std", "tokenizer", "max_length", *_TASK, *_TRAINING),
    schedule="cosine",
)
def quantize(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The ONNX model, in floats.", metavar="MODEL.onnx")],
    data: Annotated[
        Path,
        panels.data(help=f"Data for the inputs of the model, and labels with --qat: {panels.FORMATS}."),
    ],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the quantized model.")],
    rows: Annotated[int, panels.data(min=1, help="So many rows, the first, decide the ranges of activations.")] = ROWS,
    qat: Annotated[
        bool,
        panels.run("--qat", help="Train the quantized model: straight through the rounding, with learned scales."),
    ] = False,
    restart: Restart = False,
    force: Force = False,
    quiet: Quiet = False,
    **flags: Any,
) -> None:
    """Quantize MODEL as ONNX Runtime does, and train the quantized model if asked to.

    The result has QuantizeLinear and DequantizeLinear nodes, which ONNX Runtime runs with kernels for integers. `train`
    fine-tunes a model that is quantized already.
    """
    if not qat:
        _refuse_training(context)
    given = read_flags(flags)
    given.setdefault("checkpoint", output.parent / f"{output.stem}.checkpoint")
    scheme = pop_recipe(Scheme, given)
    outputs = Outputs(given.pop("save_training", None))
    recipe = Recipe.of("quantize", {"distributed": "none", **given}, (*TRAINER, *FIT))
    source = load_model(model)
    checkpoint, history = given["checkpoint"], given.get("history")
    check_paths(
        train_options.paths_read(model, source, data, recipe),
        {OUTPUT: output, GOING: outputs.save_training, "--history": history},
        {"--checkpoint": (checkpoint, checkpoint_files(checkpoint))} if qat else {},
        force=force,
    )
    if qat and not (recipe.loss.loss or recipe.task.name):
        raise BadInput("--qat trains the quantized model; say which loss to use with --loss")
    columns, recipe = train_options.opened(data, recipe, source)
    ready = quantized(source, columns, scheme, rows=rows, preparation=recipe.data, task=recipe.task)
    if not qat:
        save_model(folded(ready), output)
        check_runs(output, model)
        print_lines(entry("quantized", f"{output}  {_size(output)}, {_size(model)} before"))
        return
    job = Job(
        ready, recipe, before=model, after=output, outputs=outputs, restart=restart, quiet=quiet, between="quantized"
    )
    job.run(columns)


def _refuse_training(context: typer.Context) -> None:
    """Raise BadInput for a training flag without `--qat`."""
    for param in context.command.params:
        source: Any = context.get_parameter_source(param.name or "")
        if param.name in (*_TRAINING, "restart", "quiet") and source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"{param.opts[0]} says how to train, which --qat asks for")


def _size(path: Path) -> str:
    beside = path.with_name(f"{path.name}.data")
    size = path.stat().st_size + (beside.stat().st_size if beside.exists() else 0)
    return f"{size / 1e6:.3g} MB"

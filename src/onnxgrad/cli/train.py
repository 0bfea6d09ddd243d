"""``onnxgrad train``: train a model file on data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir
import typer

from onnxgrad.cli import panels, train_config, train_options, train_ranks
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import GOING, OUTPUT, Force, check_paths, checkpoint_files
from onnxgrad.cli.train_run import Job, Outputs, Quiet, Restart
from onnxgrad.cli.train_siblings import sibling_paths
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model
from onnxgrad.settings import settings_of
from onnxgrad.training.adapters.folder import check_adapter
from onnxgrad.training.adapters.folder import files_in as adapter_files
from onnxgrad.training.graph.lost_updates import lost_updates
from onnxgrad.training.language.recipe import DETECTION
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.loop.train import with_detector


@takes_flags(*FIT, *TRAINER, Outputs)
def train(
    context: typer.Context,
    model: panels.Model,
    data: Annotated[
        Path,
        panels.data(help=f"Training data, arrays by name: {panels.FORMATS}."),
    ],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the trained model.")],
    head: train_options.Head = None,
    find_lr: Annotated[
        bool,
        panels.optimizer(
            "--find-lr", help="Only look for a learning rate: raise it until the loss grows; --plot draws that."
        ),
    ] = False,
    restart: Restart = False,
    force: Force = False,
    quiet: Quiet = False,
    config: train_config.Config = None,
    **flags: Any,
) -> None:
    """Train MODEL with a loss and an optimizer, or as the training information that it carries says.

    Beside the trained model, which is plain ONNX, it leaves a checkpoint to go on from.
    """
    ranks = train_ranks.join_ranks(flags["distributed"])
    source = load_model(model, aside=True)
    given = read_flags(flags) | {"distributed": ranks}
    given.setdefault("checkpoint", output.parent / f"{output.stem}.checkpoint")
    outputs = Outputs(*(given.pop(name, None) for name in settings_of(Outputs)))
    recipe = Recipe.of("train", given, (*TRAINER, *FIT))
    _check_places(model, source, data, output, recipe, outputs, force or not ranks.is_first)
    train_options.check_algorithm(source, model, recipe)
    if outputs.save_adapter is not None and recipe.adapter.build_adapter() is None:
        check_adapter(source)
    notes: list[str] = []
    columns: Any
    if recipe.task.name == DETECTION:
        source, columns, recipe, notes = with_detector(source, data, recipe)
    else:
        columns, recipe = train_options.opened(data, recipe, source)
    notes += [f"advice: {line}" for line in lost_updates(source)]
    if head is not None:
        source, where = train_options.headed(source, head)
        notes.append(where)
    job = Job(
        source,
        recipe,
        before=model,
        after=output,
        outputs=outputs,
        notes=notes,
        restart=restart,
        quiet=quiet,
        find_lr=find_lr,
        replay=train_config.written(context),
    )
    job.run(columns)


def _check_places(
    model: Path, source: ir.Model, data: Path, output: Path, recipe: Recipe, outputs: Outputs, force: bool
) -> None:
    """Raise BadInput if a file of the run would replace another one, or cannot be written."""
    checkpoint, log = Path(recipe.loop.checkpoint or ""), recipe.log
    folders = {"--checkpoint": (checkpoint, checkpoint_files(checkpoint))}
    if outputs.switchable and outputs.save_adapter is None:
        raise BadInput("--switchable needs --save-adapter")
    if outputs.save_adapter is not None:
        folders["--save-adapter"] = (outputs.save_adapter, adapter_files(outputs.save_adapter))
    if log.tensorboard is not None:
        folders["--tensorboard"] = (Path(log.tensorboard), [])
    siblings = {f"--also {name}": path for name, path in sibling_paths(outputs.also, output).items()}
    files = {f"--{name}": getattr(log, name) for name in ("history", "plot", "report", "log")}
    check_paths(
        train_options.paths_read(model, source, data, recipe),
        {OUTPUT: output, GOING: outputs.save_training, **files, **siblings},
        folders,
        force=force,
    )

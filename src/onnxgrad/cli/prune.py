"""``onnxgrad prune``: a smaller model, by shares or within a budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels, train_options
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import OUTPUT, Force, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.figures import drawing, plain
from onnxgrad.files import replacing
from onnxgrad.model_io import load_model, save_model
from onnxgrad.remat.budget import megabytes
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import pop_recipe, settings_of
from onnxgrad.training.loop.prune import ROWS, pruned
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.pruning.narrow import Pruned
from onnxgrad.training.pruning.recipe import PruneRecipe
from onnxgrad.wording import count_text

_FURTHER = ("inputs", "image_mean", "image_std", "tokenizer", "max_length", "loss", "labels", "prediction")


@takes_flags(PruneRecipe, *FIT, *TRAINER, only=(*settings_of(PruneRecipe), *_FURTHER, "task"))
def prune(
    model: Annotated[Path, typer.Argument(help="The ONNX model, in floats.", metavar="MODEL.onnx")],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the pruned model.")],
    data: Annotated[
        Path | None,
        panels.data(
            help=f"Rows that scores and damage are measured on: {panels.FORMATS}. Default: none, weights decide."
        ),
    ] = None,
    rows: Annotated[int, panels.data(min=1, help="So many rows, the first, are used.")] = ROWS,
    sensitivity: Annotated[
        Path | None,
        panels.output(help="Write a table of the damage of narrowing each layer: .json, or a picture, .png or .svg."),
    ] = None,
    force: Force = False,
    **flags: Any,
) -> None:
    """Remove channels, heads or weights of MODEL: by a share, or until it is within a budget.

    Channels and heads go from all weights that make or read them. The smaller model is compared with MODEL in which
    they are zero. Train it afterwards; zeros of single weights stay zero.
    """
    if sensitivity is not None and sensitivity.suffix not in (".json", ".png", ".svg"):
        raise BadInput(f"--sensitivity {sensitivity} is none of .json, .png, .svg")
    given = read_flags(flags)
    recipe = pop_recipe(PruneRecipe, given)
    rest = Recipe.of("prune", {"distributed": "none", **given}, (*TRAINER, *FIT))
    source = load_model(model)
    check_paths(
        train_options.paths_read(model, source, data, rest),
        {OUTPUT: output, "--sensitivity": sensitivity},
        force=force,
    )
    columns = None
    if data is not None:
        columns, rest = train_options.opened(data, rest, source)
    found = pruned(
        source, columns, recipe, rows=rows, loss=rest.loss.loss, labels=rest.loss.labels,
        prediction=rest.loss.prediction, preparation=rest.data, task=rest.task, sensitivity=sensitivity is not None,
    )  # fmt: skip
    save_model(found.model, output)
    check_runs(output, model)
    if sensitivity is not None:
        _write_sensitivity(found, sensitivity)
    print_lines(*(entry(*line) for line in _lines(found, output)))


def _lines(found: Pruned, output: Path) -> list[tuple[str, str]]:
    narrowed = [layer for layer in found.layers if layer["after"] < layer["before"]]
    lines = []
    if narrowed:
        lines.append(("narrowed", f"{len(narrowed)} of {count_text(len(found.layers), 'layer')}"))
        lines += [("", f"{w['name']}: {w['before']} → {w['after']} {w['kind']}") for w in narrowed[:40]]
    if found.zeros:
        lines.append(("zeros", f"{100 * found.zeros:.3g} % of the weights of layers"))
    if found.left_alone:
        lines.append(
            ("left alone", f"{count_text(len(found.left_alone), 'weight')}, such as {_listed(found.left_alone)}")
        )
    lines.append(("operations", f"{found.before['flops']:.4g} → {found.after['flops']:.4g} for a row"))
    lines.append(("weights", f"{megabytes(found.before['bytes'])} → {megabytes(found.after['bytes'])}"))
    if "milliseconds" in found.after:
        lines.append(("time", f"{found.before['milliseconds']:.3g} → {found.after['milliseconds']:.3g} ms"))
    lines.append(("compared", f"differs from the masked model by {found.difference:.1e} of the largest output"))
    lines.append(("pruned", str(output)))
    return lines


def _listed(left_alone: dict[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in list(left_alone.items())[:3])


def _write_sensitivity(found: Pruned, path: Path) -> None:
    if path.suffix == ".json":
        with replacing(path) as file:
            file.write_text(json.dumps({"layers": found.layers, "left_alone": found.left_alone}, indent=1))
        return
    with drawing() as new_figure, replacing(path) as file:
        figure = new_figure(figsize=(max(5.0, 0.16 * len(found.layers)), 4.5), layout="constrained")
        _draw(figure.subplots(), found.layers)
        figure.savefig(file, format=path.suffix[1:], dpi=120)


def _draw(axes: Any, layers: Sequence[dict[str, Any]]) -> None:
    places = range(len(layers))
    for share in layers[0]["damage"] if layers else ():
        damage = [max(layer["damage"][share], 1e-12) for layer in layers]
        axes.plot(places, damage, "o-", label=f"{100 * float(share):.0f} % removed")
    axes.set_yscale("log")
    axes.set_ylabel("change of the outputs")
    axes.set_xticks(places, [plain(layer["name"][-28:]) for layer in layers], rotation=90, fontsize=6)
    if layers:
        axes.legend()

"""``onnxgrad uncertain``: a model whose outputs are a prediction and its spread, an interval, or a set of classes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

from onnxgrad import uncertainty
from onnxgrad.cli import data_options, panels
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import MODEL, OUTPUT, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.model_io import files_of, load_model, save_model
from onnxgrad.model_io.read import read_proto
from onnxgrad.runtime import Options
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import settings_of
from onnxgrad.training.build.recipe import LossRecipe, OptimizerRecipe, WeightsRecipe
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.loop.loop_recipe import LoopRecipe
from onnxgrad.uncertainty.prediction import KINDS

#: Settings of training, for the members of an ensemble.
_TRAINING = ("loss", "optimizer", "learning_rate", "epochs", "batch_size")


class SpreadMethod(enum.StrEnum):
    """The source of the spread."""

    dropout = "dropout"
    laplace = "laplace"
    ensemble = "ensemble"
    conformal = "conformal"
    temperature = "temperature"


@takes_flags(
    PreparationRecipe, LossRecipe, OptimizerRecipe, WeightsRecipe, LoopRecipe,
    only=(*settings_of(PreparationRecipe), "labels", "prediction", "dropout", *_TRAINING),
)  # fmt: skip
def uncertain(
    model: panels.Model,
    method: Annotated[
        SpreadMethod,
        panels.run(
            help="dropout: masks with seeds. laplace: the posterior of the last layer. ensemble: several models in "
            "one. conformal: intervals or sets with a coverage. temperature: calibrated probabilities."
        ),
    ],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the model.")],
    data: Annotated[
        Path | None,
        panels.data(
            help="Rows with labels. laplace: those that the model was trained on. ensemble: those to train on. "
            "conformal, temperature: others, that it was not trained on."
        ),
    ] = None,
    samples: Annotated[
        int | None, panels.run(min=2, help="Masks of dropout (32), or models that an ensemble trains (5).")
    ] = None,
    seed: Annotated[int, panels.run(min=0, help="Of masks, or of the first model of an ensemble.")] = 0,
    members: Annotated[
        list[Path] | None,
        panels.model("--member", help="Another model of the ensemble, trained already. Repeatable."),
    ] = None,
    redraw: Annotated[
        bool, panels.model("--redraw", help="Models that an ensemble trains begin with weights drawn anew.")
    ] = False,
    coverage: Annotated[float, panels.run(help="For conformal: the share of labels in their interval or set.")] = 0.9,
    prior: Annotated[
        float | None,
        panels.run(help="For laplace: precision of the weights. Default: that with the largest evidence."),
    ] = None,
    kind: Annotated[
        str | None,
        panels.model(help=f"For dropout and ensemble, what the prediction holds: {', '.join(KINDS)}."),
    ] = None,
    threads: data_options.Threads = None,
    **flags: Any,
) -> None:
    """Write MODEL with the spread of its predictions, as plain ONNX: by dropout, Laplace, an ensemble or held-out data.

    The outputs are {y} and {y}_spread; of conformal, {y}_lower and {y}_upper, or {y}_set.
    """
    opened = load_model(model)
    reads = [f for m in members or () for f in files_of(load_model(m), m)]
    check_paths({MODEL: files_of(opened, model), "--data": data, "--member": reads}, {OUTPUT: output}, force=False)
    given = read_flags(flags)
    prediction, training = given.pop("prediction", None), {n: given.pop(n) for n in _TRAINING if n in given}
    masks = given.pop("dropout", None)
    measured = {"output": prediction, "options": Options(threads=threads), **given}
    if data is None and method is not SpreadMethod.dropout and not (method is SpreadMethod.ensemble and members):
        raise BadInput(f"--method {method.value} needs --data")
    if method is SpreadMethod.dropout:
        made = uncertainty.dropout(
            opened, samples=samples or 32, seed=seed, dropout=masks, output=prediction, kind=kind
        )
    elif method is SpreadMethod.laplace:
        made = uncertainty.laplace(opened, data, prior=prior, **measured)
    elif method is SpreadMethod.conformal:
        made = uncertainty.conformal(opened, data, coverage=coverage, **measured)
    elif method is SpreadMethod.temperature:
        made = uncertainty.scaled(opened, data, **measured)
    elif members:
        made = uncertainty.ensemble([opened, *members], output=prediction, kind=kind)
    else:
        if "loss" not in training:
            raise BadInput("an ensemble is trained; say which loss to use with --loss, or give models with --member")
        settings = {**training, **given, "prediction": prediction, "dropout": masks, "threads": threads}
        settings = {n: v for n, v in settings.items() if v is not None}
        models = uncertainty.train_members(opened, data, samples=samples or 5, redraw=redraw, seed=seed, **settings)
        made = uncertainty.ensemble([read_proto(m) for m in models], output=prediction, kind=kind)
    save_model(made, output)
    check_runs(output, model)
    names = ", ".join(v.name or "" for v in made.graph.outputs)
    print_lines(entry("written", f"{output}  ({method.value}: {names})"))

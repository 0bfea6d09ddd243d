"""A model made smaller in one call: scored, narrowed within a budget, and compared with its masked form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import keywords_of
from onnxgrad.model_io import AnyModel, open_model, save_model, training_info
from onnxgrad.model_io.aside import external_aside
from onnxgrad.model_io.save import in_kind_of
from onnxgrad.settings import pop_recipe, takes
from onnxgrad.training.build.attach import attached
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.loop.gradients import gradients
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.measure.predict import open_rows
from onnxgrad.training.pruning.channels import Channels, find_channels
from onnxgrad.training.pruning.follow import follow
from onnxgrad.training.pruning.known_sizes import settle_sizes
from onnxgrad.training.pruning.narrow import Narrowing, Pruned
from onnxgrad.training.pruning.recipe import OF_GRADIENTS, PruneRecipe
from onnxgrad.training.pruning.scores import Scores, magnitudes, wanda, weights_of

#: Rows of the data that scores are computed from, and that damage is measured on.
ROWS = 256


@takes(PruneRecipe, PreparationRecipe, TaskRecipe)
def prune(
    model: AnyModel,
    data: Any = None,
    *,
    output: str | os.PathLike | None = None,
    rows: int = ROWS,
    loss: Any = None,
    labels: str | None = None,
    prediction: str | None = None,
    **settings: Any,
) -> Any:
    """`model` with fewer channels, heads or weights.

    Channels and heads go from every weight that makes or reads them: the graph is smaller, and faster in stock ONNX
    Runtime. Weights are set to zero, and stay zero when the model is trained.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, in floats.
        data: arrays by name, rows that are dicts, or a path: what the model reads, and labels for a score of gradients.
            Budgets measure the damage of narrowing a layer on them; without data, they go by the score alone.
        output: where to save the pruned model. Default: nowhere.
        rows: how many rows of `data`, its first, are used.
        loss: of the scores gradient and movement, as for `train`.
        labels: the array that holds the labels. Default: 'labels'.
        prediction: the output that meets the labels. Default: the only float output.
        settings:

    Returns:
        The smaller model, in the caller's kind (an ``onnx.ModelProto`` for a path).

    Raises:
        BadInput: nothing can be removed, or not as much as the budget asks for.
    """
    own = pop_recipe(PruneRecipe, settings)
    recipe = Recipe.of("prune", settings, (*TRAINER, *FIT), keywords_of(prune))
    found = pruned(
        model, data, own, rows=rows, loss=loss, labels=labels, prediction=prediction,
        preparation=recipe.data, task=recipe.task,
    )  # fmt: skip
    if output is not None:
        save_model(found.model, output)
    return in_kind_of(model, found.model)


def pruned(
    model: AnyModel,
    data: Any,
    recipe: PruneRecipe,
    *,
    rows: int = ROWS,
    loss: Any = None,
    labels: str | None = None,
    prediction: str | None = None,
    preparation: PreparationRecipe = PreparationRecipe(),
    task: TaskRecipe = TaskRecipe(),
    sensitivity: bool = False,
) -> Pruned:
    """The result of `prune`, with its report; with `sensitivity`, the damage of every layer is measured in any case."""
    if recipe.score in OF_GRADIENTS and (loss is None or data is None):
        raise BadInput(f"the score {recipe.score!r} needs a loss and data with labels\n  hint: loss='cross_entropy'")
    if recipe.score == "wanda" and data is None:
        raise BadInput("the score 'wanda' needs data: norms of what layers read")
    opened = opened_for_pruning(model)
    batches = [] if data is None else list(open_rows(opened, data, preparation, task).first_batches(rows))
    channels = find_channels(opened.graph, follow)
    scores = _scores(opened, model, data, channels, recipe, batches, rows, loss, labels, prediction)
    return Narrowing(opened, channels, recipe, scores, batches).run(sensitivity)


def opened_for_pruning(model: AnyModel) -> ir.Model:
    """`model`, private, with every weight an initializer and all sizes known that do not depend on the batch.

    Raises:
        BadInput: it cannot be opened, or carries training information.
    """
    opened = open_model(model).model
    external_aside(opened)
    if training_info(opened):
        raise BadInput("the model carries training information\n  hint: prune the inference model, or train --prune")
    own_tensors(opened)
    settle_sizes(opened)
    return opened


def _scores(
    opened: ir.Model, model: AnyModel, data: Any, channels: Channels, recipe: PruneRecipe,
    batches: Sequence[Mapping[str, np.ndarray]], rows: int, loss: Any, labels: str | None, prediction: str | None,
) -> Scores:  # fmt: skip
    if recipe.score == "magnitude":
        return magnitudes(channels)
    if recipe.score == "wanda":
        return wanda(opened, channels, batches)
    return gradient_scores(model, data, channels, recipe.score, rows, loss, labels, prediction)


def gradient_scores(
    model: AnyModel, data: Any, channels: Channels, score: str, rows: int, loss: Any, labels: str | None,
    prediction: str | None,
) -> Scores:  # fmt: skip
    """|w·g| or -w·g of every element, summed over batches of `data`.

    Raises:
        BadInput: the loss does not fit, or depends on none of the weights.
    """
    source = attached(
        model, loss=loss, labels=labels, prediction=prediction, optimizer="sgd", learning_rate=0.0, train_mode=False
    )
    held = {n: v.const_value.numpy() for n, v in weights_of(channels).items() if v.const_value is not None}
    sums = {n: np.zeros(a.shape, np.float32) for n, a in held.items()}
    for found in gradients(source, data, rows):
        if not sums.keys() & found.keys():
            raise BadInput("the loss depends on none of the weights that can be pruned")
        for name in sums.keys() & found.keys():
            product = held[name].astype(np.float32) * found[name]
            sums[name] += np.abs(product) if score == "gradient" else -product
    return sums

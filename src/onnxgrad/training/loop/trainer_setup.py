"""From a model and a trainer's settings to a step and its machine: in parts, on ranks, within memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel, load_model, training_info
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels import ATTENTION
from onnxgrad.runtime.on_device import runner
from onnxgrad.runtime.resident import MANY
from onnxgrad.runtime.session import give_back
from onnxgrad.training.build.attach import attached
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.language.limits import with_task
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.loop.trained import Setup
from onnxgrad.training.metadata import PREPROCESSING
from onnxgrad.training.parallel.joining import divide_processors, ranks_of
from onnxgrad.training.parallel.strategy import AnyMachine, Strategy, choose_strategy
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.accumulate import split_step
from onnxgrad.training.step.cached_gradients import cut_at_predictions
from onnxgrad.training.step.compile import compile_step
from onnxgrad.training.step.memory_budget import within_memory
from onnxgrad.training.step.precision import precision_for
from onnxgrad.training.step.step import Step


def set_up(model: AnyModel | Step, recipe: Recipe, batch_size: int | None) -> Setup:
    """The step of `model`, set up as `Trainer` is asked to.

    Args:
        model: see `Trainer`.
        recipe: the settings of the run.
        batch_size: the most rows of a batch that memory is planned for.

    Raises:
        BadInput: as `Trainer`.
    """
    exchange, accumulate, memory = recipe.processes, recipe.step.accumulate, recipe.step.memory
    entry, attention_rows, dims = recipe.step.entry, recipe.step.attention_rows, recipe.step.dims
    options = recipe.runtime.build_options()
    if exchange.sync_every == 1 and (exchange.outer_rate, exchange.outer_momentum) != (None, None):
        raise BadInput("outer_rate and outer_momentum are of the step that ranks take together every sync_every steps")
    strategy = choose_strategy(ranks_of(exchange.distributed), exchange)
    parts = accumulate * strategy.ranks.size
    training = _with_training(model, recipe.algorithm(), parts > 1, recipe.task)
    if isinstance(training, Source) and len(training.model.graph) >= MANY:
        give_back()  # the graph that the algorithm was written into: the step's graphs take its place
    if isinstance(training, Source) and training.compared and strategy.has_several:
        for what, is_set in (
            ("sync_every", exchange.sync_every > 1), ("compress", exchange.compress is not None),
            ("sync_batch_norm", exchange.sync_batch_norm),
        ):  # fmt: skip
            if is_set:
                raise BadInput(f"{what} does not go with a loss of all rows: one that compares them, or your own")
    narrow = precision_for(recipe.step.precision, options)
    if isinstance(training, Step) and (attention_rows is not None or narrow is not None):
        raise BadInput("a compiled step is not changed; pass attention_rows and precision to compile_step")
    terms = training.terms if isinstance(training, Source) else ()
    asked_of_runtime = divide_processors(options) if strategy.has_several else options
    settled = asked_of_runtime.resolve_target()
    kernel = attention_rows is None and settled.target == "native" and ATTENTION.name not in options.without
    rows: int | str | None = "kernel" if kernel else attention_rows
    asked: dict[str, Any] = {
        "entry": entry, "outputs": terms, "precision": narrow, "attention_rows": rows, "without": options.without
    }  # fmt: skip
    machine: Callable[[Strategy, Options], AnyMachine]
    if parts == 1:
        step = training if isinstance(training, Step) else compile_step(training, **asked)
        _check_loss(step)
        if memory is not None:
            step = within_memory(step, memory, batch_size, dims)
        planned_step, machine = step, lambda strategy, options: runner(step, options)
    elif isinstance(training, Step):
        raise BadInput("a compiled step cannot be cut into parts; pass the model that it was compiled from")
    else:
        synchronized = strategy.exchange.sync_batch_norm
        for what, given in (("memory", memory), ("precision", narrow)):
            if synchronized and given is not None:
                raise BadInput(f"sync_batch_norm does not go with {what}")
        split = split_step(training, arrange=strategy.arrangement(), synchronized=synchronized, **asked)
        step = split.whole
        _check_loss(step)
        if isinstance(training, Source) and training.compared:
            split = cut_at_predictions(split)
        if memory is not None:
            each = None if batch_size is None else -(-batch_size // parts)
            split.gradient = within_memory(split.gradient, memory, each, dims)
        planned_step = split.gradient
        machine = lambda strategy, options: strategy.machine_of(split, accumulate, options)  # noqa: E731
    if planned_step.recomputes:
        settled = asked_of_runtime.for_a_plan().resolve_target()
    planned = batch_size if memory is not None else None
    return Setup(step, planned_step.plan, planned, strategy, accumulate, settled, asked_of_runtime.is_free, machine)


def _check_loss(step: Step) -> None:
    if not step.loss:
        raise BadInput("the training information has no loss: no Gradient, and no output that updates nothing")


def _with_training(
    model: AnyModel | Step, asked: dict[str, Any], in_halves: bool, task: TaskRecipe
) -> AnyModel | Source | Step:
    """`model` unchanged if it has training information, else with the `asked` training attached."""
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model, aside=True)
    if not isinstance(model, (onnx.ModelProto, ir.Model, Step)):
        raise BadInput(f"a model is a path, an onnx.ModelProto or an onnx_ir.Model, not a {type(model).__name__}")
    if isinstance(model, Step):
        carries = "a compiled step carries its training information"
    elif model.training_info if isinstance(model, onnx.ModelProto) else training_info(model):
        carries = "the model carries training information"
    elif "loss" in asked or task.name:
        if isinstance(model, onnx.ModelProto):
            described = {p.key for p in model.metadata_props}
        else:
            described = set(model.metadata_props)
        if PREPROCESSING in described:
            opened = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
            model = Preprocessing.of(opened).behind_tables(opened)
        model = ir.from_proto(model) if isinstance(model, onnx.ModelProto) and task.name else model
        if task.name and isinstance(model, ir.Model):
            asked = with_task(asked, model, task)
        return attached(model, **{"accumulate": in_halves, "cached": in_halves, **asked})
    else:
        raise BadInput("the model carries no training information; say which loss to minimize, as in loss='mse'")
    if asked:
        raise BadInput(f"{carries}, which is used as it is; drop {', '.join(asked)}")
    return model

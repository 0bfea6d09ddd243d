"""A model quantized over data in one call, and trained to make up for it."""

from __future__ import annotations

import os
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import keywords_of
from onnxgrad.model_io import AnyModel, save_model
from onnxgrad.model_io.save import in_kind_of
from onnxgrad.settings import pop_recipe, settings_of, takes
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.loop.train import train
from onnxgrad.training.measure.predict import open_rows
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.learned_rounding import learn_rounding
from onnxgrad.training.quantization.place import Scheme, opened_floats, place_quantizers

#: Rows that activations are calibrated over.
ROWS = 512


@takes(Scheme, PreparationRecipe, others=True)
def quantize(
    model: AnyModel,
    data: Any,
    *,
    output: str | os.PathLike | None = None,
    rows: int = ROWS,
    qat: bool = False,
    **settings: Any,
) -> Any:
    """`model` with QuantizeLinear and DequantizeLinear nodes, which stock ONNX Runtime runs with integer kernels.

    ONNX Runtime's quantizer places the nodes and calibrates the activations over `data`. BatchNormalization is folded
    into the layer before it. With `qat`, the quantized model is then trained (quantization-aware training): weights are
    kept as floats and rounded where they are read, gradients pass straight through the rounding, and scales are
    learned (see `onnxgrad.training.quantization.scales`). A model that is quantized already is trained by `train`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, in floats.
        data: arrays by name, rows that are dicts, or a path (see `Trainer.fit`): what the model reads and, with `qat`,
            labels.
        output: where to save the quantized model. Default: nowhere.
        rows: how many rows of `data`, its first, activations are calibrated over.
        qat: train the quantized model, with arguments of `onnxgrad.train`: ``loss="cross_entropy"``, ``epochs=10``, ….
        settings:

    Returns:
        The quantized model, in the caller's kind (an ``onnx.ModelProto`` for a path).

    Raises:
        BadInput: the model is quantized already, nothing in it can be, data that do not fit, or what `train` refuses.
        UnknownName: no such type of node, or node.
    """
    scheme = pop_recipe(Scheme, settings)
    recipe = Recipe.of("quantize", settings, (*TRAINER, *FIT), keywords_of(quantize))
    of_training = [name for name in settings if name not in settings_of(PreparationRecipe, TaskRecipe)]
    if of_training and not qat:
        raise BadInput(f"{of_training[0]!r} says how to train, which qat=True asks for")
    found = quantized(model, data, scheme, rows=rows, preparation=recipe.data, task=recipe.task)
    if qat:
        found = train(found, data, recipe=recipe).inference_ir()
    else:
        found = folded(found)
    if output is not None:
        save_model(found, output)
    return in_kind_of(model, found)


def quantized(
    model: AnyModel,
    data: Any,
    scheme: Scheme,
    *,
    rows: int = ROWS,
    preparation: PreparationRecipe = PreparationRecipe(),
    task: TaskRecipe = TaskRecipe(),
) -> ir.Model:
    """The model with quantized weights as floats, which are rounded where they are read.

    Raises:
        BadInput, UnknownName: as `quantize`.
    """
    if rows < 1:
        raise BadInput(f"activations are calibrated over at least 1 row, not {rows}")
    opened = opened_floats(model)
    fed = open_rows(opened, data, preparation, task)
    # ONNX Runtime makes histograms only of batches that are alike
    batches = fed.first_batches(rows) if scheme.calibration == "minmax" else fed.first_batches(rows, rows)
    found = place_quantizers(opened, scheme, batches)
    if scheme.rounding == "learned":
        learn_rounding(found, fed.first_batches(rows))
    return found

"""Completions of prompts by a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options
from onnxgrad.settings import read_recipes, takes
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.generator import Completion, Generator

if TYPE_CHECKING:
    from onnxgrad.training.language.keywords import GenerationKeywords


@check_keywords
@takes(GenerationRecipe)
def generate(
    model: AnyModel,
    prompts: Any,
    *,
    tokenizer: Any = None,
    encoder: AnyModel | None = None,
    options: Options | None = None,
    **settings: Unpack[GenerationKeywords],
) -> list[Completion]:
    """Continue each of `prompts` by `model`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with tokens as an input and their scores as an
            output; with or without a cache (``past_key_values``); also of an encoder and a decoder.
        prompts: texts, or rows of tokens; also one of them alone.
        tokenizer: the path of a ``tokenizer.json``, or a ``tokenizers.Tokenizer``. Default: the one that the model was
            trained with. Prompts of tokens need none.
        encoder: the file of the encoder, if `model` is the decoder of both (``encoder_model.onnx``). Prompts are what
            it reads: texts, or arrays of features.
        options: how ONNX Runtime runs the model.
        settings:

    Returns:
        A `Completion` for each prompt, in their order.

    Raises:
        BadInput: the model is no language model, a prompt has no tokens or some that the model does not know, or a
            setting does not fit.
    """
    (recipe,) = read_recipes("generate", [GenerationRecipe], settings, ["tokenizer", "encoder", "options"])
    reading = None if encoder is None else as_given(encoder)
    return Generator(as_given(model), recipe, tokenizer, options, reading)(prompts)

"""Texts that a language model generates, beside reference texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.generator import Generator
from onnxgrad.training.language.prompts import open_answers, open_prompts
from onnxgrad.training.metrics.registry import names_of, running

#: Metrics that need no further package.
USUAL = ("exact",)
#: The most tokens of a completion that is compared, without another length.
LONGEST = 256


def complete(
    model: ir.Model, data: Any, tokenizer: Any, longest: int | None, options: Options | None
) -> tuple[list[str], list[str]]:
    """The likeliest completions of the prompts in `data`, and the answers beside them.

    Args:
        model: a language model, or one of an encoder and a decoder.
        data: see `open_prompts` and `open_answers`.
        tokenizer: see `onnxgrad.generate`.
        longest: the most tokens of a completion.
        options: how ONNX Runtime runs the model.

    Raises:
        BadInput: a row has no prompt or no answer, or the model does not generate.
    """
    prompts, answers = open_prompts(data), open_answers(data)
    recipe = GenerationRecipe(max_new_tokens=longest or LONGEST)
    found = Generator(model, recipe, tokenizer, options)(prompts)
    return [completion.text or "" for completion in found], answers


def compare_texts(
    texts: Sequence[str], references: Sequence[str], metrics: Sequence[str] | str | None = None
) -> dict[str, float]:
    """Metrics of `texts` beside `references`.

    Args:
        texts: as a model wrote them (see `onnxgrad.generate`).
        references: one for each text.
        metrics: names, in a list or with commas between them: exact, bleu, chrf, rouge1, rouge2, rougeL.
            Default: exact.

    Raises:
        BadInput: there are not as many references, a metric is not of texts, or the package for it is missing.
        UnknownName: there is no such metric.
    """
    if len(texts) != len(references):
        raise BadInput(f"there are {len(texts)} texts and {len(references)} references; each text needs one")
    found = {}
    for name in names_of(metrics) or USUAL:
        metric = running(name, "texts")
        metric.add(np.array(texts, object), np.array(references, object))
        found[name] = metric.result()
    return found

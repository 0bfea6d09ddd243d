"""``onnxgrad generate``: completions of prompts by a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import data_options, panels
from onnxgrad.cli.console import print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.errors import BadInput, json_text, printable
from onnxgrad.model_io import load_model
from onnxgrad.runtime import Options
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.prompts import open_answers, open_prompts
from onnxgrad.training.measure import generate as generated
from onnxgrad.training.measure.texts import compare_texts


@takes_flags(GenerationRecipe)
def generate(
    model: Annotated[Path, typer.Argument(help="The ONNX model, a decoder.", metavar="MODEL.onnx")],
    prompt: Annotated[list[str] | None, panels.data("--prompt", help="The text to continue. Repeatable.")] = None,
    prompts: Annotated[
        Path | None,
        panels.data(
            help="File of prompts: lines of .txt, or rows of a .jsonl file or a table with prompt, text or messages."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        panels.data(help="tokenizer.json of the model. Default: the one that the model was trained with."),
    ] = None,
    encoder: Annotated[
        Path | None,
        panels.data(help="The file of the encoder, if MODEL is the decoder of both: encoder_model.onnx."),
    ] = None,
    metrics: Annotated[
        str | None,
        panels.output(
            help="Compare completions with the answers in --prompts: exact, bleu, chrf, rouge1, rouge2, rougeL, with "
            "commas between them."
        ),
    ] = None,
    threads: data_options.Threads = None,
    as_lines: Annotated[bool, panels.output("--json", help="Print a line of JSON for each prompt.")] = False,
    **flags: Any,
) -> None:
    """Continue prompts by MODEL, a language model with or without a cache; behind an encoder: answer them."""
    texts: list[Any] = list(prompt or ())
    if prompts is not None:
        texts += open_prompts(prompts)
    if not texts:
        raise BadInput("there is no prompt\n  hint: --prompt 'Once upon a time', or --prompts FILE")
    answers = None
    if metrics is not None:
        if prompts is None or prompt:
            raise BadInput("--metrics compares with the answers in a file of prompts: --prompts FILE, and no --prompt")
        answers = open_answers(prompts)
        compare_texts([], [], metrics)  # unknown names are refused before anything is generated
    options = Options(threads=threads)
    reading = None if encoder is None else load_model(encoder)
    settings = {"tokenizer": tokenizer, "encoder": reading, "options": options, **read_flags(flags)}
    found = generated(load_model(model), texts, **settings)
    for completion in found:
        if as_lines:
            print(json_text(completion.to_json()))
        else:
            print_lines(printable(f"{completion.prompt}{completion.text}", keep="\n\t"))
    if answers is not None:
        scores = compare_texts([c.text or "" for c in found], answers, metrics)
        if as_lines:
            print(json_text({"metrics": scores}))
        else:
            print_lines(*(f"{name:<20} {value:.6g}" for name, value in scores.items()))

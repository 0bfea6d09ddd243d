"""Samples of a language model during training: completions of prompts after every epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad.errors import printable
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.generator import Completion, Generator
from onnxgrad.training.loop.run import Callback, Run


def _print(completion: Completion) -> None:
    from rich.console import Console

    text = printable(f"{completion.prompt}{completion.text}", keep="\n\t")
    Console(stderr=True).print(f"sample: {text}", markup=False, highlight=False, soft_wrap=True)


class Samples(Callback):
    """Completions of `prompts` after every epoch, printed and kept in the history.

    Args:
        prompts: texts.
        show: called with each completion. Default: prints it on standard error.
        settings: of the generation (see `onnxgrad.generate`). Default: 32 of the likeliest tokens.
    """

    is_told_once = True

    def __init__(
        self, prompts: Sequence[str], show: Callable[[Completion], None] | None = None, **settings: Any
    ) -> None:
        self.prompts, self.show = list(prompts), show or _print
        self.recipe = GenerationRecipe(**{"max_new_tokens": 32, **settings})

    def start(self, run: Run) -> None:
        """Raise BadInput, before the first step, for a model that does not generate text."""
        self._completions(run, GenerationRecipe(max_new_tokens=1))

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Generate."""
        found = self._completions(run, self.recipe)
        kept = run.history.about.setdefault("samples", [])
        kept += [{"epoch": record["epoch"], "prompt": c.prompt, "text": c.text} for c in found]
        for completion in found:
            self.show(completion)

    def _completions(self, run: Run, recipe: GenerationRecipe) -> list[Completion]:
        return Generator(run.trainer.inference_ir(), recipe, options=run.trainer.options)(self.prompts)

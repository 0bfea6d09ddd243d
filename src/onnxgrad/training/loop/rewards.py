"""Rewards: a language model learns completions of its own that a function, or another model, rates higher than others.

GRPO (Shao et al. 2024): several completions of each prompt are drawn, and the advantage of one is its reward minus the
mean of its group, in standard deviations. Each completion is learned from once, so that the ratio of probabilities
which GRPO clips is 1, and the gradient is that of ``policy_gradient``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import required_inputs
from onnxgrad.keywords import check_whole
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.text import Tokens
from onnxgrad.training.data.tokenizer_file import encode
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from onnxgrad.training.language.generator import Completion, Generator
from onnxgrad.training.language.inputs import inputs_beside, tokens_of
from onnxgrad.training.language.preferences import ADVANTAGE
from onnxgrad.training.language.rows import number_tokens
from onnxgrad.training.language.task import IGNORED
from onnxgrad.training.loop.trainer import Trainer

Reward = Callable[[Completion], float]


class RewardModel:
    """A reward that a model computes: one number for the tokens of a prompt and its completion.

    Args:
        model: with tokens as an input, and an output of one number for each row. One that was trained from text reads
            the text by its own tokenizer.
        options: how ONNX Runtime runs it.

    Raises:
        BadInput: no input takes tokens, or no output is of floats.
    """

    def __init__(self, model: AnyModel, options: Options | None = None) -> None:
        opened = as_given(model)
        self.fields = [Field.of(v) for v in required_inputs(opened.graph)]
        self.tokens = tokens_of(self.fields)
        self.output = next((v.name for v in opened.graph.outputs if v.dtype in FLOATS), None)
        if self.tokens is None or self.output is None:
            raise BadInput("the model of rewards takes no tokens [N, T], or has no output of floats")
        trained = Preprocessing.of(opened)
        self.tokenizer: Any = trained.own_text().tokenizer if trained.tokenizer else None
        self.session = Session(opened, options)

    def __call__(self, completion: Completion) -> float:
        """The reward. Raises BadInput if the output is not one number."""
        row = np.array([*completion.prompt_tokens, *completion.tokens])
        if self.tokenizer is not None:
            text = f"{completion.prompt or ''}{completion.text or ''}"
            row = next(iter(encode(self.tokenizer, [text], None, True)))[0]
        assert self.tokens is not None  # or they are refused
        assert self.output is not None
        columns = {self.tokens.name: Tokens([row], 0), **inputs_beside(self.fields, *number_tokens([row]), False)}
        missing = [f.name for f in self.fields if f.name not in columns]
        if missing:
            raise BadInput(
                f"the model of rewards reads {', '.join(map(repr, missing))}, which do not follow from tokens"
            )
        feeds = {f.name: np.asarray(columns[f.name].take(np.arange(1), f)).astype(f.dtype) for f in self.fields}
        found = self.session.run(feeds, [self.output])[self.output]
        if found.size != 1:
            raise BadInput(f"a reward is one number, and {self.output!r} has {found.size} for a row")
        return float(found.reshape(-1)[0])


def grpo(
    model: AnyModel | Trainer,
    prompts: Sequence[Any],
    reward: Reward | AnyModel,
    *,
    tokenizer: Any = None,
    rounds: int = 100,
    group: int = 8,
    prompts_per_round: int | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    show: Callable[[int, float], None] | None = None,
    **settings: Any,
) -> Trainer:
    """Train `model` to complete `prompts` with a larger `reward`.

    Args:
        model: a language model, or a trainer of one with the loss ``policy_gradient``.
        prompts: texts, conversations or rows of tokens.
        reward: called with each `Completion`, returns a number; or a model that computes one (see `RewardModel`).
        tokenizer: see `onnxgrad.generate`.
        rounds: how often completions are drawn and learned from; each round is one step of the optimizer.
        group: completions of each prompt in a round.
        prompts_per_round: how many of the prompts a round takes, in turn. Default: all.
        max_new_tokens, temperature: of the completions.
        seed: decides which tokens are drawn.
        show: called after each round with its number and the mean reward.
        settings: of `Trainer`, such as ``learning_rate`` and ``lora``.

    Returns:
        The trainer.

    Raises:
        BadInput: the model does not generate, a reward is no finite number, or a setting does not fit.
    """
    check_whole(1, rounds=rounds, prompts_per_round=prompts_per_round)
    check_whole(2, group=group)
    prompts = list(prompts)
    if not prompts:
        raise BadInput("there is no prompt")
    rate = reward if callable(reward) else RewardModel(reward)
    if isinstance(model, Trainer):
        trainer = model
    else:
        usual = {"task": "causal_lm", "pack": False, "loss": "policy_gradient", "optimizer": "adamw"}
        trainer = Trainer(model, **{**usual, **settings})
    size = min(prompts_per_round or len(prompts), len(prompts))
    for number in range(rounds):
        some = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
        recipe = GenerationRecipe(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + number)
        generator = Generator(trainer.inference_ir(), recipe, tokenizer, trainer.options)
        found = generator([prompt for prompt in some for _ in range(group)])
        rewards = np.array([_check_reward(rate(completion)) for completion in found]).reshape(size, group)
        if show is not None:
            show(number, float(rewards.mean()))
        apart = rewards.std(1, keepdims=True)
        advantages = ((rewards - rewards.mean(1, keepdims=True)) / (apart + 1e-4)).reshape(-1)
        if not advantages.any() or len({token for completion in found for token in completion.tokens}) < 2:
            continue  # all completions are alike
        rows = [_row(completion, a) for completion, a in zip(found, advantages)]
        trainer.fit(rows, batch_size=len(rows), epochs=1, shuffle=False, progress=False)
    return trainer


def _check_reward(reward: Any) -> float:
    found = float(reward)
    if not np.isfinite(found):
        raise BadInput(f"a reward is a finite number, not {found}")
    return found


def _row(completion: Completion, advantage: float) -> dict[str, Any]:
    """A row whose completion is learned, in proportion to its advantage."""
    before, new = completion.prompt_tokens, completion.tokens
    labels = [IGNORED] * len(before) + new
    return {"input_ids": [*before, *new], "labels": labels, f"labels{ADVANTAGE}": np.float32(advantage)}

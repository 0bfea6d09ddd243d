"""Completions with a larger reward become likelier."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, generate, grpo
from onnxgrad.training.loop.rewards import RewardModel
from tests.training.language.models import VOCABULARY, decoder, tokenizer

CAT = 9
PROMPTS = ["the cat", "a dog"]


def share_of_cats(completion):
    return completion.tokens.count(CAT) / len(completion.tokens)


def judge(fed="int64[N, T] input_ids, int64[N, T] attention_mask", output="float[N, 1] score"):
    """The same share for prompt and completion together."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        judge ({fed}) => ({output}) <int64 cat = {{{CAT}}}, int64[1] time = {{1}}> {{
            same = Equal (input_ids, cat)  ones = Cast <to = 1> (same)
            score = ReduceMean <keepdims = 1> (ones, time) }}""")
    return proto


@pytest.mark.sweep(2)
@pytest.mark.parametrize("reward", [share_of_cats, judge()], ids=["function", "model"])
def test_the_reward_rises(reward):
    means = []
    settings = {"rounds": 15, "group": 8, "max_new_tokens": 6, "learning_rate": 0.05}
    trainer = grpo(decoder(), PROMPTS, reward, tokenizer=tokenizer(), show=lambda _, r: means.append(r), **settings)
    assert len(means) == 15
    assert np.mean(means[:3]) < 0.3 < 0.6 < np.mean(means[-3:])
    found = generate(trainer.inference_model(), PROMPTS, tokenizer=tokenizer(), max_new_tokens=6)
    assert np.mean([share_of_cats(c) for c in found]) > 0.8


def test_a_round_is_the_policy_gradient():
    """The loss of a round is Σ -a·mean log p over its completions, by the formula in numpy."""
    seen = []

    def reward(completion):
        seen.append(completion)
        return float(len(seen) % 3)

    trainer = Trainer(decoder(), task="causal_lm", loss="policy_gradient", optimizer="sgd", learning_rate=1e-9)
    losses = []
    fit = trainer.fit
    trainer.fit = lambda *given, **settings: losses.append(fit(*given, **settings).epochs[-1]["loss"])
    grpo(trainer, [[8, 9], [13, 14, 15]], reward, rounds=1, group=4, max_new_tokens=5)
    wanted = 0.0
    rewards = np.array([(i + 1) % 3 for i in range(8)], float).reshape(2, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    session = onnxruntime.InferenceSession(decoder(past=False).SerializeToString())
    for completion, advantage in zip(seen, advantages.reshape(-1)):
        row = np.array([[*completion.prompt_tokens, *completion.tokens]])
        feeds = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.shape[1])[None]}
        logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        first = len(completion.prompt_tokens)
        wanted -= advantage * np.mean([logs[i - 1, row[0, i]] for i in range(first, row.shape[1])]) / 8
    np.testing.assert_allclose(losses, [wanted], rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"group": 1}, "group"),
        ({"rounds": 0}, "rounds"),
        ({"reward": lambda _: float("nan")}, "finite number"),
        ({"reward": judge(output="int64[N, 1] score")}, "has no output of floats"),
        ({"reward": judge(fed="int64[N, T] input_ids, float[N] other")}, "'other', which do not follow"),
        ({"learning_rat": 0.1}, "learning_rat"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    given = {"prompts": PROMPTS, "reward": share_of_cats, "rounds": 1, "tokenizer": tokenizer(), **settings}
    with pytest.raises((BadInput, TypeError), match=message):
        grpo(decoder(), given.pop("prompts"), given.pop("reward"), **given)


def test_a_model_of_rewards_gives_one_number():
    rate = RewardModel(judge())
    completion = generate(decoder(), [[CAT, 8]], max_new_tokens=2)[0]
    row = [*completion.prompt_tokens, *completion.tokens]
    assert rate(completion) == pytest.approx(row.count(CAT) / len(row))
    with pytest.raises(BadInput, match=f"has {VOCABULARY * 4} for a row"):
        RewardModel(decoder(past=False))(completion)
    assert json.dumps(completion.to_json())

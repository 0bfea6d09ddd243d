"""Pairs of a chosen and a rejected answer: DPO and ORPO over text, against their formulas in numpy."""

import json
from contextlib import nullcontext

import numpy as np
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data.recipe import PreparationRecipe
from tests.training.language.models import decoder, merged_decoder, tokenizer

PAIRS = [
    {"prompt": "the cat", "chosen": " sat on", "rejected": " ran to a tree"},
    {"prompt": "a dog", "chosen": " ran", "rejected": " sat"},
    {"prompt": "the red", "chosen": " mat the", "rejected": " tree"},
    {"prompt": "a blue cat", "chosen": " ran", "rejected": " on"},
]
END = 2


def likelihoods(model, texts):
    """Σ log p and the number of the tokens behind the prompt, of each (prompt, answer), in float64."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = []
    for prompt, answer in texts:
        before = tokenizer().encode(prompt).ids
        row = np.array([[*before, *tokenizer().encode(answer).ids, END]])
        feeds = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.shape[1])[None]}
        logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own = logs[np.arange(len(before) - 1, row.shape[1] - 1), row[0, len(before) :]]
        found.append((own.sum(), len(own)))
    return np.array(found)


def formula(task, model, reference, beta=0.1):
    sides = [likelihoods(model, [(p["prompt"], p[n]) for p in PAIRS]) for n in ("chosen", "rejected")]
    if task == "dpo":
        base = [likelihoods(reference, [(p["prompt"], p[n]) for p in PAIRS]) for n in ("chosen", "rejected")]
        z = beta * ((sides[0] - base[0])[:, 0] - (sides[1] - base[1])[:, 0])
        return np.log1p(np.exp(-z)).mean()
    p, q = (side[:, 0] / side[:, 1] for side in sides)
    odds = [m - np.log1p(-np.exp(m)) for m in (p, q)]
    return (-p + beta * np.log1p(np.exp(odds[1] - odds[0]))).mean()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("export", [lambda: decoder(past=False), decoder, merged_decoder])
@pytest.mark.parametrize("task", ["dpo", "orpo"])
def test_the_loss_is_that_of_the_formula_and_falls(task, export):
    plain = decoder(past=False)
    settings = {"tokenizer": tokenizer(), "batch_size": 2, "epochs": 12, "seed": 1}
    trainer = Trainer(export(), task=task, optimizer="adam", learning_rate=0.01)
    history = trainer.fit(PAIRS, validation=PAIRS, **settings)
    losses = [e["validation_loss"] for e in history.epochs]
    assert losses[-1] < losses[0] < formula(task, plain, plain)
    if export is not merged_decoder:
        names = {i.name: i for i in plain.graph.initializer}
        for made in trainer.inference_model().graph.initializer:
            if made.name in names:
                names[made.name].CopyFrom(made)
        np.testing.assert_allclose(losses[-1], formula(task, plain, decoder(past=False)), rtol=1e-4)


def test_the_first_loss_of_dpo_is_log_2():
    trainer = Trainer(decoder(), task="dpo", optimizer="sgd", learning_rate=1e-9)
    history = trainer.fit(PAIRS, tokenizer=tokenizer(), batch_size=4)
    np.testing.assert_allclose(history.epochs[0]["loss"], np.log(2), rtol=1e-6)


def test_the_option_of_a_loss_takes_its_place():
    trainer = Trainer(decoder(), task="orpo", loss="orpo:beta=2.0", optimizer="sgd", learning_rate=1e-9)
    history = trainer.fit(PAIRS, tokenizer=tokenizer(), batch_size=4, shuffle=False)
    plain = decoder(past=False)
    np.testing.assert_allclose(history.epochs[0]["loss"], formula("orpo", plain, plain, 2.0), rtol=1e-5)


def test_conversations_are_pairs_too(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} : {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )

    def turn(role, text):
        return [{"role": role, "content": text}]

    pair = {"prompt": turn("user", "the cat"), "chosen": turn("assistant", "sat"), "rejected": turn("assistant", "on")}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    trainer = Trainer(decoder(), task="dpo", optimizer="sgd", learning_rate=0.1)
    rows = trainer.training_data(
        tmp_path / "pairs.jsonl", preparation=PreparationRecipe(tokenizer=tmp_path / "tokenizer.json")
    )
    batch = next(rows.batches(1))
    assert batch["input_ids"].tolist() == [[4, 7, 8, 9, 2, 5, 7, 10, 2], [4, 7, 8, 9, 2, 5, 7, 11, 2]]
    assert batch["labels"].tolist() == [[-100] * 6 + [t, 2, -100] for t in (10, 11)]
    assert batch["labels_reference"].shape == (2,)


def test_a_trained_model_generates(tmp_path):
    trainer = onnxgrad.train(
        decoder(), PAIRS, task="dpo", tokenizer=tokenizer(), learning_rate=0.01, output=tmp_path / "trained.onnx"
    )
    (found,) = onnxgrad.generate(tmp_path / "trained.onnx", "the cat", max_new_tokens=3)
    assert found.text is not None
    assert trainer.preprocessing.task["name"] == "causal_lm"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("task", "rows", "settings", "message"),
    [
        ("dpo", [{"prompt": "the", "chosen": "cat"}], {}, "no field 'rejected'"),
        ("orpo", [{"prompt": "the", "rejected": "cat"}], {}, "no field 'chosen'"),
        ("dpo", [{"text": "the cat"}], {}, "row 0 .* is no preference"),
        ("causal-lm", PAIRS, {}, "pair of answers"),
        ("dpo", PAIRS, {"max_length": 2}, "row 0 .* no token of the chosen answer"),
    ],
)
def test_rows_that_do_not_fit_are_refused(task, rows, settings, message):
    trainer = Trainer(decoder(), task=task, optimizer="sgd", learning_rate=0.1)
    with pytest.raises(BadInput, match=message), pytest.warns() if settings else nullcontext():
        trainer.fit(rows, tokenizer=tokenizer(), **settings)

"""Completions during training."""

import json

import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from tests.training.language.models import decoder, tokenizer

TEXTS = ["the cat sat on the mat", "a dog ran to a tree"] * 4


def test_samples_are_shown_and_kept(tmp_path, capsys):
    settings = {"task": "causal_lm", "learning_rate": 0.05, "tokenizer": tokenizer(), "epochs": 12}
    trainer = onnxgrad.train(
        decoder(), TEXTS, sample_prompts=["the cat"], history=tmp_path / "history.json", progress=False, **settings
    )
    kept = json.loads((tmp_path / "history.json").read_text())["samples"]
    assert [s["epoch"] for s in kept] == [*range(1, 13)]
    (wanted,) = onnxgrad.generate(trainer.inference_model(), "the cat", max_new_tokens=32)
    assert kept[-1] == {"epoch": 12, "prompt": "the cat", "text": wanted.text}
    assert wanted.text == " sat on the mat"
    assert wanted.finish == "end"
    assert capsys.readouterr().err.splitlines()[-1] == "sample: the cat sat on the mat"


def test_samples_need_a_tokenizer():
    trainer = Trainer(decoder(), task="causal_lm", learning_rate=0.05)
    rows = [{"input_ids": [8, 9, 10]}, {"input_ids": [13, 14]}]
    with pytest.raises(BadInput, match="need a tokenizer"):
        trainer.fit(rows, sample_prompts=["the cat"])
    with pytest.raises(BadInput, match="list of texts"):
        trainer.fit(rows, sample_prompts=[8])

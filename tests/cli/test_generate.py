"""``onnxgrad generate``: prompts in, text or lines of JSON out."""

import json

import onnx
import pytest
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from tests.training.language.models import decoder, tokenizer


def run(*line):
    """The exit code, standard output and standard error of ``onnxgrad generate``."""
    found = CliRunner().invoke(build(), ["generate", *map(str, line)])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def files(tmp_path):
    onnx.save(decoder(), tmp_path / "m.onnx")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_prompts_and_their_completions_are_printed(files):
    tokens = ["--tokenizer", files / "tokenizer.json"]
    (wanted,) = onnxgrad.generate(decoder(), "the cat sat", tokenizer=tokenizer(), max_new_tokens=4)
    code, out, _ = run(files / "m.onnx", *tokens, "--prompt", "the cat sat", "--max-new-tokens", 4)
    assert (code, out) == (0, f"the cat sat{wanted.text}\n")


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.csv"])
def test_prompts_of_a_file_are_lines_of_json(files, name):
    texts = ["the cat sat", "a dog"]
    written = {
        "p.txt": "the cat sat\n\na dog\n",
        "p.jsonl": "".join(json.dumps({"prompt": t, "completion": "ran"}) + "\n" for t in texts),
        "p.csv": "prompt,other\nthe cat sat,1\na dog,2\n",
    }
    (files / name).write_text(written[name])
    flags = ["--tokenizer", files / "tokenizer.json", "--prompts", files / name, "--json", "--temperature", 1.5]
    code, out, _ = run(files / "m.onnx", *flags, "--seed", 3, "--stop", "blue", "--no-cache")
    assert code == 0
    wanted = onnxgrad.generate(decoder(), texts, tokenizer=tokenizer(), temperature=1.5, seed=3, stop=["blue"])
    assert [json.loads(line) for line in out.splitlines()] == [c.to_json() for c in wanted]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "there is no prompt"),
        (["--prompt", "the"], "need a tokenizer"),
        (["--prompts", "none.txt"], "there is no file"),
        (["--prompts", "bad.jsonl"], "row 0 of 'bad.jsonl' has no prompt"),
        (["--prompts", "empty.txt"], "has no prompts"),
        (["--prompt", "the", "--tokenizer", "none.json"], "there is no file"),
    ],
)
def test_bad_input_is_one_error(files, monkeypatch, flags, message):
    monkeypatch.chdir(files)
    (files / "bad.jsonl").write_text('{"other": "the"}\n')
    (files / "empty.txt").write_text("\n")
    code, out, err = run("m.onnx", *flags)
    assert code == 2
    assert message in err
    assert not out
    assert err.startswith("error: ")


def test_completions_are_compared_with_answers(files):
    texts = ["the cat sat", "a dog"]
    found = onnxgrad.generate(decoder(), texts, tokenizer=tokenizer(), max_new_tokens=3)
    rows = [{"prompt": texts[0], "completion": found[0].text}, {"prompt": texts[1], "completion": "another one"}]
    (files / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["m.onnx", "--tokenizer", "tokenizer.json", "--prompts", "p.jsonl", "--max-new-tokens", 3]
    line = [files / part if "." in str(part) else part for part in line]
    code, out, _ = run(*line, "--metrics", "exact")
    assert (code, out.splitlines()[-1].split()) == (0, ["exact", "0.5"])
    code, out, _ = run(*line, "--metrics", "exact", "--json")
    assert (code, json.loads(out.splitlines()[-1])) == (0, {"metrics": {"exact": 0.5}})
    code, _, err = run(*line, "--metrics", "exakt")
    assert code == 2
    assert "exact" in err
    (files / "p.jsonl").write_text('{"prompt": "the cat"}\n')
    code, _, err = run(*line, "--metrics", "exact")
    assert code == 2
    assert "row 0 of" in err

"""A column of text feeds the inputs of a language model as the tokens that the tokenizer gives."""

import json
import sys

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, evaluate, predict
from onnxgrad.training.data import Data, Field, Text, tokenizer_file
from onnxgrad.training.data.preprocessing import Preprocessing
from tests.cli.said import said

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "very", "a"]
TEXTS = ["a good film", "bad", "a very very bad film", "good good"] * 8
LABELS = ["praise", "blame", "blame", "praise"] * 8
INT = np.dtype(np.int64)
IDS, MASK, TYPES = (Field(n, INT, (None,)) for n in ("input_ids", "attention_mask", "token_type_ids"))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors

    found = tokenizers.Tokenizer(models.WordLevel({w: 5 + i for i, w in enumerate(WORDS)}, "[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 7), ("[SEP]", 8)]
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ends)
    return found


def model(length="T"):
    """The mean of the words that the mask leaves."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (int64[N, {length}] input_ids, int64[N, {length}] attention_mask) => (float[N, 2] y)
        <int64[1] last = {{-1}}, int64[1] time = {{1}}> {{
            e = Gather (table, input_ids)  m = Cast <to = 1> (attention_mask)  w = Unsqueeze (m, last)
            k = Mul (e, w)  total = ReduceSum <keepdims = 0> (k, time)  count = ReduceSum <keepdims = 0> (w, time)
            mean = Div (total, count)  y = MatMul (mean, head) }}""")
    rng = np.random.default_rng(0)
    for name, shape in {"table": (14, 6), "head": (6, 2)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def test_tokens_are_padded_to_the_longest_row_of_a_batch(tokenizer):
    data = Data({"text": TEXTS[:3]}, [IDS, MASK, TYPES], text=Text(tokenizer))
    (batch,) = data.batches(3)
    assert batch["input_ids"].tolist() == [[7, 13, 9, 11, 8, 5, 5], [7, 10, 8, 5, 5, 5, 5], [7, 13, 12, 12, 10, 11, 8]]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 2, [1] * 3 + [0] * 4, [1] * 7]
    assert not batch["token_type_ids"].any()
    assert data.lengths.tolist() == [5, 3, 7]
    (one,) = data.batches(1, np.array([1]))
    assert one["input_ids"].tolist() == [[7, 10, 8]]


def test_lengths_of_the_caller_the_model_and_the_tokenizer(tokenizer):
    fixed = [Field("input_ids", INT, (6,)), Field("attention_mask", INT, (6,))]

    def first(fields, **options):
        return next(iter(Data({"text": TEXTS[2:3]}, fields, text=Text(tokenizer, **options)).batches(1)))

    assert first(fixed)["input_ids"].tolist() == [[7, 13, 12, 12, 10, 8]], "cut to what the model fixes"
    assert first(fixed, max_length=4)["input_ids"].tolist() == [[7, 13, 12, 8, 5, 5]]
    assert first(fixed, max_length=4)["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]
    assert first([IDS], max_length=3)["input_ids"].tolist() == [[7, 13, 8]]
    with pytest.raises(BadInput, match="max_length is 7, and 'input_ids' takes 6 tokens"):
        first(fixed, max_length=7)
    cut = type(tokenizer).from_str(tokenizer.to_str())
    cut.enable_truncation(5)
    (batch,) = Data({"text": TEXTS[2:3]}, [IDS], text=Text(cut)).batches(1)
    assert batch["input_ids"].shape == (1, 5)
    assert tokenizer.truncation is None, "the caller's tokenizer stays as it is"


def test_text_is_trained_and_predicted(tokenizer, tmp_path):
    data = {"text": TEXTS, "labels": LABELS}
    trainer = Trainer(model(), loss="cross_entropy", learning_rate=0.1, options=Options(threads=1))
    trainer.fit(data, epochs=20, batch_size=8, validation_split=0.25, tokenizer=tokenizer)
    assert trainer.classes == ("blame", "praise")
    assert trainer.evaluate(data, tokenizer=tokenizer)["accuracy"] == 1
    trainer.save(tmp_path / "m.onnx")
    assert evaluate(tmp_path / "m.onnx", data, tokenizer=tokenizer).metrics["accuracy"] == 1
    whole = predict(tmp_path / "m.onnx", data, tokenizer=tokenizer)["y"]
    rows = [{"review": t, "stars": 5} for t in TEXTS]
    parts = predict(tmp_path / "m.onnx", rows, tokenizer=tokenizer, inputs={"input_ids": "review"}, batch_size=1)["y"]
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


def test_the_command_reads_lines_of_json(tokenizer, tmp_path):
    pytest.importorskip("pyarrow")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    onnx.save(model(), tmp_path / "m.onnx")
    lines = [json.dumps({"review": t, "title": "x", "labels": label}) for t, label in zip(TEXTS, LABELS)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data = "--data PLACE/d.jsonl --tokenizer PLACE/tokenizer.json --input input_ids=review"
    said(tmp_path, f"train PLACE/m.onnx {data} --loss cross_entropy --optimizer adam --lr 0.1 -q -o PLACE/t.onnx")
    found = said(tmp_path, f"evaluate PLACE/t.onnx {data} --max-length 16 --json")
    assert json.loads(found)["metrics"]["accuracy"] == 1
    said(tmp_path, f"predict PLACE/t.onnx {data} -o PLACE/p.csv")
    assert (tmp_path / "p.csv").read_text().splitlines()[1].endswith(",praise")
    said(tmp_path, "predict PLACE/t.onnx --data PLACE/d.jsonl -o PLACE/q.csv")
    assert (tmp_path / "q.csv").read_text() == (tmp_path / "p.csv").read_text()
    (tmp_path / "titles.jsonl").write_text("\n".join(json.dumps({"title": t}) for t in TEXTS))
    other = said(tmp_path, "predict PLACE/t.onnx --data PLACE/titles.jsonl -o PLACE/q.csv", code=2)
    assert "no column 'review', which the model was trained on\n  hint: 'review' fed 'input_ids'" in other
    two = said(tmp_path, f"evaluate PLACE/m.onnx {data.replace('--input input_ids=review', '')}", code=2)
    assert "2 columns of text: 'review', 'title'\n  hint: --input input_ids=review says which" in two
    bare = said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.jsonl --input input_ids=review -o PLACE/q.csv", code=2)
    assert "is text, and the input 'input_ids' takes tokens\n  hint: --tokenizer tokenizer.json" in bare
    with pytest.raises(BadInput, match="'review' of the data is text"):
        predict(model(), {"review": TEXTS})
    (tmp_path / "broken.json").write_text("{}")
    broken = data.replace("tokenizer.json", "broken.json")
    assert "as a tokenizer.json" in said(tmp_path, f"evaluate PLACE/t.onnx {broken}", code=2)
    assert "there is no file" in said(tmp_path, f"evaluate PLACE/t.onnx {broken.replace('broken', 'none')}", code=2)


def test_what_cannot_be_is_refused(tokenizer, monkeypatch):
    def refused(columns, fields, words):
        with pytest.raises(BadInput, match=words):
            Data(columns, fields, text=Text(tokenizer))

    refused({"text": ["good"]}, [Field("x", np.dtype(np.float32), (3,))], "no input takes tokens")
    refused({"x": [1, 2]}, [IDS], "no column of text; it holds 'x'")
    with pytest.raises(BadInput, match="max_length must be at least 1"):
        Text(tokenizer, 0)
    with pytest.raises(BadInput, match="not a int"):
        Text(3)
    with pytest.raises(BadInput, match="needs a tokenizer"):
        Text.of(None, 16)
    bare = type(tokenizer).from_str(tokenizer.to_str())
    bare.post_processor = None
    with pytest.raises(BadInput, match="row 1 of 'text' of the data has no tokens: ''"):
        Data({"text": ["good", ""]}, [IDS], text=Text(bare))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(BadInput, match=r"pip install 'onnxgrad\[train\]'"):
        Text("tokenizer.json")


def _described(**parts):
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models

    return json.loads(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")).to_str()) | parts


def _grows(times):
    replaced = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
    first = {"type": "Prepend", "prepend": "a"}
    return json.dumps(_described(normalizer={"type": "Sequence", "normalizers": [first, *[replaced] * times]}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: "", "as a tokenizer.json: EOF while parsing"),
        (lambda: "[" * 100_000, "as a tokenizer.json: "),
        (lambda: "\udcff", "as a tokenizer.json: "),
        (
            lambda: json.dumps(_described(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})),
            "vocabulary",
        ),
        (lambda: _grows(9), "reading it ends the process, or needs more than 512 MiB"),
    ],
    ids=["empty", "deep", "bytes", "merges", "grows"],
)
def test_a_tokenizer_of_a_stranger(tmp_path, monkeypatch, make, says):
    """A file that ends the process that reads it, or takes all memory, ends another one."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_file, "MEMORY", 1 << 29)
    (tmp_path / "tokenizer.json").write_bytes(make().encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=f"cannot read .*{says}"):
        Text(tmp_path / "tokenizer.json")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("ask", [Preprocessing.own_text, lambda p: p.text(None, 3)])
def test_a_tokenizer_of_a_stranger_in_a_model(monkeypatch, ask):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_file, "MEMORY", 1 << 29)
    with pytest.raises(BadInput, match="cannot read the model's tokenizer: reading it ends the process"):
        ask(Preprocessing(tokenizer=_grows(9)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("parts", "text", "says"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "the"}, "content": "thethethethethethe"}] * 11}},
         "over the top", "reading it ends the process, or needs more than"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
         "a" * 40 + "b", "retry-limit-in-match"),
    ],
    ids=["grows", "panics"],
)  # fmt: skip
def test_a_tokenizer_that_fails_on_a_text(tmp_path, monkeypatch, capfd, parts, text, says):
    """The failure depends on the text, so the trial shows nothing; the output of the child process is discarded."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_file, "MEMORY", 1 << 29)
    (tmp_path / "tokenizer.json").write_text(json.dumps(_described(**parts)))
    made = Text(tmp_path / "tokenizer.json")
    with pytest.raises(BadInput, match=f"the tokenizer fails on 'text' of the data: .*{says}"):
        Data({"text": ["a", text]}, [IDS], text=made)
    assert capfd.readouterr().err == ""


def test_many_texts_are_encoded_in_parts(tokenizer, monkeypatch):
    texts = ["good", "bad good good", "bad"] * 5
    expected = [e.ids for e in tokenizer.encode_batch(texts)]
    assert [ids.tolist() for ids, *_ in tokenizer_file.encode(tokenizer, texts, None)] == expected
    monkeypatch.setattr(tokenizer_file, "_ENCODE", tokenizer_file._ENCODE.replace(str(1 << 20), "9"))
    assert [ids.tolist() for ids, *_ in tokenizer_file.encode(tokenizer, texts, None)] == expected
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert [ids.tolist() for ids, *_ in tokenizer_file.encode(tokenizer, texts, None)] == expected


def test_a_tokenizer_that_takes_its_time(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_file, "PATIENCE", 0.01)
    (tmp_path / "tokenizer.json").write_text(json.dumps(_described()))
    with pytest.raises(BadInput, match=r"takes more than 0\.01 seconds"):
        Text(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_is_too_large(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_file, "LARGEST", 100)
    (tmp_path / "tokenizer.json").write_text(json.dumps(_described()))
    with pytest.raises(BadInput, match="has more than"):
        Text(tmp_path / "tokenizer.json")

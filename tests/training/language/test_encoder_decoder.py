"""Models of an encoder and a decoder learn completions; speech models bring features for their encoder."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data.recipe import PreparationRecipe
from tests.training.language.models import VOCABULARY, WIDTH, WORDS, decoder, tokenizer

PAIRS = [
    {"prompt": "the cat sat on", "completion": "the mat"},
    {"prompt": "a dog", "completion": "ran to a tree"},
    {"source": "red", "target": "blue"},
]


def model(features=False):
    """Scores from the word before, and the mean of what the encoder reads."""
    given = f"float[N, S, {WIDTH}] input_features" if features else "int64[N, S] input_ids, int64[N, S] attention_mask"
    encoder = (
        "mean = ReduceMean (input_features, time)"
        if features
        else """
        e = Gather (words, input_ids)  m0 = Cast <to = 1> (attention_mask)  m = Unsqueeze (m0, last)
        k = Mul (e, m)  total = ReduceSum (k, time)  count = ReduceSum (m, time)  mean = Div (total, count)"""
    )
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        pairs ({given}, int64[N, T] decoder_input_ids) => (float[N, T, {VOCABULARY}] logits)
        <int64[1] time = {{1}}, int64[1] last = {{-1}}> {{
            {encoder}
            d = Gather (words, decoder_input_ids)  h = Add (d, mean)  logits = MatMul (h, head) }}""")
    random = np.random.default_rng(0)
    for name, shape in {"words": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}.items():
        array = (0.3 * random.standard_normal(shape)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def first_batch(trainer, rows):
    return next(iter(trainer.data(rows, preparation=PreparationRecipe(tokenizer=tokenizer())).batches(8)))


def words(ids):
    return " ".join(WORDS[i] for i in ids if i >= 0)


def test_the_decoder_reads_the_labels_shifted_by_one():
    batch = first_batch(Trainer(model(), task="seq2seq"), PAIRS)
    assert [words(row) for row in batch["labels"]] == ["the mat <eos>", "ran to a tree <eos>", "blue <eos>"]
    assert words(batch["decoder_input_ids"][1]) == "[PAD] ran to a tree"
    assert words(batch["decoder_input_ids"][2]) == "[PAD] blue [PAD] [PAD] [PAD]"
    assert words(batch["input_ids"][0]) == "the cat sat on"
    np.testing.assert_array_equal(batch["attention_mask"].sum(1), [4, 2, 1])


def test_it_learns_pairs():
    trainer = Trainer(model(), task="seq2seq", learning_rate=0.05)
    trainer.fit(PAIRS, tokenizer=tokenizer(), epochs=60)
    assert trainer.evaluate(PAIRS, tokenizer=tokenizer())["accuracy"] == 1


def test_completions_are_measured_with_the_tokens():
    trainer = Trainer(model(), task="seq2seq", learning_rate=0.05)
    trainer.fit(PAIRS, tokenizer=tokenizer(), epochs=60)
    rows = [*PAIRS, {"prompt": "red", "completion": "the cat"}]
    trained = trainer.inference_model()
    found = onnxgrad.evaluate(trained, rows, metrics="exact,accuracy")
    texts = [c.text for c in onnxgrad.generate(trained, ["the cat sat on", "a dog", "red", "red"])]
    assert texts == ["the mat", "ran to a tree", "blue", "blue"]
    assert found.metrics["exact"] == 0.75
    assert 0 < found.metrics["accuracy"] < 1
    alone = onnxgrad.evaluate(trained, rows, metrics="exact")
    assert (alone.metrics, alone.rows) == ({"exact": 0.75}, 4)
    with pytest.raises(BadInput, match="has no answer to compare with"):
        onnxgrad.evaluate(decoder(), ["the cat sat"], metrics="exact", task="causal-lm", tokenizer=tokenizer())


def test_features_of_speech_come_from_their_own_column():
    random = np.random.default_rng(0)
    rows = [
        {"input_features": random.standard_normal((5, WIDTH)).astype(np.float32), "target": pair}
        for pair in ("the cat", "a dog ran")
    ]
    batch = first_batch(Trainer(model(features=True), task="seq2seq"), rows)
    assert batch["input_features"].shape == (2, 5, WIDTH)
    assert words(batch["labels"][0]) == "the cat <eos>"


@pytest.mark.parametrize(("rows", "text"), [([{"text": "the cat"}, {"text": "a dog"}], "the cat <eos>")])
def test_a_text_alone_is_a_target(rows, text):
    random = np.random.default_rng(0)
    for row in rows:
        row["input_features"] = random.standard_normal((3, WIDTH)).astype(np.float32)
    batch = first_batch(Trainer(model(features=True), task="seq2seq"), rows)
    assert words(batch["labels"][0]) == text


def test_a_document_without_a_prompt_is_refused():
    with pytest.raises(BadInput, match="documents without a prompt, which the encoder reads"):
        first_batch(Trainer(model(), task="seq2seq"), [*PAIRS, {"text": "the cat"}])


def test_the_encoders_text_is_truncated_with_its_end():
    ends = tokenizer()
    processors = pytest.importorskip("tokenizers").processors
    ends.post_processor = processors.TemplateProcessing("$A <eos>", None, [("<eos>", WORDS.index("<eos>"))])
    trainer, preparation = Trainer(model(), task="seq2seq"), PreparationRecipe(tokenizer=ends, max_length=3)
    with pytest.warns(UserWarning, match="1 of 3 rows of the data are truncated to 3 tokens"):
        data = trainer.data(PAIRS, preparation=preparation)
    batch = next(iter(data.batches(8)))
    assert words(batch["input_ids"][0]) == "the cat <eos>"
    assert words(batch["labels"][1]) == "ran to a"

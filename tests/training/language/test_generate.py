"""Completions by small decoders: with and without a cache, alone and together, drawn and greedy."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training.language.decoder import choice, shares
from onnxgrad.training.language.generation_recipe import GenerationRecipe
from tests.training.language.models import HEADS, SIZE, VOCABULARY, decoder, merged_decoder, tokenizer

PROMPTS = [[8, 9, 10], [13, 14], [8, 13, 14, 15, 8], [9, 9, 10]]


def greedy(ids: list[int], steps: int) -> list[int]:
    """The likeliest tokens behind `ids`, by the decoder without a cache on all tokens at each step."""
    session = onnxruntime.InferenceSession(decoder(past=False).SerializeToString())
    found = list(ids)
    for _ in range(steps):
        row = np.array([found])
        feeds = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(row.shape[1])[None]}
        found.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    return found[len(ids) :]


EXPORTS = {
    "without a cache": lambda: decoder(past=False),
    "with a cache": decoder,
    "with both in an If": merged_decoder,
    "of a fixed length": lambda: decoder(past=False, length="12"),
    "with a mask of pairs": lambda: decoder(past=False, pairs="bool"),
    "of one token at a time": lambda: decoder(length="1"),
    "of two rows": lambda: two_rows(),
}


def two_rows() -> onnx.ModelProto:
    """The decoder with a cache for batches of exactly two rows."""
    proto = decoder()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].Clear()
        value.type.tensor_type.shape.dim[0].dim_value = 2
    return proto


@pytest.mark.parametrize(
    ("export", "cache"), [(e, c) for e in EXPORTS for c in (True, False) if c or e != "of one token at a time"]
)
def test_greedy_completions_are_the_likeliest_tokens(export, cache):
    found = onnxgrad.generate(EXPORTS[export](), PROMPTS, max_new_tokens=6, cache=cache)
    assert [c.tokens for c in found] == [greedy(p, 6) for p in PROMPTS]
    assert {c.finish for c in found} == {"length"}
    assert [c.prompt_tokens for c in found] == PROMPTS
    assert found[0].text is None


def test_a_cache_is_empty_at_first_and_grows(monkeypatch):
    sizes = []
    run = onnxruntime.InferenceSession.run

    def watched(self, names, feeds, *rest):
        sizes.append((feeds["input_ids"].shape, feeds["past_key_values_0_key"].shape, feeds["attention_mask"].shape))
        return run(self, names, feeds, *rest)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", watched)
    onnxgrad.generate(decoder(), [[8, 9, 10]], max_new_tokens=3)
    assert sizes == [((1, t), (1, HEADS, p, SIZE), (1, p + t)) for t, p in ((3, 0), (1, 3), (1, 4))]


def test_text_is_read_and_written_by_the_tokenizer():
    (found,) = onnxgrad.generate(decoder(), "the cat sat", tokenizer=tokenizer(), max_new_tokens=4, end_token="none")
    tokens = greedy([8, 9, 10], 4)
    assert found.prompt == "the cat sat"
    assert found.tokens == tokens
    assert found.text.split() == tokenizer().decode(tokens).split()


def test_a_completion_ends_at_its_token_or_text():
    tokens = greedy([8, 9, 10], 8)
    (by_token,) = onnxgrad.generate(decoder(), [[8, 9, 10]], max_new_tokens=8, end_token=tokens[2])
    assert (by_token.tokens, by_token.finish) == (tokens[: tokens.index(tokens[2]) + 1], "end")
    text = tokenizer().decode(tokens)
    assert text.startswith(": dog [UNK]")
    (by_text,) = onnxgrad.generate(
        decoder(), "the cat sat", tokenizer=tokenizer(), max_new_tokens=8, stop=["blue", "[UNK]"], end_token="none"
    )
    assert (by_text.text, by_text.finish) == (" : dog ", "stop")
    assert by_text.tokens == tokens[:3]


def test_a_row_that_has_ended_leaves_others_alone():
    ends = greedy(PROMPTS[0], 1)[0]
    found = onnxgrad.generate(decoder(), [PROMPTS[0], PROMPTS[3]], max_new_tokens=6, end_token=ends)
    others = greedy(PROMPTS[3], 6)
    assert found[0].tokens == [ends]
    assert found[1].tokens == (others[: others.index(ends) + 1] if ends in others else others)


def test_positions_end_a_completion():
    (found,) = onnxgrad.generate(decoder(past=False), [[8] * 30], max_new_tokens=9)  # of 32 positions
    assert (len(found.tokens), found.finish) == (3, "positions")
    (found,) = onnxgrad.generate(decoder(past=False, length="5"), [[8, 9]], max_new_tokens=9)
    assert (len(found.tokens), found.finish) == (4, "positions")


def test_draws_follow_the_seed_and_not_the_batch():
    settings = {"max_new_tokens": 6, "temperature": 1.5, "seed": 3}
    together = onnxgrad.generate(decoder(), PROMPTS, **settings)
    again = onnxgrad.generate(decoder(), PROMPTS, cache=False, **settings)
    assert [c.tokens for c in together] == [c.tokens for c in again]
    assert onnxgrad.generate(decoder(), PROMPTS[0], **settings)[0].tokens == together[0].tokens
    other = onnxgrad.generate(decoder(), PROMPTS, **{**settings, "seed": 4})
    assert [c.tokens for c in together] != [c.tokens for c in other]
    likeliest = onnxgrad.generate(decoder(), PROMPTS, max_new_tokens=6, top_k=1)
    assert [c.tokens for c in likeliest] == [greedy(p, 6) for p in PROMPTS]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.5**2 / 0.365, 0.3**2 / 0.365, 0.15**2 / 0.365, 0.05**2 / 0.365]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [0.625, 0.375, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.625, 0.375, 0, 0]),
    ],
)
def test_shares(settings, wanted):
    order = [2, 0, 3, 1]  # scores in another order than that of their sizes
    found = shares(np.log([0.5, 0.3, 0.15, 0.05])[order], GenerationRecipe(**settings))
    np.testing.assert_allclose(found, np.array(wanted)[order], rtol=1e-12)


def test_draws_have_these_shares():
    scores = np.log([0.5, 0.3, 0.15, 0.05])
    choose = choice(GenerationRecipe(temperature=1.0), np.arange(2000))
    counts = np.bincount(choose(np.tile(scores, (2000, 1))), minlength=4)
    assert abs(counts - 2000 * np.exp(scores)).max() < 4 * np.sqrt(2000 * 0.25)


def test_conversations_are_written_by_the_template(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "the cat"}]
    (found,) = onnxgrad.generate(decoder(), [chat], tokenizer=tmp_path / "tokenizer.json", max_new_tokens=2)
    assert found.prompt == "user : the cat <eos> assistant :"
    assert found.prompt_tokens == [4, 7, 8, 9, 2, 5, 7]


def no_presents() -> onnx.ModelProto:
    proto = decoder()
    del proto.graph.output[1:]
    return proto


def fixed_cache() -> onnx.ModelProto:
    proto = decoder()
    for value in proto.graph.input:
        if "past" in value.name:
            value.type.tensor_type.shape.dim[2].Clear()
            value.type.tensor_type.shape.dim[2].dim_value = 16
    return proto


def no_scores() -> onnx.ModelProto:
    proto = decoder(past=False)
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["N", "T"]))
    return proto


def more_inputs() -> onnx.ModelProto:
    proto = decoder()
    value = onnx.helper.make_tensor_value_info("encoder_hidden_states", onnx.TensorProto.FLOAT, ["N", "S", 8])
    proto.graph.input.append(value)
    return proto


@pytest.mark.parametrize(
    ("model", "prompts", "settings", "message"),
    [
        (decoder, [], {}, "there is no prompt"),
        (decoder, ["the"], {}, "need a tokenizer"),
        (decoder, [[]], {}, "has no tokens"),
        (decoder, [[VOCABULARY]], {}, f"the token {VOCABULARY}, and the model has {VOCABULARY}"),
        (decoder, [[-1]], {}, "the token -1"),
        (decoder, [[0.5, 1.0]], {}, "neither text nor"),
        (lambda: decoder(length="1"), [[8, 9]], {"cache": False}, "2 tokens, and the model reads 1"),
        (decoder, [[8] * 33], {}, "33 tokens, and the model reads 32"),
        (decoder, [[8]], {"temperature": -1.0}, "temperature"),
        (decoder, [[8]], {"temperature": 0, "top_k": 3}, "drop either"),
        (decoder, [[8]], {"top_p": 0.0}, "top_p"),
        (decoder, [[8]], {"top_p": 1.5}, "top_p"),
        (decoder, [[8]], {"top_k": 0}, "top_k"),
        (decoder, [[8]], {"max_new_tokens": 0}, "max_new_tokens"),
        (decoder, [[8]], {"stop": ["x"]}, "needs a tokenizer"),
        (decoder, [[8]], {"stop": 8}, "list of texts"),
        (decoder, [[8]], {"stop": ""}, "list of texts"),
        (decoder, [[8]], {"end_token": "zzz"}, "no token of the tokenizer"),
        (decoder, [[8]], {"max_tokens": 5}, "max_new_tokens"),
        (no_presents, [[8]], {}, "no output has the next value"),
        (fixed_cache, [[8]], {}, "no axis grows"),
        (no_scores, [[8]], {}, "no language model"),
        (more_inputs, [[8]], {}, "encoder_hidden_states"),
    ],
)
def test_what_does_not_fit_is_refused(model, prompts, settings, message):
    with pytest.raises(BadInput, match=message):
        onnxgrad.generate(model(), prompts, **settings)


def test_a_tokenizer_of_another_vocabulary_is_refused():
    tokenizers = pytest.importorskip("tokenizers")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": VOCABULARY + 5, "[UNK]": 0}, "[UNK]"))
    with pytest.raises(BadInput, match="another model"):
        onnxgrad.generate(decoder(), "a", tokenizer=other)

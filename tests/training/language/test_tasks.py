"""Documents become tokens, labels and masks, and a decoder trains on them as it was exported."""

import json
import re
import warnings

import numpy as np
import onnx
import pyarrow.parquet
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Session
from onnxgrad.training import Trainer, evaluate, predict, train
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.language import chat, documents
from onnxgrad.training.language.masking import Masking
from onnxgrad.training.loop.callbacks import Callback
from tests.cli.said import said
from tests.training.language.models import VOCABULARY, WORDS, decoder, masked_loss, merged_decoder, tokenizer, weights

TEXTS = ["the cat sat on the mat", "the dog ran to a tree", "a red cat", "the blue dog sat on a mat", "a dog ran"]
CHAT = [
    {"role": "system", "content": "red"},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "ran to a tree"},
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def step(self, run, loss):
        self.values.append(loss)


@pytest.fixture
def place(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<eos>"}, "pad_token": "[PAD]", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "corpus.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHAT[:n]}) for n in (3, 5)))
    onnx.save(decoder(), tmp_path / "m.onnx")
    return tmp_path


def rows_of(place, data, model=None, max_length=None, **task):
    """The rows that a trainer makes of `data`."""
    trainer = Trainer(model or decoder(), **{"task": "causal_lm", **task})
    return trainer, rows_for(trainer, place, data, max_length)


def rows_for(trainer, place, data, max_length=None):
    return trainer.data(data, preparation=PreparationRecipe(tokenizer=place / "tokenizer.json", max_length=max_length))


def words(ids):
    return " ".join(WORDS[i] for i in ids if i >= 0)


def test_labels_are_the_next_tokens_and_padding_has_none(place):
    _, rows = rows_of(place, place / "corpus.txt")
    (batch,) = rows.batches(8)
    assert words(batch["input_ids"][2]).startswith("a red cat <eos> [PAD]")
    assert words(batch["labels"][2]) == "red cat <eos>"
    assert batch["labels"][2].tolist()[3:] == [-100] * (batch["labels"].shape[1] - 3)
    assert batch["attention_mask"].sum(1).tolist() == [len(t.split()) + 1 for t in TEXTS]
    assert batch["position_ids"][0].tolist() == [*range(7), 0]
    assert batch["past_key_values_0_key"].shape == (5, 2, 0, 4)


def test_only_the_assistants_turns_are_learned(place):
    _, rows = rows_of(place, place / "chats.jsonl")
    (batch,) = rows.batches(8)
    assert words(batch["input_ids"][0]).startswith("system : red <eos> user : the cat <eos> assistant : sat on <eos>")
    assert words(batch["labels"][0]) == "sat on <eos>"
    assert words(batch["labels"][1]) == "sat on <eos> ran to a tree <eos>"


def test_prompts_are_not_learned(place):
    pairs = [{"prompt": "the cat", "completion": " sat on"}, {"source": "a dog ", "target": "ran"}]
    pairs.append({"prompt": CHAT[:4], "completion": CHAT[4:]})
    _, rows = rows_of(place, pairs)
    (batch,) = rows.batches(8)
    assert [words(labels) for labels in batch["labels"]] == ["sat on <eos>", "ran <eos>", "ran to a tree <eos>"]


def test_tokens_and_labels_of_the_caller_are_shifted_alike(place):
    _, rows = rows_of(place, {"input_ids": [[8, 9, 10], [8, 9, 10, 11]], "labels": [[-100, 9, 10], [8, 9, 10, 11]]})
    (batch,) = rows.batches(8)
    assert batch["labels"].tolist() == [[9, 10, -100, -100], [9, 10, 11, -100]]


def test_a_file_is_one_document_if_asked(place):
    _, rows = rows_of(place, place / "corpus.txt", documents="file", max_length=8)
    assert rows.notes == [f"{str(place / 'corpus.txt')!r}: 1 of 1 texts are cut into pieces of 8 tokens",
                          "documents are not packed: no mask of the model keeps those of a row apart"]  # fmt: skip
    ids = np.concatenate([b["input_ids"][0] for b in rows.batches(1)])
    assert words(ids).split() == [*" ".join(TEXTS).split(), "<eos>"]


def test_conversations_are_truncated_with_a_warning(place):
    with pytest.warns(UserWarning, match="1 of 2 rows of .* are truncated to 16 tokens"):
        _, rows = rows_of(place, place / "chats.jsonl", max_length=16)
    assert max(rows.lengths) == 16


def streams_of_texts(place):
    (place / "texts.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, place / "texts.parquet", row_group_size=2)
    yield place / "corpus.txt"
    yield place / "texts.jsonl"
    yield place / "texts.parquet"
    yield lambda: iter(TEXTS)
    yield lambda: iter([{"text": TEXTS[:3]}, {"text": TEXTS[3:]}])
    yield lambda: table.to_batches(2)


def test_documents_are_streamed(place, monkeypatch):
    """The steps are those of the documents in memory, whose rows are padded to the longest of a batch."""
    monkeypatch.setattr(documents, "_AT_A_TIME", 2)
    settings = {"tokenizer": place / "tokenizer.json", "batch_size": 3, "epochs": 2, "shuffle": False}
    trainers = []
    for source in (TEXTS, *streams_of_texts(place)):
        trainers.append(Trainer(decoder(), task="causal-lm", optimizer="sgd", learning_rate=0.1))
        trainers[-1].fit(source, **settings, stream=isinstance(source, type(place)))
        for name, array in trainers[0].state().items():
            np.testing.assert_allclose(trainers[-1].state()[name], array, rtol=1e-5, atol=1e-7, err_msg=str(source))


def test_conversations_are_streamed(place):
    rows = [{"messages": CHAT[:3]}, {"messages": CHAT}]
    settings = {"tokenizer": place / "tokenizer.json", "shuffle": False}
    losses = []
    for source in (rows, lambda: iter(rows), lambda: iter([{"messages": [CHAT[:3], CHAT]}])):
        trainer = Trainer(decoder(), task="causal-lm", optimizer="sgd", learning_rate=0.1)
        losses.append(trainer.fit(source, **settings).epochs[0]["loss"])
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-6)


def test_masks_of_a_stream_are_new_in_each_epoch(place):
    batches = []

    class Seen(Callback):
        def start(self, run):
            step = run.machine.step
            monkeypatch.setattr(run.machine, "step", lambda batch: (batches.append(dict(batch)), step(batch))[1])

    trainer = Trainer(decoder(past=False), task="masked-lm", optimizer="sgd", learning_rate=0.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer.fit(lambda: iter(TEXTS), tokenizer=place / "tokenizer.json", epochs=2, callbacks=[Seen()])
    first, second = batches
    assert (first["labels"] != second["labels"]).any()
    assert (first["input_ids"] == WORDS.index("[MASK]")).any()


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (lambda: iter([3]), {}, "item 0 of the training data is int, not a text or an object"),
        (lambda: iter(TEXTS), {"documents": "file"}, "a stream of text has paragraphs"),
        (lambda: iter(TEXTS), {"task": "orpo"}, "compares pairs of all rows"),
    ],
)
def test_streams_of_documents_that_are_refused(place, source, settings, message):
    trainer = Trainer(decoder(past=False), **{"task": "causal-lm", **settings})
    with pytest.raises(BadInput, match=message):
        trainer.fit(source, tokenizer=place / "tokenizer.json")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("build", [lambda: decoder(past=False), decoder, merged_decoder])
def test_losses_are_those_of_the_formula_with_any_cache(place, build):
    losses, model = Losses(), build()
    trainer = Trainer(model, task="causal-lm", optimizer="sgd", learning_rate=0.1)
    data = place / "corpus.txt"
    trainer.fit(data, tokenizer=place / "tokenizer.json", batch_size=5, shuffle=False, epochs=2, callbacks=[losses])
    (batch,) = rows_for(trainer, place, data).batches(8)
    plain = decoder(past=False)
    feeds = {v.name: batch[v.name] for v in plain.graph.input}
    first = masked_loss(Session(plain).run(feeds)["logits"], batch["labels"])
    assert losses.values[0] == pytest.approx(first, rel=1e-5)
    changed = {i.name: onnx.numpy_helper.to_array(i) for i in trainer.inference_model().graph.initializer}
    for tensor in plain.graph.initializer:
        if tensor.name in weights():
            tensor.CopyFrom(onnx.numpy_helper.from_array(changed[tensor.name], tensor.name))
            assert np.abs(changed[tensor.name] - weights()[tensor.name]).max() > 0, "all of them train"
    found = trainer.evaluate(data, tokenizer=place / "tokenizer.json")["loss"]
    assert found == pytest.approx(masked_loss(Session(plain).run(feeds)["logits"], batch["labels"]), rel=1e-5)
    assert [v.name for v in trainer.inference_model().graph.input] == [v.name for v in model.graph.input]


@pytest.mark.parametrize("dtype", ["bool", "bfloat16"])
def test_documents_of_a_row_do_not_see_each_other(place, dtype):
    model = decoder(past=False, pairs=dtype)
    trainer, rows = rows_of(place, place / "corpus.txt", model, max_length=16)
    assert rows.notes == ["5 documents are packed into 2 rows"]
    apart = Trainer(model, task="causal_lm", pack=False)
    alone = rows_for(apart, place, place / "corpus.txt", max_length=16)
    assert len(alone) == 5
    state = trainer.state()
    assert trainer.evaluation(state, rows)["loss"] == pytest.approx(apart.evaluation(state, alone)["loss"], rel=1e-5)
    (batch,) = rows.batches(2)
    assert batch["position_ids"][0].tolist()[:14] == [*range(7), *range(7)]


def test_masked_tokens_are_new_in_each_epoch_and_the_same_in_validation(place):
    _, rows = rows_of(place, place / "corpus.txt", decoder(past=False), task="masked-lm")
    order = np.arange(5)
    drawn = [next(iter(rows.batches(5, order, draw=[0, epoch]))) for epoch in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0]["input_ids"], drawn[1]["input_ids"])
    assert (drawn[0]["labels"] != drawn[2]["labels"]).any()
    for batch in drawn:
        assert ((batch["labels"] != -100).sum(1) >= 1).all()
        hidden = batch["input_ids"] == WORDS.index("[MASK]")
        assert (batch["labels"][hidden] != -100).all()
    held_out = [next(iter(rows.batches(5))) for _ in range(2)]
    np.testing.assert_array_equal(held_out[0]["labels"], held_out[1]["labels"])


def test_the_shares_of_masked_tokens(place):
    ids = np.tile(np.arange(4, 20), (500, 4))
    made = Masking("ids", "labels", 3, VOCABULARY)({"ids": ids, "labels": ids}, np.arange(500), [1, 2])
    learned = made["labels"] != -100
    assert learned.mean() == pytest.approx(0.15, abs=0.01)
    assert (made["ids"][learned] == 3).mean() == pytest.approx(0.8, abs=0.03)
    assert (made["ids"][learned] == ids[learned]).mean() == pytest.approx(0.1, abs=0.03)
    np.testing.assert_array_equal(made["ids"][~learned], ids[~learned])


def test_the_command_trains_measures_and_predicts(place):
    data = "--data PLACE/corpus.txt --tokenizer PLACE/tokenizer.json"
    said(place, f"train PLACE/m.onnx {data} --task causal-lm --lr 0.05 --epochs 20 -q -o PLACE/t.onnx")
    found, before = (
        json.loads(said(place, f"evaluate {line} --json").splitlines()[-1])["metrics"]
        for line in ("PLACE/t.onnx --data PLACE/corpus.txt", f"PLACE/m.onnx {data} --task causal-lm")
    )
    assert found["perplexity"] < 5 < before["perplexity"]
    assert found["accuracy"] > 0.6
    said(place, "predict PLACE/t.onnx --data PLACE/corpus.txt -o PLACE/p.npz")
    rows = np.load(place / "p.npz")
    assert rows["tokens"].tolist() == [len(t.split()) for t in TEXTS]
    mean = (rows["log_loss"] * rows["tokens"]).sum() / rows["tokens"].sum()
    assert np.exp(mean) == pytest.approx(found["perplexity"], rel=1e-4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data PLACE/corpus.txt --task causal-lm", "needs a tokenizer"),
        ("--data PLACE/corpus.txt --task causal --tokenizer PLACE/tokenizer.json", "there is no task 'causal'"),
        ("--data PLACE/long.txt --task causal-lm --tokenizer PLACE/tokenizer.json", "the model has 32 positions"),
        ("--data PLACE/corpus.txt --task causal-lm --tokenizer PLACE/large.json", "and the model scores 24"),
        ("--data PLACE/same.txt --task causal-lm --tokenizer PLACE/tokenizer.json", "one label only"),
        ("--data PLACE/mute.jsonl --task causal-lm --tokenizer PLACE/tokenizer.json", "nothing to learn"),
        ("--data PLACE/odd.jsonl --task causal-lm --tokenizer PLACE/tokenizer.json", "row 1 of .* has no text"),
        ("--data PLACE/bad.jsonl --task causal-lm --tokenizer PLACE/tokenizer.json", "line 1 of .* is no JSON"),
        ("--data PLACE/chats.jsonl --task causal-lm --tokenizer PLACE/bare/tokenizer.json", "no chat template"),
        ("--data PLACE/chats.jsonl --task causal-lm --tokenizer PLACE/fails/tokenizer.json", "no system turns, please"),
        ("--data PLACE/chats.jsonl --task causal-lm --tokenizer PLACE/evil/tokenizer.json", "chat template fails"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(place, flags, message):
    (place / "long.txt").write_text("the cat " * 20)
    (place / "same.txt").write_text("<eos> <eos> <eos>\n\n<eos> <eos>")
    (place / "mute.jsonl").write_text(json.dumps({"messages": CHAT[:2]}))
    (place / "odd.jsonl").write_text('{"text": "a cat"}\n{"review": "a cat"}')
    (place / "bad.jsonl").write_text("{text: 1}")
    large = tokenizer()
    large.add_tokens([f"word{i}" for i in range(9)])
    large.save(str(place / "large.json"))
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for name, template in {
        "bare": None,
        "fails": "{{ raise_exception('no system turns, please') }}",
        "evil": evil,
    }.items():
        (place / name).mkdir()
        tokenizer().save(str(place / name / "tokenizer.json"))
        (place / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    before = set(place.rglob("*"))
    found = said(place, f"train PLACE/m.onnx {flags} -o PLACE/t.onnx", code=2)
    assert re.search(message, found), found
    assert found.startswith("error: ")
    assert set(place.rglob("*")) == before


def test_a_template_without_end_is_stopped(place, monkeypatch):
    monkeypatch.setattr(chat, "_PATIENCE", 1)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(BadInput, match="takes more than"):
        chat.Manners(template=loop).render([{"messages": CHAT}], "chats")


def test_predictions_of_trained_models_need_no_flags(place):
    trained = train(decoder(), TEXTS, task="causal_lm", tokenizer=place / "tokenizer.json", epochs=1).inference_model()
    assert evaluate(trained, TEXTS).rows == sum(len(t.split()) for t in TEXTS)
    assert predict(trained, TEXTS)["perplexity"].shape == (5,)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("build", [decoder, merged_decoder])
def test_parts_of_a_batch_have_caches_of_their_own(place, build):
    found = []
    settings = {"tokenizer": place / "tokenizer.json", "batch_size": 4}
    for parts in (1, 2):
        losses = Losses()
        trainer = Trainer(build(), task="causal_lm", optimizer="sgd", learning_rate=0.1, accumulate=parts)
        rates = trainer.find_rate(place / "corpus.txt", steps=10, highest=10, **settings)
        trainer.fit(place / "corpus.txt", callbacks=[losses], shuffle=False, epochs=2, **settings)
        found.append([*rates.losses, *losses.values])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_labels_that_are_the_input_are_warned_of(place):
    ids = np.arange(12).reshape(3, 4) + 4
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.zeros_like(ids) + np.arange(4)}
    trainer = Trainer(decoder(past=False), loss="cross_entropy:ignore_index=-100", prediction="logits")
    padded = np.where(np.arange(4) < 3, ids, -100)
    with pytest.warns(UserWarning, match="'labels' equal the input 'input_ids'.*without a shift"):
        trainer.fit({**feeds, "labels": padded}, epochs=1)
    shifted = np.append(ids[:, 1:], np.full((3, 1), -100), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit({**feeds, "labels": shifted}, epochs=1)
    with pytest.warns(UserWarning, match="the labels are the input 'input_ids'"):
        Trainer(decoder(past=False), loss="cross_entropy", labels="input_ids")


def test_a_template_writes_turns_again_and_may_mark_those_of_the_assistant():
    """Templates that write an earlier turn otherwise than the last one: only what stays the same is learned."""
    again = "{% if loop.last and m.role == 'assistant' %}red {% endif %}"
    turn = "{% generation %}" + again + "{{ m.content }} {% endgeneration %}"
    forgets = (
        "{% for m in messages %}{{ m.role }} : "
        + turn
        + "{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
    )
    ((text, spans),) = chat.Manners(template=forgets).render([{"messages": CHAT}], "chats")
    assert text == "system : red user : the cat assistant : sat on user : the dog assistant : red ran to a tree "
    assert [text[begin:end] for begin, end in spans] == ["", "red ran to a tree "]


def test_the_tokenizers_file_may_name_templates_and_tokens(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"decoder_start_token_id": 7, "max_position_embeddings": 99}')
    found = chat.Manners.beside(tmp_path / "tokenizer.json")
    assert found == chat.Manners({"eos_token": "</s>"}, "yes", 99, 7) == chat.Manners.of(found.to_json())
    (tmp_path / "chat_template.jinja").write_text("own")
    assert chat.Manners.beside(tmp_path / "tokenizer.json").template == "own"
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(BadInput, match="no object of JSON"):
        chat.Manners.beside(tmp_path / "tokenizer.json")


def test_tables_and_columns_have_documents(place):
    pytest.importorskip("pyarrow")
    (place / "d.csv").write_text("stars,review\n5,a red cat\n1,the blue dog sat\n")
    for data, inputs in (
        (place / "d.csv", {"input_ids": "review"}),
        ({"text": ["a red cat", "the blue dog sat"]}, None),
    ):
        preparation = PreparationRecipe(tokenizer=place / "tokenizer.json", inputs=inputs)
        (batch,) = Trainer(decoder(), task="causal_lm").data(data, preparation=preparation).batches(4)
        assert [words(row) for row in batch["labels"]] == ["red cat <eos>", "blue dog sat <eos>"]


def test_text_quantizes_a_model_and_trains_it_through_the_rounding(place):
    data = "--data PLACE/corpus.txt --tokenizer PLACE/tokenizer.json --task causal-lm"
    said(place, f"quantize PLACE/m.onnx {data} -o PLACE/q.onnx")
    said(place, f"quantize PLACE/m.onnx {data} --qat --epochs 20 --learning-rate 0.05 -q -o PLACE/t.onnx")
    before, after = (
        evaluate(place / name, TEXTS, task="causal_lm", tokenizer=place / "tokenizer.json").metrics["perplexity"]
        for name in ("q.onnx", "t.onnx")
    )
    assert after < before / 2
    assert any(n.op_type == "DequantizeLinear" for n in onnx.load(place / "t.onnx").graph.node)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["use_cache_branch", "num_logits_to_keep"])
def test_switches_of_exporters_may_be_scalars(place, name):
    """A scalar that selects: with the value 0, the model is the one that trains."""
    model = decoder(past=False)
    kind = onnx.TensorProto.BOOL if name.startswith("use") else onnx.TensorProto.INT64
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, []))
    model.graph.node[-1].output[0] = "all"
    model.graph.node.append(onnx.helper.make_node("Cast", [name], ["number"], to=onnx.TensorProto.FLOAT))
    model.graph.node.append(onnx.helper.make_node("Sub", ["all", "number"], ["logits"]))
    data, settings = place / "corpus.txt", {"tokenizer": place / "tokenizer.json"}
    with_switch, without = (Trainer(m, task="causal_lm") for m in (model, decoder(past=False)))
    with_switch.fit(data, epochs=1, **settings)
    without.fit(data, epochs=1, **settings)
    assert with_switch.evaluate(data, **settings) == without.evaluate(data, **settings)
    with_switch.save(place / "t.onnx")
    assert evaluate(place / "t.onnx", data).metrics["perplexity"] > 1
    assert len(predict(place / "t.onnx", data)["tokens"]) == len(TEXTS)
    with pytest.raises(BadInput, match=f"input {name!r} is a scalar"):
        Trainer(model, loss="cross_entropy").fit({"input_ids": np.zeros((1, 2), np.int64)})


def test_the_tokenizers_own_truncation_cuts_texts_into_pieces(place):
    own = tokenizer()
    own.enable_truncation(4)
    trainer = Trainer(decoder(), task="causal_lm")
    rows = trainer.data(place / "corpus.txt", preparation=PreparationRecipe(tokenizer=own))
    ids = [batch["input_ids"][0] for batch in rows.batches(1)]
    assert max(map(len, ids)) == 4
    assert words(np.concatenate(ids)).split() == [*" <eos> ".join(TEXTS).split(), "<eos>"]

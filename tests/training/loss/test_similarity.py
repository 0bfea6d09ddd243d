"""Losses of pairs and triples against PyTorch and the formulas of their papers; encoders that learn by them."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, attach, compile_step
from tests.models import assert_sound

SIZE, ROWS = 5, 7
RNG = np.random.default_rng(0)


def encoder(size: int = 4, width: int = SIZE) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        encoder (float[N, {size}] x) => (float[N, {width}] y) {{ y = MatMul (x, w) }}""")
    array = RNG.standard_normal((size, width)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return model


def multiple_negatives(torch, e, t, temperature=0.05, symmetric=False):
    """As MultipleNegativesRankingLoss of sentence-transformers."""
    f = torch.nn.functional
    a, c = f.normalize(e[:, 0], dim=1), f.normalize(torch.cat(list(e[:, 1:].unbind(1))), dim=1)
    scores, own = a @ c.T / temperature, torch.arange(len(e))
    loss = f.cross_entropy(scores, own)
    return (loss + f.cross_entropy(scores[:, : len(e)].T, own)) / 2 if symmetric else loss


def triplet_margin(torch, e, t, margin=1.0, distance="euclidean"):
    f = torch.nn.functional
    if distance == "euclidean":
        return f.triplet_margin_loss(e[:, 0], e[:, 1], e[:, 2], margin=margin)
    away = [1 - f.cosine_similarity(e[:, 0], e[:, k]) for k in (1, 2)]
    return f.relu(away[0] - away[1] + margin).mean()


def cosine_similarity(torch, e, t):
    return torch.nn.functional.mse_loss(torch.nn.functional.cosine_similarity(e[:, 0], e[:, 1]), t)


def cosent(torch, e, t, scale=20.0):
    """As CoSENTLoss of sentence-transformers."""
    s = torch.nn.functional.cosine_similarity(e[:, 0], e[:, 1]) * scale
    s = s[:, None] - s[None, :]
    wrong = (t[:, None] < t[None, :]).double()
    s = (s - (1 - wrong) * 1e12).flatten()
    return torch.logsumexp(torch.cat([torch.zeros(1, dtype=s.dtype), s]), 0)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("reference", "roles", "options", "rtol"),
    [
        (multiple_negatives, 2, {}, 1e-4),
        (multiple_negatives, 3, {"temperature": 0.3}, 1e-4),
        (multiple_negatives, 2, {"symmetric": True}, 1e-4),
        (triplet_margin, 3, {}, 1e-4),
        (triplet_margin, 3, {"margin": 0.7, "distance": "cosine"}, 1e-4),
        (cosine_similarity, 2, {}, 1e-4),
        (cosent, 2, {"scale": 5.0}, 1e-4),
    ],
)
def test_losses_and_gradients_are_those_of_torch(reference, roles, options, rtol):
    torch = pytest.importorskip("torch")
    names = ["anchor", "positive", "negative"][:roles]
    given = ",".join(f"{k}={v}".lower() if isinstance(v, bool) else f"{k}={v}" for k, v in options.items())
    loss = reference.__name__ + (f":{given}" if given else "")
    model = encoder()
    step = compile_step(attach(model, loss=loss, pairs=names, optimizer="sgd", learning_rate=1.0))
    rows = {n: RNG.standard_normal((ROWS, 4)).astype(np.float32) for n in names}
    t = RNG.random(ROWS).astype(np.float32)
    feeds = {**rows, **({"labels": t} if "labels" in step.batch else {})}
    assert set(step.batch) == set(feeds)
    trainer = Trainer(step)
    found = trainer.fit(feeds, epochs=1, batch_size=ROWS, shuffle=False).epochs[0]["loss"]
    w = torch.tensor(onnx.numpy_helper.to_array(model.graph.initializer[0])).double().requires_grad_()
    e = torch.stack([torch.tensor(rows[n]).double() @ w for n in names], 1)
    wanted = reference(torch, e, torch.tensor(t).double(), **options)
    wanted.backward()
    assert found == pytest.approx(wanted.item(), rel=rtol)
    moved = trainer.inference_model()
    (after,) = (onnx.numpy_helper.to_array(a) for a in moved.graph.initializer)
    np.testing.assert_allclose(after, (w - w.grad).detach().numpy(), rtol=1e-3, atol=1e-4)
    assert [v.name for v in moved.graph.input] == ["x"]  # the encoder as it was


@pytest.mark.torch
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_arcface_is_that_of_its_paper(margin):
    torch = pytest.importorskip("torch")
    cosines = RNG.uniform(-0.99, 0.99, (ROWS, 4)).astype(np.float32)
    labels = RNG.integers(0, 4, ROWS)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 4] x) => (float[N, 4] y) { y = Mul (x, w) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    trainer = Trainer(model, loss=f"arcface:margin={margin},scale=8", optimizer="sgd", learning_rate=1.0)
    found = trainer.fit({"x": cosines, "labels": labels}, epochs=1, batch_size=ROWS).epochs[0]["loss"]
    w = torch.ones(4, dtype=torch.double, requires_grad=True)
    c = torch.tensor(cosines).double() * w
    own = torch.nn.functional.one_hot(torch.tensor(labels), 4).bool()
    wanted = torch.nn.functional.cross_entropy(
        8 * torch.where(own, torch.cos(torch.arccos(c) + margin), c), torch.tensor(labels)
    )
    wanted.backward()
    assert found == pytest.approx(wanted.item(), rel=1e-4)
    np.testing.assert_allclose(trainer.state()["w"], (w - w.grad).detach().numpy(), rtol=1e-3)


def test_an_encoder_learns_which_rows_belong_together(tmp_path):
    """Rows of different lengths, several inputs: the roles are padded to the longest."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        encoder (int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, 16] embedding) {
            tokens = Gather (table, input_ids)
            m = Cast <to = 1> (attention_mask)
            mask = Unsqueeze (m, last)
            kept = Mul (tokens, mask)
            total = ReduceSum <keepdims = 0> (kept, one)
            count = ReduceSum <keepdims = 0> (mask, one)
            mean = Div (total, count)
            embedding = MatMul (mean, w)
        }""")
    draw = np.random.default_rng(0)
    for name, array in {
        "table": draw.standard_normal((60, 16)).astype(np.float32), "w": np.eye(16, dtype=np.float32),
        "last": np.array([2]), "one": np.array([1]),
    }.items():  # fmt: skip
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

    def tokens(kinds, words):  # a word of its kind twice, among words of no meaning
        found = [draw.permutation([k, k, *draw.integers(40, 60, words - 2)]) for k in kinds]
        return {"input_ids": np.stack(found), "attention_mask": np.ones((len(kinds), words), int)}

    kinds = draw.integers(0, 20, 400)  # the words of answers are others than those of questions
    rows = {f"question.{n}": a for n, a in tokens(kinds, 5).items()}
    rows |= {f"answer.{n}": a for n, a in tokens(20 + kinds, 8).items()}
    trainer = onnxgrad.train(
        model, rows, loss="multiple_negatives", pairs="question,answer", learning_rate=0.02, epochs=6, batch_size=40,
        validation_split=0.1,
    )  # fmt: skip
    assert trainer.history.epochs[-1]["validation_loss"] < 0.7 * trainer.history.epochs[0]["validation_loss"]
    trainer.save(tmp_path / "encoder.onnx")
    assert_sound(onnx.load(tmp_path / "encoder.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    pairs = np.arange(20)
    test = {**tokens(np.r_[pairs, 20 + pairs], 6), "kind": np.r_[pairs, pairs]}
    before, after = (
        onnxgrad.evaluate(m, test, labels="kind", metrics="recall_at_1,mrr").metrics
        for m in (model, tmp_path / "encoder.onnx")
    )
    assert after["recall_at_1"] > before["recall_at_1"] + 0.4
    assert after["mrr"] > before["mrr"]


def test_pairs_of_texts_in_a_table(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["cat", "dog", "car", "train", "purrs", "barks", "drives", "rails", "the", "a"]
    numbers = {w: i for i, w in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "pairs.csv").write_text(
        "anchor,positive\n" + "".join(f"the {a},a {b} a\n" for a, b in zip(words[:4], words[4:8])) * 8
    )
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        encoder (int64[N, T] input_ids) => (float[N, 8] y) {
            e = Gather (table, input_ids)
            y = ReduceMean <keepdims = 0> (e, one)
        }""")
    table = np.random.default_rng(0).standard_normal((11, 8)).astype(np.float32)
    for name, array in {"table": table, "one": np.array([1])}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    settings = {"tokenizer": tmp_path / "tokenizer.json", "epochs": 10, "batch_size": 8, "learning_rate": 0.05}
    trainer = onnxgrad.train(
        tmp_path / "m.onnx", tmp_path / "pairs.csv", loss="multiple_negatives", pairs="anchor,positive", **settings
    )
    assert trainer.history.epochs[-1]["loss"] < trainer.history.epochs[0]["loss"] / 2
    found = trainer.predict([{"text": "the cat"}, {"text": "a purrs a"}, {"text": "a rails a"}])["y"]
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    assert found[0] @ found[1] > found[0] @ found[2] + 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "multiple_negatives"}, r"takes embeddings \[N, 2, size\]\n  hint: --pairs anchor,positive"),
        ({"loss": "triplet_margin", "pairs": "a,b"}, r"takes embeddings \[N, 3, size\]"),
        ({"loss": "multiple_negatives", "pairs": "a"}, "pairs are two or more columns"),
        ({"loss": "multiple_negatives", "pairs": "a,b", "prediction": "z"}, "name the output"),
        ({"loss": "multiple_negatives", "pairs": "a,b", "accumulate": True}, "cannot be accumulated"),
        ({"loss": "multiple_negatives:reduction=sum", "pairs": "a,b", "accumulate": True}, "cannot be accumulated"),
        ({"loss": "arcface:margin=4"}, r"margin lies in \[0, π\)"),
    ],
)
def test_what_does_not_fit(settings, message):
    with pytest.raises(BadInput, match=message):
        attach(encoder(), **settings)

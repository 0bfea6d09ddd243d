"""Completions by an encoder and a decoder: in one file, in two, and with a cache of both."""

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxgrad
from onnxgrad.errors import BadInput
from tests.commands import command
from tests.training.language.models import VOCABULARY, WIDTH, decoder, tokenizer

SOURCES = [[8, 9, 10], [13, 14], [8, 13, 14, 15, 8], [9, 9, 10]]
_HEAD = '<ir_version: 10, opset_import: ["": 21]>'
_STATES = f"float[N, S, {WIDTH}]"
_KEYS = f"float[N, 1, L, {WIDTH}]"
_CROSS = f"float[N, 1, S, {WIDTH}]"
#: Scores of each word (d), of the mean of those up to it (k has all of them) and of the source (c).
_SCORES = """
    all = Shape <start = 2, end = 3> (k)  new_words = Shape <start = 1, end = 2> (d)  first = Sub (all, new_words)
    sums = CumSum (k, two)  own = Slice (sums, first, all, second)
    from1 = Add (first, one)  upto1 = Add (all, one)  f = Squeeze (from1)  u = Squeeze (upto1)
    counts = Range (f, u, step)  counted = Cast <to = 1> (counts)  each = Unsqueeze (counted, one)
    means = Div (own, each)  km = Squeeze (means, one)
    cm = ReduceMean <keepdims = 0> (c, second)  a = Add (d, km)  h = Add (a, cm)  logits = MatMul (h, head)
"""
_CONSTANTS = "<int64[1] one = {1}, int64[1] second = {2}, int64 two = {2}, int64 step = {1}>"


def weights():
    random = np.random.default_rng(3)
    shapes = {"words": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def parsed(text):
    proto = onnx.parser.parse_model(_HEAD + text)
    read = {name for node in proto.graph.node for name in node.input}
    for graph in [a.g for node in proto.graph.node for a in node.attribute if a.HasField("g")]:
        read |= {name for node in graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights().items() if n in read)
    return proto


def encoder(given="int64[N, S] input_ids, int64[N, S] attention_mask"):
    body = "e = Gather (words, input_ids)  m0 = Cast <to = 1> (attention_mask)  m = Unsqueeze (m0, last)"
    if "features" in given:
        return parsed(f"encoder ({given}) => ({_STATES} states) {{ states = Tanh (input_features) }}")
    return parsed(f"""encoder ({given}) => ({_STATES} last_hidden_state) <int64[1] last = {{-1}}> {{
        {body}  last_hidden_state = Mul (e, m) }}""")


def whole():
    """Both parts in one file, without a cache."""
    return parsed(f"""
        both (int64[N, S] input_ids, int64[N, T] decoder_input_ids)
        => (float[N, T, {VOCABULARY}] logits) {_CONSTANTS} {{
            e = Gather (words, input_ids)  c0 = Unsqueeze (e, one)  c = Identity (c0)
            d = Gather (words, decoder_input_ids)  k = Unsqueeze (d, one) {_SCORES} }}""")


def plain():
    """The decoder without a cache."""
    return parsed(f"""
        decoder (int64[N, T] input_ids, {_STATES} encoder_hidden_states, int64[N, S] encoder_attention_mask)
        => (float[N, T, {VOCABULARY}] logits) {_CONSTANTS} {{
            m0 = Cast <to = 1> (encoder_attention_mask)  m = Unsqueeze (m0, second)
            e = Mul (encoder_hidden_states, m)  c = Unsqueeze (e, one)
            d = Gather (words, input_ids)  k = Unsqueeze (d, one) {_SCORES} }}""")


def merged():
    """The decoder with keys of its tokens and of the source, which the branch with a cache does not compute again."""
    called = {
        "past": "past_key_values.0.decoder.key", "cross": "past_key_values.0.encoder.key",
        "kept": "present.0.decoder.key", "crossed": "present.0.encoder.key",
    }  # fmt: skip
    outputs = f"float[N, T, {VOCABULARY}] logits, {_KEYS} kept, {_CROSS} crossed"
    inputs = f"int64[N, T] input_ids, {_STATES} encoder_hidden_states, {_KEYS} past, {_CROSS} cross"
    read = f"d = Gather (words, input_ids)  new = Unsqueeze (d, one)  k = Concat <axis = 2> (past, new) {_SCORES}"
    with_past = f"c = Identity (cross) {read} kept = Identity (k)  crossed = Slice (cross, zero, zero, second)"
    without = f"c = Unsqueeze (encoder_hidden_states, one) {read} kept = Identity (k)  crossed = Identity (c)"
    constants = _CONSTANTS.replace(">", ", int64[1] zero = {0}>")
    branches = []
    for name, body in (("then", with_past), ("else", without)):
        own = onnx.parser.parse_model(f"{_HEAD} {name} ({inputs}) => ({outputs}) {constants} {{ {body} }}").graph
        made = {o for node in own.node for o in node.output}
        for node in own.node:
            for names in (node.input, node.output):
                names[:] = [f"{n}_{name}" if n in made else called.get(n, n) for n in names]
        for value in own.output:
            value.name += f"_{name}"
        branches.append(helper.make_graph(own.node, name, [], own.output, own.initializer))
    proto = onnx.parser.parse_model(f"{_HEAD} decoder ({inputs}, bool[1] use_cache_branch) => ({outputs}) {{ }}")
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = called.get(value.name, value.name)
    results = [value.name for value in proto.graph.output]
    then, other = branches
    proto.graph.node.append(helper.make_node("If", ["use_cache_branch"], results, then_branch=then, else_branch=other))
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights().items())
    return proto


def greedy(source, steps, start=0, ends=None):
    """The likeliest tokens, in numpy."""
    w, found = weights(), [start]
    states = np.tanh(source) if np.asarray(source).ndim == 2 else w["words"][source]
    for _ in range(steps):
        h = w["words"][found[-1]] + w["words"][found].mean(0) + states.mean(0)
        found.append(int((h @ w["head"]).argmax()))
        if found[-1] == ends:
            break
    return found[1:]


LAYOUTS = {
    "one file": (whole, False),
    "two files": (plain, True),
    "a merged decoder": (merged, True),
}


@pytest.mark.parametrize(
    ("layout", "cache"), [(k, c) for k in LAYOUTS for c in (True, False) if c or k == "a merged decoder"]
)
def test_completions_are_the_likeliest_tokens(layout, cache):
    build, is_split = LAYOUTS[layout]
    settings = {"encoder": encoder() if is_split else None, "decoder_start": [0], "cache": cache}
    found = onnxgrad.generate(build(), SOURCES, max_new_tokens=6, **settings)
    assert [c.tokens for c in found] == [greedy(s, 6) for s in SOURCES]
    assert [c.prompt_tokens for c in found] == SOURCES
    assert len({tuple(c.tokens) for c in found}) > 2


def test_text_begins_with_the_token_of_padding():
    (found,) = onnxgrad.generate(whole(), "the cat sat", tokenizer=tokenizer(), max_new_tokens=4, end_token="none")
    assert found.tokens == greedy([8, 9, 10], 4)
    assert found.text.split() == tokenizer().decode(found.tokens).split()
    again = onnxgrad.generate(
        whole(), "the cat sat", tokenizer=tokenizer(), max_new_tokens=4, end_token="none", decoder_start="dog"
    )
    assert again[0].tokens == greedy([8, 9, 10], 4, start=13)


def test_features_are_prompts():
    random = np.random.default_rng(0)
    features = [random.standard_normal((s, WIDTH)).astype(np.float32) for s in (4, 6, 4)]
    reading = encoder(f"float[N, S, {WIDTH}] input_features")
    found = onnxgrad.generate(plain(), features, encoder=reading, decoder_start=[0], max_new_tokens=5)
    assert [c.tokens for c in found] == [greedy(f, 5) for f in features]
    assert found[0].prompt is None


def test_the_command_reads_both_files(tmp_path):
    onnx.save(merged(), tmp_path / "d.onnx")
    onnx.save(encoder(), tmp_path / "e.onnx")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    line = ["generate", "d.onnx", "--encoder", "e.onnx", "--tokenizer", "tokenizer.json", "--prompt", "the cat sat"]
    done = command(
        *line, "--max-new-tokens", 5, "--decoder-start", "dog", "--json", "--end-token", "none", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == greedy([8, 9, 10], 5, start=13)


def with_past_alone():
    """Optimum's ``decoder_with_past_model.onnx``, which reads keys of the source and never computes them."""
    keys, cross = (f"past_key_values_0_{part}_key" for part in ("decoder", "encoder"))
    proto = parsed(f"""
        decoder (int64[N, T] input_ids, {_KEYS} {keys}, {_CROSS} {cross})
        => (float[N, T, {VOCABULARY}] logits, {_KEYS} present_0_decoder_key) {_CONSTANTS} {{
            c = Identity ({cross})  d = Gather (words, input_ids)  new = Unsqueeze (d, one)
            k = Concat <axis = 2> ({keys}, new) {_SCORES} present_0_decoder_key = Identity (k) }}""")
    text = proto.SerializeToString()
    for part in ("decoder", "encoder"):
        text = text.replace(f"values_0_{part}_key".encode(), f"values.0.{part}.key".encode())
    return onnx.ModelProto.FromString(text)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (plain, {"decoder_start": [0]}, "encoder_hidden_states.*the states of an encoder"),
        (with_past_alone, {"decoder_start": [0]}, "keys of the encoder's states that no step of it computes"),
        (decoder, {"encoder": encoder}, "an encoder is given, and the model reads no states"),
        (whole, {}, "which token the decoder begins with"),
        (whole, {"decoder_start": "dog"}, "needs a tokenizer"),
        (whole, {"decoder_start": [VOCABULARY]}, f"decoder_start has the token {VOCABULARY}"),
        (plain, {"encoder": decoder, "decoder_start": [0]}, "size 24 along axis 2, and the model takes 8"),
    ],
)
def test_what_does_not_fit_is_refused(model, settings, message):
    given = {name: value() if callable(value) else value for name, value in settings.items()}
    with pytest.raises(BadInput, match=message):
        onnxgrad.generate(model(), SOURCES[:1], **given)

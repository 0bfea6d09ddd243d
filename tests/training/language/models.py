"""Small language models as exporters write them, and a tokenizer for their words."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

WORDS = [
    "[PAD]", "[UNK]", "<eos>", "[MASK]", "user", "assistant", "system", ":", "the", "cat", "sat", "on", "mat", "dog",
    "ran", "to", "a", "tree", "red", "blue",
]  # fmt: skip
VOCABULARY, WIDTH, HEADS, SIZE, PLACES = 24, 8, 2, 4, 32
_BODY = """
    w = Gather (words, input_ids)  p = Gather (places, position_ids)  h = Add (w, p)
    q0 = MatMul (h, query)  k0 = MatMul (h, key)  v0 = MatMul (h, value)
    q1 = Reshape (q0, split)  k1 = Reshape (k0, split)  v1 = Reshape (v0, split)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
    KEYS
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s0 = MatMul (q, kt)  s = Mul (s0, scale)
    kn = Shape <start = 2, end = 3> (k)  qn = Shape <start = 2, end = 3> (q)
    kc = Squeeze (kn)  qc = Squeeze (qn)  first = Sub (kc, qc)
    keys = Range (zero, kc, one)  queries0 = Range (first, kc, one)  queries = Unsqueeze (queries0, last)
    causal = LessOrEqual (keys, queries)
    MASK
    allowed = And (causal, own)
    masked = Where (allowed, s, lowest)
    a = Softmax <axis = -1> (masked)
    o0 = MatMul (a, v)  o1 = Transpose <perm = [0, 2, 1, 3]> (o0)  o2 = Reshape (o1, join)  o = MatMul (o2, out)
    r = Add (h, o)
    logits = MatMul (r, head)
"""
_CONSTANTS = """
    <int64[4] split = {0, 0, 2, 4}, int64[3] join = {0, 0, 8}, float scale = {0.5}, int64 zero = {0}, int64 one = {1},
     int64[1] last = {-1}, int64[2] middle = {1, 2}, float lowest = {-1e9}, int64[1] second = {1}>
"""
_MASKS = {
    "": "own0 = Cast <to = 9> (attention_mask)  own = Unsqueeze (own0, middle)",
    "bool": "own = Identity (attention_mask)",
    "bfloat16": "own0 = Cast <to = 1> (attention_mask)  own = Greater (own0, lowest)",
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The weights of `decoder`, by name."""
    random = np.random.default_rng(seed)
    shapes = {"words": (VOCABULARY, WIDTH), "places": (PLACES, WIDTH), "head": (WIDTH, VOCABULARY)}
    shapes |= dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    return {name: (0.3 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def decoder(past: bool = True, pairs: str = "", length: str = "T") -> onnx.ModelProto:
    """A decoder of one layer.

    Args:
        past: it has a cache.
        pairs: the type of its mask for each pair of tokens, [N, 1, T, T]; else there is one for each token.
        length: the declared length of the sequence.
    """
    cache = f"float[N, {HEADS}, P, {SIZE}]"
    total = "S" if past else length
    mask = f"{pairs}[N, 1, {length}, {total}]" if pairs else f"int64[N, {total}]"
    given = f", {cache} past_key_values_0_key, {cache} past_key_values_0_value" if past else ""
    made = ", float[N, 2, S, 4] present_0_key, float[N, 2, S, 4] present_0_value" if past else ""
    body = _BODY.replace("MASK", _MASKS[pairs])
    if past:
        keys = "k = Concat <axis = 2> (past_key_values_0_key, k2)  v = Concat <axis = 2> (past_key_values_0_value, v2)"
        body += "present_0_key = Identity (k)  present_0_value = Identity (v)"
    else:
        keys = "k = Identity (k2)  v = Identity (v2)"
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        decoder (int64[N, {length}] input_ids, {mask} attention_mask, int64[N, {length}] position_ids{given})
        => (float[N, {length}, {VOCABULARY}] logits{made}) {_CONSTANTS} {{ {body.replace("KEYS", keys)} }}""")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights().items())
    return proto


def merged_decoder() -> onnx.ModelProto:
    """The decoder with a cache, and one without that ignores the cache, in the branches of an If."""
    with_past, without = decoder(past=True), decoder(past=False)
    branches = []
    for source, suffix in ((with_past, "_with"), (without, "_without")):
        graph = source.graph
        if suffix == "_without":
            graph.node.append(helper.make_node("Identity", ["k"], ["present_0_key"]))
            graph.node.append(helper.make_node("Identity", ["v"], ["present_0_value"]))
        made = {o for node in graph.node for o in node.output}
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [f"{n}{suffix}" if n in made else n for n in names]
        outputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in with_past.graph.output]
        for value in outputs:
            value.name = value.name.removesuffix("_with") + suffix
        branches.append(helper.make_graph(graph.node, suffix, [], outputs))
    outputs = [o.name for o in with_past.graph.output]
    node = helper.make_node("If", ["use_cache_branch"], outputs, then_branch=branches[0], else_branch=branches[1])
    switch = helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    graph = helper.make_graph(
        [node], "merged", [*with_past.graph.input, switch], with_past.graph.output, with_past.graph.initializer
    )
    return helper.make_model(graph, opset_imports=with_past.opset_import, ir_version=10)


def tokenizer():
    """A tokenizer of `WORDS`, one for each token."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens(["[PAD]", "<eos>", "[MASK]"])
    return found


def masked_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """The mean cross-entropy of `logits` over the labels that are not -100, in numpy."""
    scores = logits.astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    counted = labels != -100
    return float(-np.take_along_axis(logs[counted], labels[counted][:, None], 1).mean())

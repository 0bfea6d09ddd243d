"""Sequences and optionals: the oracle is the same computation on the tensors themselves."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad
from tests.flow.compare import check, differences, model, normal, run

#: each: with containers, without
PAIRS = {
    "construct, at": (
        "{ q = SequenceConstruct(x, z, x) i = Constant <value_int = -2>() j = Constant <value_int = 2>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) c = Mul(a, b) y = Sin(c) }",
        "{ c = Mul(z, x) y = Sin(c) }",
    ),
    "insert at the end": (
        "{ q = SequenceConstruct(x) m = Mul(x, z) r = SequenceInsert(q, m) i = Constant <value_int = 1>()"
        " a = SequenceAt(r, i) y = Mul(a, x) }",
        "{ m = Mul(x, z) y = Mul(m, x) }",
    ),
    "insert at a place": (
        "{ q = SequenceConstruct(x, z) m = Mul(x, z) o = Constant <value_int = -1>() r = SequenceInsert(q, m, o)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 2>()"
        " a = SequenceAt(r, i) b = SequenceAt(r, j) c = Mul(a, b) y = Sin(c) }",
        "{ m = Mul(x, z) c = Mul(m, z) y = Sin(c) }",
    ),
    "erase": (
        "{ q = SequenceConstruct(x, z, x) o = Constant <value_int = -3>() r = SequenceErase(q, o) p = SequenceErase(r)"
        " i = Constant <value_int = 0>() a = SequenceAt(p, i) y = Mul(a, x) }",
        "{ y = Mul(z, x) }",
    ),
    "concatenate": (
        "{ a = Sin(x) q = SequenceConstruct(a, z, a) b = ConcatFromSequence <axis = 1> (q) y = Mul(b, b) }",
        "{ a = Sin(x) b = Concat <axis = 1> (a, z, a) y = Mul(b, b) }",
    ),
    "stack": (
        "{ a = Sin(x) q = SequenceConstruct(a, z) b = ConcatFromSequence <axis = 1, new_axis = 1> (q) y = Mul(b, b) }",
        "{ a = Sin(x) k = Constant <value_ints = [1]>() c = Unsqueeze(a, k) d = Unsqueeze(z, k)"
        " b = Concat <axis = 1> (c, d) y = Mul(b, b) }",
    ),
    "split into single ones": (
        "{ q = SplitToSequence <axis = 1, keepdims = 0> (x) i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) y = Mul(a, b) }",
        "{ i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = Gather <axis = 1> (x, i) b = Gather <axis = 1> (x, j) y = Mul(a, b) }",
    ),
    "split into sizes": (
        "{ s = Constant <value_ints = [1, 2]>() q = SplitToSequence <axis = 1> (x, s)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) y = Mul(a, b) }",
        "{ s = Constant <value_ints = [1, 2]>() b, a = Split <axis = 1> (x, s) y = Mul(a, b) }",
    ),
    "map": (
        "{ q = SequenceConstruct(x, z) r = SequenceMap <body = f (F[N,3] e) => (F[N,3] h) { k = Mul(e, x) h = Sin(k) }> (q)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = SequenceAt(r, i) b = SequenceAt(r, j) y = Mul(a, b) }",
        "{ k = Mul(x, x) l = Mul(z, x) b = Sin(k) a = Sin(l) y = Mul(a, b) }",
    ),
    "optional": (
        "{ a = Sin(x) o = Optional(a) b = OptionalGetElement(o) c = OptionalGetElement(b) y = Mul(c, z) }",
        "{ a = Sin(x) y = Mul(a, z) }",
    ),
}
HEAD = "agraph (F[N,3] x, F[N,3] z) => (F{} y) "
RANKS = {
    "stack": "[N,2,3]",
    "split into single ones": "[N]",
    "concatenate": "[N,9]",
    "split into sizes": "[N,2]",
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_container_equals_its_contents(name):
    texts = [HEAD.format(RANKS.get(name, "[N,3]")) + body for body in PAIRS[name]]
    feeds = {"x": normal(2, 3), "z": normal(2, 3)}
    used = ["x"] if name.startswith("split") else ["x", "z"]
    check(*map(model, texts), feeds, used)
    differences(model(texts[0], "double"), feeds, used)

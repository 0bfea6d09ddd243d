"""``python -m tests.fuzz.mutants [--count 5000]``: small models whose declarations, attributes and operands lie.

Each mutant is a valid model of which one to three things are changed: a declared size, rank or type, an attribute, an
operand, an opset. Whatever comes of it, an error is the user's: `check`, `vjp`, `jvp`, the compilation of a training
step and a session succeed or raise an error of the library that is not a RuleError.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, parser

from onnxgrad import jvp, vjp
from onnxgrad.check import check
from onnxgrad.errors import BadInput, NotDifferentiable
from onnxgrad.model_io.read import read_proto
from onnxgrad.runtime import Session
from onnxgrad.training import attach, compile_step
from tests.fuzz.graphs import model_of
from tests.fuzz.random_graphs import grown
from tests.models import mlp

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
TYPES = (*FLOATS, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING)
HEAD = '<ir_version: 10, opset_import: ["": 21]>'
BY_HAND = (
    """g (float[N,3,8,8] x, float[4,3,3,3] w) => (float[N,4] y) {
        c = Conv<pads=[1,1,1,1]>(x, w) r = Relu(c) p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
        q = GlobalAveragePool(p) y = Flatten(q) }""",
    """g (float[2,3] x, bool c) => (float[2,3] y) {
        y = If(c) <then_branch = t () => (float[2,3] a) { e = Exp(x) a = Mul(e, x) },
                   else_branch = e () => (float[2,3] b) { b = Tanh(x) }> }""",
    """g (int64 n, bool c, float[2,3] x) => (float[2,3] y, float[n,2,3] s) {
        y, s = Loop(n, c, x) <body = b (int64 i, bool k, float[2,3] a) => (bool k2, float[2,3] b, float[2,3] o) {
            k2 = Identity(k) b = Sin(a) o = Mul(a, a) }> }""",
    """g (float[2] h, float[5,2] x) => (float[2] y, float[5,2] s) {
        y, s = Scan(h, x) <num_scan_inputs = 1, body = b (float[2] a, float[2] e) => (float[2] b, float[2] o) {
            b = Add(a, e) o = Exp(b) }> }""",
    """g (float[N,4] x, float[4] s, float[4] b) => (float[N,4] y) {
        l = LayerNormalization<axis=-1>(x, s, b) m = Softmax(l) y = LogSoftmax<axis=0>(m) }""",
    """g (float[5,2,3] x, float[1,16,3] w, float[1,16,4] r) => (float[5,1,2,4] y) {
        y = LSTM<hidden_size=4>(x, w, r) }""",
    """g (float[2,3,4] x) => (float[2,6,2] y) {
        k = Constant<value = int64[3] {2,6,2}>() t = Transpose<perm=[2,0,1]>(x) y = Reshape(t, k) }""",
    "g (float[3,4] x, int64[2] i) => (float[2,4] y) { a = Gather<axis=0>(x, i) y = Cast<to=1>(a) }",
    """g (float[2,3] x, float[3,4] w) => (float[2,4] y, float s) {
        y = Einsum<equation="ij,jk->ik">(x, w) a = ReduceMax<keepdims=0>(y) b = ReduceL2<keepdims=0>(y)
        s = Add(a, b) }""",
)  # fmt: skip


def sources() -> list[onnx.ModelProto]:
    """Small valid models."""
    found = [parser.parse_model(HEAD + text) for text in BY_HAND]
    return [*found, mlp(), *(model_of(grown(np.random.default_rng(seed)), np.float32) for seed in range(12))]


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(a.g)


def _declared(graph: onnx.GraphProto, rng: random.Random) -> onnx.ValueInfoProto:
    """A declaration that is there, or a new one of a result."""
    known = [*graph.input, *graph.output, *graph.value_info]
    results = [o for n in graph.node for o in n.output if o]
    if (rng.random() < 0.4 or not known) and results:
        value = graph.value_info.add()
        value.name = rng.choice(results)
        value.type.tensor_type.elem_type = rng.choice(TYPES) if rng.random() < 0.3 else TensorProto.FLOAT
        for _ in range(rng.randrange(4)):
            value.type.tensor_type.shape.dim.add().dim_value = rng.choice((1, 2, 3, 4, 7))
        return value
    return rng.choice(known)


def _mutate(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = rng.choice(list(_graphs(model.graph)))
    kind = rng.choice(("size", "size", "rank", "type", "attribute", "operand", "opset", "weight"))
    if kind in ("size", "rank", "type"):
        held = _declared(graph, rng).type.tensor_type
        dims = held.shape.dim
        if kind == "type":
            held.elem_type = rng.choice(TYPES)
        elif kind == "size" and dims:
            d = rng.choice(dims)
            d.Clear()
            d.dim_value = rng.choice((0, 1, 2, 3, 4, 5, 9))
        elif dims and rng.random() < 0.5:
            del dims[rng.randrange(len(dims))]
        else:
            dims.add().dim_value = rng.choice((1, 2, 3))
    elif kind == "attribute":
        nodes = [n for n in graph.node if n.attribute]
        if nodes:
            a = rng.choice(rng.choice(nodes).attribute)
            if a.type == onnx.AttributeProto.INT:
                a.i = rng.choice((-3, -1, 0, 1, 2, 5, 100))
            elif a.ints:
                a.ints[rng.randrange(len(a.ints))] = rng.choice((-1, 0, 1, 2, 3, 7))
            elif a.type == onnx.AttributeProto.FLOAT:
                a.f = rng.choice((0.0, -1.0, 1e30, float("nan")))
            elif a.type == onnx.AttributeProto.STRING:
                a.s = rng.choice((b"", b"ij,jk->ik", b"NOTSET", b"xyz"))
    elif kind == "operand" and graph.node:
        node = rng.choice(graph.node)
        at = list(graph.node).index(node)
        names = [v.name for v in (*model.graph.input, *graph.input)] + [t.name for t in graph.initializer]
        names += [o for n in list(graph.node)[:at] for o in n.output] + [""]
        if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif kind == "opset":
        model.opset_import[0].version = rng.choice((7, 11, 13, 17, 18, 20, 22, 24))
    elif kind == "weight" and graph.initializer:
        t = rng.choice(graph.initializer)
        if t.raw_data and len(t.dims) > 1:
            t.dims[0], t.dims[1] = t.dims[1], t.dims[0]


def mutant(seed: int, models: list[onnx.ModelProto]) -> onnx.ModelProto:
    """The mutant of this number."""
    rng = random.Random(seed)
    model = onnx.ModelProto()
    model.CopyFrom(rng.choice(models))
    for _ in range(rng.randint(1, 3)):
        _mutate(model, rng)
    return model


def judged(model: onnx.ModelProto) -> str:
    """ "differentiated" or the kind of the refusal. Raises what is neither."""
    names = [v.name for v in model.graph.input if v.type.tensor_type.elem_type in FLOATS][:2]
    said = "no float input"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        derivatives = [lambda m: vjp(m, wrt=names), lambda m: jvp(m, wrt=names)] if names else []
        for derive in (_train, _load, check, *derivatives):
            try:
                derive(model)
                said = "differentiated"
            except (BadInput, NotDifferentiable) as e:
                said = type(e).__name__
    return said


def _train(model: onnx.ModelProto) -> None:
    compile_step(attach(model, loss="mse"))


def _load(model: onnx.ModelProto) -> None:
    Session(read_proto(model))


def main() -> None:
    """Judge mutants; print what is the fault of no user."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--count", type=int, default=5000)
    given.add_argument("--seed", type=int, default=0)
    options = given.parse_args()
    models, outcomes = sources(), Counter()
    for seed in range(options.seed, options.seed + options.count):
        try:
            outcomes[judged(mutant(seed, models))] += 1
        except Exception as e:
            outcomes["failed"] += 1
            print(seed, type(e).__name__, " ".join(str(e).split())[:300], flush=True)
    print(dict(outcomes))


if __name__ == "__main__":
    main()

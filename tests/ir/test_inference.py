"""Types and shapes that are inferred once for all nodes of a kind are those of every one of them."""

from __future__ import annotations

import onnx_ir as ir
import onnx_shape_inference as osi
import pytest
from onnx import parser

from onnxgrad.ir.infer.inference import infer_model, kind_of
from tests.large_models import gpt
from tests.models import chain, mlp

#: Nodes that differ in one thing: an attribute, an element of an operand, a symbol, a type, what is declared.
ALIKE = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4, 6] x, float[M, 4, 6] m, double[N, 4, 6] d, float[3] f) => (float[] y) <int64[2] p = {4, -1},
        int64[2] q = {-1, 4}, float[3] one = {1, 1, 1}, float[3] two = {1, 1, 2}> {
        a = Transpose <perm = [0, 2, 1]> (x) b = Transpose <perm = [1, 0, 2]> (x) c = Transpose <perm = [0, 2, 1]> (m)
        e = Reshape (x, p) h = Reshape (x, q) i = Exp (x) j = Exp (m) k = Exp (d) l = Softmax <axis = 0> (x)
        n = Resize <mode = "nearest"> (x, f, one) o = Resize <mode = "nearest"> (x, f, two)
        r = Add (x, m) s = Add (x, m) t = Concat <axis = 0> (x, m) u = Concat <axis = 1> (x, x)
        v = ReduceSum <keepdims = 0> (t) w = ReduceSum <keepdims = 0> (u) y = Add (v, w) }"""


@pytest.mark.parametrize(
    "proto", [mlp(), chain(20), gpt(2), parser.parse_model(ALIKE)], ids=["mlp", "chain", "gpt", "alike"]
)
def test_each_node_has_what_the_library_says_of_it(proto):
    ours, wanted = ir.from_proto(proto), ir.from_proto(proto)
    infer_model(ours)
    osi.infer_symbolic_shapes(wanted, warn_on_missing=False, adopt_declared_symbols=False)
    for node, like in zip(ours.graph, wanted.graph, strict=True):
        for value, other in zip(node.outputs, like.outputs, strict=True):
            assert (value.name, value.dtype) == (other.name, other.dtype)
            assert _told(value) == _told(other), value.name


def _told(value):
    """The sizes of a value, and which of its axes have no name of the model's."""
    return None if value.shape is None else [d if isinstance(d, int) or str(d)[0] != "_" else "?" for d in value.shape]


def test_what_is_new_is_like_nothing_else():
    model = ir.from_proto(parser.parse_model(ALIKE))
    infer_model(model)
    made = {node.outputs[0].name: node.outputs[0].shape for node in model.graph}
    assert made["r"][0] != made["s"][0]  # either of N and M may be 1, so nobody knows what comes of them
    kinds = [kind_of(node) for node in model.graph]
    assert kinds[0] == kinds[0] != kinds[1]

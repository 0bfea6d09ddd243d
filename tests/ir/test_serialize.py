"""A model becomes the message that onnx_ir makes of it, to the byte."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from onnxgrad import value_and_grad
from onnxgrad.ir.serialize import serialize
from onnxgrad.model_io.read import read_proto
from tests.large_models import gpt
from tests.models import chain, mlp

SCAN = """<ir_version: 10, opset_import: ["": 21, "own": 1], producer_name: "someone">
    g (float[4,4] w, float[3,N] x, float[6,3,4] xs) => (float[3,4] y, float[6,3,4] z) <float[4] unused = {1, 2, 3, 4}> {
        y, z = Scan <num_scan_inputs = 1, body = s (float[3,4] b, float[3,4] e) => (float[3,4] c, float[3,4] o) {
            m = MatMul (b, w) a = Add (m, e) c = Tanh (a) o = Exp (c) }> (xs, xs)
        t, q = TopK <axis = 0> (x, unused)
        p = own.twice <k = 3> (x, t) }
    <domain: "own", opset_import: ["": 21]> twice <k> (a, b) => (c) { c = Concat <axis: int = @k> (a, b) }"""


def noted() -> onnx.ModelProto:
    """Notes wherever a model may have some."""
    model = chain(3)
    model.doc_string = "what it is for"
    model.metadata_props.add(key="a", value="b")
    model.graph.metadata_props.add(key="c", value="d")
    model.graph.node[1].doc_string = "a node"
    model.graph.node[2].metadata_props.add(key="e", value="f")
    info = model.graph.value_info.add(name=model.graph.node[0].output[0], doc_string="a value")
    info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    model.graph.value_info.add(name=model.graph.node[1].output[0], type=info.type).type.denotation = "IMAGE"
    return model


def annotated() -> onnx.ModelProto:
    """Notes on quantization."""
    model = chain(3)
    graph = model.graph
    for name in (graph.input[0].name, "w", graph.node[0].output[0], graph.output[0].name):
        note = graph.quantization_annotation.add(tensor_name=name)
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    return model


@pytest.mark.parametrize(
    "model",
    [mlp(), gpt(1), value_and_grad(gpt(1), wrt=["w9"]), parser.parse_model(SCAN), noted(), annotated()],
    ids=["mlp", "gpt", "derived", "scan", "noted", "annotated"],
)
def test_a_model_as_onnx_ir_writes_it(model):
    held = read_proto(model)
    assert serialize(held).SerializeToString(deterministic=True) == ir.to_proto(held).SerializeToString(
        deterministic=True
    )


def test_notes_on_quantization_stay():
    assert serialize(read_proto(annotated())).graph.quantization_annotation == annotated().graph.quantization_annotation

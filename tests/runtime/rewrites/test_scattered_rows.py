"""Rows added to a table number by number: the same sums, ids that repeat or count from the end included."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxgrad import signature, vjp
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized


def _embedding(table=(5, 4), ids=("N", 3), axis=0):
    inputs = [
        helper.make_tensor_value_info("table", TensorProto.FLOAT, table),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ids),
    ]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"], axis=axis)], "g", inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    return vjp(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), wrt="table")


def _run(derived, ids, how, row=(4,)):
    names = signature(derived)
    rng = np.random.default_rng(1)
    feeds = {"table": np.zeros((5, *row), np.float32), "ids": np.array(ids)}
    feeds[names.cotangents["y"]] = rng.standard_normal((*np.shape(ids), *row)).astype(np.float32)
    (output,) = names.gradients.values()
    session = Session(ir.from_proto(derived), Options(layout=how, threads=2))
    return session.run({k: v for k, v in feeds.items() if k in session.inputs}, [output])[output]


@pytest.mark.parametrize("table", [(5, 4), ("V", 4), (5, 4, 2), ("V", 3, 2), (5, 17), (5, 1)])
@pytest.mark.parametrize("ids", [[[0, 1, 2]], [[4, 4, 4], [0, 4, -1]], [[-5, -1, 0]], np.zeros((0, 3), int)])
def test_same_numbers(ids, table):
    derived = _embedding(table)
    model = ir.from_proto(derived)
    assert any(n.op_type == "ScatterElements" for n in model.graph)
    (scatter,) = [n for n in optimized(model).graph if n.op_type == "ScatterElements"]
    assert scatter.name.startswith("scattered_rows")
    np.testing.assert_array_equal(*(_run(derived, ids, how, table[1:]) for how in ("auto", "plain")))


@pytest.mark.parametrize("start", ["zeros", "h"])
def test_messages_along_edges_that_are_fed(start):
    """The `scatter_add` of exporters: the index of an edge, repeated along its message."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[V, 6] h, float[E, 6] sent, int64[E] to) => (float[V, 6] y) {{
            last = Constant <value_ints = [1]> ()
            column = Unsqueeze (to, last)
            shape = Shape (sent)
            index = Expand (column, shape)
            like = Shape (h)
            zero = Constant <value_floats = [0.0]> ()
            zeros = Expand (zero, like)
            y = ScatterElements <axis = 0, reduction = "add"> ({start}, index, sent)
        }}""")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))
    next(n for n in model.graph if n.op_type == "Expand").outputs[0].shape = ir.Shape(["E", 6])
    (scatter,) = [n for n in optimized(model).graph if n.op_type == "ScatterElements"]
    assert scatter.name.startswith("scattered_rows")
    rng = np.random.default_rng(0)
    for v, e in ((5, 9), (1, 0)):
        h, sent = rng.standard_normal((v, 6), np.float32), rng.standard_normal((e, 6), np.float32)
        feeds = {"h": h, "sent": sent, "to": rng.integers(-v, v, e)}
        y, plain = (Session(model, Options(layout=how, threads=2)).run(feeds)["y"] for how in ("auto", "plain"))
        np.testing.assert_array_equal(y, plain)


@pytest.mark.parametrize("id_", [5, -6])
def test_an_id_beyond_the_table_is_still_an_error(id_):
    with pytest.raises(BadInput):
        _run(_embedding(), [[0, 1, id_]], "auto")


@pytest.mark.parametrize("how", [{"axis": 1}, {"table": (5, "W")}, {"table": (5, 4, "W")}])
def test_others_are_left_alone(how):
    model = ir.from_proto(_embedding(**how))
    assert optimized(model) is model

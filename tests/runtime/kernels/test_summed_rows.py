"""Rows that a ScatterElements adds up at places, as calls of the kernel for cotangents of lookups."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import passed, with_summed_rows

pytestmark = needs_kernels


def scattered(table, rows, index, *, zero=True, symbolic=False, spread=True, **attributes):
    """`rows` added to a table of the shape `table` at `index`; the model, its feeds and what is expected."""
    kind = onnx.TensorProto.INT32 if index.dtype == np.int32 else onnx.TensorProto.INT64
    shape = ["E" if symbolic and not i else n for i, n in enumerate(rows.shape)]
    infos = [
        helper.make_tensor_value_info("rows", 1, shape),
        helper.make_tensor_value_info("index", kind, [shape[0]]),
        helper.make_tensor_value_info("like", 1, table),
    ]
    column = np.array([-1, *[1] * (len(table) - 1)], np.int64)
    nodes = [
        helper.make_node("Shape", ["like"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Reshape", ["index", "column"], ["each"]),
        helper.make_node("Shape", ["rows"], ["spread"]),
        helper.make_node("Expand" if spread else "Identity", ["each", "spread"] if spread else ["each"], ["all"]),
        helper.make_node("ScatterElements", ["zeros" if zero else "like", "all", "rows"], ["y"], **attributes),
    ]
    outputs = [helper.make_tensor_value_info("y", 1, table)]
    given = [("each", [shape[0], *[1] * (len(table) - 1)]), ("all", shape)]
    known = [helper.make_tensor_value_info(name, kind, dims) for name, dims in given]
    constants = [numpy_helper.from_array(column, "column")]
    graph = helper.make_graph(nodes, "sums", infos, outputs, constants, value_info=known)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    feeds = {"rows": rows, "index": index, "like": np.ones(table, np.float32)}
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True)), feeds


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def calls(model):
    return [n.op_type for n in with_summed_rows(model).graph if n.op_type.startswith("GatherGrad")]


@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("table", "count"),
    [((7, 5), 9), ((500, 4), 9000), ((3, 4), 9000), ((1000, 4, 16), 2000), ((5,), 40), ((4, 3), 0)],
    ids=str,
)
def test_sums(table, count, kind, symbolic):
    index = np.random.default_rng(1).integers(-table[0], table[0], count).astype(kind)
    rows = normal(count, *table[1:])
    model, feeds = scattered(table, rows, index, symbolic=symbolic, spread=len(table) > 1, reduction="add")
    assert calls(model) == ["GatherGrad"]
    expected = np.zeros(table)
    np.add.at(expected, index, rows.astype(np.float64))
    found = [Session(model, Options(threads=t, target="native")).run(feeds)["y"] for t in (1, 2)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(*found)


INDEX = np.array([0, 2, 2])


@pytest.mark.parametrize(
    ("rows", "how"),
    [
        (normal(3, 4), {"reduction": "none"}),
        (normal(3, 4), {"reduction": "max"}),
        (normal(3, 4), {"reduction": "add", "zero": False}),
        (normal(3, 4), {"reduction": "add", "axis": 1}),
        (normal(3, 3), {"reduction": "add"}),
    ],
    ids=["last", "maximum", "table with numbers", "other axis", "narrower rows"],
)
def test_others_stay_operators(rows, how):
    model, feeds = scattered((6, 4), rows, INDEX, **how)
    assert calls(model) == []
    plain = Session(model, Options(target="portable")).run(feeds)["y"]
    np.testing.assert_array_equal(Session(model, Options(target="native")).run(feeds)["y"], plain)


def test_an_index_out_of_range_is_refused():
    model, feeds = scattered((6, 4), normal(3, 4), INDEX, reduction="add")
    feeds["index"] = np.array([0, 6, 1])
    with pytest.raises(Exception, match="out of range"):
        Session(model, Options(target="native")).run(feeds)


def messages(model):
    """`model`, whose rows are those of a table x that an index `source` picks."""
    graph, kind = model.graph, ir.DataType.INT64
    (rows,) = [v for v in graph.inputs if v.name == "rows"]
    count, *width = rows.shape
    x = ir.Value(name="x", type=rows.type, shape=ir.Shape(["V", *width]))
    source = ir.Value(name="source", type=ir.TensorType(kind), shape=ir.Shape([count]))
    gather = ir.Node("", "Gather", [x, source], num_outputs=1)
    graph.insert_before(graph[0], gather)
    gather.outputs[0].type, gather.outputs[0].shape, gather.outputs[0].name = rows.type, rows.shape, "picked"
    rows.replace_all_uses_with(gather.outputs[0])
    graph.inputs[list(graph.inputs).index(rows)] = x
    graph.inputs.append(source)
    return model


def gathers(model):
    return [n.op_type for n in passed(("summed_rows", "gathered_sums"), model).graph].count("Gather")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("table", "count", "sources"),
    [((7, 5), 9, 4), ((500, 4), 9000, 300), ((3, 4), 9000, 1), ((1000, 4, 16), 2000, 999), ((4, 3), 0, 2)],
    ids=str,
)
def test_messages_are_read_where_the_nodes_are(table, count, sources, symbolic):
    rng = np.random.default_rng(1)
    index, source = rng.integers(-table[0], table[0], count), rng.integers(-sources, sources, count)
    x = rng.integers(-9, 9, (sources, *table[1:])).astype(np.float32)  # sums are exact in any order
    model, feeds = scattered(table, x[source], index, symbolic=symbolic, reduction="add")
    assert gathers(messages(model)) == 0
    feeds = {"x": x, "source": source, "index": index, "like": feeds["like"]}
    expected = np.zeros(table, np.float32)
    np.add.at(expected, index, x[source])
    sessions = [Session(model, Options(threads=t, target="native")) for t in (1, 2)]
    for session in sessions:
        np.testing.assert_array_equal(session.run(feeds)["y"], expected)
    for bad in (sources, -sources - 1) if count else ():
        with pytest.raises(Exception, match="out of range"):
            sessions[0].run(feeds | {"source": np.where(np.arange(count) == count - 1, bad, source)})


def test_messages_that_something_else_reads_are_gathered():
    model, _ = scattered((6, 4), normal(3, 4), INDEX, reduction="add")
    messages(model)
    model.graph.outputs.append(model.graph[0].outputs[0])
    assert gathers(model) == 1

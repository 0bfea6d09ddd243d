"""Picking and placing elements up the ladder."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun

from onnxgrad import grad
from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder


def ints(*values):
    return np.array(values, np.int64)


class Unique(OpRun):
    """The reference evaluator's own sorts if nobody asks for indices, and takes unsorted slices along axis 0."""

    op_domain = ""

    def _run(self, x, axis=None, sorted=1):
        y, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
        if not sorted:
            order = np.argsort(first)
            y, first, counts = np.take(y, order, axis=axis or 0), first[order], counts[order]
            inverse = np.argsort(order)[inverse]
        found = (y, *(v.astype(np.int64).reshape(-1) for v in (first, inverse, counts)))
        return found[: len(self.onnx_node.output)]


FAR = 2**63 - 1
REPEATED = np.array([0.5, -1.5, 2.0, 0.25])
ROWS = np.array([[1.5, 0.5], [-2.0, 0.1], [1.0, 0.7]])
DISTINCT = {"evaluators": [Unique], "of": [0]}
CASES = [
    Case("Slice", [(5, 4), ints(1), ints(4), ints(0)], note="middle"),
    Case("Slice", [(5, 4), ints(-3), ints(FAR), ints(-1)], note="from the end"),
    Case("Slice", [(5, 4), ints(0), ints(-1), ints(1)], note="but the last"),
    Case("Slice", [(5, 4), ints(2), ints(FAR), ints(0)], note="tail"),
    Case("Slice", [(5, 4), ints(-100), ints(100), ints(0)], note="far out of range"),
    Case("Slice", [(5, 4), ints(4), ints(2), ints(0)], note="empty"),
    Case("Slice", [(5, 4), ints(9), ints(12), ints(0)], symbolic=False, note="beyond"),
    Case("Slice", [(5, 4), ints(1, 0), ints(3, 2)], note="axes omitted"),
    Case("Slice", [(5, 4), ints(1), ints(3)], note="fewer than axes"),
    Case("Slice", [(7, 2), ints(1), ints(6), ints(0), ints(2)], note="step 2"),
    Case("Slice", [(7, 2), ints(0), ints(FAR), ints(0), ints(3)], note="step 3"),
    Case("Slice", [(5, 4), ints(-1), ints(-FAR), ints(1), ints(-1)], note="reversed"),
    Case("Slice", [(8, 2), ints(6), ints(0), ints(0), ints(-2)], note="step -2"),
    Case("Slice", [(5, 4), ints(3, 0), ints(0, FAR), ints(0, 1), ints(-2, 3)], note="two strides"),
    Case("Slice", [(5, 4), ints(1), ints(2), ints(0), ints(-1)], note="empty backwards"),
    Case("Slice", [(5, 4), ints(0), ints(FAR), ints(0)], note="all"),
    Case("Slice", [(5, 4), ints(1, 3), ints(4, 0), ints(0, 1), ints(1, -1)], fed=True, note="all fed"),
    Case("Slice", [(0, 4), ints(0), ints(2), ints(0)], symbolic=False),
    Case("Gather", [(5, 3), ints(4, 0, 4)], note="repeated"),
    Case("Gather", [(5, 3), ints(-1, 0, -5)], note="negative"),
    Case("Gather", [(5, 3), np.array(2)], note="scalar"),
    Case("Gather", [(2, 5), np.array(-1)], {"axis": 1}, note="last"),
    Case("Gather", [(2, 5), np.array(-2)], {"axis": -1}, note="last but one"),
    Case("Gather", [(5, 3), np.array(2)], fed=True, note="scalar fed"),
    Case("Gather", [(4, 2), np.array([[0, 3, 3], [1, 0, 0]])], fed=True),
    Case("Gather", [(2, 4, 2), np.array([[0, 3], [3, 0]])], {"axis": 1}),
    Case("Gather", [(4,), np.array([[0, 3], [3, 0]])]),
    Case("Gather", [(2, 6), np.add.outer([0, 1, 2], np.arange(4))], {"axis": 1}, note="windows"),
    Case("Gather", [(6, 2), np.add.outer(np.arange(4), [0, 2])], note="windows in columns"),
    Case("Gather", [(2, 6), np.add.outer([0, 1], [0, 2, 4])], {"axis": -1}, note="windows with a step"),
    Case("Gather", [(4, 2), np.zeros((0,), np.int64)], note="nothing"),
    Case("Gather", [(3, 0), ints(0, 2)], note="empty rows"),
    Case("GatherElements", [(3, 4), np.array([[0, 2, 2, 0], [1, -1, 0, 0]])]),
    Case(
        "GatherElements",
        [(3, 4), np.array([[0, 3, 3], [1, -1, 0], [2, 2, 2]])],
        {"axis": 1},
        fed=True,
        note="axis 1",
    ),
    Case("GatherND", [(3, 4), np.array([[0, 1], [2, 3], [0, 1]])]),
    Case("GatherND", [(3, 4), np.array([[-1], [0], [-1]])], note="rows"),
    Case("GatherND", [(3, 2, 2), np.array([[[-1], [0]], [[-1], [2]]])], note="a matrix of rows"),
    Case("GatherND", [(3, 4, 2), np.array([[0, -1], [2, 3], [0, 3], [1, 1]])], note="rows of two axes"),
    Case("GatherND", [(3, 4, 2), np.array([[0, 1], [-3, 1]])], fed=True, symbolic=False, note="fed, of two axes"),
    Case("GatherND", [(2, 3, 2), np.array([[1], [2]])], {"batch_dims": 1}, note="batched"),
    Case("GatherND", [(3, 4), np.array([[0, 1], [2, 3]])], fed=True, symbolic=False, note="fed"),
    Case("Compress", [(3, 4), np.array([True, False, True])], {"axis": 0}),
    Case("Compress", [(3, 4), np.array([False, True])], {"axis": -1}, note="short"),
    Case("Compress", [(3, 2), np.array([True, False, True, True])], note="flat"),
    Case("TopK", [(2, 5), ints(3)], outputs=2, of=[0]),
    Case("TopK", [(5, 2), ints(2)], {"axis": 0, "largest": 0}, outputs=2, of=[0]),
    *[Case("Unique", [REPEATED], {"sorted": s}, note=f"sorted {s}", **DISTINCT) for s in (0, 1)],
    *[Case("Unique", [(2, 3)], {"sorted": s}, outputs=4, note=f"matrix {s}", **DISTINCT) for s in (0, 1)],
    *[Case("Unique", [ROWS], {"axis": 0, "sorted": s}, note=f"rows {s}", **DISTINCT) for s in (0, 1)],
    Case("Unique", [ROWS.T], {"axis": -1}, outputs=3, note="columns", **DISTINCT),
    Case("OneHot", [np.array([[0, 2], [-1, 1]]), np.array(4), (2,)]),
]
test_rule = ladder("index", CASES)
test_dtype = dtypes(CASES)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("start", "end", "step", "want"), [(-9, -99, -1, [1, 0, 0]), (-4, -99, -2, [1, 0, 0])])
def test_a_slice_backwards_from_before_the_first_takes_the_first(symbolic, start, end, step, want):
    """ONNX and its runtime take the first element; the reference evaluator slices like Python, and takes none."""
    held = [helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in zip("seap", (start, end, 0, step))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N" if symbolic else 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M"])
    graph = helper.make_graph([helper.make_node("Slice", ["x", *"seap"], ["y"])], "g", [x], [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    derived = grad(model, wrt="x")
    onnx.checker.check_model(derived, full_check=True)
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": np.ones(3, np.float32)})[0], want)


@pytest.mark.parametrize("rows", ["N", "4"])
@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_slice_whose_end_is_computed_gives_back_zeros_around(rows, start):
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[{rows}, 3] x, float[M] like) => (float[K, 3] y) {{
            from = Constant <value_ints = [{start}]> ()
            axis = Constant <value_ints = [0]> ()
            end = Shape (like)
            y = Slice (x, from, end, axis)
        }}""")
    derived = grad(model, wrt="x")
    assert "Range" not in {n.op_type for n in derived.graph.node}
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    for end in (0, 2, 4, 7):
        want = np.zeros((4, 3), np.float32)
        want[start:end] = 1
        feeds = {"x": np.ones((4, 3), np.float32), "like": np.ones(end, np.float32)}
        given = {i.name: feeds[i.name] for i in session.get_inputs()}
        np.testing.assert_array_equal(session.run(None, given)[0], want)


def test_a_slice_of_everything_gives_back_all():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 3] x) => (float[N, 3] y) {
            from = Constant <value_ints = [0]> ()
            end = Shape <end = 1> (x)
            y = Slice (x, from, end, from)
        }""")
    assert "Pad" not in {n.op_type for n in grad(model, wrt="x").graph.node}

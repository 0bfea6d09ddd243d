"""Rows are copied in place of numbers, and a slice of everything not at all: the same numbers."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized


def _model(inputs, output, body):
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => ({output} y) {{ {body} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))


def _ops(model):
    return [n.op_type for n in optimized(model).graph]


_ROWS = """s = Constant <value_ints = [30, 2, 6]> () expanded = Expand (ids, s) index = Identity (expanded)
y = GatherElements <axis = 0> (x, index)"""
_COLUMNS = "y = Gather <axis = -1> (x, ids)"
_CASES = {
    "rows": ("float[9, 2, 6] x, int64[30, 1, 1] ids", "float[30, 2, 6]", _ROWS),
    "columns": ("float[5, 9] x, int64[30] ids", "float[5, 30]", _COLUMNS),
    "of a batch of matrices": ("float[2, 5, 9] x, int64[30] ids", "float[2, 5, 30]", _COLUMNS),
}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_same_numbers(case):
    model = _model(*case)
    operators = _ops(model)
    assert operators.count("Gather") == 1
    assert "GatherElements" not in operators
    rng = np.random.default_rng(0)
    sizes = {v.name: tuple(v.shape.numpy()) for v in model.graph.inputs}
    feeds = {"x": rng.standard_normal(sizes["x"], np.float32), "ids": rng.integers(-9, 9, sizes["ids"])}
    y = {how: Session(model, Options(layout=how, threads=1)).run(feeds)["y"] for how in ("auto", "plain")}
    np.testing.assert_array_equal(y["auto"], y["plain"])
    session = Session(model, Options(threads=1))
    with pytest.raises(BadInput):
        session.run(feeds | {"ids": feeds["ids"] * 0 + 9})


@pytest.mark.parametrize("step", [1, 2])
def test_windows_of_the_last_axis_are_slices(step):
    body = "i = Gather <axis = -1> (x, places) y = Neg (i)"
    model = _model(f"float[2, 5, 40] x, int64[{4 - step}, 20] places", f"float[2, 5, {4 - step}, 20]", body)
    places = np.add.outer(np.arange(4 - step), step * np.arange(20))
    x = np.random.default_rng(0).standard_normal((2, 5, 40), np.float32)
    model.graph.inputs.pop().const_value = ir.tensor(places)
    model.graph.register_initializer(model.graph[0].inputs[1])
    assert "Gather" not in _ops(model)
    np.testing.assert_array_equal(Session(model, Options(threads=1)).run({"x": x})["y"], -x[:, :, places])


def test_a_slice_of_everything_is_what_it_is_of():
    body = "z = Constant <value_ints = [0]> () e = Shape <end = 1> (x) a = Sqrt (x) s = Slice (a, z, e, z) y = Neg (s)"
    model = _model("float[N, 3] x", "float[N, 3]", body)
    next(n for n in model.graph if n.op_type == "Slice").outputs[0].shape = ir.Shape(["N", 3])
    assert _ops(model) == ["Sqrt", "Neg"]
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(Session(model, Options(threads=1)).run({"x": x})["y"], -x)


@pytest.mark.parametrize(("rows", "removed"), [("4", True), ("N", False)])
def test_an_expand_to_its_own_shape_is_what_it_is_of(rows, removed):
    """Of named sizes it stays: there it may be a check that two inputs of one name have as many rows."""
    body = "a = Sqrt (x) s = Shape (x) e = Expand (a, s) y = Neg (e)"
    model = _model(f"float[{rows}, 3] x", f"float[{rows}, 3]", body)
    size = int(rows) if rows.isdigit() else rows
    next(n for n in model.graph if n.op_type == "Expand").outputs[0].shape = ir.Shape([size, 3])
    assert ("Expand" not in _ops(model)) == removed


def test_an_expand_of_a_row_stays():
    model = _model(
        "float[1, 3] x",
        "float[4, 3]",
        "a = Sqrt (x) s = Constant <value_ints = [4, 1]> () e = Expand (a, s) y = Neg (e)",
    )
    assert "Expand" in _ops(model)


@pytest.mark.parametrize(("second", "gathers"), [([2, -1, 0], 1), ([2, 3, 0], 2)])
def test_rows_picked_from_picked_rows(second, gathers):
    numbers = ", ".join(map(str, second))
    body = (
        f"i = Constant <value_ints = [4, -2, 0]> () j = Constant <value_ints = [{numbers}]> () "
        "a = Gather (x, i) y = Gather (a, j)"
    )
    model = _model("float[N, 3] x", "float[3, 3]", body)
    assert _ops(model).count("Gather") == gathers
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    session = Session(model, Options(threads=1))
    if gathers == 1:
        np.testing.assert_array_equal(session.run({"x": x})["y"], x[[4, -2, 0]][second])
    else:
        with pytest.raises(BadInput):
            session.run({"x": x})


_ND = "a = Transpose <perm = [1, 0, 2]> (x) b = GatherND (a, ids) y = Transpose <perm = [1, 0, 2]> (b)"
_TURNED = "a = Transpose <perm = [2, 0, 1, 3]> (x) b = GatherND (a, ids) y = Transpose <perm = [1, 2, 0, 3]> (b)"
_NEARLY = "a = Transpose <perm = [1, 0, 2]> (x) b = GatherND (a, ids) y = Transpose <perm = [2, 0, 1]> (b)"
_LAST = "a = Transpose <perm = [2, 0, 1]> (x) b = GatherND (a, ids) y = Transpose <perm = [1, 2, 0]> (b)"
_KEPT = _ND.replace("y =", "c =") + " d = Neg (b) e = Transpose <perm = [1, 0, 2]> (d) y = Add (c, e)"
_PICKED = {
    "rows": ("float[9, 6] x, int64[M, 1]", "float[M, 6]", "y = GatherND (x, ids)", ["Squeeze", "Gather"]),
    "numbers": ("double[9] x, int64[5, M, 1]", "double[5, M]", "y = GatherND (x, ids)", ["Squeeze", "Gather"]),
    "one row": ("bool[9, 2] x, int64[1]", "bool[2]", "y = GatherND (x, ids)", ["Squeeze", "Gather"]),
    "an inner axis": ("float[N, 9, 2] x, int64[M, 1]", "float[N, M, 2]", _ND, ["Squeeze", "Gather"]),
    "of four": ("float16[2, N, 9, 3] x, int64[M, 1]", "float16[2, N, M, 3]", _TURNED, ["Squeeze", "Gather"]),
    "another order": (
        "float[N, 9, 2] x, int64[M, 1]", "float[2, M, N]", _NEARLY, ["Transpose", "Squeeze", "Gather", "Transpose"],
    ),
    "the last axis": (
        "float[N, 2, 9] x, int64[M, 1]", "float[N, 2, M]", _LAST, ["Transpose", "Squeeze", "Gather", "Transpose"],
    ),
    "an inner axis, read twice": (
        "float[N, 9, 2] x, int64[M, 1]", "float[N, M, 2]", _KEPT,
        ["Transpose", "Squeeze", "Gather", "Transpose", "Neg", "Transpose", "Add"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("case", _PICKED.values(), ids=_PICKED)
def test_rows_picked_by_gather_nd(case, count):
    inputs, output, body, operators = case
    model = _model(f"{inputs} ids", output, body)
    assert _ops(model) == operators
    free, rng = {"N": 3, "M": count}, np.random.default_rng(0)
    shapes = {v.name: [d if isinstance(d, int) else free[d.value] for d in v.shape] for v in model.graph.inputs}
    x = rng.standard_normal(shapes["x"]).astype(model.graph.inputs[0].dtype.numpy())
    feeds = {"x": x, "ids": rng.integers(-9, 9, shapes["ids"])}
    y, plain = (Session(model, Options(layout=how, threads=1)).run(feeds)["y"] for how in ("auto", "plain"))
    np.testing.assert_array_equal(y, plain)
    if feeds["ids"].size:
        with pytest.raises(BadInput):
            Session(model, Options(threads=1)).run(feeds | {"ids": feeds["ids"] * 0 - 10})


def _masked(width="6"):
    """Numbers of rows that a mask picks, doubled and written back, and how many they are; by places of all numbers."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 4, {width}] x, bool[N, 4] mask) => (float[N, 4, {width}] y, int64[2] size, int64[1] count)
    {{
        last = Constant <value_ints = [2]> () column = Unsqueeze (mask, last) shape = Shape (x)
        six = Constant <value_ints = [1, 1, 6]> () once = Expand (column, six)
        lead = Shape <end = 2> (x) row = Constant <value_ints = [6]> () to = Concat <axis = 0> (lead, row)
        of_all = Expand (once, to) found = NonZero (of_all) places = Transpose <perm = [1, 0]> (found)
        picked = GatherND (x, places) doubled = Add (picked, picked)
        size = Shape (places) count = Shape <end = 1> (places)
        y = ScatterND (x, places, doubled)
    }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))


@pytest.mark.parametrize("true", [0, 0.5, 1])
@pytest.mark.parametrize("batch", [3, 0])
def test_rows_that_a_mask_picks(batch, true):
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((batch, 4, 6), np.float32), rng.random((batch, 4)) < true
    assert _ops(_masked()).count("Expand") == 0
    results = Session(_masked(), Options(threads=1)).run({"x": x, "mask": mask})
    np.testing.assert_array_equal(results["y"], np.where(mask[..., None], 2 * x, x))
    assert results["size"].tolist() == [6 * mask.sum(), 3]
    assert results["count"].tolist() == [6 * mask.sum()]


def test_a_mask_of_a_part_of_each_row_stays():
    x, mask = np.ones((2, 4, 7), np.float32), np.array([[1, 0, 0, 1], [0, 1, 0, 0]], bool)
    y = Session(_masked("7"), Options(threads=1)).run({"x": x, "mask": mask})["y"]
    np.testing.assert_array_equal(y[..., :6], np.where(mask[..., None], 2, x[..., :6]))
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])


_OTHERS = {
    "rows of batches": ("float[2, 9, 6] x, int64[2, 1] i", "float[2, 6]", "y = GatherND <batch_dims = 1> (x, i)"),
    "numbers of rows": ("float[9, 6] x, int64[5, 2] i", "float[5]", "y = GatherND (x, i)"),
    "of any depth": ("float[9, 6] x, int64[5, D] i", "float[5, M]", "y = GatherND (x, i)"),
    "parts of rows": ("float[9, 3, 6] x, int64[30, 1, 1] ids", "float[30, 2, 6]", _ROWS),
    "few columns": ("float[5, 9] x, int64[3] ids", "float[5, 3]", _COLUMNS),
    "integers": ("int64[5, 9] x, int64[30] ids", "int64[5, 30]", _COLUMNS),
    "rows already": ("float[5, 9] x, int64[30] ids", "float[30, 9]", "y = Gather <axis = 0> (x, ids)"),
    "a part": (
        "float[N, 3] x", "float[M, 3]",
        "z = Constant <value_ints = [1]> () e = Shape <end = 1> (x) o = Constant <value_ints = [0]> ()"
        "s = Slice (x, z, e, o) y = Exp (s)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _OTHERS.values(), ids=_OTHERS)
def test_others_are_left_alone(case):
    model = _model(*case)
    assert optimized(model) is model

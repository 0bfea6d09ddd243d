"""Rows added at constant places, picked and multiplied by ones: the same sums, in any order of axes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized

_FEW = np.random.default_rng(0).integers(-7, 7, 90)  # of seven places, about thirteen each
_ONCE = np.random.default_rng(1).permutation(100)[:80]


def _model(ids, table, rows, axis=0, reduction="add", start="zeros", dtype="float", constant=True, squeezed=False):
    """`table` (zeros, or an input) with `rows` added at `ids` along `axis`."""
    column = [1] * len(rows)
    column[axis] = len(ids)
    numbers = ", ".join(map(str, ids))
    shape = ", ".join(map(str, column))
    given = "" if constant else f", int64[{shape}] ids"
    made = f"ids = Constant <value = int64[{shape}] {{{numbers}}}> ()" if constant else "unread = Identity(ids)"
    if squeezed:  # as the index of a GatherND of rows
        pairs = f"pairs = Constant <value = int64[{shape}, 1] {{{numbers}}}> ()"
        made = f"{pairs} last = Constant <value = int64[1] {{-1}}> () ids = Squeeze (pairs, last)"
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    g ({dtype}[{", ".join(map(str, table))}] table, {dtype}[{", ".join(map(str, rows))}] rows{given})
        => ({dtype}[{", ".join(map(str, table))}] y)
    {{
        {made}
        shape = Shape (rows)
        index = Expand (ids, shape)
        like = Shape (table)
        zero = Constant <value = {dtype}[1] {{0}}> ()
        zeros = Expand (zero, like)
        y = ScatterElements <axis = {axis}, reduction = "{reduction}"> ({start}, index, rows)
    }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))


def _scatters(model):
    return [n for n in optimized(model, ("scattered_rows",)).graph if n.op_type == "ScatterElements"]


_CASES = {
    "several rows meet": {"ids": _FEW, "table": (7, 8), "rows": (90, 8)},
    "in a table that holds numbers": {"ids": _FEW, "table": (7, 8), "rows": (90, 8), "start": "table"},
    "some places get nothing": {"ids": _FEW, "table": (20, 8), "rows": (90, 8)},
    "no two meet": {"ids": _ONCE, "table": (100, 2, 4), "rows": (80, 2, 4)},
    "every place once": {"ids": np.arange(80)[::-1], "table": (80, 8), "rows": (80, 8)},
    "equally many everywhere": {"ids": np.arange(80) % 20, "table": (20, 8), "rows": (80, 8)},
    "columns": {"ids": _ONCE, "table": ("N", 100), "rows": ("N", 80), "axis": 1},
    "columns that meet": {"ids": _FEW, "table": (8, 7), "rows": (8, 90), "axis": 1},
    "the axis in between": {"ids": _FEW, "table": ("N", 7, 8), "rows": ("N", 90, 8), "axis": 1},
    "a batch inside": {"ids": _FEW, "table": (7, "N", 8), "rows": (90, "N", 8)},
    "the last of a place stays": {"ids": _FEW, "table": (20, 8), "rows": (90, 8), "reduction": "none"},
    "in a table, the last stays": {
        "ids": _FEW,
        "table": (7, 2, 4),
        "rows": (90, 2, 4),
        "start": "table",
        "reduction": "none",
    },
    "a table of any size": {"ids": _FEW % 7, "table": ("V", 8), "rows": (90, 8)},
    "a table of any size where nothing meets": {"ids": _ONCE, "table": ("V", 8), "rows": (80, 8)},
    "a table of any size, the last stays": {"ids": _FEW % 7, "table": ("V", 8), "rows": (90, 8), "reduction": "none"},
    "the greatest of a place": {"ids": _FEW, "table": (20, 8), "rows": (90, 8), "reduction": "max"},
    "the least, on the axis in between": {
        "ids": _FEW,
        "table": ("N", 7, 8),
        "rows": ("N", 90, 8),
        "axis": 1,
        "start": "table",
        "reduction": "min",
    },
    "the greatest, a table of any size": {
        "ids": _FEW % 7,
        "table": ("V", 8),
        "rows": (90, 8),
        "start": "table",
        "reduction": "max",
    },
    "ids of a GatherND": {"ids": _FEW, "table": (7, "N", 8), "rows": (90, "N", 8), "squeezed": True},
    "float64": {"ids": _FEW, "table": (7, 8), "rows": (90, 8), "dtype": "double"},
}


@pytest.mark.parametrize("batch", [3, 0])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_same_numbers(case, batch):
    model = _model(**case)
    assert not _scatters(model)
    rng = np.random.default_rng(2)
    dtype = np.float64 if case.get("dtype") == "double" else np.float32
    free = {"N": batch, "V": max(case["ids"]) + 1 + batch}
    sizes = {k: tuple(free.get(d, d) for d in case[k]) for k in ("table", "rows")}
    feeds = {k: rng.integers(-9, 9, size).astype(dtype) for k, size in sizes.items()}  # sums are exact in any order
    y = {
        how: Session(model, Options(layout=how, threads=1, target="portable")).run(feeds)["y"]
        for how in ("auto", "plain")
    }
    np.testing.assert_array_equal(y["auto"], y["plain"])


def test_infinities_and_nan_stay_where_they_are():
    model = _model(ids=np.arange(80) % 20, table=(24, 8), rows=(80, 8))
    rows = np.ones((80, 8), np.float32)
    rows[3, 2], rows[5, 1] = np.inf, np.nan
    feeds = {"table": np.zeros((24, 8), np.float32), "rows": rows}
    y = Session(model, Options(threads=1, target="portable")).run(feeds)["y"]
    expected = np.full((24, 8), 4.0)
    expected[20:] = 0
    expected[3, 2], expected[5, 1] = np.inf, np.nan
    np.testing.assert_array_equal(y, expected)


_OTHERS = {
    "indices are computed": {"constant": False},
    "rows are multiplied": {"reduction": "mul"},
    "the last of columns stays": {"reduction": "none", "axis": 1, "table": (8, 7), "rows": (8, 90)},
    "rows are narrower than the table": {"table": (7, 9)},
    "rows are too narrow": {"table": (7, 4), "rows": (90, 4)},
    "few rows": {"ids": [0, 1, 1], "rows": (3, 8)},
    "integers": {"dtype": "int64"},
    "places from the end of a table of any size": {"table": ("V", 8)},
}


@pytest.mark.parametrize("how", _OTHERS.values(), ids=_OTHERS)
def test_others_are_left_alone(how):
    assert _scatters(_model(**{"ids": _FEW, "table": (7, 8), "rows": (90, 8), **how}))


@pytest.mark.parametrize("reduction", ["add", "none"])
def test_a_table_with_fewer_rows_than_places_is_still_an_error(reduction):
    session = Session(_model(ids=_FEW % 7, table=("V", 8), rows=(90, 8), reduction=reduction), Options(threads=1))
    with pytest.raises(BadInput):
        session.run({"table": np.zeros((6, 8), np.float32), "rows": np.zeros((90, 8), np.float32)})


def test_an_id_beyond_the_table_is_still_an_error():
    model = _model(ids=np.arange(90), table=(89, 8), rows=(90, 8))
    assert _scatters(model)
    session = Session(model, Options(threads=1, target="portable"))
    with pytest.raises(BadInput):
        session.run({"table": np.zeros((89, 8), np.float32), "rows": np.zeros((90, 8), np.float32)})


@pytest.mark.parametrize("reduction", ["add", "none"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("changed", [0, 1], ids=["whole rows", "one number elsewhere"])
def test_constant_indices_of_all_numbers(changed, axis, reduction):
    """PyTorch's newer exporter folds the Expand of constant ids."""
    rng = np.random.default_rng(3)
    index = np.repeat(_FEW[:, None], 8, 1)
    index[-1, -1] = (index[-1, -1] + changed) % 7 if changed else index[-1, -1]
    index = index.T.copy() if axis else index
    table = np.zeros((8, 7) if axis else (7, 8), np.float32)
    model = _model(ids=_FEW, table=table.shape, rows=index.shape, axis=axis)
    scatter = next(n for n in model.graph if n.op_type == "ScatterElements")
    scatter.attributes["reduction"] = ir.AttrString("reduction", reduction)
    value = ir.Value(name="all_ids", const_value=ir.tensor(index))
    value.shape, value.type = ir.Shape(index.shape), ir.TensorType(ir.DataType.INT64)
    model.graph.register_initializer(value)
    scatter.replace_input_with(1, value)
    assert bool(_scatters(model)) == bool(changed or (axis and reduction == "none"))
    feeds = {"rows": rng.integers(-9, 9, index.shape).astype(np.float32), "table": table}
    wanted = np.zeros_like(table)
    for place in np.ndindex(*index.shape):
        at = list(place)
        at[axis] = index[place]
        kept = wanted[tuple(at)] if reduction == "add" else 0
        wanted[tuple(at)] = kept + feeds["rows"][place]
    found = Session(model, Options(threads=1, target="portable")).run(feeds)["y"]
    np.testing.assert_array_equal(found, wanted)

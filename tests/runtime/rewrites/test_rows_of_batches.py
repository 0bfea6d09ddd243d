"""Rows of the entries of a batch as rows of one table: the same numbers; an index beyond an entry stays an error."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import optimized

_SIZES = {"N": 3, "M": 2, "K": 4, "P": 5}


def _model(x=("N", 5, 3), k=4, axis=1, dtype="float", found="TopK", ids=None, reduction="add", size=5, columns=1):
    """Rows that are picked at the best places of scores, and rows that are added up there."""
    outer, row = x[:axis], x[axis + 1 :]
    text = {n: ", ".join(map(str, d)) for n, d in
            {"x": x, "score": (*outer, size), "rows": (*outer, k, *row), "ids": (*outer, k)}.items()}  # fmt: skip
    best = f"count = Constant <value_ints = [{k}]> () v, best = TopK (score, count)"
    if found == "ArgMax":
        best = "best = ArgMax <axis = -1> (score)"
    elif ids is not None:
        best = f"best = Constant <value = int64[{len(ids)}] {{{', '.join(map(str, ids))}}}> ()"
    elif found == "values":
        best = f"count = Constant <value_ints = [{k}]> () best, at = TopK (ids, count)"
    elif found is None:
        best = "best = Identity (ids)"
    behind = [axis + 1 + i for i in range(len(row))] if ids is None else [1 + i for i in range(len(row))]
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g ({dtype}[{text["x"]}] x, float[{text["score"]}] score, {dtype}[{text["rows"]}] rows, int64[{text["ids"]}] ids)
    => ({dtype}[{text["rows"]}] picked, {dtype}[{text["x"]}] sums) {{
        {best}
        behind = Constant <value_ints = {behind}> ()
        column = Unsqueeze (best, behind)
        shape = Shape (rows)
        index = Expand (column, shape)
        picked = GatherElements <axis = {axis}> (x, index)
        sums = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, index, rows)
    }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))
    for node in model.graph:  # TopK along an axis of any size is not inferred
        if node.op_type in ("TopK", "Unsqueeze", "Expand") and ids is None:
            sizes = {"TopK": (), "Unsqueeze": [1] * len(row), "Expand": row}[node.op_type]
            node.outputs[-1].shape = ir.Shape([*outer, k, *sizes])
    return model


def _feeds(model, **sizes):
    rng = np.random.default_rng(0)
    free = _SIZES | sizes
    shapes = {v.name: [free.get(d, d) for d in (getattr(d, "value", d) for d in v.shape)] for v in model.graph.inputs}
    feeds = {k: rng.integers(-9, 9, shapes[k]).astype(model.graph.inputs[0].dtype.numpy()) for k in ("x", "rows")}
    score = rng.standard_normal(shapes["score"]).astype(np.float32)
    return feeds | {"score": score, "ids": rng.integers(0, 5, shapes["ids"])}


_CASES = {
    "neighbours": {},
    "of static sizes": {"x": (2, 5, 3)},
    "matrices of entries of two axes": {"x": ("N", "M", 5, 2, 3), "axis": 2},
    "of any size": {"x": ("N", "P", 3), "size": "P"},
    "one row of one": {"x": ("N", 1, 3), "size": 1, "k": 1},
    "the best": {"found": "ArgMax", "k": 1},
    "known and repeated": {"ids": [4, 0, 4, 2]},
    "float64": {"dtype": "double"},
    "int64": {"dtype": "int64"},
}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_same_numbers(case):
    model, axis = _model(**case), case.get("axis", 1)
    written = optimized(model).graph
    assert not any(n.op_type == "GatherElements" for n in written)
    assert all(n.attributes.get_int("axis", 0) == 0 for n in written if n.op_type == "ScatterElements")
    session = Session(model, Options(threads=1, target="portable"))
    for sizes in ({}, {"N": 1, "M": 0}, {"N": 0})[
        : 2 if "found" in case else 3
    ]:  # an ArgMax of nothing has a wrong shape
        feeds = _feeds(model, **sizes)
        x, rows = feeds["x"], feeds["rows"]
        best = np.argsort(-feeds["score"], -1, kind="stable")[..., : rows.shape[axis]]
        if "ids" in case:
            best = np.broadcast_to(case["ids"], best.shape)
        sums = x.copy()
        for entry in np.ndindex(*x.shape[:axis]):
            np.add.at(sums[entry], best[entry], rows[entry])
        y = session.run(feeds)
        picked = np.take_along_axis(x, best.reshape(*best.shape, *[1] * (x.ndim - axis - 1)), axis)
        np.testing.assert_array_equal(y["picked"], picked)
        np.testing.assert_array_equal(y["sums"], sums)


_OTHERS = {
    "places that are fed": {"found": None},
    "values of TopK": {"found": "values", "k": 5},
    "places of a longer axis": {"size": 6},
    "known places from the end": {"ids": [4, 0, -1, 2]},
    "known places beyond": {"ids": [4, 0, 5, 2]},
    "rows that may be empty": {"x": ("N", 5, "W")},
    "numbers": {"x": ("N", 5, 1)},
}


@pytest.mark.parametrize("how", _OTHERS.values(), ids=_OTHERS)
def test_others_are_left_alone(how):
    scatter = next(n for n in optimized(_model(**how)).graph if n.op_type == "ScatterElements")
    assert scatter.attributes.get_int("axis") == 1


def test_other_reductions_are_left_alone():
    assert any(n.attributes.get_int("axis", 0) == 1 for n in optimized(_model(reduction="max")).graph)


def test_a_place_beyond_an_entry_is_still_an_error():
    model = _model(size=6)
    with pytest.raises(BadInput):
        Session(model, Options(threads=1)).run(_feeds(model) | {"score": np.eye(6, dtype=np.float32)[[5, 5, 5]]})


def _distances(tokens, high=5, dtype="float", start="zeros"):
    """Numbers of 6 that are picked by the distances of tokens, the same for each entry, and the sums of those."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    g ({dtype}[N, 2, {tokens}, 6] x, {dtype}[N, 2, {tokens}, {tokens}] rows, int64[{tokens}, {tokens}] ids)
    => ({dtype}[N, 2, {tokens}, {tokens}] picked, {dtype}[N, 2, {tokens}, 6] sums) {{
        low = Constant <value_int = 0> () high = Constant <value_int = {high}> () clipped = Clip (ids, low, high)
        turned = Transpose <perm = [1, 0]> (clipped) shape = Shape (rows) index = Expand (turned, shape)
        zero = Constant <value = {dtype} {{0}}> () like = Shape (x) zeros = Expand (zero, like)
        picked = GatherElements <axis = 3> (x, index)
        sums = ScatterElements <axis = -1, reduction = "add"> ({start}, index, rows)
    }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))


@needs_kernels
@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize(("tokens", "count"), [(4, 4), ("T", 4), ("T", 1), ("T", 0)])
@pytest.mark.parametrize("batch", [3, 0])
def test_numbers_at_the_same_places_of_each_entry(batch, tokens, count, dtype):
    model = _distances(tokens, dtype=dtype)
    assert not any(n.op_type == "GatherElements" or n.attributes.get_int("axis", 0) for n in optimized(model).graph)
    rng = np.random.default_rng(0)
    x, rows = rng.integers(-9, 9, (batch, 2, count, 6)), rng.integers(-9, 9, (batch, 2, count, count))
    ids = rng.integers(-3, 9, (count, count))
    index = np.broadcast_to(ids.clip(0, 5).T, rows.shape)
    kind = {"float": np.float32, "double": np.float64}[dtype]
    y = Session(model, Options(threads=1, target="native")).run(
        {"x": x.astype(kind), "rows": rows.astype(kind), "ids": ids}
    )
    np.testing.assert_array_equal(y["picked"], np.take_along_axis(x, index, 3))
    sums = np.zeros_like(x)
    for place in np.ndindex(rows.shape):
        sums[(*place[:3], index[place])] += rows[place]
    np.testing.assert_array_equal(y["sums"], sums)


@pytest.mark.parametrize(("how", "left"), [({"high": 6}, 2), ({"start": "x"}, 1)])
def test_places_beyond_and_numbers_of_a_table_stay(how, left):
    written = optimized(_distances(4, **how)).graph
    assert sum(n.attributes.get_int("axis", 0) in (3, -1) for n in written) == left

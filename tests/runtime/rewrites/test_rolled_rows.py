"""Rows that change places are picked in one pass, and those that stay not at all: the same numbers."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import signature, vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import passed

ROWS = ("joined_slices", "rolled_rows")


def _ints(name, *numbers):
    return f"{name} = Constant <value_ints = [{', '.join(map(str, numbers))}]> () "


def _roll(x, y, shift, axis, far=2**62):
    """`y` is `x` rolled as PyTorch exports it: what is behind the shift, then what is before it."""
    names = [f"{y}{part}" for part in ("first", "cut", "last", "axis", "a", "b")]
    first, cut, last, along, a, b = names
    return (
        _ints(first, 0) + _ints(cut, -shift) + _ints(last, far) + _ints(along, axis)
        + f"{a} = Slice ({x}, {cut}, {last}, {along}) {b} = Slice ({x}, {first}, {cut}, {along}) "
        + f"{y} = Concat <axis = {axis}> ({a}, {b}) "
    )  # fmt: skip


_WINDOWS = (
    _ints("cut", 0, 2, 2, 3, 2, 16) + "c = Reshape (b, cut) w = Transpose <perm = [0, 1, 3, 2, 4, 5]> (c) "
    + _ints("joined", -1, 4, 16) + "y = Reshape (w, joined)"
)  # fmt: skip
_BACK = _ints("cut", 0, 2, 3, 2, 2, 16) + _ints("whole", 0, 4, 6, 16) + (
    "c = Reshape (x, cut) w = Transpose <perm = [0, 1, 3, 2, 4, 5]> (c) v = Reshape (w, whole) "
)  # fmt: skip
_X = "N, 4, 6, 16"


def _windows(x):
    return x.reshape(-1, 2, 2, 3, 2, 16).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 16)


def _back(x):
    return x.reshape(-1, 2, 3, 2, 2, 16).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 6, 16)


#: Sizes of operand and result, nodes, what they compute, and the Gathers in place of Slices, Concats and Transposes.
CASES = {
    "one axis": (_X, _X, _roll("x", "y", -1, 1), lambda x: np.roll(x, -1, 1), 1),
    "two axes": (_X, _X, _roll("x", "a", -1, 1) + _roll("a", "y", 2, 2), lambda x: np.roll(x, (-1, 2), (1, 2)), 1),
    "windows": (
        _X, "M, 4, 16", _roll("x", "a", -1, 1) + _roll("a", "b", -1, 2) + _WINDOWS,
        lambda x: _windows(np.roll(x, (-1, -1), (1, 2))), 1,
    ),
    "windows put back": (
        "N, 6, 4, 16", _X, _BACK + _roll("v", "a", 1, 1) + _roll("a", "y", 1, 2),
        lambda x: np.roll(_back(x), (1, 1), (1, 2)), 1,
    ),
    "there and back": (_X, _X, _roll("x", "a", -1, 1) + _roll("a", "y", 1, 1), lambda x: x, 0),
    "by nothing": (
        _X, _X,
        _ints("from", 2**62) + _ints("to", 2**62) + _ints("axis", 2)
        + "e = Slice (x, from, to, axis) y = Concat <axis = 2> (x, e)",
        lambda x: x, 0,
    ),
    "a part of the parts": (
        "N, 6, 17", "N, 6, 17",
        _ints("sizes", 1, 5) + "a, b = Split <axis = 1> (x, sizes) y = Concat <axis = -2> (b, a)",
        lambda x: np.roll(x, -1, 1), 1,
    ),
    "half of the rows twice": (
        "N, 4, 16", "N, 4, 16",
        _ints("sizes", 2, 2) + "a, b = Split <axis = 1> (x, sizes) y = Concat <axis = 1> (b, b)",
        lambda x: x[:, [2, 3, 2, 3]], 1,
    ),
    "every second one first": (
        "N, 7, 16", "N, 7, 16",
        _ints("zero", 0) + _ints("one", 1) + _ints("two", 2) + _ints("end", 9)
        + "a = Slice (x, zero, end, one, two) b = Slice (x, one, end, one, two) y = Concat <axis = 1> (a, b)",
        lambda x: x[:, [0, 2, 4, 6, 1, 3, 5]], 1,
    ),
}  # fmt: skip
#: The same, where something else is computed, or nothing is gained.
OTHERS = {
    "the batch": (_X, _X, _roll("x", "y", -1, 0), lambda x: np.roll(x, -1, 0)),
    "numbers of a row": (_X, _X, _roll("x", "y", 5, 3), lambda x: np.roll(x, 5, 3)),
    "short rows": ("N, 4, 15", "N, 4, 15", _roll("x", "y", -1, 1), lambda x: np.roll(x, -1, 1)),
    "an open size": ("N, M, 16", "N, M, 16", _roll("x", "y", -1, 1), lambda x: np.roll(x, -1, 1)),
    "some rows twice": (
        "N, 4, 16", "N, 5, 16",
        _ints("zero", 0) + _ints("one", 1) + _ints("end", 9)
        + "a = Slice (x, zero, one, one) b = Slice (x, zero, end, one) y = Concat <axis = 1> (a, b)",
        lambda x: x[:, [0, 0, 1, 2, 3]],
    ),
    "not all rows": (
        "N, 4, 16", "N, 2, 16",
        _ints("zero", 0) + _ints("one", 1) + _ints("two", 2)
        + "a = Slice (x, zero, one, one) b = Slice (x, one, two, one) y = Concat <axis = 1> (b, a)",
        lambda x: x[:, [1, 0]],
    ),
    "no rows": ("N, 0, 16", "N, 0, 16", _roll("x", "y", -1, 1), lambda x: x),
    "backwards": (
        "N, 4, 16", "N, 4, 16",
        _ints("a", 3) + _ints("b", 1) + _ints("c", -9) + _ints("axis", 1) + _ints("step", -1)
        + "p = Slice (x, a, b, axis, step) q = Slice (x, b, c, axis, step) y = Concat <axis = 1> (p, q)",
        lambda x: x[:, ::-1],
    ),
    "rows of two": (
        "N, 4, 16", "N, 4, 16",
        _ints("zero", 0) + _ints("two", 2) + _ints("end", 9) + _ints("axis", 1) + "n = Neg (x) "
        + "a = Slice (x, two, end, axis) b = Slice (n, zero, two, axis) y = Concat <axis = 1> (a, b)",
        lambda x: np.concatenate([x[:, 2:], -x[:, :2]], 1),
    ),
}  # fmt: skip


#: What a roll is read by, where more than rows of the same batch is moved.
BEHIND = {
    "joined as a batch": (_ints("s", 2, 2) + "p, q = Split <axis = 1> (r, s) y = Concat <axis = 0> (q, p)", "8, 2, 16",
                          lambda r: np.concatenate([r[:, 2:], r[:, :2]])),
    "rows and batch change": ("y = Transpose <perm = [1, 0, 2]> (r)", "4, 4, 16", lambda r: r.transpose(1, 0, 2)),
    "batch and rows are one": (_ints("s", 2, 8, 16) + "y = Reshape (r, s)", "2, 8, 16", lambda r: r.reshape(2, 8, 16)),
    "shifted by a Pad and added": (
        _ints("s", 0, 1, 0, 0, -1, 0) + "p = Pad (r, s) y = Add (r, p)", "4, 4, 16",
        lambda r: r + np.pad(r, ((0, 0), (1, 0), (0, 0)))[:, :4],
    ),
}  # fmt: skip


def _model(source, target, body, dtype="float", opset=20, more=""):
    head = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({dtype}[{source}] x) => ({dtype}[{target}] y{more})'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{head} {{ {body} }}"), data_prop=True)


def _ops(proto, names=ROWS):
    nodes = passed(names, ir.from_proto(proto)).graph
    return [n.op_type for n in nodes if n.op_type not in ("Constant", "Reshape")]


def _example(source, batch=3, dtype=np.float32):
    sizes = [int(d) if d.isdigit() else {"N": batch, "M": 6 * batch}[d] for d in source.split(", ")]
    return np.random.default_rng(0).standard_normal(sizes).astype(dtype)


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "int64"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_pass(case, dtype):
    source, target, body, formula, gathers = case
    model = _model(source, target, body, dtype)
    assert _ops(model) in (["Gather"] * gathers, ["Identity"] * (1 - gathers))
    for batch in (0, 1, 3):
        x = _example(source, batch, {"float": "f4", "float16": "f2", "double": "f8", "int64": "i8"}[dtype])
        np.testing.assert_array_equal(Session(model, Options(threads=1)).run({"x": x})["y"], formula(x))


@pytest.mark.parametrize("case", [*CASES][:7])
def test_cotangents(case):
    """⟨g, f(x)⟩ = ⟨fᵀ(g), x⟩: the cotangent puts each row back where it was."""
    source, target, body, formula, gathers = CASES[case]
    model = vjp(_model(source, target, body), wrt="x")
    assert _ops(model).count("Gather") == 2 * gathers
    assert {*_ops(model)} <= {"Gather", "Identity"}
    names = signature(model)
    x = _example(source)
    places = formula(np.arange(x.size).reshape(x.shape))
    g = np.random.default_rng(1).standard_normal(places.shape).astype(np.float32)
    found = Session(model, Options(threads=1)).run({"x": x, names.cotangents["y"]: g}, [names.gradients["x"]])
    expected = np.empty(x.size, np.float32)
    expected[places.reshape(-1)] = g.reshape(-1)
    np.testing.assert_array_equal(found[names.gradients["x"]].reshape(-1), expected)


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_graphs_stay(case):
    source, target, body, formula = case
    proto = _model(source, target, body)
    model = ir.from_proto(proto)
    assert passed(ROWS, model) is model
    x = _example(source)
    np.testing.assert_array_equal(Session(proto, Options(threads=1)).run({"x": x})["y"], formula(x))


@pytest.mark.parametrize("opset", [11, 13, 18, 23])
def test_opsets(opset):
    split = (
        "a, b = Split <axis = 1, split = [1, 3]> (x) "
        if opset < 13
        else _ints("s", 1, 3) + "a, b = Split <axis = 1> (x, s) "
    )
    proto = _model("N, 4, 16", "N, 4, 16", split + "y = Concat <axis = 1> (b, a)", opset=opset)
    x = _example("N, 4, 16")
    np.testing.assert_array_equal(Session(proto, Options(threads=1)).run({"x": x})["y"], np.roll(x, -1, 1))


def test_values_that_others_read():
    """A roll on the way is a result too, and read inside of a branch; a slice of it is read elsewhere."""
    body = (
        _roll("x", "r", -1, 1) + _roll("r", "y", 2, 2) + _ints("whole", 0, 4, 6, 16)
        + "n = Neg (ra) z = ReduceSum (n) s = ReduceSum (x) q = Cast <to = 9> (s) "
        + f"t = If (q) <then_branch = g1 () => (float[{_X}] u) {{ u = Neg (r) }},"
        + f" else_branch = g2 () => (float[{_X}] v) {{ v = Abs (y) }}>"
    )  # fmt: skip
    proto = _model(_X, _X, body, more=f", float[{_X}] r, float[1, 1, 1, 1] z, float[{_X}] t")
    assert _ops(proto).count("Gather") == 2
    x = _example(_X)
    found = Session(proto, Options(threads=1)).run({"x": x})
    r = np.roll(x, -1, 1)
    np.testing.assert_array_equal(found["r"], r)
    np.testing.assert_array_equal(found["y"], np.roll(r, 2, 2))
    np.testing.assert_array_equal(found["t"], -r)
    np.testing.assert_allclose(found["z"].item(), -x[:, 1:].sum(dtype=np.float64), rtol=1e-4)


def test_zeros_of_a_constant_are_added():
    """Only a Pad of nothing with zeros adds nothing."""
    head = _ints("from", 9) + _ints("axis", 1) + _ints("pads", 0, 0, 0, 0, 4, 0) + "e = Slice (x, from, from, axis) "
    for value, added in ((0, True), (1, False)):
        number = f"c = Constant <value_float = {value}.0> () " if value else ""
        pad = f"p = Pad (e, pads{', c' if value else ''}) "
        body = head + number + pad + "a = Add (x, p) " + _roll("a", "y", -1, 1)
        proto = _model("N, 4, 16", "N, 4, 16", body)
        assert ("Add" not in _ops(proto)) == added
        x = _example("N, 4, 16")
        np.testing.assert_array_equal(Session(proto, Options(threads=1)).run({"x": x})["y"], np.roll(x + value, -1, 1))


@pytest.mark.parametrize("case", BEHIND.values(), ids=BEHIND)
def test_what_moves_more_than_rows_stays(case):
    body, target, formula = case
    proto = _model("4, 4, 16", target, _roll("x", "r", -1, 1) + body)
    assert _ops(proto).count("Gather") == 1
    x = _example("4, 4, 16")
    np.testing.assert_array_equal(Session(proto, Options(threads=1)).run({"x": x})["y"], formula(np.roll(x, -1, 1)))

"""Slices that are picked and stacked one by one become parts of a view: the same bits; others stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import shape_inference

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized, passed

TIMES = 5


def _model(text, x="N,5,4,3", y="", constants=""):
    numbers = ", ".join(f"int64 i{k} = {{{k}}}" for k in range(6))
    axes = ", ".join(f"int64[1] a{k} = {{{k}}}" for k in range(4))
    head = f'<ir_version: 10, opset_import: ["": 21]> g (float[{x}] x) => (float[{y}] y) <{numbers}, {axes}{constants}>'
    return ir.from_proto(shape_inference.infer_shapes(onnx.parser.parse_model(f"{head} {{ {text} }}"), data_prop=True))


def _picked(axis=1, order=range(TIMES), after="h{0} = Exp (p{0})"):
    return "".join(f"p{t} = Gather <axis = {axis}> (x, i{t}) {after.format(t)} " for t in order)


def _stacked(axis=1, name="h"):
    puts = "".join(f"u{t} = Unsqueeze ({name}{t}, a{axis}) " for t in range(TIMES))
    return puts + f"y = Concat <axis = {axis}> ({', '.join(f'u{t}' for t in range(TIMES))})"


def _agree(model, images=2):
    x = np.random.default_rng(0).standard_normal(
        [d if isinstance(d, int) else images for d in model.graph.inputs[0].shape]
    )
    feeds = {"x": x.astype(np.float32)}
    feeds |= {
        v.name: np.full([d if isinstance(d, int) else images for d in v.shape], 0.5, np.float32)
        for v in model.graph.inputs[1:]
    }
    names = [v.name for v in model.graph.outputs]
    options = Options(target="portable", layout="plain", threads=1)
    expected, found = (Session(m, options).run(feeds, names) for m in (model, passed(("stacked_slices",), model)))
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name])


def _counts(model):
    found = Counter(n.op_type for n in passed(("stacked_slices",), model).graph)
    return {name: found[name] for name in ("Gather", "Split", "Squeeze", "Unsqueeze", "Concat")}


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize(("axis", "x"), [(0, "5,4,3"), (0, "5,N,3"), (1, "N,5,4,3"), (2, "N,2,5,3"), (1, "2,5,4,N")])
def test_a_loop_that_is_written_out(axis, x, images):
    model = _model(_picked(axis) + _stacked(axis), x, x)
    if axis == 0 and "N" in x:  # it would have to be cut where its size is not known
        assert _counts(model) == {"Gather": 5, "Split": 0, "Squeeze": 0, "Unsqueeze": 0, "Concat": 1}
    else:
        assert _counts(model) == {"Gather": 0, "Split": 1, "Squeeze": 0, "Unsqueeze": 0, "Concat": 1}
    _agree(model, images)


def test_any_order_and_more_readers():
    text = _picked(order=(3, 1, 4, 0, 2)) + "q = Gather <axis = 1> (x, i-1) r = Unsqueeze (q, a1) " + _stacked()
    model = _model(
        text.replace("i-1", "last").replace("y = Concat <axis = 1> (", "y = Concat <axis = 1> (r, "),
        y="N,6,4,3",
        constants=", int64 last = {-1}",
    )
    assert _counts(model) == {"Gather": 0, "Split": 1, "Squeeze": 0, "Unsqueeze": 0, "Concat": 1}
    _agree(model)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_an_axis_that_all_readers_put_in(axis):
    """x[:, t, None]"""
    text = _picked(after=f"v{{0}} = Unsqueeze (p{{0}}, a{axis}) h{{0}} = Exp (v{{0}})")
    model = _model(text + f"y = Concat <axis = 1> ({', '.join(f'h{t}' for t in range(TIMES))})", y="?,?,?,?")
    assert _counts(model) == {"Gather": 0, "Split": 1, "Squeeze": 0, "Unsqueeze": 0, "Concat": 1}
    _agree(model)


def test_an_axis_that_a_branch_puts_in():
    put_in = "".join(f"u{t} = Unsqueeze (p{t}, a1) " for t in range(TIMES))
    model = _model(
        f"""{_picked(after="")} m = ReduceMax <keepdims = 0> (x) c = Greater (m, half)
        y = If (c) <then_branch = t () => (float[N,1,4,3] z) {{ {put_in} z = Sum (u0, u1, u2, u3, u4) }},
            else_branch = e () => (float[N,1,4,3] w) {{ v = Unsqueeze (p0, a1) w = Neg (v) }}>""",
        y="N,1,4,3",
        constants=", float half = {0.5}",
    )
    assert _counts(model) == {"Gather": 0, "Split": 1, "Squeeze": 0, "Unsqueeze": 0, "Concat": 0}
    _agree(model)


def test_parts_of_a_split():
    names = ", ".join(f"s{t}" for t in range(TIMES))
    text = f"{names} = Split <axis = 1, num_outputs = {TIMES}> (x) "
    text += "".join(f"p{t} = Squeeze (s{t}, a1) h{t} = Exp (p{t}) " for t in range(TIMES))
    model = _model(text + _stacked(), y="N,5,4,3")
    assert _counts(model) == {"Gather": 0, "Split": 1, "Squeeze": 0, "Unsqueeze": 0, "Concat": 1}
    _agree(model)


def test_what_is_undone():
    model = _model("s = Squeeze (x, a1) u = Unsqueeze (s, a1) y = Exp (u)", "N,1,4", "N,1,4")
    assert _counts(model)["Squeeze"] + _counts(model)["Unsqueeze"] == 0
    _agree(model)
    for put_in, y in (("a2", "N,4,1"), ("a0", "1,N,4")):
        other = _model(f"s = Squeeze (x, a1) u = Unsqueeze (s, {put_in}) y = Exp (u)", "N,1,4", y)
        assert passed(("stacked_slices",), other) is other
    result = _model("s = Squeeze (x, a1) y = Unsqueeze (s, a1)", "N,1,4", "N,1,4")
    assert passed(("stacked_slices",), result) is result


@pytest.mark.parametrize(
    ("text", "x"),
    [
        (_picked(order=range(4)) + "y = Sum (h0, h1, h2, h3)", "N,5,4"),  # not all
        (_picked(axis=2) + "y = Sum (h0, h1, h2, h3, h4)", "N,4,5"),  # no axis after it
        (_picked(axis=1) + "y = Sum (h0, h1, h2, h3, h4)", "N,T,4"),  # of unknown length
        ("p = Gather <axis = 1> (x, i0) q = Gather <axis = 1> (x, i1) y = Add (p, q)", "N,2,4"),  # few
        ("".join(f"h{t} = Mul (x, x) " for t in range(TIMES)) + _stacked(axis=2), "N,4"),  # stacked as the last axis
    ],
)
def test_others_stay(text, x):
    model = _model(text, x, ",".join("?" * (2 + ("stacked" in text))))
    assert passed(("stacked_slices",), model) is model


def test_an_unrolled_scan_and_its_derivative():
    steps = "".join(
        f"k{t} = Gather <axis = 1> (x, i{t}) m{t} = Mul (h{t}, k{t}) h{t + 1} = Add (m{t}, k{t}) " for t in range(TIMES)
    )
    stacked = _stacked(name="m")
    model = _model("h0 = ConstantOfShape (sizes) " + steps + stacked, "2,5,3", "2,5,3", ", int64[2] sizes = {2, 3}")
    derived = vjp(model, wrt=["x"])
    found = Counter(n.op_type for n in optimized(derived).graph)
    assert not found["Squeeze"] + found["Unsqueeze"] + found["Gather"]
    _agree(derived)

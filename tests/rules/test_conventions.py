"""Pins every row of docs/conventions.md, in float32, float64 and float16."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import grad, jvp, vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case, node_model, reference
from tests.rules.dtypes import loads, session

PAGE = Path(__file__).parents[2] / "docs" / "conventions.md"
INF, NAN = np.inf, np.nan
ROW = np.array([1], np.int64)


def at(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


# (operator, where) → nodes at such points: operands, the gradients of Σy by operand, attributes
PINS: dict[tuple[str, str], list[tuple[str, list, list, dict]]] = {
    ("Relu", "x = 0"): [("Relu", [at(0, -1, 1)], [[0, 0, 1]], {})],
    ("LeakyRelu", "x = 0"): [("LeakyRelu", [at(0)], [[a]], {"alpha": a}) for a in (0.25, 2.0, -0.5)],
    ("PRelu", "x = 0"): [("PRelu", [at(0), at(0.25)], [[0.25], [0]], {})],
    ("Elu", "x = 0"): [("Elu", [at(0)], [[1.5]], {"alpha": 1.5})],
    ("Selu", "x = 0"): [("Selu", [at(0)], [[3]], {"alpha": 1.5, "gamma": 2.0})],
    ("Celu", "x = 0"): [("Celu", [at(0)], [[1]], {"alpha": 1.5})],
    ("ThresholdedRelu", "x = α"): [("ThresholdedRelu", [at(1.5)], [[0]], {"alpha": 1.5})],
    ("Shrink", "x = ±λ"): [("Shrink", [at(0.5, -0.5)], [[0, 0]], {"lambd": 0.5})],
    ("HardSigmoid", "αx + β is 0 or 1"): [("HardSigmoid", [at(-1, 1)], [[0, 0]], {"alpha": 0.5, "beta": 0.5})],
    ("HardSwish", "x = -3 and x = 3"): [("HardSwish", [at(-3, 3, INF, -INF)], [[0, 1, 1, 0]], {})],
    ("Abs", "x = 0"): [("Abs", [at(0)], [[0]], {})],
    ("ReduceL1", "x = 0"): [("ReduceL1", [at(0, -2)], [[0, -1]], {})],
    ("Sign, Ceil, Floor, Round, Hardmax", "everywhere"): [
        (op, [at(0, 0.5, 1)], [[0, 0, 0]], {}) for op in ("Sign", "Ceil", "Floor", "Round", "Hardmax")
    ],
    ("Max, Min", "two operands tie"): [
        (op, [at(2, INF, -INF), at(2, INF, -INF)], [[0.5] * 3] * 2, {}) for op in ("Max", "Min")
    ],
    ("Max, Min", "more operands tie"): [
        (
            "Max",
            [at(2, 2), at(2, 2), at(2, 1), at(2, 0)],
            [[0.25, 0.5], [0.25, 0.5], [0.25, 0], [0.25, 0]],
            {},
        ),
        (
            "Min",
            [at(2, 2), at(2, 2), at(2, 3), at(2, 4)],
            [[0.25, 0.5], [0.25, 0.5], [0.25, 0], [0.25, 0]],
            {},
        ),
    ],
    ("ReduceMax, ReduceMin", "several elements tie"): [
        ("ReduceMax", [at(3, 1, 3)], [[0.5, 0, 0.5]], {}),
        ("ReduceMin", [at(1, 1, 3, 1, 1)], [[0.25, 0.25, 0, 0.25, 0.25]], {}),
    ],
    ("Clip", "x is equal to a bound"): [
        ("Clip", [at(-1, 2), np.array(-1.0), np.array(2.0)], [[1, 1], 0, 0], {}),
        ("Clip", [at(-1, -2), np.array(-1.0)], [[1, 0], 1], {}),
    ],
    ("Clip", "min > max"): [("Clip", [at(0, 5, -5, 1.5), np.array(2.0), np.array(1.0)], [[0] * 4, 0, 4], {})],
    ("Pow", "x = 0, k = 0"): [("Pow", [at(0), at(0)], [[0], [0]], {})],
    ("Pow", "x = 0, k ≥ 1"): [("Pow", [at(0, 0, 0), at(1, 1.5, 2)], [[1, 0, 0], [0, 0, 0]], {})],
    ("Pow", "x < 0, k whole"): [("Pow", [at(-2, -2), at(2, -1)], [[-4, -0.25], [NAN, NAN]], {})],
    ("Mod", "a is a multiple of b"): [("Mod", [at(6, -6), at(2, 2)], [[1, 1], [-3, 3]], {"fmod": 1})],
    ("Sqrt", "x = 0"): [("Sqrt", [at(0)], [[INF]], {})],
    ("Log, Reciprocal", "x = 0"): [("Log", [at(0)], [[INF]], {}), ("Reciprocal", [at(0)], [[-INF]], {})],
    ("Asin, Acosh", "x = 1"): [("Asin", [at(1)], [[INF]], {}), ("Acosh", [at(1)], [[INF]], {})],
    ("Where", "the operand not taken"): [
        ("Where", [np.array([True, False]), at(1, NAN), at(INF, 2)], [None, [1, 0], [0, 1]], {})
    ],
    ("ReduceL2", "a row of zeros"): [("ReduceL2", [at(0, 0)], [[0, 0]], {})],
    ("LpNormalization", "a row of zeros"): [("LpNormalization", [at(0, 0)], [[0, 0]], {"p": p}) for p in (1, 2)],
    ("ReduceProd", "one zero, or more"): [
        ("ReduceProd", [at(0, 2, 3)], [[6, 0, 0]], {}),
        ("ReduceProd", [at(0, 0, 3)], [[0, 0, 0]], {}),
    ],
    ("Unique", "a value that occurs several times"): [
        ("Unique", [at(2, 1, 2, 1)], [[1, 1, 0, 0]], {"sorted": s}) for s in (0, 1)
    ],
    ("ReduceLogSumExp", "a row of -∞"): [("ReduceLogSumExp", [at(-INF, -INF)], [[0, 0]], {})],
    ("ReduceLogSumExp", "an element +∞"): [("ReduceLogSumExp", [at(INF, 0)], [[NAN, 0]], {})],
    ("Softmax, LogSoftmax", "some elements -∞"): [
        ("Softmax", [at(-INF, 0, 0)], [[0, 0, 0]], {}),
        ("LogSoftmax", [at(-INF, 0, 0)], [[1, -0.5, -0.5]], {}),
    ],
    ("Softmax, LogSoftmax", "a row of -∞"): [
        (op, [at(-INF, -INF)], [[NAN, NAN]], {}) for op in ("Softmax", "LogSoftmax")
    ],
}
ROWS_OF_THREE = at(0, 1, 4, 0, 1, 4).reshape(1, 1, 2, 3)
ON_THEM = at(-1, 0, 0, 0, 1, 0).reshape(1, 1, 3, 2)  # points on each of these, from corner to corner
CORNERS = {"mode": "linear", "align_corners": 1}
PINS |= {
    ("GridSample", "linear, a point on an element"): [
        ("GridSample", [ROWS_OF_THREE, ON_THEM], [None, [1, 0, 3, 0, -4, 0]], CORNERS)
    ],
    ("GridSample", "linear with border or reflection, a point on an outermost element"): [
        ("GridSample", [ROWS_OF_THREE, ON_THEM], [None, [0, 0, 3, 0, 0, 0]], CORNERS | {"padding_mode": p})
        for p in ("border", "reflection")
    ],
    ("GridSample", "nearest"): [
        ("GridSample", [ROWS_OF_THREE, ON_THEM * 0.8], [None, [0] * 6], CORNERS | {"mode": "nearest"})
    ],
    ("RoiAlign", "a point on an element"): [
        ("RoiAlign", [ROWS_OF_THREE, at(1, 0.1, 2, 0.3).reshape(1, 4), np.array([0])], [None, [1.5, 0, 1.5, 0]], {})
    ],
    ("MaxPool", "several elements tie"): [
        (
            "MaxPool",
            [at(3, 3, 1, 3, np.inf, np.inf, -np.inf, -np.inf).reshape(1, 1, 8)],
            [[1, 0, 0, 1, 1, 0, 1, 0]],
            {"kernel_shape": [2], "strides": [2]},
        )
    ],
    ("MaxUnpool", "several elements with one index"): [
        (
            "MaxUnpool",
            [at(3, 4).reshape(1, 1, 2), np.array([[[1, 1]]])],
            [[0, 1]],
            {"kernel_shape": [2], "strides": [2]},
        )
    ],
}
LOSSES = "SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss"
ELSEWHERE = {  # rows that take more than one node to show: the test that pins each
    ("Resize, linear", "a place that roi or scales move is at an element"): "test_a_place_that_a_region_moves",
    ("Sqrt", "x = 0, cotangent 0"): "test_a_root_that_is_discarded",
    ("Div, Exp, Log, Pow, Reciprocal, Sqrt", "not finite there, and a Where discards it"): "test_what_a_where_discards",
    ("Softmax, LogSoftmax", "a row of -∞, the operand of a Where"): "test_a_masked_row_that_is_discarded",
    ("Dropout", "the ratio"): "test_the_ratio_of_dropout",
    ("Dropout", "ratio 1 in training"): "test_dropout_of_everything",
    (LOSSES, "an ignored target"): "test_ignored_targets",
    (LOSSES, "a mean over ignored targets only"): "test_ignored_targets",
    ("MaxRoiPool", "several elements tie"): "test_the_first_of_the_largest_in_a_region",
}
ALL = [(key, pin) for key, pins in PINS.items() for pin in pins]


def test_every_row_of_the_page_is_pinned() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|[^|]*\|$", PAGE.read_text(), re.MULTILINE)
    assert set(rows) - {("Operator", "Where")} == {*PINS, *ELSEWHERE}
    assert all(name in globals() for name in ELSEWHERE.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("pin", [p for _, p in ALL], ids=[f"{p[0]} {k[1]}" for k, p in ALL])
def test_convention(pin: tuple, dtype: type) -> None:
    op, operands, expected, attrs = pin
    feeds = {f"x{i}": x.astype(dtype) if x.dtype.kind == "f" else x for i, x in enumerate(operands)}
    try:
        primal = node_model(Case(op, operands, attrs), feeds, dtype=dtype)
        onnx.checker.check_model(primal, full_check=True)
    except (onnx.shape_inference.InferenceError, AssertionError):
        pytest.skip("the operator does not take this type")
    wrt = [f"x{i}" for i, e in enumerate(expected) if e is not None]
    wants = [e for e in expected if e is not None]
    derived = vjp(primal, wrt=wrt, of="y0")
    sig = signature(derived)
    shape = reference(primal, feeds)["y0"].shape
    feeds[sig.cotangents["y0"]] = np.ones(shape, dtype)
    if loads(primal):
        names, runtime = [sig.gradients[w] for w in wrt], session(derived)
        got = dict(zip(names, runtime.run(names, {i.name: feeds[i.name] for i in runtime.get_inputs()})))
    else:
        got = reference(derived, feeds)
    for w, want in zip(wrt, wants):
        value = got[sig.gradients[w]]
        np.testing.assert_allclose(value.ravel(), np.ravel(want).astype(float), rtol=2e-3, atol=1e-6)


def graph_of(nodes: list, inputs: dict, constants: dict, output: str) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(n, t, dims) for n, (t, dims) in inputs.items()]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in constants.items()]
    out = onnx.ValueInfoProto(name=output)
    graph = helper.make_graph(nodes, "g", infos, [out], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def test_a_root_that_is_discarded() -> None:
    """y = √x where x > 0, else 0: no NaN at 0, to second order."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["c"]),
        helper.make_node("Sqrt", ["x"], ["r"]),
        helper.make_node("Where", ["c", "r", "zero"], ["y"]),
    ]
    model = graph_of(nodes, {"x": (TensorProto.FLOAT, [3])}, {"zero": np.float32(0)}, "y")
    x = np.array([0, 4, 0.25], np.float32)
    first = grad(model, wrt="x", of="y")
    np.testing.assert_allclose(session(first).run(None, {"x": x})[0], [0, 0.25, 1])
    second = grad(first, wrt="x")
    np.testing.assert_allclose(session(second).run(None, {"x": x})[0], [0, -1 / 32, -2])


DISCARDED = {  # y = f(x) where 0 < x < 100, else 0: the nodes of f, f' and f"
    "log": ([("Log", ["x"])], lambda x: (1 / x, -1 / x**2)),
    "reciprocal": ([("Reciprocal", ["x"])], lambda x: (-1 / x**2, 2 / x**3)),
    "quotient": ([("Div", ["one", "x"])], lambda x: (-1 / x**2, 2 / x**3)),
    "root": ([("Sqrt", ["x"])], lambda x: (0.5 * x**-0.5, -0.25 * x**-1.5)),
    "power": ([("Pow", ["x", "half"])], lambda x: (0.5 * x**-0.5, -0.25 * x**-1.5)),
    "powers": ([("Pow", ["x", "halves"])], lambda x: (0.5 * x**-0.5, -0.25 * x**-1.5)),
    "exp": ([("Exp", ["x"])], lambda x: (np.exp(x), np.exp(x))),
    "chain": ([("Sqrt", ["x"]), ("Div", ["t0", "x"])], lambda x: (-0.5 * x**-1.5, 0.75 * x**-2.5)),
    "cast": ([("Log", ["x"]), ("Cast", ["t0"])], lambda x: (1 / x, -1 / x**2)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("f", DISCARDED)
def test_what_a_where_discards(f: str, dtype: type) -> None:
    """No NaN where f is not finite, to second order; and where the cotangent is 0 by chance, nothing is lost."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    steps, derivatives = DISCARDED[f]
    nodes = [
        helper.make_node(op, ins, [f"t{i}"], **({"to": kind} if op == "Cast" else {}))
        for i, (op, ins) in enumerate(steps)
    ]
    picks = [("Greater", ["x", "zero"], "low"), ("Less", ["x", "hundred"], "high"), ("And", ["low", "high"], "c")]
    nodes += [helper.make_node(op, ins, [out]) for op, ins, out in picks]
    nodes.append(helper.make_node("Where", ["c", f"t{len(steps) - 1}", "zero"], ["y"]))
    numbers = {"zero": 0, "one": 1, "half": 0.5, "halves": [0.5] * 4, "hundred": 100}
    model = graph_of(nodes, {"x": (kind, [4])}, {k: np.array(v, dtype) for k, v in numbers.items()}, "y")
    x, inside = np.array([0, -2, 1000, 2], dtype), np.array([0, 0, 0, 1])
    first, second = (inside * d for d in derivatives(np.array([1, 1, 1, 2.0])))
    back = vjp(model, wrt="x", of="y")
    tolerance = {"rtol": 5e-3 if dtype is np.float16 else 1e-6}
    ones = np.ones(4, dtype)
    np.testing.assert_allclose(session(back).run(["x_grad"], {"x": x, "y_cotangent": ones})[0], first, **tolerance)
    again = grad(back, wrt=["x", "y_cotangent"], of="x_grad")
    to_x, to_u = session(again).run(None, {"x": x, "y_cotangent": ones})
    np.testing.assert_allclose(to_x, second, **tolerance)
    np.testing.assert_allclose(to_u, first, **tolerance)
    to_x, to_u = session(again).run(None, {"x": x, "y_cotangent": 0 * ones})
    np.testing.assert_array_equal(to_x, 0)
    np.testing.assert_allclose(to_u, first, **tolerance)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("through", ["Identity", "Cast"])
def test_a_masked_row_that_is_discarded(op: str, through: str) -> None:
    """y = 0 where the whole row is masked, else softmax x: no NaN, in both modes and to second order."""
    nodes = [
        helper.make_node(op, ["x"], ["p"]),
        helper.make_node(through, ["p"], ["q"], **({"to": TensorProto.FLOAT} if through == "Cast" else {})),
        helper.make_node("IsNaN", ["q"], ["masked"]),
        helper.make_node("Where", ["masked", "zero", "q"], ["y"]),
    ]
    model = graph_of(nodes, {"x": (TensorProto.FLOAT, [2, 2])}, {"zero": np.float32(0)}, "y")
    feeds = {"x": np.array([[-INF, -INF], [0, 0]], np.float32), "y_cotangent": np.array([[1, 2], [0, 1]], np.float32)}
    back = vjp(model, wrt="x", of="y")
    _, g = session(back).run(None, feeds)
    np.testing.assert_allclose(g, [[0, 0], [-0.25, 0.25] if op == "Softmax" else [-0.5, 0.5]])
    push = jvp(model, wrt="x", of="y")
    _, moved = session(push).run(None, {"x": feeds["x"], "x_tangent": np.float32([[1, 2], [0, 1]])})
    np.testing.assert_allclose(moved, [[0, 0], [-0.25, 0.25] if op == "Softmax" else [-0.5, 0.5]])
    second = grad(back, wrt="x", of="x_grad")
    (h,) = session(second).run(None, feeds)
    np.testing.assert_array_equal(h[0], 0)
    assert np.isfinite(h).all()


def test_the_norm_of_a_row_of_zeros_to_second_order() -> None:
    nodes = [helper.make_node("ReduceL2", ["x", "axes"], ["y"], keepdims=0)]
    model = graph_of(nodes, {"x": (TensorProto.FLOAT, [2, 2])}, {"axes": ROW}, "y")
    push = jvp(grad(model, wrt="x", of="y"), wrt="x")
    x = np.array([[0, 0], [3, 4]], np.float32)
    (moved,) = session(push).run([signature(push).output_tangents["x_grad"]], {"x": x, "x_tangent": np.ones_like(x)})
    np.testing.assert_allclose(moved, [[0, 0], [4 / 125, -3 / 125]], atol=1e-7)


def dropout() -> onnx.ModelProto:
    nodes = [helper.make_node("Dropout", ["x", "r", "training"], ["y"], seed=1)]
    inputs = {"x": (TensorProto.FLOAT, [50]), "r": (TensorProto.FLOAT, [])}
    return graph_of(nodes, inputs, {"training": np.array(True)}, "y")


def test_the_ratio_of_dropout() -> None:
    (g,) = session(grad(dropout(), wrt="r", of="y")).run(
        None, {"x": np.ones(50, np.float32), "r": np.array(0.5, np.float32)}
    )
    assert g == 0


def test_dropout_of_everything() -> None:
    nodes = [helper.make_node("Dropout", ["x", "r", "training"], ["y"], seed=1)]
    constants = {"training": np.array(True), "r": np.array(1, np.float32)}
    model = grad(graph_of(nodes, {"x": (TensorProto.FLOAT, [50])}, constants, "y"), wrt="x", of="y")
    np.testing.assert_array_equal(reference(model, {"x": np.ones(50, np.float32)})["x_grad"], 0)


@pytest.mark.parametrize("op", LOSSES.split(", "))
@pytest.mark.parametrize("labels", [[1, -1], [-1, -1]])
def test_ignored_targets(op: str, labels: list) -> None:
    nodes = [helper.make_node(op, ["x", "t"], ["y"], ignore_index=-1)]
    model = graph_of(nodes, {"x": (TensorProto.FLOAT, [2, 3])}, {"t": np.array(labels)}, "y")
    loss, g = session(vjp(model, wrt="x", of="y")).run(
        None, {"x": np.eye(2, 3, dtype=np.float32), "y_cotangent": np.array(1, np.float32)}
    )
    assert np.isnan(loss) == (labels == [-1, -1])
    np.testing.assert_array_equal(g[1], 0)
    assert (g[0] == 0).all() == (labels == [-1, -1])


def test_a_place_that_a_region_moves() -> None:
    """Place i is 3·start + i·(end - start), at element i; the slopes to the right are 1, 2, 4 and none."""
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    nodes = [helper.make_node("Resize", ["x", "roi", "", "sizes"], ["y"], **attrs)]
    inputs = {"x": (TensorProto.FLOAT, [4]), "roi": (TensorProto.FLOAT, [2])}
    model = grad(graph_of(nodes, inputs, {"sizes": np.array([4])}, "y"), wrt="roi", of="y")
    (found,) = session(model).run(None, {"x": np.float32([1, 2, 4, 8]), "roi": np.float32([0, 1])})
    np.testing.assert_allclose(found, [1 * 3 + 2 * 2 + 4 * 1, 2 * 1 + 4 * 2], rtol=1e-6)


def test_the_first_of_the_largest_in_a_region() -> None:
    nodes = [helper.make_node("MaxRoiPool", ["x", "r"], ["y"], pooled_shape=[1, 1])]
    inputs = {"x": (TensorProto.FLOAT, [1, 1, 2, 2]), "r": (TensorProto.FLOAT, [1, 5])}
    model = vjp(graph_of(nodes, inputs, {}, "y"), wrt=["x", "r"], of="y")
    feeds = {"x": np.float32([[[[1, 5], [5, 5]]]]), "r": np.float32([[0, 0, 0, 1, 1]])}
    feeds["y_cotangent"] = np.ones((1, 1, 1, 1), np.float32)
    _, dx, dr = session(model).run(None, feeds)
    np.testing.assert_array_equal(dx.ravel(), [0, 1, 0, 0])
    assert not dr.any()

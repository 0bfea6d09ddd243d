"""ONNX Runtime's operators on quantized numbers: against its kernels, and straight through."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import straight_through, vjp
from onnxgrad.testing import Case, node_model, reference
from tests.rules.contrib import MICROSOFT, body, contrib, whole
from tests.rules.dtypes import session

RNG = np.random.default_rng(0)


def f32(x) -> np.ndarray:
    return np.asarray(x, np.float32)


def normal(*shape: int) -> np.ndarray:
    return f32(np.random.default_rng(3).standard_normal(shape))


def cases(dtype: type) -> list[Case]:
    """Of numbers of one type."""

    def numbers(*shape: int) -> np.ndarray:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return whole(*shape, low=low, high=high, dtype=dtype, seed=len(shape))

    def z(x) -> np.ndarray:
        return np.asarray(x, dtype)

    def case(op: str, inputs: list, attrs: dict | None = None, note: str = "plain", **more) -> Case:
        return contrib(op, inputs, attrs, f"{note} {np.dtype(dtype)}", fed=True, **more)

    x, y = [numbers(2, 3, 4), f32(0.03), z(5)], [f32(0.05), z(9)]
    image, last = [numbers(1, 3, 4, 5), *x[1:]], [numbers(1, 4, 5, 3), *x[1:]]
    a, w = [numbers(3, 4), f32(0.03), z(5)], [numbers(4, 5), f32(0.02), z(7)]
    columns = [f32([0.02, 0.01, 0.03, 0.04, 0.05]), z([7, 1, 2, 3, 4])]
    kernel = whole(4, 3, 3, 3, low=-127, high=127, dtype=np.int8)
    c = whole(5, low=-999, high=999, dtype=np.int32)
    bias = normal(5)
    return [
        case("QLinearAdd", [*x, numbers(3, 1), f32(0.02), z(9), *y]),
        case("QLinearMul", [*x, numbers(4), f32(0.02), z(9), *y]),
        case("QLinearSigmoid", [*x, f32(1 / 256), z(0)]),
        case("QLinearLeakyRelu", [*x, *y], {"alpha": 0.2}),
        case("QLinearSoftmax", [*x, f32(1 / 256), z(0)], {"opset": 13}),
        case("QLinearSoftmax", [*x, f32(1 / 256), z(0)], {"opset": 12, "axis": 1}, "over all behind"),
        case("QLinearGlobalAveragePool", [*image, *y]),
        case("QLinearGlobalAveragePool", [*last, *y], {"channels_last": 1}, "channels last"),
        case("QLinearAveragePool", [*image, *y], {"kernel_shape": [2, 3], "pads": [1, 1, 0, 0], "strides": [2, 1]}),
        case(
            "QLinearAveragePool",
            [*last, *y],
            {"kernel_shape": [2, 3], "pads": [1, 1, 0, 0], "count_include_pad": 1, "channels_last": 1},
            "channels last",
        ),
        case("QLinearConcat", [*y, *x, numbers(2, 1, 4), f32(0.02), z(1)], {"axis": 1}),
        case("QLinearWhere", [whole(2, 3, 1, high=2, dtype=np.bool_), *x, numbers(3, 4), f32(0.02), z(1), *y]),
        case("QLinearConv", [*image, kernel, f32(0.01), np.int8(0), *y], {"strides": [2, 1]}),
        case(
            "QLinearConv",
            [*last, kernel, f32([0.01, 0.02, 0.03, 0.04]), np.zeros(4, np.int8), *y, c[:4]],
            {"channels_last": 1, "pads": [1, 1, 1, 1]},
            "by channel",
        ),
        case("MatMulIntegerToFloat", [a[0], w[0], a[1], w[1], a[2], w[2], bias]),
        case("MatMulIntegerToFloat", [a[0], w[0], a[1], columns[0], a[2], columns[1]], note="by column"),
        case("MatMulIntegerToFloat", [a[0], w[0], f32([0.03]), w[1]], note="no zero points"),
        case("DynamicQuantizeMatMul", [normal(3, 4), *w, bias]),
        case("DynamicQuantizeMatMul", [normal(2, 3, 4), w[0], *columns], note="by column"),
        case("QGemm", [*a, *w, c], {"alpha": 1.5}),
        case("QGemm", [*a, *w, None, *y], note="quantized"),
        case("QGemm", [a[0].T, *a[1:], w[0].T, *columns, c, *y], {"transA": 1, "transB": 1}, "transposed"),
        case("DequantizeLinear", x),
        case("DequantizeLinear", [x[0], f32([0.03, 0.02, 0.01]), z([5, 6, 7])], {"axis": 1}, "by slice"),
        case("QuantizeLinear", [normal(2, 3, 4), *y]),
        case("QuantizeLinear", [normal(2, 3, 4), f32([0.02, 0.05]), z([5, 6])], {"axis": 0}, "by slice"),
    ]


def attending(note: str, *rest, scale=0.01, zero=7, attrs=None, **more) -> Case:
    operands = [whole(2, 4, 6), whole(6, 12, seed=1), normal(12), f32(0.02), f32(scale)]
    tail = [None, np.uint8(5), np.asarray(zero, np.uint8)]
    tail[: len(rest)] = rest
    return contrib("QAttention", [*operands, *tail], {"num_heads": 2, **(attrs or {})}, note, fed=True, **more)


MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
KERNELS = [
    *cases(np.uint8),
    *cases(np.int8),
    attending("plain"),
    attending("mask", MASK, attrs={"unidirectional": 1}),
    attending("by column", scale=np.linspace(0.01, 0.02, 12), zero=whole(12)),
    attending("past", None, np.uint8(5), np.uint8(7), normal(2, 2, 2, 3, 2), outputs=2),
]


def checked(case: Case, *, tolerance: float = 1e-5) -> None:
    """The body gives what the kernel gives: whole numbers but for a tie, floats to the last digits."""
    feeds = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    wanted = None
    for symbolic in (False, True):
        open_axes = {i: tuple(range(x.ndim)) for i, x in enumerate(case.inputs) if np.ndim(x) > 1}
        own = Case(**{**vars(case), "symbolic": open_axes})
        model = node_model(own, feeds, symbolic=symbolic, dtype=np.float32)
        given = {i.name: feeds[i.name] for i in model.graph.input}
        wanted = wanted or session(model).run(None, given)
        for got, want in zip(session(body(model)).run(None, given), wanted):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if want.dtype.kind == "f":
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
            else:
                assert want.min() < want.max(), "a saturated case shows nothing"
                assert np.abs(got.astype(int) - want).max() <= 1


@pytest.mark.parametrize("case", KERNELS, ids=[c.id for c in KERNELS])
def test_kernel(case: Case) -> None:
    checked(case)


def gates(direction: str, dtype: type, by_column: bool) -> Case:
    """An LSTM of 3 units, of small weights: 8 bits for what goes through it then cost little."""
    ways = 2 if direction == "bidirectional" else 1
    low, high, zero = (-127, 127, 0) if dtype is np.int8 else (0, 256, 128)
    shape = (ways, 12) if by_column else (ways,)
    scale, zeros = f32(np.full(shape, 0.004)), np.full(shape, zero, dtype)
    weights = [whole(ways, n, 12, low=low, high=high, dtype=dtype, seed=n) for n in (2, 3)]
    states = [normal(ways, 1, 3)] * 2
    operands = [normal(4, 1, 2), *weights, normal(ways, 24), None, *states, None, scale, zeros, scale, zeros]
    note = f"{direction} {np.dtype(dtype)}" + (", by column" if by_column else "")
    attrs = {"hidden_size": 3, "direction": direction}
    return contrib("DynamicQuantizeLSTM", operands, attrs, note, outputs=3, fed=True)


LSTMS = [
    gates("forward", np.int8, False),
    gates("reverse", np.uint8, True),
    gates("bidirectional", np.int8, True),
]


@pytest.mark.parametrize("case", LSTMS, ids=[c.note for c in LSTMS])
def test_lstm(case: Case) -> None:
    """The kernel rounds what goes through it to 8 bits, which is left out."""
    checked(case, tolerance=0.02)


@pytest.mark.parametrize("case", LSTMS, ids=[c.note for c in LSTMS])
def test_lstm_has_the_derivative_of_one_with_those_weights(case: Case) -> None:
    feeds = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    u = normal(4, len(feeds["x1"]), 1, 3)
    wrt = ["x0", "x3", "x5", "x6", "x8", "x10"]
    back = vjp(node_model(case, feeds, dtype=np.float32), wrt=wrt, of="y0")
    found = session(back).run([f"{n}_grad" for n in wrt], {**feeds, "y0_cotangent": u})
    units = []
    for i, n in ((1, 8), (2, 10)):
        width = [feeds[f"x{j}"].reshape(len(u[0]), 1, -1) for j in (n, n + 1)]
        units.append(feeds[f"x{i}"].astype(np.float32) - width[1])
        feeds[f"x{i}"] = (units[-1] * width[0]).transpose(0, 2, 1)
    plain = Case("LSTM", [feeds.get(f"x{i}") for i in range(7)], case.attrs, outputs=3, fed=True)
    kept = {n: v for n, v in feeds.items() if int(n[1:]) < 7}
    names = [*wrt[:4], "x1", "x2"]
    lstm = vjp(node_model(plain, kept, dtype=np.float32), wrt=names, of="y0")
    *wanted, dw, dr = session(lstm).run([f"{n}_grad" for n in names], {**kept, "y0_cotangent": u})
    for d, unit, scale in ((dw, units[0], feeds["x8"]), (dr, units[1], feeds["x10"])):
        each = (d.transpose(0, 2, 1) * unit).sum(1)
        wanted.append(each if scale.ndim == 2 else each.sum(1))
    for got, want, name in zip(found, wanted, wrt):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * max(1, np.abs(want).max()), err_msg=name)


def test_a_mean_is_as_defined() -> None:
    x = whole(2, 3, 4)
    case = contrib(
        "QLinearReduceMean", [x, f32(0.03), np.uint8(5), f32(0.02), np.uint8(9)], {"axes": [1], "keepdims": 0}
    )
    feeds = {f"x{i}": np.asarray(v) for i, v in enumerate(case.inputs)}
    model = body(node_model(Case(**{**vars(case), "fed": True}), feeds, dtype=np.float32))
    want = np.clip(np.round((0.03 * (x.astype(float) - 5)).mean(1) / 0.02) + 9, 0, 255)
    got = session(model).run(None, feeds)[0]
    assert got.dtype == np.uint8
    assert np.abs(got - want).max() <= 1


# --- straight through ------------------------------------------------------------------------------


def between(nodes: list[onnx.NodeProto], held: dict[str, np.ndarray], shape: list[int]) -> onnx.ModelProto:
    """x, quantized as q by s and z; `nodes`; p, dequantized as y."""
    first = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    last = helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"])
    constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in held.items()]
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([first, *nodes, last], "g", [info], [out], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


HELD = {"s": f32(0.05), "z": np.uint8(128), "w": whole(4, seed=5), "ws": f32(0.01), "wz": np.uint8(120)}


def made(op: str, *inputs: str, out: str = "p", **attrs) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [out], domain=MICROSOFT, **attrs)


W = (HELD["w"].astype(np.float64) - 120) * 0.01
STRAIGHT = {
    "add": ([made("QLinearAdd", "q", "s", "z", "w", "ws", "wz", "s", "z")], lambda x, u: u),
    "mul": ([made("QLinearMul", "q", "s", "z", "w", "ws", "wz", "s", "z")], lambda x, u: u * W),
    "leaky": ([made("QLinearLeakyRelu", "q", "s", "z", "s", "z", alpha=0.5)], lambda x, u: u * np.where(x < 0, 0.5, 1)),
    "concat": ([made("QLinearConcat", "s", "z", "q", "s", "z", "q", "s", "z", axis=0)], lambda x, u: u[:2] + u[2:]),
}


@pytest.mark.parametrize("way", STRAIGHT)
def test_straight_through(way: str) -> None:
    nodes, slope = STRAIGHT[way]
    model = between(nodes, HELD, [2, 4])
    x = f32(RNG.uniform(-1.5, 1.5, (2, 4)))
    y = session(model).run(None, {"x": x})[0]
    u = normal(*y.shape)
    with straight_through("QuantizeLinear"):
        back = vjp(model, wrt="x", of="y")
    got, gradient = session(back).run(["y", "x_grad"], {"x": x, "y_cotangent": u})
    np.testing.assert_allclose(got, y, atol=0.051)  # a tie may fall the other way
    assert (np.abs(y) < 6.3).all(), "nothing is saturated"
    rounded = np.round(x.astype(np.float64) / 0.05) * 0.05
    np.testing.assert_allclose(gradient, slope(rounded, u), rtol=1e-4, atol=1e-5)
    plain = session(vjp(model, wrt="x", of="y")).run(["x_grad"], {"x": x, "y_cotangent": u})[0]
    np.testing.assert_array_equal(plain, 0)


def test_numbers_of_another_type_between() -> None:
    """QGemm makes int8 of uint8: the tangent goes through."""
    gemm = made("QGemm", "q", "s", "z", "m", "ws", "wz", "", "s2", "z2")
    held = {**HELD, "m": whole(4, 3), "s2": f32(0.05), "z2": np.int8(0)}
    model = between([gemm], held, [2, 4])
    model.graph.node[-1].input[1:] = ["s2", "z2"]
    x, u = f32(RNG.uniform(-1, 1, (2, 4))), normal(2, 3)
    with straight_through("QuantizeLinear"):
        back = vjp(model, wrt="x", of="y")
    (gradient,) = session(back).run(["x_grad"], {"x": x, "y_cotangent": u})
    np.testing.assert_allclose(gradient, u @ ((held["m"].astype(np.float64) - 120) * 0.01).T, rtol=1e-4)


def test_many_sums_take_no_longer_than_few() -> None:
    """Sums of what was summed, of whole numbers that come from outside: each is looked at once."""
    names = ["q0", *(f"q{i}" for i in range(1, 60)), "p"]
    nodes = [made("QLinearAdd", a, "s", "z", a, "s", "z", "s", "z", out=b) for a, b in pairwise(names)]
    model = between(nodes, HELD, [2, 4])
    model.graph.input.append(helper.make_tensor_value_info("q0", TensorProto.UINT8, [2, 4]))
    with straight_through("QuantizeLinear"):
        back = vjp(model, wrt="s", of="y")
    assert back.graph.output


def test_products_with_rounded_activations() -> None:
    """DynamicQuantizeMatMul: that of the dequantized weights, and what the extrema do to the scale."""
    w = whole(4, 3)
    constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in {"w": w, "ws": f32(0.01)}.items()]
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(
        [made("DynamicQuantizeMatMul", "x", "w", "ws", out="y")],
        "g",
        [info],
        [helper.make_tensor_value_info("y", 1, None)],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x, u = f32(RNG.uniform(-1, 1, (5, 4))), normal(5, 3)
    with straight_through("QuantizeLinear"):
        (gradient,) = session(vjp(model, wrt="x")).run(["x_grad"], {"x": x, "y_cotangent": u})
    want = u @ (w * 0.01).T
    inner = (x > x.min()) & (x < x.max())
    np.testing.assert_allclose(gradient[inner], want[inner], rtol=1e-4)


@pytest.mark.parametrize("op", ["MatMulIntegerToFloat", "QGemm"])
def test_scales_of_weights(op: str) -> None:
    """A float result is linear in a scale: its values for unit scales are the Jacobian."""
    case = next(c for c in KERNELS if c.op == op and ("by column uint8" in c.note or c.note == "plain uint8"))
    at = 3 if op == "MatMulIntegerToFloat" else 4
    feeds = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    model = node_model(case, feeds, dtype=np.float32)
    u = normal(3, 5)
    (gradient,) = session(vjp(model, wrt=f"x{at}")).run([f"x{at}_grad"], {**feeds, "y0_cotangent": u})
    plain = body(model)

    def along(direction: np.ndarray) -> float:
        up, down = (reference(plain, {**feeds, f"x{at}": f32(s * direction)})["y0"] for s in (1, -1))
        return float(np.vdot(u, up - down)) / 2

    units = np.eye(feeds[f"x{at}"].size).reshape(-1, *feeds[f"x{at}"].shape)
    np.testing.assert_allclose(gradient.ravel(), [along(e) for e in units], rtol=1e-4)

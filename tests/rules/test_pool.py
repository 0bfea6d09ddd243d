"""Pooling up the ladder."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.testing import Case
from tests.rules import windowed
from tests.rules.ladder import ladder

BATCH = {0: (0,)}
POOLS = ("AveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool")
EVALUATORS = tuple(
    getattr(windowed, op) for op in (*POOLS, "Conv", "ConvTranspose", "GatherElements", "ScatterElements")
)


def case(op, x, *, note="", symbolic=True, order=1, **attrs):
    rng = np.random.default_rng(7)
    x = rng.permutation(np.prod(x)).reshape(x) / 7 - 2.03 if "Max" in op else x  # no two elements near each other
    # before opset 22 the onnx package infers a window in the padding that no runtime has
    opset = 22 if note.startswith(OUTSIDE) else 21
    given = {"symbolic": symbolic, "order": order, "evaluators": EVALUATORS, "outputs": 1, "opset": opset}
    return Case(op, [x], attrs, note=note, **given)


PADS = [0, 1, 1, 1]
OUTSIDE = "ceil, no window in the padding"
LATE = {"pads": [0, 0, 1, 1], "ceil_mode": 1}
WINDOWS = [
    ("", (2, 2, 5), {"kernel_shape": [2]}),
    ("tiles", (2, 2, 6), {"kernel_shape": [3], "strides": [3]}),
    ("tiles", (1, 2, 4, 6), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    ("rest", (1, 2, 5, 5), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("overlap", (1, 2, 5, 4), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    ("ceil", (1, 2, 5, 6), {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("ceil, padded", (1, 1, 4, 5), {"kernel_shape": [2, 3], "strides": [3, 2], "pads": [0, 1, 1, 1], "ceil_mode": 1}),
    (OUTSIDE, (1, 1, 3, 6), {**LATE, "kernel_shape": [2, 2], "strides": [3, 3]}),
    ("dilated", (1, 2, 5, 6), {"kernel_shape": [2, 3], "dilations": [3, 2], "pads": [1, 1, 0, 1]}),
    ("gaps", (1, 2, 5, 6), {"kernel_shape": [1, 2], "strides": [2, 3]}),
    ("same upper", (1, 2, 5, 4), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("same lower", (1, 2, 5, 4), {"kernel_shape": [3, 2], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ("same upper, steps of 1", (1, 2, 4, 3), {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"}),
    ("valid", (1, 2, 5, 4), {"kernel_shape": [3, 2], "strides": [2, 3], "auto_pad": "VALID"}),
    ("tiles", (1, 1, 2, 4, 2), {"kernel_shape": [1, 2, 2], "strides": [1, 2, 2]}),
    ("tiles", (1, 2, 4, 2, 3), {"kernel_shape": [2, 1, 3], "strides": [2, 1, 3]}),
    ("long tiles", (1, 1, 9, 4, 2), {"kernel_shape": [9, 2, 1], "strides": [9, 2, 1]}),
    ("", (1, 1, 3, 4, 3), {"kernel_shape": [2, 2, 2], "strides": [1, 2, 1], "pads": [0, 1, 0, 1, 0, 1]}),
]
INCLUDED = ("overlap", "ceil, padded", OUTSIDE, "dilated", "same upper", "same lower")

CASES = [
    *(case("MaxPool", x, note=note, order=1 + (i < 4), **attrs) for i, (note, x, attrs) in enumerate(WINDOWS)),
    case("MaxPool", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2], symbolic=BATCH, note="tiles, batch"),
    case("MaxPool", (2, 1, 2, 2, 4), kernel_shape=[2, 1, 2], strides=[2, 1, 2], symbolic=BATCH, note="tiles, batch"),
    case("MaxPool", (2, 2, 3, 4), kernel_shape=[2, 2], storage_order=1, note="column major"),
    *(case("AveragePool", x, note=note, order=1 + (i < 5), **attrs) for i, (note, x, attrs) in enumerate(WINDOWS)),
    *(
        case("AveragePool", x, note=f"{note}, padding counts", count_include_pad=1, **attrs)
        for note, x, attrs in WINDOWS
        if note in INCLUDED
    ),
    case("AveragePool", (2, 1, 4, 4), kernel_shape=[2, 2], strides=[2, 2], symbolic=BATCH, note="tiles, batch"),
    *(
        case("LpPool", x, note=note, order=1 + (i == 4), **attrs)
        for i, (note, x, attrs) in enumerate(WINDOWS)
        if "gaps" not in note
    ),
    case("LpPool", (1, 2, 4, 4), kernel_shape=[2, 3], p=1, note="p 1"),
    case("LpPool", (1, 2, 4, 4), kernel_shape=[2, 3], p=3, note="p 3", order=2),
    case("LpPool", (1, 2, 4, 4), kernel_shape=[2, 3], p=4, note="p 4"),
    case("GlobalMaxPool", (2, 2, 3), order=2),
    case("GlobalMaxPool", (2, 2, 3, 4)),
    case("GlobalAveragePool", (2, 2, 3), order=2),
    case("GlobalAveragePool", (2, 2, 3, 2)),
    case("GlobalLpPool", (2, 2, 3), order=2),
    case("GlobalLpPool", (2, 2, 3, 2), p=3, note="p 3"),
    case("GlobalLpPool", (2, 2, 3, 2), p=1, note="p 1"),
]
test_rule = ladder("pool", CASES)


@pytest.mark.parametrize("target", ["portable", "auto"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernel", [[2, 1, 3], [3, 2, 2], [9, 2, 1]], ids=str)
def test_max_pool_tiles_over_three_axes(kernel, tied, target):
    """In float32, where planes are first: each is reached, as with float64, which has no such lowering."""
    sizes = [2 * k for k in kernel]
    rng = np.random.default_rng(0)
    count = 4 * int(np.prod(sizes))
    x = (rng.integers(-1, 2, count) if tied else rng.permutation(count)).reshape(2, 2, *sizes)
    g = np.random.default_rng(1).standard_normal((2, 2, 2, 2, 2))
    found = []
    for dtype in (np.float32, np.float64):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=kernel, strides=kernel)
        x_info = helper.make_tensor_value_info("x", kind, ["N", 2, *sizes])
        y_info = helper.make_tensor_value_info("y", kind, None)
        graph = helper.make_graph([node], "pool", [x_info], [y_info])
        derived = vjp(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), wrt=["x"])
        feeds = {"x": x.astype(dtype), "y_cotangent": g.astype(dtype)}
        found.append(Session(derived, Options(target=target)).run(feeds)["x_grad"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("sizes", [(8,), ("L",)], ids=["known", "symbolic"])
@pytest.mark.parametrize("op", ["AveragePool", "Conv", "LpPool", "MaxPool"])
def test_same_padding_is_never_negative(op, sizes, mode):
    """Strides that leave gaps begin with the first row, in the derived model and in its gradient."""
    x = np.arange(1, 9, dtype=np.float32)[None, None]
    attributes = {"auto_pad": mode, "strides": [4], **({} if op == "Conv" else {"kernel_shape": [1]})}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, *sizes])]
    w = numpy_helper.from_array(np.full((1, 1, 1), 2, np.float32), "w")
    node = helper.make_node(op, ["x", "w"] if op == "Conv" else ["x"], ["y"], **attributes)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "gaps", inputs, outputs, [w] if op == "Conv" else [])
    derived = vjp(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), wrt=["x"])
    found = Session(derived).run({"x": x, "y_cotangent": np.float32([[[3, 5]]])})
    slope = 2 if op == "Conv" else 1
    np.testing.assert_allclose(found["y"], slope * x[..., ::4], rtol=1e-6)
    np.testing.assert_allclose(found["x_grad"], slope * np.float32([[[3, 0, 0, 0, 5, 0, 0, 0]]]), rtol=1e-6)

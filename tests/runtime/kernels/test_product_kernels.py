"""Products in C, of layers and cotangents of their weights, against numpy in float64 and the runtime's operators."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_products

pytestmark = needs_kernels


def product(op, m, n, leading=("K",), kind=1, **attributes):
    """Two derived ones: that of the weights [m, n] (or of a Gemm with transB, [n, m]), and of what ends in a Tanh."""
    shape = [n, m] if attributes.get("transB") else [m, n]
    infos = [helper.make_tensor_value_info("x", kind, [*leading, m]), helper.make_tensor_value_info("w", kind, shape)]
    nodes = [helper.make_node(op, ["x", "w"], ["h"], **attributes), helper.make_node("Tanh", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "product", infos, [helper.make_tensor_value_info("y", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return vjp(ir.from_proto(model), wrt=["w"])


def calls(model, left=1):
    found = [node for node in with_products(model).graph if (node.domain, node.op_type) == (DOMAIN, "Product")]
    return [node for node in found if node.attributes["left"].as_int() == left]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 191, 193, 500, 5000])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (43, 96), (300, 250), (4096, 1), (7, 608), (5, 31), (24, 48)], ids=str)
def test_against_float64(rows, m, n):
    model = product("MatMul", m, n)
    assert len(calls(model)) == (n > 1)
    feeds = {"x": normal(rows, m), "w": normal(m, n, seed=1) / m**0.5, "y_cotangent": normal(rows, n, seed=2)}
    found = [
        Session(model, Options(threads=t, target="native")).run(feeds)["w_grad"] for t in ((1, 2) if n > 1 else (1,))
    ]
    y = np.tanh(feeds["x"].astype(np.float64) @ feeds["w"])
    expected = feeds["x"].T.astype(np.float64) @ (feeds["y_cotangent"] * (1 - y**2))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5 * max(rows, 1) ** 0.5)
    np.testing.assert_array_equal(found[0], found[-1])


CASES = {
    "leading axes": (product("MatMul", 64, 96, ("N", 5)), 1),
    "Gemm": (product("Gemm", 64, 96), 1),
    "Gemm, transposed weights": (product("Gemm", 64, 96, transB=1), 1),
    "scaled": (product("Gemm", 64, 96, alpha=2.0), None),
    "columns between tiles": (product("MatMul", 640, 33), 0),
    "columns of half a tile": (product("MatMul", 192, 48), 1),
    "small": (product("MatMul", 4, 32), 1),
    "too small": (product("MatMul", 3, 32), 0),
    "float64": (product("MatMul", 64, 96, kind=11), 0),
    "unknown sizes": (product("MatMul", "M", 96), 0),
}


@pytest.mark.parametrize(("model", "count"), CASES.values(), ids=CASES)
def test_which_are_taken(model, count):
    assert count is None or len(calls(model)) == count
    rng = np.random.default_rng(0)
    known = {"N": 3, "K": 7, "M": 64}
    feeds = {
        v.name: rng.standard_normal([known.get(str(d), d) for d in v.shape or ()]).astype(v.dtype.numpy())
        for v in model.graph.inputs
    }
    expected = Session(model, Options(target="portable")).run(feeds)
    found = Session(model, Options(target="native")).run(feeds)
    np.testing.assert_allclose(found["w_grad"], expected["w_grad"], rtol=1e-4, atol=1e-5)


def test_infinity_and_nan_stay_where_they_are():
    model = product("MatMul", 64, 96)
    feeds = {"x": normal(9, 64), "w": normal(64, 96, seed=1), "y_cotangent": normal(9, 96, seed=2)}
    feeds["x"][3, 5], feeds["y_cotangent"][7, 95] = np.inf, np.nan
    found = Session(model, Options(target="native")).run(feeds)["w_grad"]
    wrong = np.zeros((64, 96), bool)
    wrong[5], wrong[:, 95] = True, True
    np.testing.assert_array_equal(~np.isfinite(found), wrong)


def test_left_out():
    model = product("MatMul", 64, 96)
    feeds = {"x": normal(9, 64), "w": normal(64, 96), "y_cotangent": normal(9, 96, seed=2)}
    plain = Session(model, Options(target="native", without=("products",))).run(feeds)
    np.testing.assert_allclose(
        plain["w_grad"], Session(model, Options(target="native")).run(feeds)["w_grad"], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(OnnxGradError, match="there is no pass 'product'"):
        Session(model, Options(without=("product",)))


def test_in_a_branch():
    """A product inside an If is one as well, and what the branch gives keeps its name."""
    x, g = (helper.make_tensor_value_info(n, 1, ["K", 64]) for n in "xg")
    flag = helper.make_tensor_value_info("flag", 9, [])
    result = helper.make_tensor_value_info("y", 1, [64, 64])
    branch = [helper.make_graph([helper.make_node("Gemm", ends, ["y"], transA=1)], "one", [], [result])
              for ends in (["x", "g"], ["g", "x"])]  # fmt: skip
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1])
    graph = helper.make_graph([node], "branches", [flag, x, g], [result])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    inside = [n.op_type for body in with_products(model).graphs() for n in body if n.domain == DOMAIN]
    assert inside == ["Product"] * 2


def layer(body, **shapes):
    """A model of that body, from inputs of these shapes to y."""
    ends = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({ends}) => (y) {{ {body} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize(("k", "n"), [(96, 64), (101, 250), (133, 608), (1024, 32)], ids=str)
@pytest.mark.parametrize("turned", [0, 1])
def test_layers_against_float64(k, n, turned):
    """Heights of tiles and their rests, pieces, and columns between tiles; few rows, and no row."""
    body = f"h = Gemm <transB = {turned}> (x, w, c) y = Relu (h)"
    model = layer(body, x=("N", k), w=(n, k) if turned else (k, n), c=(n,))
    assert [call.attributes["relu"].as_int() for call in calls(model, left=0)] == [1]
    feeds = {"w": normal(*((n, k) if turned else (k, n)), seed=1), "c": normal(n, seed=2)}
    w = feeds["w"].T if turned else feeds["w"]
    sessions = [Session(model, Options(threads=t, target="native")) for t in (1, 2)]
    for rows in (1000, 193, 96, 50, 23, 12, 9, 5, 4, 1, 0):
        x = normal(rows, k)
        found = [session.run(feeds | {"x": x})["y"] for session in sessions]
        expected = np.maximum(x.astype(np.float64) @ w + feeds["c"], 0)
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-6 * k)
        np.testing.assert_array_equal(*found)


TURNED = "t = Transpose <perm = [0, 2, 1]> (x) h = MatMul (t, w)"
TWICE = f"{TURNED} m = ReduceMax (t) y = Add (h, m)"

#: Operators, shapes, how many layers, and with which bias and ReLU.
LAYERS = {
    "plain": ("y = MatMul (x, w)", {}, [(False, 0)]),
    "of several axes": ("y = MatMul (x, w)", {"x": ("N", 5, 128)}, [(False, 0)]),
    "Transpose before": ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", {"w": (96, 128)}, [(False, 0)]),
    "Add behind": ("h = MatMul (x, w) y = Add (c, h)", {}, [(True, 0)]),
    "Add and Relu": ("h = MatMul (x, w) a = Add (h, c) y = Relu (a)", {}, [(True, 1)]),
    "Relu alone": ("h = Gemm (x, w) y = Relu (h)", {}, [(False, 1)]),
    "read twice": ("h = Gemm (x, w, c) r = Relu (h) y = Add (r, h)", {}, [(True, 0)]),
    "another operator": ("h = Gemm (x, w, c) y = Tanh (h)", {}, [(True, 0)]),
    "added to itself": ("h = MatMul (x, w) y = Add (h, h)", {}, [(False, 0)]),
    "Add of a column": ("h = MatMul (x, w) y = Add (h, c)", {"x": (96, 128), "c": (96, 1)}, [(False, 0)]),
    "bias for each row": ("y = Gemm (x, w, c)", {"c": ("N", 96)}, []),
    "scaled": ("y = Gemm <alpha = 2.0> (x, w, c)", {}, []),
    "bias scaled": ("y = Gemm <beta = 2.0> (x, w, c)", {}, []),
    "x transposed": ("y = Gemm <transA = 1> (x, w, c)", {"x": (128, 96)}, []),
    "columns between tiles": ("y = MatMul (x, w)", {"w": (128, 65)}, []),
    "few weights": ("y = MatMul (x, w)", {"x": ("N", 100), "w": (100, 32)}, []),
    "short rows": ("y = MatMul (x, w)", {"x": ("N", 95), "w": (95, 96)}, []),
    "short rows, transposed": (f"{TURNED} y = Relu (h)", {"x": ("N", 48, 20), "w": (48, 96)}, []),
    "these read twice": (TWICE, {"x": ("N", 48, 20), "w": (48, 96)}, [(False, 0)]),
    "shorter ones": (TWICE, {"x": ("N", 47, 20), "w": (47, 96)}, []),
    "long rows": ("y = MatMul (x, w)", {"x": ("N", 1025), "w": (1025, 64)}, []),
    "many weights": ("y = MatMul (x, w)", {"x": ("N", 1000), "w": (1000, 544)}, []),
    "few rows": ("y = MatMul (x, w)", {"x": (3, 21, 128)}, []),
    "constant weights": ("v = ConstantOfShape (s) y = MatMul (x, v)", {}, []),
    "a batch of matrices": ("y = MatMul (x, w)", {"x": (2, 96, 128), "w": (2, 128, 96)}, []),
    "other axes transposed": ("t = Transpose <perm = [0, 2, 1]> (w) y = MatMul (x, t)", {"w": (1, 96, 128)}, []),
}


@pytest.mark.parametrize(("body", "shapes", "expected"), LAYERS.values(), ids=LAYERS)
def test_which_layers_are_taken(body, shapes, expected):
    body = body.replace("v = ConstantOfShape (s)", "s = Constant <value_ints = [128, 96]> () v = ConstantOfShape (s)")
    shapes = {"x": ("N", 128), "w": (128, 96), "c": (96,)} | shapes
    model = layer(body, **shapes)
    made = [(call.inputs[2] is not None, call.attributes["relu"].as_int()) for call in calls(model, left=0)]
    if "ConstantOfShape" not in body:  # the runtime folds it later
        assert made == expected
    feeds = {
        name: normal(*(70 if d == "N" else d for d in shape), seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    feeds = {v.name: feeds[v.name] for v in model.graph.inputs if v.name in feeds}
    native, portable = (Session(model, Options(target=t)).run(feeds)["y"] for t in ("native", "portable"))
    np.testing.assert_allclose(native, portable, rtol=1e-4, atol=1e-4)


def test_infinity_and_nan_of_layers_stay_where_they_are():
    model = layer("h = Gemm (x, w, c) y = Relu (h)", x=("N", 128), w=(128, 96), c=(96,))
    for rows in (3, 40):
        feeds = {"x": normal(rows, 128), "w": abs(normal(128, 96, seed=1)), "c": normal(96, seed=2)}
        feeds["x"][1, 5], feeds["x"][2, 7], feeds["c"][9] = np.inf, np.nan, np.nan
        found = Session(model, Options(target="native")).run(feeds)["y"]
        wrong = np.zeros((rows, 96), bool)
        wrong[1], wrong[2], wrong[:, 9] = True, True, True
        np.testing.assert_array_equal(~np.isfinite(found), wrong)
        assert np.isnan(found[2]).all()
        assert np.isposinf(found[1, :9]).all()


def test_nothing_else_reads_what_is_looked_at():
    """A call that was only tried once counted as a reader of its operands."""
    model = layer("h = Gemm (x, w, c) y = Relu (h)", x=("N", 128), w=(128, 96), c=(96,))
    copy = with_products(model)
    assert copy is not model
    assert [len(v.uses()) for v in (*model.graph.inputs, *copy.graph.inputs)] == [1] * 6
    assert [n.op_type for n in copy.graph] == ["Product"]


def test_a_transpose_that_moves_nothing():
    """An idle Transpose of weights does not turn the product."""
    model = layer("t = Transpose <perm = [0, 1]> (w) y = MatMul (x, t)", x=("N", 128), w=(128, 128))
    feeds = {"x": normal(70, 128), "w": normal(128, 128, seed=1)}
    found = Session(model, Options(target="native")).run(feeds)["y"]
    np.testing.assert_allclose(found, feeds["x"] @ feeds["w"], rtol=1e-4, atol=1e-4)

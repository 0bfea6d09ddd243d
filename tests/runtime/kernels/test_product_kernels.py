"""Cotangents of weights of products in C, against numpy in float64 and the operators of the runtime."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels import with_products
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.twins import needs_compiler

pytestmark = needs_compiler


def product(op, m, n, leading=("K",), kind=1, **attributes):
    """Two derived ones: that of the weights [m, n] (or of a Gemm with transB, [n, m]), and of what ends in a Tanh."""
    shape = [n, m] if attributes.get("transB") else [m, n]
    infos = [helper.make_tensor_value_info("x", kind, [*leading, m]), helper.make_tensor_value_info("w", kind, shape)]
    nodes = [helper.make_node(op, ["x", "w"], ["h"], **attributes), helper.make_node("Tanh", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "product", infos, [helper.make_tensor_value_info("y", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return vjp(ir.from_proto(model), wrt=["w"])


def calls(model):
    return [node for node in with_products(model).graph if (node.domain, node.op_type) == (DOMAIN, "ProductGrad")]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 191, 193, 500, 5000])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (43, 96), (300, 250), (4096, 1), (7, 608)], ids=str)
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
    "small": (product("MatMul", 32, 32), 0),
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
    with pytest.raises(OnnxGradError, match="there is no rewrite 'product'"):
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
    assert inside == ["ProductGrad"] * 2

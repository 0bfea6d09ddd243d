"""Large outputs that are views of other results: the session returns views of arrays, with the same bits."""

import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16

from onnxgrad import Function, vjp
from onnxgrad.backend import BackendRep
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime import result_views as views

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
#: Text of the outputs and nodes, and the outputs that become views.
CASES = {
    "reshape": ("{t}[6,2] y", "p = MatMul(x, w) y = Reshape(p, shape)", ["y"]),
    "two views": ("{t}[6,2,1] y", "p = MatMul(x, w) q = Reshape(p, shape) y = Unsqueeze(q, last)", ["y"]),
    "flattened": ("{t}[1,12] y", "p = MatMul(x, w) q = Unsqueeze(p, first) y = Flatten(q)", ["y"]),
    "identity": ("{t}[4,3] y", "p = MatMul(x, w) y = Identity(p)", ["y"]),
    "operand read elsewhere": ("{t}[6,2] y, {t}[4,3] z", "p = MatMul(x, w) y = Reshape(p, shape) z = Neg(p)", ["y"]),
    "operand an output": ("{t}[6,2] y, {t}[4,3] p", "p = MatMul(x, w) y = Reshape(p, shape)", []),
    "two views of one": (
        "{t}[6,2] y, {t}[6,2] z", "p = MatMul(x, w) y = Reshape(p, shape) z = Reshape(p, shape)", ["y"],
    ),
    "read as well": ("{t}[6,2] y, {t}[6,2] z", "p = MatMul(x, w) y = Reshape(p, shape) z = Neg(y)", []),
    "of an input": ("{t}[2,4] y", "y = Reshape(x, turned)", []),
    "of unknown size": ("{t}[N,2] y", "p = MatMul(x, w) y = Reshape(p, shape)", []),
    "in a branch": (
        "{t}[6,2] y",
        "p = MatMul(x, w) y = If(yes) <then_branch = a () => ({t}[6,2] b) {{ b = Reshape(p, shape) }},"
        " else_branch = c () => ({t}[6,2] d) {{ q = Neg(p) d = Reshape(q, shape) }}>",
        [],
    ),
}  # fmt: skip


def model(case, dtype="float"):
    outputs, nodes, _ = CASES[case]
    return onnx.parser.parse_model(
        f"""{HEAD} m ({dtype}[4,2] x, {dtype}[2,3] w, bool yes) => ({outputs.format(t=dtype)})
        <int64[2] shape = {{6, 2}}, int64[2] turned = {{2, 4}}, int64[1] last = {{2}}, int64[1] first = {{0}}>
        {{ {nodes.format(t=dtype)} }}"""
    )


def feeds(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((4, 2)).astype(dtype),
        "w": rng.standard_normal((2, 3)).astype(dtype),
        "yes": np.array(True),
    }


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(views, "_LARGE", 1)


@pytest.mark.parametrize("target", ["portable", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_graph_as_it_is(case, target, of_any_size):
    proto = model(case)
    before = proto.SerializeToString()
    session = Session(proto, Options(target=target))
    plain = Session(proto, Options(target=target, without=("result_views",)))
    found, expected = session.run(feeds()), plain.run(feeds())
    assert [*session.shapes] == CASES[case][2]
    assert not plain.shapes
    assert proto.SerializeToString() == before
    assert [*found] == session.outputs == [*expected]
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    for name in expected:  # one output alone
        assert session.run(feeds(), [name])[name].tobytes() == expected[name].tobytes()


@pytest.mark.parametrize(("text", "dtype"), [("float16", np.float16), ("double", np.float64), ("bfloat16", bfloat16)])
def test_results_of_other_types(text, dtype, of_any_size):
    fed = feeds(dtype)
    session = Session(model("reshape", text))
    expected = Session(model("reshape", text), Options(without=("result_views",))).run(fed)["y"]
    assert [*session.shapes] == ["y"]
    assert session.run(fed)["y"].tobytes() == expected.tobytes()


def test_an_empty_result(of_any_size):
    proto = onnx.parser.parse_model(
        f"{HEAD} m (float[0,2] x, float[2,3] w) => (float[3,0] y)"
        "<int64[2] shape = {3, 0}> { p = MatMul(x, w) y = Reshape<allowzero = 1>(p, shape) }"
    )
    fed = {"x": np.zeros((0, 2), np.float32), "w": np.ones((2, 3), np.float32)}
    assert Session(proto).run(fed)["y"].shape == (3, 0)


def test_small_results_stay():
    assert not Session(model("reshape")).shapes


def test_readers_of_sessions(of_any_size):
    """A function, and the interface of backends, return the declared shapes."""
    f, fed = Function(model("reshape")), feeds()
    assert f(fed["x"], fed["w"], fed["yes"]).shape == (6, 2)
    assert BackendRep(model("reshape")).run(fed)[0].shape == (6, 2)
    assert BackendRep(model("reshape")).run([fed["x"].tolist(), fed["w"], fed["yes"]])[0].shape == (6, 2)


def test_gradients_of_a_convolution():
    """The cotangent of the weights ends in a Reshape, which is left out."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((160, 128, 1, 1)).astype(np.float32)
    proto = onnx.parser.parse_model(
        f"{HEAD} m (float[1,128,2,2] x, float[160,128,1,1] w) => (float[1,160,2,2] y) {{ y = Conv(x, w) }}"
    )
    fed = {"x": rng.standard_normal((1, 128, 2, 2)).astype(np.float32), "w": w}
    derived = vjp(proto, wrt=["w"])
    g = rng.standard_normal((1, 160, 2, 2)).astype(np.float32)
    (cotangent,) = {v.name for v in derived.graph.input} - {"x", "w"}
    session = Session(derived)
    (gradient,) = [n for n in session.outputs if n != "y"]
    found = session.run({**fed, cotangent: g})[gradient]
    assert session.shapes == {gradient: w.shape}
    want = np.einsum("nohw,nihw->oi", g.astype(np.float64), fed["x"].astype(np.float64)).reshape(w.shape)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)

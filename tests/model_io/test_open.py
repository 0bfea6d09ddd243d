"""Opening and returning models: kinds, functions, weights, training information, dimensions."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onnxgrad import BadInput, grad, vjp
from onnxgrad.model_io import load_model, open_model, save_model, to_proto, training_info
from tests.models import assert_no_traps, assert_sound, mlp, model, normal, run, value

# --- local functions --------------------------------------------------------------------------------


def _softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def _leaky(x, slope):
    return np.tanh(np.where(x < 0, slope * x, x))


#: a model with functions, and what its outputs are
FUNCTIONS = {
    "nested, with default attributes": (
        """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y, float[3,4] z) {
          y = l.f<alpha=0.5>(x)
          z = l.f(y) }
        <opset_import: ["" : 17, "l" : 1], domain: "l"> f <alpha: float = 0.25>(a) => (b) {
          t = LeakyRelu<alpha: float = @alpha>(a)
          b = l.h(t) }
        <opset_import: ["" : 17], domain: "l"> h (a) => (b) { b = Tanh(a) }""",
        lambda x: [_leaky(x, 0.5), _leaky(_leaky(x, 0.5), 0.25)],
    ),
    "another opset": (
        """<ir_version: 8, opset_import: ["" : 18, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y) { y = l.f(x) }
        <opset_import: ["" : 11], domain: "l"> f (a) => (b) { b = Softmax<axis=0>(a) }""",
        lambda x: [_softmax(x)],
    ),
    "graphs inside that shadow names": (
        """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y, float[3,4] z) {
          t = Identity(x)
          y = l.f(t)
          z = l.f(y) }
        <opset_import: ["" : 17], domain: "l"> f (a) => (b) {
          c = Constant<value = bool {1}>()
          b = If (c) <then_branch = g1 () => (t) { x = Neg(a)
            t = Relu(x) }, else_branch = g2 () => (q) { q = Abs(a) }> }""",
        lambda x: [np.maximum(-x, 0), np.maximum(-np.maximum(-x, 0), 0)],
    ),
    "an input handed through": (
        """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y, float[3,4] z) { y, z = l.f(x) }
        <opset_import: ["" : 17], domain: "l"> f (a) => (a, b) { b = Tanh(a) }""",
        lambda x: [x, np.tanh(x)],
    ),
    "an optional input left out": (
        """<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y) { y = l.f(x) }
        <opset_import: ["" : 17], domain: "l"> f (a, low) => (b) { b = Clip(a, low) }""",
        lambda x: [x],
    ),
}


@pytest.mark.parametrize(("text", "expected"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_local_functions_are_inlined(text, expected):
    source = parser.parse_model(text)
    inlined = open_model(source).close()
    assert not inlined.functions
    assert "l" not in {o.domain for o in inlined.opset_import}
    assert_sound(inlined)
    x = normal(3, 4)
    for got, want in zip(run(inlined, {"x": x}).values(), expected(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_function_with_the_name_of_a_standard_operator_is_not_that_operator():
    source = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y) { y = l.Tanh(x) }
        <opset_import: ["" : 18], domain: "l"> Tanh (a) => (b) { b = Mul(a, a) }"""
    )
    x = normal(3, 4)
    np.testing.assert_allclose(run(grad(source, wrt="x"), {"x": x})["x_grad"], 2 * x, rtol=1e-6)


def test_names_of_function_weights_are_made_unique():
    """A weight of a nested graph that shadows a value of the model gets a new name, here only."""
    source = parser.parse_model(FUNCTIONS["graphs inside that shadow names"][0])
    branch = source.functions[0].node[1].attribute[0].g
    branch.node[0].input[0] = "y"
    branch.initializer.append(numpy_helper.from_array(np.full((3, 4), 2, np.float32), "y"))
    before = source.SerializeToString()
    inlined = open_model(source).close()
    assert source.SerializeToString() == before
    assert_sound(inlined)
    assert run(inlined, {"x": normal(3, 4)})["z"].max() == 0  # relu(-2)


def test_the_long_name_of_the_default_domain():
    text = """<ir_version: 8, opset_import: ["ai.onnx" : 11]>
        g (float[3,4] x) => (float[3,4] y) { y = ai.onnx.Softmax<axis=0>(x) }"""
    x = normal(3, 4)
    raised = open_model(parser.parse_model(text)).close()
    assert_sound(raised)
    np.testing.assert_allclose(run(raised, {"x": x})["y"], _softmax(x), rtol=1e-5)


def test_text_formats(tmp_path):
    save_model(mlp(), tmp_path / "m.textproto")
    assert (tmp_path / "m.textproto").read_text().startswith("ir_version: 10")
    assert vjp(tmp_path / "m.textproto", wrt="w") == vjp(mlp(), wrt="w")


def test_a_recursive_function_is_refused():
    text = """<ir_version: 8, opset_import: ["" : 18, "l" : 1]> g (float[3] x) => (float[3] y) { y = l.f(x) }
        <opset_import: ["" : 18, "l" : 1], domain: "l"> f (a) => (b) { b = l.f(a) }"""
    with pytest.raises(BadInput, match="inline"):
        open_model(parser.parse_model(text))


# --- kinds, and the caller's model ------------------------------------------------------------------


def test_the_kind_that_comes_in_comes_out(tmp_path):
    source = mlp()
    onnx.save(source, tmp_path / "m.onnx")
    from_proto = vjp(source, wrt="w")
    from_path = vjp(tmp_path / "m.onnx", wrt="w")
    from_ir = vjp(ir.from_proto(source), wrt="w")
    assert isinstance(from_proto, onnx.ModelProto)
    assert isinstance(from_path, onnx.ModelProto)
    assert isinstance(from_ir, ir.Model)
    assert from_proto == from_path == ir.to_proto(from_ir)
    assert vjp(str(tmp_path / "m.onnx"), wrt="w") == from_path
    with pytest.raises(BadInput, match="not a dict"):
        vjp({}, wrt="w")


@pytest.mark.parametrize("text", [*(text for text, _ in FUNCTIONS.values()), None], ids=[*FUNCTIONS, "mlp"])
def test_the_callers_model_is_unchanged_byte_for_byte(text):
    source = parser.parse_model(text) if text else mlp(11)
    held = ir.from_proto(source)
    proto_before, ir_before = source.SerializeToString(), ir.to_proto(held).SerializeToString()
    for _ in range(2):
        first, second = open_model(source), open_model(held)
        for opened in (first, second):  # and then do what one likes with the private copies
            for name in list(opened.model.graph.initializers):
                opened.model.graph.initializers[name].shape = None
            for node in opened.model.graph:
                for v in node.outputs:
                    v.dtype = ir.DataType.DOUBLE
                    v.metadata_props["touched"] = "yes"
            opened.model.graph.inputs[0].dtype = ir.DataType.DOUBLE
            opened.model.metadata_props["touched"] = "yes"
        assert source.SerializeToString() == proto_before
        assert ir.to_proto(held).SerializeToString() == ir_before


def test_graph_inputs_that_are_initializers_too():
    """The way of IR version 3: the weight is an input with a default, and stays one."""
    source = mlp(9)
    source.ir_version = 3
    source.graph.input.extend([value("w", [3, 2]), value("b", [2])])
    derived = grad(source, wrt=["w", "x"])
    assert [i.name for i in derived.graph.input] == ["x", "w", "b"]
    assert "w" in {t.name for t in derived.graph.initializer}
    assert_sound(derived)
    x, w = normal(4, 3), normal(3, 2)
    default, given = run(derived, {"x": x}), run(derived, {"x": x, "w": w})
    slope = 2 * np.tanh(x @ w + [0.1, -0.2]) * (1 - np.tanh(x @ w + [0.1, -0.2]) ** 2)
    np.testing.assert_allclose(given["w_grad"], x.T @ slope, rtol=1e-4, atol=1e-5)
    assert not np.allclose(default["w_grad"], given["w_grad"])


def test_weights_in_constant_nodes():
    w = normal(3, 2)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w, "anything")),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    derived = vjp(model(nodes, [value("x", ["N", 3])], [value("y", ["N", 2])]), wrt="w")
    assert_sound(derived)
    assert derived.graph.node[0].op_type == "Constant"
    x, u = normal(4, 3), normal(4, 2)
    got = run(derived, {"x": x, "y_cotangent": u})
    np.testing.assert_allclose(got["w_grad"], x.T @ u, rtol=1e-5)
    np.testing.assert_allclose(got["y"], x @ w, rtol=1e-5)


@pytest.mark.parametrize("linear", [True, False])
def test_sparse_initializers_become_dense(linear):
    source = mlp()
    dense = np.zeros((3, 2), np.float32)
    dense[[0, 2], [1, 0]] = [2.0, -3.0]
    values = numpy_helper.from_array(np.array([2.0, -3.0], np.float32), "w")
    at = np.array([1, 4]) if linear else np.array([[0, 1], [2, 0]])
    del source.graph.initializer[0]
    source.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(at.astype(np.int64), "w_at"), [3, 2])
    )
    before = source.SerializeToString()
    derived = vjp(source, wrt="w")
    assert source.SerializeToString() == before
    assert not derived.graph.sparse_initializer
    held = next(t for t in derived.graph.initializer if t.name == "w")
    np.testing.assert_array_equal(numpy_helper.to_array(held), dense)


# --- training information ---------------------------------------------------------------------------


def _with_training(opset: int = 21) -> onnx.ModelProto:
    source = mlp(opset)
    info = source.training_info.add()
    grad_node = helper.make_node(
        "Gradient", ["w", "x"], ["w_grad"], domain="ai.onnx.preview.training", xs=["w"], zs=["x"], y="y"
    )
    step = [grad_node, helper.make_node("Sub", ["w", "w_grad"], ["w_new"])]
    info.algorithm.CopyFrom(helper.make_graph(step, "step", [], [value("w_new", [3, 2])]))
    info.update_binding.add(key="w", value="w_new")
    return source


def test_training_information_is_carried_across(tmp_path):
    source = _with_training()
    onnx.save(source, tmp_path / "m.onnx")
    for came in (source, tmp_path / "m.onnx"):
        assert list(vjp(came, wrt="w").training_info) == list(source.training_info)
    held = load_model(tmp_path / "m.onnx")
    derived = vjp(held, wrt="w")
    assert training_info(derived) == list(source.training_info)
    assert training_info(derived)[0] is not training_info(held)[0]
    save_model(derived, tmp_path / "d.onnx")
    assert list(onnx.load(tmp_path / "d.onnx").training_info) == list(source.training_info)
    assert to_proto(derived) == onnx.load(tmp_path / "d.onnx")


def test_names_of_training_information_are_not_taken():
    """The graphs will be concatenated: `w_grad` is a value of the algorithm already."""
    derived = vjp(_with_training(), wrt="w")
    assert [o.name for o in derived.graph.output] == ["y", "w_grad_1"]


def test_training_information_about_lost_values_is_dropped_with_a_warning():
    source = _with_training()
    source.training_info[0].update_binding.add(key="b", value="nowhere")
    with pytest.warns(UserWarning, match="refers to nowhere"):
        assert not vjp(source, wrt="w").training_info
    fixed = _with_training()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    with pytest.warns(UserWarning, match="refers to y"):  # nothing needs the output, and grad drops it
        assert not grad(fixed, wrt="w").training_info


def test_training_information_in_old_forms_is_refused():
    source = _with_training(12)
    source.training_info[0].algorithm.node.append(helper.make_node("Softmax", ["w_new"], ["q"]))
    with pytest.raises(BadInput, match="training information that uses"):
        vjp(source, wrt="w")


def test_the_guard_against_traps_sees_them():
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="add")
    bad = model([node], [value("x", [3])], [value("y", [3])])
    with pytest.raises(AssertionError, match="racy"):
        assert_no_traps(bad)


def test_a_pad_that_names_its_axes_names_none_afterwards():
    """ONNX Runtime's transpose optimizer takes its pads for those of all axes."""
    text = """
        <ir_version: 10, opset_import: ["": 21]>
        g (float[2, 3, 4, 5] x, int64[P] p, int64[A] a) => (float[W, H, C, N] y)
        <int64[2] fixed = {1, 2}, int64[1] axis = {-1}, int64[4] both = {3, 0, 0, 1}, int64[2] two = {2, -3}> {
            t = Transpose <perm = [0, 2, 3, 1]> (x)
            u = Pad (t, fixed, , axis)
            v = Pad (u, both, , two)
            w = Pad (v, p, , a)
            y = Transpose <perm = [3, 2, 1, 0]> (w)
        }"""
    primal = onnx.parser.parse_model(text)
    derived = vjp(primal, wrt="x")
    assert_no_traps(derived)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 4, 5), np.float32), "p": np.int64([1, 2, 0, 3]), "a": np.int64([0, -2])}
    want = ReferenceEvaluator(primal).run(None, feeds)[0]
    g = rng.standard_normal(want.shape, np.float32)
    got = run(derived, feeds | {"y_cotangent": g})
    np.testing.assert_array_equal(got["y"], want)
    mask = ReferenceEvaluator(primal).run(None, feeds | {"x": np.arange(1, 121, dtype=np.float32).reshape(2, 3, 4, 5)})
    places = np.argsort(mask[0].ravel())[-120:]  # where each element of x went
    np.testing.assert_array_equal(got["x_grad"].ravel(), g.ravel()[places])


# --- dimensions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["?", "None", "unknown", "-1", -1])
def test_dimensions_that_exporters_do_not_know_promise_nothing(unknown):
    """Two of them need not be equal: here the gradient of b is a sum over the axis along which it was repeated."""
    source = model(
        [helper.make_node("Mul", ["a", "b"], ["y"])],
        [value("a", [unknown, unknown]), value("b", [unknown, unknown])],
        [value("y", [unknown, unknown])],
    )
    feeds = {"a": np.float32([[1, 2, 3], [4, 5, 6]]), "b": np.float32([[1], [2]])}
    got = run(vjp(source, wrt=["a", "b"]), feeds | {"y_cotangent": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(got["b_grad"], [[6], [15]])
    np.testing.assert_array_equal(got["a_grad"], [[1, 1, 1], [2, 2, 2]])


def test_names_of_dimensions_that_are_no_expressions():
    source = model(
        [helper.make_node("Mul", ["a", "b"], ["y"])],
        [value("a", ["batch size", "x:0"]), value("b", ["batch size", "batch_size"])],
        [value("y", ["batch size", "x:0"])],
    )
    derived = vjp(source, wrt="b")
    assert_sound(derived)
    dims = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in derived.graph.input}
    assert dims["a"] == ["batch_size_1", "x_0"]
    assert dims["b"] == ["batch_size_1", "batch_size"]


def test_the_weights_of_a_convolution_tell_the_rank_of_its_operand():
    """The result of a Squeeze inside an If has no rank; exporters write ``x.squeeze(-1)`` that way."""
    text = """
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2, T] x, bool c) => (float[N, 1, U] y) <float[1, 2, 2] w = {1, 2, 3, 4}, int64[1] last = {-1}> {
            h = If (c) <then_branch = a () => (float q) { s = Unsqueeze (x, last) q = Squeeze (s, last) },
                        else_branch = b () => (float r) { r = Neg (x) }>
            y = Conv (h, w)
        }"""
    source = onnx.parser.parse_model(text)
    for node in source.graph.node[0].attribute:
        node.g.output[0].type.tensor_type.ClearField("shape")
    x = np.random.default_rng(0).standard_normal((1, 2, 3), np.float32)
    got = run(vjp(source, wrt="x"), {"x": x, "c": np.array(False), "y_cotangent": np.ones((1, 1, 2), np.float32)})
    np.testing.assert_allclose(got["x_grad"], [[[-1, -3, -2], [-3, -7, -4]]])


def test_an_output_declared_with_a_wrong_rank():
    """ONNX Runtime runs such models with a warning; the cotangent has the rank that there is."""
    text = """
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2] x) => (float[1, S] y) <int64[1] one = {1}, int64[1] two = {2}> {
            n = Shape <start = 0, end = 1> (x)
            s = Concat <axis = 0> (n, one, two)
            h = Reshape (x, s)
            y = Reshape (h, s)
        }"""
    derived = vjp(onnx.parser.parse_model(text), wrt="x")
    assert_sound(derived)
    x = np.ones((3, 2), np.float32)
    got = run(derived, {"x": x, "y_cotangent": 2 * x.reshape(3, 1, 2)})
    np.testing.assert_array_equal(got["x_grad"], 2 * x)


def test_nodes_in_another_order_are_sorted(tmp_path):
    """As ONNX Runtime does: exporters write such files."""
    turned = mlp()
    nodes = list(turned.graph.node)
    del turned.graph.node[:]
    turned.graph.node.extend(reversed(nodes))
    onnx.save(turned, tmp_path / "turned.onnx")
    feeds = {"x": normal(4, 3)}
    expected = run(grad(mlp(), wrt=["w"], of="y"), feeds)["w_grad"]
    for source in (turned, load_model(tmp_path / "turned.onnx")):
        np.testing.assert_array_equal(run(grad(source, wrt=["w"], of="y"), feeds)["w_grad"], expected)
    turned.graph.node[-1].input[0] = "t"  # a circle
    with pytest.raises(BadInput, match="form a cycle"):
        open_model(ir.from_proto(turned))

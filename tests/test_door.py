"""What comes in and goes out of the door: kinds, files, opsets, functions, weights, training information."""

from __future__ import annotations

import itertools
import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onnxgrad import BadInput, grad, vjp
from onnxgrad.door import load_model, open_model, save_model, saving, to_proto, training_info
from tests.models import assert_no_traps, assert_sound, mlp, model, run, value

# --- raising the opset ------------------------------------------------------------------------------

_rng = np.random.default_rng(0)


def f(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare", "LogSum"]


def _cases():
    """(operator, opset, operands, attributes, options) of every operator whose form changed since opset 7."""
    for opset, op in itertools.product((7, 11, 12), ("Softmax", "LogSoftmax", "Hardmax")):
        for axis in (None, 0, 1, 2, *([-1] if opset >= 11 else [])):
            yield op, opset, [f(2, 3, 4)], {} if axis is None else {"axis": axis}, {}
    for opset in (7, 11, 12):
        yield "Squeeze", opset, [f(1, 3, 1)], {"axes": [0]}, {}
        yield "Unsqueeze", opset, [f(3, 4)], {"axes": [0, 3]}, {}
        yield "Split", opset, [f(6, 2)], {"split": [2, 4]}, {"outputs": 2}
        yield "Split", opset, [f(2, 6)], {"axis": 1}, {"outputs": 3}
        for op in REDUCTIONS:
            yield f"Reduce{op}", opset, [np.abs(f(2, 3, 4))], {"axes": [0, 2], "keepdims": 0}, {}
            yield f"Reduce{op}", opset, [np.abs(f(2, 3))], {"axes": [1]}, {}
            yield f"Reduce{op}", opset, [np.abs(f(2, 3))], {}, {}
    yield "Split", 13, [f(2, 6)], {"axis": 1}, {"outputs": 3}
    yield "Split", 17, [f(6, 2), np.array([2, 4])], {}, {"outputs": 2, "fixed": {1}}
    for opset in (13, 14, 15, 16, 17):
        yield "ReduceMean", opset, [f(2, 3)], {"axes": [-1]}, {}
    for opset in (7, 9):
        yield "Slice", opset, [f(4, 5)], {"starts": [1, -3], "ends": [3, 100], "axes": [0, 1]}, {}
        yield "Slice", opset, [f(4, 5)], {"starts": [1], "ends": [3]}, {}
    yield "TopK", 7, [f(3, 5)], {"k": 2, "axis": 0}, {"outputs": 2, "types": [T.FLOAT, T.INT64]}
    yield "TopK", 10, [f(3, 5), np.array([2])], {}, {"outputs": 2, "types": [T.FLOAT, T.INT64], "fixed": {1}}
    for opset in (7, 10):
        yield "Pad", opset, [f(2, 3)], {"pads": [0, 1, 1, 0], "value": 1.5}, {}
        yield "Pad", opset, [f(2, 3)], {"pads": [0, 1, 1, 0], "mode": "reflect"}, {}
        yield "Clip", opset, [f(3, 4)], {"min": -0.5, "max": 0.5}, {}
        yield "Clip", opset, [f(3, 4)], {"max": 0.5}, {}
        yield "Clip", opset, [f(3, 4)], {}, {}
        yield "Dropout", opset, [f(3, 4)], {"ratio": 0.4}, {}
    yield "Clip", 7, [f(3, 4).astype(np.float64)], {"min": -0.5}, {"types": [T.DOUBLE]}
    yield "Pad", 7, [f(2, 3).astype(np.float64)], {"pads": [1, 0, 0, 2], "value": 0.5}, {"types": [T.DOUBLE]}
    yield "Clip", 10, [f(3, 4).astype(np.float16)], {"max": 0.5}, {"types": [T.FLOAT16]}
    for mode in ("nearest", "linear"):
        yield "Upsample", 7, [f(1, 2, 3, 3)], {"scales": [1.0, 1.0, 2.0, 3.0], "mode": mode}, {}
        yield (
            "Upsample",
            9,
            [f(1, 2, 3, 3), np.array([1, 1, 2, 2.5], np.float32)],
            {"mode": mode},
            {"fixed": {1}},
        )
        for scales in ([1, 1, 2, 2.5], [1, 1, 0.6, 0.5], [1, 1, 0.7, 0.35], [1, 1, 1.3, 1.7]):
            operands = [f(1, 2, 7, 7), np.array(scales, np.float32)]
            yield "Resize", 10, operands, {"mode": mode}, {"fixed": {1}}
        operands = [f(1, 2, 4, 4), np.array([], np.float32), np.array([1, 1, 0.6, 0.5], np.float32)]
        yield "Resize", 11, operands, {"mode": mode}, {"fixed": {1, 2}}
    for opset in (7, 9, 13, 14):
        yield (
            "BatchNormalization",
            opset,
            [f(2, 3, 4), np.abs(f(3)), f(3), f(3), np.abs(f(3))],
            {"epsilon": 1e-3},
            {},
        )
    yield "Gemm", 7, [f(2, 3), f(3, 4), f(4)], {"alpha": 0.5, "beta": 2.0}, {}
    yield "Scatter", 9, [f(3, 3), np.array([[0, 1, 2]]), f(1, 3)], {"axis": 0}, {}
    boxes = [f(1, 2, 8, 8), np.array([[0, 0, 5, 5.0]], np.float32), np.array([0])]
    yield "RoiAlign", 10, boxes, {"output_height": 3, "output_width": 3, "sampling_ratio": 2}, {}
    yield "MaxPool", 7, [f(1, 2, 6, 6)], {"kernel_shape": [2, 2], "strides": [2, 2]}, {}
    yield "AveragePool", 7, [f(1, 2, 6, 6)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, {}
    yield "Conv", 7, [f(1, 2, 6, 6), f(3, 2, 3, 3)], {"kernel_shape": [3, 3]}, {}
    yield "LSTM", 7, [f(3, 2, 4), f(1, 20, 4), f(1, 20, 5)], {"hidden_size": 5}, {"outputs": 3}
    yield "MeanVarianceNormalization", 9, [f(2, 3, 4, 4)], {}, {}
    one_hot = [np.array([1, -1, 0, 3, 2]), np.array([3]), np.array([0.5, 2], np.float32)]
    yield "OneHot", 9, one_hot, {}, {"fixed": {1, 2}}
    yield "Flatten", 7, [f(2, 3, 4)], {"axis": 2}, {}
    yield "Concat", 7, [f(2, 3), f(2, 3)], {"axis": 1}, {}


def _one_node(op, opset, operands, attrs, options, symbolic):
    inputs, weights, feeds = [], {}, {}
    for i, x in enumerate(operands):
        if i in options.get("fixed", ()):
            weights[f"x{i}"] = x
            continue
        feeds[f"x{i}"] = x
        dims = [f"d{i}_{k}" for k in range(x.ndim)] if symbolic else x.shape
        inputs.append(value(f"x{i}", dims, helper.np_dtype_to_tensor_dtype(x.dtype)))
    count = options.get("outputs", 1)
    types = options.get("types", [T.FLOAT] * count)
    node = helper.make_node(op, [f"x{i}" for i in range(len(operands))], [f"y{i}" for i in range(count)], **attrs)
    outs = [value(f"y{i}", None, t) for i, t in enumerate(types)]
    return model([node], inputs, outs, weights, opset=opset, ir_version=7), feeds


CASES = list(_cases())


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[0]}-{c[1]}" for i, c in enumerate(CASES)])
def test_raising_keeps_the_outputs(case, symbolic):
    source, feeds = _one_node(*case, symbolic)
    want = run(source, feeds)
    before = source.SerializeToString()
    raised = open_model(source).close()
    assert source.SerializeToString() == before
    assert raised.opset_import[0].version == 18
    if all(o.type.tensor_type.HasField("shape") for o in raised.graph.output):
        assert_sound(raised)
    for name, got in run(raised, feeds).items():
        assert got.dtype == want[name].dtype
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-5)


def test_cases_cover_every_form_that_changed():
    """An operator that lost an attribute or was withdrawn since opset 7 needs a case."""
    covered = {case[0] for case in CASES} | {"Scan"}  # Scan 8 is refused
    history: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= 18:
            history.setdefault(schema.name, []).append(schema)
    for name, versions in history.items():
        versions.sort(key=lambda s: s.since_version)
        old = [s for s in versions if s.since_version <= 7] or versions[:1]
        lost = set(old[-1].attributes) - set(versions[-1].attributes)
        if (lost or versions[-1].deprecated) and len(versions) > 1:
            assert name in covered, f"{name} lost {lost}"


@pytest.mark.parametrize("opset", range(7, 18))
def test_gradients_of_old_models(opset):
    """A model of old forms differentiates at every opset as its new form does."""
    attrs = {"axes": [1]} if opset < 13 else {}
    inputs = ["s"] if opset < 13 else ["s", "axes"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Unsqueeze", ["h"] if opset < 13 else ["h", "axes"], ["u"], **attrs),
        helper.make_node("Tanh", ["u"], ["s"]),
        helper.make_node("Squeeze", inputs, ["y"], **attrs),
    ]
    weights = {"w": f(3, 2)} | ({} if opset < 13 else {"axes": np.array([1])})
    old = model(nodes, [value("x", ["N", 3])], [value("y", ["N", 2])], weights, opset=opset, ir_version=7)
    derived = grad(old, wrt=["x", "w"])
    assert_sound(derived)
    x = f(4, 3)
    got = run(derived, {"x": x})
    slope = 1 - np.tanh(x @ weights["w"]) ** 2
    np.testing.assert_allclose(got["x_grad"], slope @ weights["w"].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], x.T @ slope, rtol=1e-5, atol=1e-6)


def test_newer_opsets_stay():
    for opset in (18, 21, 23):
        assert vjp(mlp(opset), wrt="w").opset_import[0].version == opset


def _text(body: str, opset: int, inputs: str = "float[2,3] x", outputs: str = "y") -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 7, opset_import: ["" : {opset}]> g ({inputs}) => (float[a,b] {outputs}) {{ {body} }}'
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (_text("y = Relu(x)", 6), "opset 6.*\n.*hint"),
        (_text("y = Foo(x)", 9), "Foo node .*no such operator"),
        (_text("y = Relu(x)", 99), "opset 99"),
        (_text("y, m = Dropout(x)\n q = Cast<to=1>(m)", 10, outputs="q"), "Dropout .*mask"),
        (_text("y = BatchNormalization<spatial=0>(x, x, x, x, x)", 7), "spatial=0"),
        (_text("y, a, b, c, d = BatchNormalization(x, x, x, x, x)", 9, outputs="c"), "saved statistics"),
        (
            _text('y = Resize<coordinate_transformation_mode="tf_half_pixel_for_nn">(x, x, x)', 11),
            "tf_half_pixel",
        ),
        (_text("y = Resize(x, s)", 10, "float[2,3] x, float[2] s"), "scales are not constant"),
    ],
)
def test_what_cannot_be_raised_is_refused(source, says):
    with pytest.raises(BadInput, match=says):
        open_model(source)


def test_training_batch_normalization_of_old_opsets():
    """More than one output meant training: the batch normalizes, and moves the statistics."""
    x, mean, var = f(5, 3, 2), f(3), np.abs(f(3))
    node = helper.make_node(
        "BatchNormalization",
        ["x", "s", "b", "m", "v"],
        ["y", "m2", "v2", "sm", "sv"],
        epsilon=1e-5,
        momentum=0.8,
    )
    outs = [value("y", [5, 3, 2]), value("m2", [3]), value("v2", [3])]
    weights = {"s": np.ones(3, np.float32), "b": np.zeros(3, np.float32), "m": mean, "v": var}
    old = model([node], [value("x", [5, 3, 2])], outs, weights, opset=9, ir_version=7)
    got = run(open_model(old).close(), {"x": x})
    m, v = x.mean((0, 2)), x.var((0, 2))
    np.testing.assert_allclose(got["y"], (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5), atol=1e-4)
    np.testing.assert_allclose(got["m2"], 0.8 * mean + 0.2 * m, atol=1e-5)


def test_nested_graphs_are_raised_too():
    source = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 12]>
        g (float[3,4] x, int64 n) => (float[3,4] y) {
          cond = Constant<value = bool {1}>()
          y = Loop(n, cond, x) <body = b (int64 i, bool ci, s) => (bool co, t) {
            co = Identity(ci)
            u = Softmax<axis=0>(s)
            t = Add(u, s) }> }"""
    )
    feeds = {"x": f(3, 4), "n": np.array(3)}
    raised = open_model(source).close()
    assert_sound(raised)
    np.testing.assert_allclose(run(raised, feeds)["y"], run(source, feeds)["y"], rtol=1e-5)


def test_raising_keeps_names_docs_and_metadata():
    source = _text("[sq] y = Softmax<axis=0>(x)", 11)
    source.graph.node[0].doc_string = "why"
    source.graph.node[0].metadata_props.add(key="k", value="v")
    source.metadata_props.add(key="author", value="me")
    source.graph.doc_string, source.producer_name = "graph doc", "someone"
    raised = open_model(source).close()
    node = next(n for n in raised.graph.node if n.name == "sq")
    assert (node.doc_string, node.metadata_props[0].value) == ("why", "v")
    assert [(p.key, p.value) for p in raised.metadata_props] == [("author", "me")]
    assert (raised.graph.doc_string, raised.producer_name) == ("graph doc", "someone")


def test_ir_version_is_one_that_runtimes_load():
    assert vjp(_text("y = Relu(x)", 9), wrt="x").ir_version == 8
    assert vjp(mlp(), wrt="w").ir_version == 10


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
    x = f(3, 4)
    for got, want in zip(run(inlined, {"x": x}).values(), expected(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_function_with_the_name_of_a_standard_operator_is_not_that_operator():
    source = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "l" : 1]>
        g (float[3,4] x) => (float[3,4] y) { y = l.Tanh(x) }
        <opset_import: ["" : 18], domain: "l"> Tanh (a) => (b) { b = Mul(a, a) }"""
    )
    x = f(3, 4)
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
    assert run(inlined, {"x": f(3, 4)})["z"].max() == 0  # relu(-2)


def test_the_long_name_of_the_default_domain():
    text = """<ir_version: 8, opset_import: ["ai.onnx" : 11]>
        g (float[3,4] x) => (float[3,4] y) { y = ai.onnx.Softmax<axis=0>(x) }"""
    x = f(3, 4)
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
    x, w = f(4, 3), f(3, 2)
    default, given = run(derived, {"x": x}), run(derived, {"x": x, "w": w})
    slope = 2 * np.tanh(x @ w + [0.1, -0.2]) * (1 - np.tanh(x @ w + [0.1, -0.2]) ** 2)
    np.testing.assert_allclose(given["w_grad"], x.T @ slope, rtol=1e-4, atol=1e-5)
    assert not np.allclose(default["w_grad"], given["w_grad"])


def test_weights_in_constant_nodes():
    w = f(3, 2)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w, "anything")),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    derived = vjp(model(nodes, [value("x", ["N", 3])], [value("y", ["N", 2])]), wrt="w")
    assert_sound(derived)
    assert derived.graph.node[0].op_type == "Constant"
    x, u = f(4, 3), f(4, 2)
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


# --- files ------------------------------------------------------------------------------------------


def _bad_files(tmp_path):
    whole = mlp().SerializeToString()
    no_opset = mlp()
    no_opset.ClearField("opset_import")
    broken = mlp()
    broken.graph.node[0].input[0] = "nowhere"
    twice = mlp()
    twice.graph.node[1].output[0] = "h"
    cycle = mlp()
    cycle.graph.node[0].input[0] = "t"
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "text": b"This is not a model, but a letter.\n" * 10,
        "random": np.random.default_rng(1).bytes(2000),
        "zeros": bytes(500),
        "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
        "no opset": no_opset.SerializeToString(),
        "reads nothing": broken.SerializeToString(),
        "defined twice": twice.SerializeToString(),
        "a cycle": cycle.SerializeToString(),
    }


@pytest.mark.parametrize("kind", list(_bad_files(None)))
def test_files_that_are_no_model(tmp_path, kind):
    path = tmp_path / "bad.onnx"
    path.write_bytes(_bad_files(tmp_path)[kind])
    with pytest.raises(BadInput):
        vjp(path, wrt="w")


def test_every_truncation_is_refused(tmp_path):
    """Wherever the file was cut, it is never taken for a (smaller) model."""
    whole = mlp().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            vjp(path, wrt="w")


def test_directories_and_missing_files(tmp_path):
    with pytest.raises(BadInput, match="is a directory"):
        vjp(tmp_path, wrt="w")
    with pytest.raises(BadInput, match="there is no file"):
        vjp(tmp_path / "none.onnx", wrt="w")


def _external(tmp_path, size=3000):
    source = mlp()
    big = np.arange(size * 2, dtype=np.float32).reshape(size, 2) / size
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(big, "w"))
    source.graph.input[0].type.tensor_type.shape.dim[1].dim_value = size
    path = tmp_path / "big.onnx"
    onnx.save(source, path, save_as_external_data=True, location="big.data", size_threshold=100)
    return path, big


def test_external_data_is_read_lazily_and_written_again(tmp_path):
    path, big = _external(tmp_path)
    held = load_model(path)
    tensor = held.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    derived = vjp(held, wrt=["w", "x"])
    assert derived.graph.initializers["w"].const_value is tensor
    assert tensor.raw is None, "the weight was read"
    out = tmp_path / "sub" / "out.onnx"
    out.parent.mkdir()
    files = save_model(derived, out)
    assert [p.name for p in files] == ["out.onnx", "out.onnx.data"]
    assert sorted(os.listdir(out.parent)) == ["out.onnx", "out.onnx.data"]
    np.testing.assert_array_equal(load_model(out).graph.initializers["w"].const_value.numpy(), big)
    onnx.checker.check_model(str(out), full_check=True)


def test_a_path_with_external_data_gives_a_model_that_holds_its_weights(tmp_path):
    path, big = _external(tmp_path)
    derived = vjp(path, wrt="w")
    held = next(t for t in derived.graph.initializer if t.name == "w")
    assert held.data_location == T.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(held), big)


def test_saving_over_the_source(tmp_path):
    path, big = _external(tmp_path)
    os.rename(tmp_path / "big.data", tmp_path / "big.onnx.data")
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = "big.onnx.data" if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())
    save_model(vjp(load_model(path), wrt="w"), path)
    again = load_model(path)
    np.testing.assert_array_equal(again.graph.initializers["w"].const_value.numpy(), big)
    assert "w_grad" in {o.name for o in again.graph.outputs}


def test_external_data_that_is_missing_or_cut_off(tmp_path):
    path, _ = _external(tmp_path)
    data = (tmp_path / "big.data").read_bytes()
    (tmp_path / "big.data").write_bytes(data[:-1])
    with pytest.raises(BadInput, match="cut off"):
        load_model(path)
    (tmp_path / "big.data").unlink()
    with pytest.raises(BadInput, match="does not exist"):
        load_model(path)


def test_a_message_whose_weights_are_elsewhere(tmp_path, monkeypatch):
    """Weights may stay behind their reference; what has to be looked into is asked for."""
    path, _ = _external(tmp_path)
    bare = onnx.load(path, load_external_data=False)
    derived = vjp(bare, wrt="w")
    held = next(t for t in derived.graph.initializer if t.name == "w")
    assert list(held.external_data) == list(bare.graph.initializer[0].external_data)
    onnx.save(mlp(), path, save_as_external_data=True, location="small.data", size_threshold=0)
    with pytest.raises(BadInput, match="pass the path"):
        vjp(onnx.load(path, load_external_data=False), wrt="w")


class _Huge(ir.ExternalTensor):
    """A weight that must never be read."""

    def numpy(self):
        raise AssertionError("the weight was read")


def _huge_model() -> ir.Model:
    source = ir.from_proto(mlp(12))
    rows = 500_000_000
    source.graph.inputs[0].shape = ir.Shape(["N", rows])
    weight = source.graph.initializers["w"]
    weight.shape = ir.Shape([rows, 2])
    weight.const_value = _Huge("none.data", 0, rows * 8, ir.DataType.FLOAT, shape=ir.Shape([rows, 2]), name="w")
    return source


def test_more_than_two_gigabytes_never_go_through_one_protobuf():
    """4 GB of weights that cannot even be read: raised from opset 12 and differentiated."""
    derived = vjp(_huge_model(), wrt=["w", "x"])
    assert isinstance(derived, ir.Model)
    assert isinstance(derived.graph.initializers["w"].const_value, _Huge)


def test_a_path_to_more_than_two_gigabytes_is_refused_with_the_remedy(tmp_path, monkeypatch):
    path, _ = _external(tmp_path)
    monkeypatch.setattr("onnxgrad.door.opening.PROTOBUF_LIMIT", 20_000)
    with pytest.raises(BadInput, match=r"onnx_ir\.load\(path\)"):
        vjp(path, wrt="w")
    assert isinstance(vjp(ir.load(path), wrt="w"), ir.Model)


def test_large_models_are_saved_with_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "EXTERNAL_FROM", 1000)
    derived = ir.from_proto(mlp())
    derived.graph.initializers["w"].const_value = ir.tensor(np.ones((3000, 2), np.float32), name="w")
    files = save_model(derived, tmp_path / "m.onnx")
    assert [p.name for p in files] == ["m.onnx", "m.onnx.data"]
    assert isinstance(derived.graph.initializers["w"].const_value, ir.Tensor), "the model in memory has changed"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    save_model(mlp(), path)
    before = path.read_bytes()
    monkeypatch.setattr(saving, "to_proto", lambda model: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BadInput, match="No space left"):
        save_model(ir.from_proto(mlp(18)), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.onnx"]
    with pytest.raises(BadInput, match="cannot write"):
        save_model(mlp(), tmp_path / "no" / "m.onnx")
    with pytest.raises(BadInput, match="is a directory"):
        save_model(mlp(), tmp_path)


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
    """What a Squeeze inside an If leaves has no rank; exporters write ``x.squeeze(-1)`` that way."""
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

"""Models of old opsets, raised at the door."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, parser

from onnxgrad import BadInput, Function, grad, vjp
from onnxgrad.model_io import open_model
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer
from tests.models import assert_sound, mlp, model, normal, run, value
from tests.training.models import blobs, classifier

# --- raising the opset ------------------------------------------------------------------------------

REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare", "LogSum"]


def _cases():
    """(operator, opset, operands, attributes, options) of every operator whose form changed since opset 7."""
    for opset, op in itertools.product((7, 11, 12), ("Softmax", "LogSoftmax", "Hardmax")):
        for axis in (None, 0, 1, 2, *([-1] if opset >= 11 else [])):
            yield op, opset, [normal(2, 3, 4)], {} if axis is None else {"axis": axis}, {}
    for opset in (7, 11, 12):
        yield "Squeeze", opset, [normal(1, 3, 1)], {"axes": [0]}, {}
        yield "Unsqueeze", opset, [normal(3, 4)], {"axes": [0, 3]}, {}
        yield "Split", opset, [normal(6, 2)], {"split": [2, 4]}, {"outputs": 2}
        yield "Split", opset, [normal(2, 6)], {"axis": 1}, {"outputs": 3}
        for op in REDUCTIONS:
            yield f"Reduce{op}", opset, [np.abs(normal(2, 3, 4))], {"axes": [0, 2], "keepdims": 0}, {}
            yield f"Reduce{op}", opset, [np.abs(normal(2, 3))], {"axes": [1]}, {}
            yield f"Reduce{op}", opset, [np.abs(normal(2, 3))], {}, {}
    yield "Split", 13, [normal(2, 6)], {"axis": 1}, {"outputs": 3}
    yield "Split", 17, [normal(6, 2), np.array([2, 4])], {}, {"outputs": 2, "fixed": {1}}
    for opset in (13, 14, 15, 16, 17):
        yield "ReduceMean", opset, [normal(2, 3)], {"axes": [-1]}, {}
    for opset in (7, 9):
        yield "Slice", opset, [normal(4, 5)], {"starts": [1, -3], "ends": [3, 100], "axes": [0, 1]}, {}
        yield "Slice", opset, [normal(4, 5)], {"starts": [1], "ends": [3]}, {}
    yield "TopK", 7, [normal(3, 5)], {"k": 2, "axis": 0}, {"outputs": 2, "types": [T.FLOAT, T.INT64]}
    yield "TopK", 10, [normal(3, 5), np.array([2])], {}, {"outputs": 2, "types": [T.FLOAT, T.INT64], "fixed": {1}}
    for opset in (7, 10):
        yield "Pad", opset, [normal(2, 3)], {"pads": [0, 1, 1, 0], "value": 1.5}, {}
        yield "Pad", opset, [normal(2, 3)], {"pads": [0, 1, 1, 0], "mode": "reflect"}, {}
        yield "Clip", opset, [normal(3, 4)], {"min": -0.5, "max": 0.5}, {}
        yield "Clip", opset, [normal(3, 4)], {"max": 0.5}, {}
        yield "Clip", opset, [normal(3, 4)], {}, {}
        yield "Dropout", opset, [normal(3, 4)], {"ratio": 0.4}, {}
    yield "Clip", 7, [normal(3, 4).astype(np.float64)], {"min": -0.5}, {"types": [T.DOUBLE]}
    yield "Pad", 7, [normal(2, 3).astype(np.float64)], {"pads": [1, 0, 0, 2], "value": 0.5}, {"types": [T.DOUBLE]}
    yield "Clip", 10, [normal(3, 4).astype(np.float16)], {"max": 0.5}, {"types": [T.FLOAT16]}
    for mode in ("nearest", "linear"):
        yield "Upsample", 7, [normal(1, 2, 3, 3)], {"scales": [1.0, 1.0, 2.0, 3.0], "mode": mode}, {}
        yield (
            "Upsample",
            9,
            [normal(1, 2, 3, 3), np.array([1, 1, 2, 2.5], np.float32)],
            {"mode": mode},
            {"fixed": {1}},
        )
        for scales in ([1, 1, 2, 2.5], [1, 1, 0.6, 0.5], [1, 1, 0.7, 0.35], [1, 1, 1.3, 1.7]):
            operands = [normal(1, 2, 7, 7), np.array(scales, np.float32)]
            yield "Resize", 10, operands, {"mode": mode}, {"fixed": {1}}
        operands = [normal(1, 2, 4, 4), np.array([], np.float32), np.array([1, 1, 0.6, 0.5], np.float32)]
        yield "Resize", 11, operands, {"mode": mode}, {"fixed": {1, 2}}
    for scales in ([1, 1, 2.3, 1.7], [1, 1, 0.6, 0.35]):
        half = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
        operands = [normal(1, 2, 7, 7), np.array([], np.float32), np.array(scales, np.float32)]
        yield "Resize", 11, operands, half, {"fixed": {1, 2}}
    for opset in (7, 9, 13, 14):
        yield (
            "BatchNormalization",
            opset,
            [normal(2, 3, 4), np.abs(normal(3)), normal(3), normal(3), np.abs(normal(3))],
            {"epsilon": 1e-3},
            {},
        )
    yield "Gemm", 7, [normal(2, 3), normal(3, 4), normal(4)], {"alpha": 0.5, "beta": 2.0}, {}
    yield "Scatter", 9, [normal(3, 3), np.array([[0, 1, 2]]), normal(1, 3)], {"axis": 0}, {}
    boxes = [normal(1, 2, 8, 8), np.array([[0, 0, 5, 5.0]], np.float32), np.array([0])]
    yield "RoiAlign", 10, boxes, {"output_height": 3, "output_width": 3, "sampling_ratio": 2}, {}
    yield "MaxPool", 7, [normal(1, 2, 6, 6)], {"kernel_shape": [2, 2], "strides": [2, 2]}, {}
    yield "AveragePool", 7, [normal(1, 2, 6, 6)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, {}
    yield "Conv", 7, [normal(1, 2, 6, 6), normal(3, 2, 3, 3)], {"kernel_shape": [3, 3]}, {}
    yield "LSTM", 7, [normal(3, 2, 4), normal(1, 20, 4), normal(1, 20, 5)], {"hidden_size": 5}, {"outputs": 3}
    yield "MeanVarianceNormalization", 9, [normal(2, 3, 4, 4)], {}, {}
    one_hot = [np.array([1, -1, 0, 3, 2]), np.array([3]), np.array([0.5, 2], np.float32)]
    yield "OneHot", 9, one_hot, {}, {"fixed": {1, 2}}
    yield "Flatten", 7, [normal(2, 3, 4)], {"axis": 2}, {}
    yield "Concat", 7, [normal(2, 3), normal(2, 3)], {"axis": 1}, {}


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


@pytest.mark.sweep(5)
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


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_the_last_axis_alone_needs_no_reshaping(op):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(op, ["h"], ["y"], axis=2)]
    old = model(nodes, [value("x", ["N", "M", 4])], [value("y", ["N", "M", 3])], {"w": normal(4, 3)}, opset=12)
    assert [n.op_type for n in open_model(old).close().graph.node] == ["MatMul", op]


def test_a_shape_that_is_computed_tells_the_rank():
    text = "r = Reshape (x, s) h = MatMul (r, r) y = Softmax <axis = 2> (h)"
    old = _text(text, 12, "float[n] x, int64[3] s")
    assert [n.op_type for n in open_model(old).close().graph.node] == ["Reshape", "MatMul", "Softmax"]


def test_cases_cover_every_form_that_changed():
    """An operator that lost an attribute or was withdrawn since opset 7 needs a case."""
    covered = {case[0] for case in CASES} | {"Scan"}  # which is below
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
    weights = {"w": normal(3, 2)} | ({} if opset < 13 else {"axes": np.array([1])})
    old = model(nodes, [value("x", ["N", 3])], [value("y", ["N", 2])], weights, opset=opset, ir_version=7)
    derived = grad(old, wrt=["x", "w"])
    assert_sound(derived)
    x = normal(4, 3)
    got = run(derived, {"x": x})
    slope = 1 - np.tanh(x @ weights["w"]) ** 2
    np.testing.assert_allclose(got["x_grad"], slope @ weights["w"].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], x.T @ slope, rtol=1e-5, atol=1e-6)


def test_newer_opsets_stay():
    for opset in (18, 21, 23):
        assert vjp(mlp(opset), wrt="w").opset_import[0].version == opset


@pytest.mark.parametrize(
    ("body", "shape", "opset"),
    [
        ("y = SwiGLU(x, x)", "2,4", 26),  # written out
        ("z = SwiGLU(x, x)\n y = Cast<to=1>(z)", "2,4", 26),  # of the Cast, only the types are more
        ('y = Einsum<equation="ij->ji">(x)', "2,4", 26),
        ("y = Celu(x)", "2,4", 26),
        ("y = SpaceToDepth<blocksize=2>(x)", "1,2,4,4", 26),
        ('y = SpaceToDepth<blocksize=2, mode="DCR">(x)', "1,2,4,4", 26),
        ('y = SpaceToDepth<blocksize=2, mode="CRD">(x)', "1,2,4,4", 28),
        ("y = Mod<fmod=1>(x, x)", "2,4", 26),
        ("y = Mod(x, x)", "2,4", 28),  # of floats: a remainder that older opsets lack
        ('h = Cast<to=16>(x)\n e = Einsum<equation="ij->ji">(h)\n y = Cast<to=1>(e)', "2,4", 28),
    ],
)
def test_what_means_the_same_there_is_of_an_opset_that_runtimes_load(body, shape, opset):
    source = _text(body, 28, inputs=f"float[{shape}] x", axes=",".join("abcd"[: shape.count(",") + 1]))
    source.ir_version = 14
    derived = vjp(source, wrt="x")
    assert_sound(derived)
    assert derived.ir_version == {26: 13, 28: 14}[opset]
    assert derived.opset_import[0].version == opset
    if opset == 26:
        onnxruntime.InferenceSession(derived.SerializeToString())


def test_models_of_newer_opsets_run_and_train_as_they_are():
    text = '<ir_version: 14, opset_import: ["": 28]> g (float[N] x) => (float[N] y) { y = Celu (x) }'
    f = Function(parser.parse_model(text))
    assert f([1.0, 2.0]).tolist() == [1, 2]
    assert f.grad(wrt="x")([1.0, 2.0]).tolist() == [1, 1]
    newer = classifier()
    newer.opset_import[0].version, newer.ir_version = 28, 14
    trainer = Trainer(newer, loss="cross_entropy", options=Options(threads=1))
    assert trainer.fit(blobs(), epochs=2, batch_size=30).epochs[-1]["loss"] < 2
    with pytest.raises(BadInput, match=r"cannot load the model.*[oO]pset 28"):
        Function(_text("y = Mod(x, x)", 28))([[1.0]])


def _text(
    body: str, opset: int, inputs: str = "float[2,3] x", outputs: str = "y", axes: str = "a,b"
) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 7, opset_import: ["" : {opset}]> g ({inputs}) => (float[{axes}] {outputs}) {{ {body} }}'
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (_text("y = Relu(x)", 6), "opset 6.*\n.*hint"),
        (_text("y = Foo(x)", 9), "Foo node .*no such operator"),
        (_text("y = Relu(x)", 99), "opset 99"),
        (_text("y, m = Dropout(x)\n q = Cast<to=1>(m)", 10, outputs="q"), "Dropout .*mask"),
        (_text("y, m, v = BatchNormalization<spatial=0>(x, x, x, x, x)", 7), "spatial=0"),
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
    x, mean, var = normal(5, 3, 2), normal(3), np.abs(normal(3))
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


BATCHED = """<ir_version: 7, opset_import: ["" : 8]>
    g ({lengths} double[b,2] s, double[b,t,2] x, double[b,t,2] z, double[2] w) => (double[b,2] last, double[b,t,2] y) {{
      last, y = Scan<num_scan_inputs = 2, directions = [0, 1], body = step (double[2] h, double[2] p, double[2] q) =>
          (double[2] next, double[2] out) {{
        a = Mul(h, w)
        c = Mul(p, q)
        next = Add(a, c)
        out = Mul(next, q)
      }}>({given}, s, x, z)
    }}"""


@pytest.mark.parametrize("lengths", [None, np.array([2, 1, 3])], ids=["whole", "lengths"])
def test_a_scan_over_a_batch(lengths):
    """The Scan of opset 8: outputs, and gradients by differences of the old model."""
    given = {"lengths": "", "given": ""} if lengths is None else {"lengths": "int64[b] n,", "given": "n"}
    source = parser.parse_model(BATCHED.format(**given))
    feeds = {"s": normal(3, 2), "x": normal(3, 3, 2), "z": normal(3, 3, 2), "w": normal(2)}
    feeds = {k: v.astype(np.float64) for k, v in feeds.items()} | ({} if lengths is None else {"n": lengths})
    wrt = ["s", "x", "z", "w"]
    back = vjp(source, wrt=wrt, of=["last", "y"])
    assert_sound(back)
    u = {"last": normal(3, 2).astype(np.float64), "y": normal(3, 3, 2).astype(np.float64)}
    got = run(back, feeds | {f"{k}_cotangent": v for k, v in u.items()})
    primal = run(source, feeds)
    for name in u:
        np.testing.assert_allclose(got[name], primal[name], atol=1e-12)
    for w in wrt:
        t = normal(*feeds[w].shape).astype(np.float64)
        up, down = (run(source, feeds | {w: feeds[w] + sign * 1e-5 * t}) for sign in (1, -1))
        moved = sum(np.vdot(u[o], up[o] - down[o]) / 2e-5 for o in u)
        np.testing.assert_allclose(np.vdot(got[f"{w}_grad"], t), moved, rtol=1e-7, atol=1e-7)


def test_normalization_that_shares_nothing():
    """``spatial=0``: statistics for each element of an example."""
    per = (2, 3)
    x, s, b, m, v = (normal(*d) for d in ((4, *per), per, per, per, per))
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], spatial=0, epsilon=1e-2)
    inputs = [value(n, d) for n, d in (("x", ["N", *per]), ("s", per), ("b", per), ("m", per), ("v", per))]
    old = model([node], inputs, [value("y", None)], {}, opset=7, ir_version=7)
    got = run(open_model(old).close(), {"x": x, "s": s, "b": b, "m": m, "v": np.abs(v)})["y"]
    np.testing.assert_allclose(got, (x - m) / np.sqrt(np.abs(v) + 1e-2) * s + b, rtol=1e-5, atol=1e-5)


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
    feeds = {"x": normal(3, 4), "n": np.array(3)}
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


@pytest.mark.parametrize("opset", [11, 17, 18, 21])
def test_pieces_of_size_one_that_lose_their_axis(opset):
    """An unbind as exporters write it: ONNX Runtime goes by ``keepdims``, the specification by the size."""
    text = """g (float[4, 3] x, bool[4, 3] where) => (float y) {
        one = Constant <value = int64 {1}> () zero = Constant <value = int64 {0}> ()
        nz = NonZero (where) places = Transpose <perm = [1, 0]> (nz)
        parts = SplitToSequence <axis = 1, keepdims = 0> (places, one)
        rows = SequenceAt (parts, zero) a = Gather <axis = 0> (x, rows)
        y = ReduceSumSquare <keepdims = 0> (a) }"""
    old = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    rng = np.random.default_rng(0)
    x, where = normal(4, 3), rng.random((4, 3)) > 0.4
    held = {v.name: v.type for v in open_model(old).close().graph.value_info}
    assert len(held["rows"].tensor_type.shape.dim) == 1
    derived = grad(old, wrt=["x"])
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    (got,) = session.run(None, {"x": x, "where": where})
    np.testing.assert_allclose(got, 2 * x * where.sum(1, keepdims=True), rtol=1e-6)

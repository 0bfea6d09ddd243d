"""grad, value_and_grad, vjp, jvp: names, seeds, what may be differentiated, and composition."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onnxgrad import BadInput, NotDifferentiable, UnknownName, grad, jvp, signature, value_and_grad, vjp
from tests.models import assert_sound, mlp, model, nodes_of, run, value

_rng = np.random.default_rng(3)


def f(*shape):
    return _rng.standard_normal(shape).astype(np.float32)


def _mlp_slope(x, w):
    """dy/da of the mlp."""
    t = np.tanh(x @ w + np.array([0.1, -0.2], np.float32))
    return 2 * t * (1 - t * t)


W = numpy_helper.to_array(mlp().graph.initializer[0])


# --- the contract -----------------------------------------------------------------------------------


def test_vjp_keeps_the_primal_and_adds_cotangents_and_gradients():
    derived = vjp(mlp(), wrt=["w", "x"])
    assert_sound(derived)
    assert [i.name for i in derived.graph.input] == ["x", "y_cotangent"]
    assert [o.name for o in derived.graph.output] == ["y", "w_grad", "x_grad"]
    assert {t.name for t in derived.graph.initializer} >= {"w", "b"}
    names = signature(derived)
    assert names.cotangents == {"y": "y_cotangent"}
    assert names.gradients == {"w": "w_grad", "x": "x_grad"}
    x, u = f(4, 3), f(4, 2)
    got = run(derived, {"x": x, "y_cotangent": u})
    np.testing.assert_allclose(got["y"], run(mlp(), {"x": x})["y"], rtol=1e-6)
    np.testing.assert_allclose(got["w_grad"], x.T @ (u * _mlp_slope(x, W)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["x_grad"], (u * _mlp_slope(x, W)) @ W.T, rtol=1e-4, atol=1e-5)


def test_the_primal_values_of_inputs_and_outputs_are_declared_as_before():
    source = mlp()
    derived = vjp(source, wrt="w")
    assert derived.graph.input[0] == source.graph.input[0]
    assert derived.graph.output[0] == source.graph.output[0]
    shapes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in derived.graph.output}
    assert shapes["w_grad"] == [3, 2]


def test_jvp_adds_tangents():
    derived = jvp(mlp(), wrt=["x", "b"])
    assert_sound(derived)
    assert [i.name for i in derived.graph.input] == ["x", "x_tangent", "b_tangent"]
    assert [o.name for o in derived.graph.output] == ["y", "y_tangent"]
    names = signature(derived)
    assert names.tangents == {"x": "x_tangent", "b": "b_tangent", "y": "y_tangent"}
    x, tx, tb = f(4, 3), f(4, 3), f(2)
    got = run(derived, {"x": x, "x_tangent": tx, "b_tangent": tb})
    np.testing.assert_allclose(got["y_tangent"], _mlp_slope(x, W) * (tx @ W + tb), rtol=1e-4, atol=1e-5)


def test_grad_is_the_gradient_of_the_sum():
    only, both = grad(mlp(), wrt="w"), value_and_grad(mlp(), wrt="w")
    for derived in (only, both):
        assert_sound(derived)
        assert [i.name for i in derived.graph.input] == ["x"]
    assert [o.name for o in only.graph.output] == ["w_grad"]
    assert [o.name for o in both.graph.output] == ["y", "w_grad"]
    x = f(4, 3)
    want = x.T @ _mlp_slope(x, W)
    for derived in (only, both):
        np.testing.assert_allclose(run(derived, {"x": x})["w_grad"], want, rtol=1e-4, atol=1e-5)


def test_of_defaults_to_all_float_outputs():
    nodes = [
        helper.make_node("Sin", ["x"], ["s"]),
        helper.make_node("ArgMax", ["x"], ["i"]),
        helper.make_node("Exp", ["x"], ["e"]),
    ]
    outputs = [value("s", [3]), value("i", [1], T.INT64), value("e", [3])]
    source = model(nodes, [value("x", [3])], outputs)
    derived = vjp(source, wrt="x")
    assert signature(derived).cotangents == {"s": "s_cotangent", "e": "e_cotangent"}
    assert [o.name for o in derived.graph.output] == ["s", "i", "e", "x_grad"]
    x = f(3)
    np.testing.assert_allclose(run(grad(source, wrt="x"), {"x": x})["x_grad"], np.cos(x) + np.exp(x), rtol=1e-5)
    only_ints = model(nodes[1:2], [value("x", [3])], outputs[1:2])
    with pytest.raises(BadInput, match="no float output"):
        vjp(only_ints, wrt="x")


def test_intermediate_values_and_totals():
    """y = tanh(h)·h with h = x·x: h and x each get the total derivative, also when asked for together."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Mul", ["t", "h"], ["y"]),
    ]
    source = model(nodes, [value("x", [3])], [value("y", [3])])
    x = np.clip(f(3), -1.5, 1.5)  # beyond, 1 - t² cancels
    h, t = x * x, np.tanh(x * x)
    by_h = (1 - t * t) * h + t
    derived = grad(source, wrt=["t", "h", "x"])
    assert_sound(derived)
    got = run(derived, {"x": x})
    np.testing.assert_allclose(got["h_grad"], by_h, rtol=1e-5)
    np.testing.assert_allclose(got["t_grad"], h, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], 2 * x * by_h, rtol=1e-5)
    # of an intermediate value
    np.testing.assert_allclose(run(grad(source, wrt="x", of="t"), {"x": x})["x_grad"], 2 * x * (1 - t * t), rtol=1e-4)
    # forward: a tangent at h is added to the one that comes from x
    pushed = jvp(source, wrt=["x", "h"], of=["y", "h"])
    assert_sound(pushed)
    tx, th = f(3), f(3)
    got = run(pushed, {"x": x, "x_tangent": tx, "h_tangent": th})
    np.testing.assert_allclose(got["h_tangent_1"], 2 * x * tx + th, rtol=1e-5)
    assert signature(pushed).output_tangents == {"y": "y_tangent", "h": "h_tangent_1"}
    np.testing.assert_allclose(got["y_tangent"], by_h * (2 * x * tx + th), rtol=1e-5)


def test_duplicates_count_once():
    derived = vjp(mlp(), wrt=["w", "w"], of=["y", "y"])
    assert [o.name for o in derived.graph.output] == ["y", "w_grad"]
    assert [i.name for i in derived.graph.input] == ["x", "y_cotangent"]


def test_what_is_not_connected_gets_zeros():
    nodes = [helper.make_node("Sin", ["x"], ["y"]), helper.make_node("Exp", ["z"], ["e"])]
    source = model(nodes, [value("x", ["N"]), value("z", ["N", "M"])], [value("y", ["N"]), value("e", ["N", "M"])])
    feeds = {"x": f(3), "z": f(3, 2)}
    derived = grad(source, wrt=["x", "z"], of="y")
    assert_sound(derived)
    np.testing.assert_array_equal(run(derived, feeds)["z_grad"], np.zeros((3, 2), np.float32))
    pushed = jvp(source, wrt="x", of=["y", "e"])
    assert_sound(pushed)
    got = run(pushed, feeds | {"x_tangent": f(3)})
    np.testing.assert_array_equal(got["e_tangent"], np.zeros((3, 2), np.float32))


def test_wrt_may_be_of():
    x, u = f(4, 3), f(4, 2)
    for name in ("y", "h"):
        pulled = vjp(mlp(), wrt=name, of=name)
        assert_sound(pulled)
        np.testing.assert_array_equal(run(pulled, {"x": x, f"{name}_cotangent": u})[f"{name}_grad"], u)
        pushed = jvp(mlp(), wrt=name, of=name)
        assert_sound(pushed)
        out = signature(pushed).output_tangents[name]
        np.testing.assert_array_equal(run(pushed, {"x": x, f"{name}_tangent": u})[out], u)
    np.testing.assert_array_equal(run(grad(mlp(), wrt="x", of="x"), {"x": x})["x_grad"], np.ones((4, 3)))


# --- names ------------------------------------------------------------------------------------------


def test_names_are_identifiers_and_clashes_get_a_suffix():
    nodes = [
        helper.make_node("Mul", ["in/x:0", "in.x.0"], ["1"]),
        helper.make_node("Mul", ["1", "in_x_0_grad"], ["out y"]),
    ]
    inputs = [value(n, [2]) for n in ("in/x:0", "in.x.0", "in_x_0_grad")]
    source = model(nodes, inputs, [value("out y", [2])])
    derived = vjp(source, wrt=["in/x:0", "in.x.0", "1"])
    assert_sound(derived)
    names = signature(derived)
    assert names.gradients == {"in/x:0": "in_x_0_grad_1", "in.x.0": "in_x_0_grad_2", "1": "_1_grad"}
    assert names.cotangents == {"out y": "out_y_cotangent"}
    made = [*names.gradients.values(), *names.cotangents.values()]
    assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", n) for n in made)
    a, b, c, u = f(2), f(2), f(2), f(2)
    got = run(derived, {"in/x:0": a, "in.x.0": b, "in_x_0_grad": c, "out_y_cotangent": u})
    np.testing.assert_allclose(got["in_x_0_grad_1"], u * c * b, rtol=1e-5)
    np.testing.assert_allclose(got["in_x_0_grad_2"], u * c * a, rtol=1e-5)
    np.testing.assert_allclose(got["_1_grad"], u * c, rtol=1e-5)


def test_values_named_like_what_is_generated():
    """The names that derived models of the mlp use are all taken already."""
    first = vjp(mlp(), wrt=["w", "x"])
    taken = {n for node in first.graph.node for n in (*node.output, node.name)}
    taken |= {t.name for t in first.graph.initializer} | {v.name for v in (*first.graph.input, *first.graph.output)}
    source = mlp()
    last = "y"
    for name in sorted(taken - {"x", "w", "b", "h", "a", "t", "y", ""}):
        source.graph.node.append(helper.make_node("Identity", [last], [name], name=f"{name}_2"))
        last = name
    source.graph.output[0].name = last
    derived = vjp(source, wrt=["w", "x"])
    assert_sound(derived)
    names, x, u = signature(derived), f(4, 3), f(4, 2)
    got = run(derived, {"x": x, names.cotangents[last]: u})
    np.testing.assert_allclose(got[names.gradients["w"]], x.T @ (u * _mlp_slope(x, W)), rtol=1e-4, atol=1e-5)


def test_names_inside_nested_graphs_are_not_taken():
    source = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x, bool c) => (float[3] y) {
          t = Tanh(x)
          z = If (c) <then_branch = g1 () => (x_grad) { x_grad = Neg(t) },
                      else_branch = g2 () => (y_cotangent) { y_cotangent = Abs(t) }>
          n = Shape(z)
          y = Expand(t, n) }"""
    )
    derived = vjp(source, wrt="x")
    assert_sound(derived)
    assert signature(derived).gradients == {"x": "x_grad_1"}
    assert signature(derived).cotangents == {"y": "y_cotangent_1"}


def test_the_signature_travels_with_the_model(tmp_path):
    derived = vjp(ir.from_proto(mlp()), wrt="w")
    onnx.save(ir.to_proto(derived), tmp_path / "d.onnx")
    assert signature(onnx.load(tmp_path / "d.onnx")) == signature(derived)
    with pytest.raises(BadInput, match="no signature"):
        signature(mlp())


# --- composition ------------------------------------------------------------------------------------


def _cube():
    """y = x³, as x·x·x."""
    nodes = [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("Mul", ["s", "x"], ["y"])]
    return model(nodes, [value("x", ["N"], T.DOUBLE)], [value("y", ["N"], T.DOUBLE)])


def test_gradients_of_gradients():
    x = np.array([0.5, -2.0, 3.0])
    second = grad(grad(_cube(), wrt="x"), wrt="x")
    third = grad(second, wrt="x")
    fourth = grad(third, wrt="x")
    for derived, want in ((second, 6 * x), (third, 6 + 0 * x), (fourth, 0 * x)):
        assert_sound(derived)
        (out,) = signature(derived).gradients.values()
        np.testing.assert_allclose(run(derived, {"x": x})[out], want, rtol=1e-12)


@pytest.mark.parametrize("outer", [vjp, jvp])
@pytest.mark.parametrize("inner", [vjp, jvp])
def test_modes_compose(inner, outer):
    """⟨second derivative of x³, u, v⟩ = 6·x·u·v elementwise, by every pair of modes."""
    x, u, v = (np.random.default_rng(i).standard_normal(4) for i in range(3))
    first = inner(_cube(), wrt="x")
    names = signature(first)
    seed = names.cotangents["y"] if inner is vjp else names.input_tangents["x"]
    out = names.gradients["x"] if inner is vjp else names.output_tangents["y"]
    second = outer(first, wrt="x", of=out)
    assert_sound(second)
    every = [o.name for o in (*second.graph.input, *second.graph.output)]
    assert len(every) == len(set(every))
    names = signature(second)
    also = names.cotangents[out] if outer is vjp else names.input_tangents["x"]
    result = names.gradients["x"] if outer is vjp else names.output_tangents[out]
    got = run(second, {"x": x, seed: u, also: v})
    np.testing.assert_allclose(got["y"], x**3, rtol=1e-12)
    np.testing.assert_allclose(got[result], 6 * x * u * v, rtol=1e-12)


def test_second_order_by_a_cotangent():
    """The pullback is linear in its cotangent: differentiating by it gives the transpose back."""
    first = vjp(_cube(), wrt="x")
    second = vjp(first, wrt="y_cotangent", of="x_grad")
    assert_sound(second)
    x, u, v = f(3).astype(np.float64), f(3).astype(np.float64), f(3).astype(np.float64)
    got = run(second, {"x": x, "y_cotangent": u, "x_grad_cotangent": v})
    np.testing.assert_allclose(got["y_cotangent_grad"], 3 * x**2 * v, rtol=1e-12)


# --- dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "array", "tolerance"),
    [
        (T.FLOAT16, np.float16, 2e-2),
        (T.BFLOAT16, ml_dtypes.bfloat16, 1e-1),
        (T.FLOAT, np.float32, 1e-5),
        (T.DOUBLE, np.float64, 1e-12),
    ],
)
def test_every_float_dtype(dtype, array, tolerance):
    """Everything derived has the dtype of the primal: no constant widens it."""
    source = mlp()
    for v in (*source.graph.input, *source.graph.output):
        v.type.tensor_type.elem_type = dtype
    for tensor in source.graph.initializer:
        held = ir.tensor(numpy_helper.to_array(tensor).astype(array), name=tensor.name)
        tensor.CopyFrom(ir.to_proto(held))
    x = np.array([[0.25, -0.5, 1.0], [0.5, 0.125, -1.5]])
    tx = np.array([[1.0, -0.5, 0.5], [0.25, 1.0, 1.0]])
    slope = _mlp_slope(x, W.astype(np.float64))
    for derived, feeds, want in (
        (grad(source, wrt=["w"]), {}, {"w_grad": x.T @ slope}),
        (jvp(source, wrt=["x"]), {"x_tangent": tx}, {"y_tangent": slope * (tx @ W)}),
    ):
        assert_sound(derived)
        for v in (*derived.graph.value_info, *derived.graph.output):
            held = v.type.tensor_type.elem_type
            assert held in (dtype, T.INT64, T.BOOL), f"{v.name} is a {T.DataType.Name(held)}"
        feeds = {k: a.astype(array) for k, a in ({"x": x} | feeds).items()}
        got = dict(zip([o.name for o in derived.graph.output], ReferenceEvaluator(derived).run(None, feeds)))
        for name, expected in want.items():
            np.testing.assert_allclose(got[name].astype(np.float64), expected, rtol=tolerance, atol=tolerance)


# --- bad input --------------------------------------------------------------------------------------


def test_unknown_names_come_with_close_matches():
    with pytest.raises(UnknownName, match="no value named 'ww'; did you mean 'w'"):
        vjp(mlp(), wrt="ww")
    with pytest.raises(UnknownName, match="no value named 'loss'; there are: a, b, h"):
        vjp(mlp(), wrt="w", of="loss")
    for bad in ([], ()):
        with pytest.raises(BadInput, match="`wrt` names no value"):
            vjp(mlp(), wrt=bad)
    with pytest.raises(BadInput, match="takes names"):
        vjp(mlp(), wrt=[3])
    with pytest.raises(UnknownName):
        vjp(mlp(), wrt="")


def test_only_float_tensors_have_derivatives():
    nodes = [
        helper.make_node("Gather", ["x", "i"], ["g"]),
        helper.make_node("Shape", ["x"], ["n"]),
        helper.make_node("SequenceConstruct", ["i"], ["q"]),
    ]
    inputs = [value("x", [3]), value("i", [2], T.INT64)]
    source = model(nodes, inputs, [value("g", [2]), value("n", [1], T.INT64)])
    for wrt in ("i", "n"):
        with pytest.raises(BadInput, match=f"`wrt` '{wrt}' is a tensor of int64"):
            vjp(source, wrt=wrt)
    with pytest.raises(BadInput, match="`of` 'n' is a tensor of int64"):
        vjp(source, wrt="x", of="n")
    with pytest.raises(BadInput, match="is a sequence"):
        vjp(source, wrt="x", of="q")


def test_a_value_of_unknown_rank():
    """An input must say how many axes it has; a gradient of ones needs no input."""
    nodes = [helper.make_node("Reshape", ["x", "s"], ["h"]), helper.make_node("Sin", ["h"], ["y"])]
    unknown = model(nodes, [value("x", ["N"]), value("s", ["K"], T.INT64)], [value("y", None)])
    with pytest.raises(BadInput, match=r"the rank of 'y' is not known\n  hint: declare"):
        vjp(unknown, wrt="x")
    derived = grad(unknown, wrt="x")
    x = np.float32([1, 2, 3, 4])
    np.testing.assert_allclose(run(derived, {"x": x, "s": np.int64([2, 2])})["x_grad"], np.cos(x), rtol=1e-6)


def test_an_operator_without_derivative_is_named_with_its_path():
    nodes = [
        helper.make_node("Sin", ["x"], ["s"]),
        helper.make_node("Strange", ["s"], ["r"], name="odd", domain="my.ops"),
        helper.make_node("Exp", ["r"], ["y"]),
    ]
    source = model(nodes, [value("x", [3])], [value("y", [3])])
    source.opset_import.add(domain="my.ops", version=1)
    source.graph.value_info.append(value("r", [3]))
    before = source.SerializeToString()
    with pytest.raises(NotDifferentiable) as caught:
        vjp(source, wrt="x")
    text = str(caught.value)
    assert "Strange node 'odd' (my.ops, opset 1)" in text
    assert "x → Sin → [Strange] → Exp → y" in text
    assert "hint:" in text
    assert source.SerializeToString() == before
    assert vjp(source, wrt="r") is not None  # a path beside it is fine


def test_nothing_is_left_that_no_output_needs():
    derived = grad(mlp(), wrt="b", of="h")  # h does not depend on b
    assert {n.op_type for n in nodes_of(derived.graph)} <= {
        "Expand",
        "Identity",
        "Constant",
        "ConstantOfShape",
    }
    assert [o.name for o in derived.graph.output] == ["b_grad"]


def test_the_path_in_an_error_is_one_that_carries_a_derivative():
    """The shortest way from x to the obstacle leads through a shape, which is not the reason."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"]),
        helper.make_node("Sin", ["x"], ["s"]),
        helper.make_node("Cos", ["s"], ["c"]),
        helper.make_node("Strange", ["c", "n"], ["r"], domain="my.ops"),
        helper.make_node("Exp", ["r"], ["e"]),
        helper.make_node("Exp", ["e"], ["y"]),
    ]
    source = model(nodes, [value("x", [3])], [value("y", [3])])
    source.opset_import.add(domain="my.ops", version=1)
    with pytest.raises(NotDifferentiable, match=r"x → Sin → Cos → \[Strange\] → Exp → Exp → y"):
        vjp(source, wrt="x")


# --- what reviewers try -----------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, 3, b"x", [None], [["x"]]])
def test_what_names_no_value(names):
    with pytest.raises(BadInput, match="`wrt` takes names of values"):
        grad(mlp(), wrt=names)
    if names is not None:
        with pytest.raises(BadInput, match="`of` takes names of values"):
            grad(mlp(), wrt="x", of=names)


def test_outputs_that_are_inputs_or_weights():
    """The identity has a derivative too: it adds to what comes through the graph."""
    u = np.array([2, 3], np.float32)
    source = model(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        [value("x", [2])],
        [value("x", [2]), value("y", [2]), value("w", [2])],
        {"w": np.array([5, 7], np.float32)},
    )
    derived = vjp(source, wrt=["x", "w"])
    onnx.checker.check_model(derived, full_check=True)
    names = signature(derived)
    got = run(derived, {"x": u, **{names.cotangents[n]: u for n in ("x", "y", "w")}})
    np.testing.assert_allclose(got[names.gradients["x"]], u + u * [5, 7])
    np.testing.assert_allclose(got[names.gradients["w"]], u + u * u)


def test_a_weight_that_is_an_input_too_takes_what_is_fed():
    source = model(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        [value("x", [2]), value("w", [2])],
        [value("y", [2])],
        {"w": np.array([5, 7], np.float32)},
    )
    derived = grad(source, wrt=["x", "w"])
    x, w = np.array([1, 2], np.float32), np.array([9, 8], np.float32)
    np.testing.assert_allclose(run(derived, {"x": x})["x_grad"], [5, 7])
    np.testing.assert_allclose(run(derived, {"x": x, "w": w})["x_grad"], w)


def test_what_is_written_beside_the_graph_stays():
    """Producer, version, docs, metadata, denotations and quantization annotations; imports of other domains."""
    source = mlp()
    source.producer_name, source.domain, source.model_version, source.doc_string = "me", "org", 7, "of the model"
    helper.set_model_props(source, {"key": "held"})
    source.graph.doc_string = "of the graph"
    source.graph.node[0].doc_string = "of the node"
    source.graph.node[0].metadata_props.add(key="node", value="held")
    source.graph.metadata_props.add(key="graph", value="held")
    source.graph.input[0].type.denotation = "TENSOR"
    source.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    note = source.graph.quantization_annotation.add(tensor_name="w")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    derived = vjp(source, wrt="w")
    for field in ("producer_name", "domain", "model_version", "doc_string"):
        assert getattr(derived, field) == getattr(source, field)
    assert {p.key: p.value for p in derived.metadata_props}["key"] == "held"
    assert derived.graph.doc_string == "of the graph"
    assert derived.graph.node[0] == source.graph.node[0]
    assert derived.graph.input[0] == source.graph.input[0]
    assert list(derived.graph.metadata_props) == list(source.graph.metadata_props)
    assert list(derived.graph.quantization_annotation) == [note]


def test_no_elements_no_axes():
    empty = model([helper.make_node("Sin", ["x"], ["y"])], [value("x", [0, 3])], [value("y", [0, 3])])
    assert run(grad(empty, wrt="x"), {"x": np.zeros((0, 3), np.float32)})["x_grad"].shape == (0, 3)
    scalar = model([helper.make_node("Sin", ["x"], ["y"])], [value("x", [])], [value("y", [])])
    third = grad(grad(grad(scalar, wrt="x"), wrt="x"), wrt="x")
    (got,) = run(third, {"x": np.array(0.5, np.float32)}).values()
    np.testing.assert_allclose(got, -np.cos(0.5), rtol=1e-6)

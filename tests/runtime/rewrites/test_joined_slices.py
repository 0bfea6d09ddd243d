"""Cotangents of slices that lie side by side become one Concat; any other sum stays what it is."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import signature, vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized


def _sliced(cuts, axis=1, factor=False, size=6):
    """y = a product of functions of slices of x; `cuts` are where each starts and ends."""
    tensors = [numpy_helper.from_array(np.array([axis], np.int64), "axis")]
    nodes = []
    for i, (start, end) in enumerate(cuts):
        for name, at in (("s", start), ("e", end)):
            tensors.append(numpy_helper.from_array(np.array([at], np.int64), f"{name}{i}"))
        nodes.append(helper.make_node("Slice", ["x", f"s{i}", f"e{i}", "axis"], [f"p{i}"]))
        nodes.append(helper.make_node(("Sin", "Cos", "Exp")[i % 3], [f"p{i}"], [f"q{i}"]))
        nodes.append(helper.make_node("ReduceSum", [f"q{i}"], [f"r{i}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"r{i}" for i in range(len(cuts))], ["sum"]))
    nodes.append(helper.make_node("ReduceSumSquare" if factor else "Identity", ["x" if factor else "sum"], ["t"], **(
        {"keepdims": 0} if factor else {})))  # fmt: skip
    nodes.append(helper.make_node("Add", ["sum", "t"], ["y"]))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", size, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])], tensors,
    )  # fmt: skip
    return vjp(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), wrt="x")


@pytest.mark.parametrize(
    ("how", "joined"),
    [
        ({"cuts": [(0, 2), (2, 4), (4, 6)]}, True),
        ({"cuts": [(3, 6), (0, 3)]}, True),
        ({"cuts": [(2, 3), (3, 4), (0, 2)], "axis": 2}, True),
        ({"cuts": [(i, i + 1) for i in range(70)], "size": 70}, True),  # the steps of an unrolled scan
        ({"cuts": [(i, i + 1) for i in range(69)], "size": 70}, False),
        ({"cuts": [(0, 2), (3, 6)]}, False),  # a gap
        ({"cuts": [(0, 4), (3, 6)]}, False),  # an overlap
        ({"cuts": [(0, 3), (3, 5)]}, False),  # not to the end
        ({"cuts": [(0, 3), (3, 6)], "factor": True}, True),  # another term is added
        ({"cuts": [(0, 3), (3, 5)], "factor": True}, False),
    ],
)
def test_same_numbers(how, joined):
    model = ir.from_proto(_sliced(**how))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    made = [n.op_type for n in optimized(model).graph]
    assert ("Concat" in made, "Pad" in made) == (joined, not joined)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    names = signature(ir.to_proto(model))
    x = np.random.default_rng(0).standard_normal((3, how.get("size", 6), 4)).astype(np.float32)
    feeds = {"x": x, names.cotangents["y"]: np.array(2, np.float32)}
    outputs = list(names.gradients.values())
    plain, quick = (Session(model, Options(layout=how)).run(feeds, outputs)[outputs[0]] for how in ("plain", "auto"))
    np.testing.assert_array_equal(quick, plain)
    assert (plain != 0).any()


def test_slices_of_a_slice():
    """Queries, keys and values are cut from one product, and halves that a rotary embedding turns from each."""
    nodes = []
    for name, source, start, end in (("p", "x", 0, 4), ("q", "x", 4, 8), ("a", "p", 0, 2), ("b", "p", 2, 4)):
        nodes += [
            f"{name}s = Constant <value = int64[1] {{{start}}}> () {name}e = Constant <value = int64[1] {{{end}}}> ()"
        ]
        nodes += [f"{name} = Slice ({source}, {name}s, {name}e, axis)"]
    body = " ".join(nodes)
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[N, 8] x) => (float[N, 4] y) {{
      axis = Constant <value = int64[1] {{1}}> () {body}
      s = Sin (a) t = Cos (b) r = Concat <axis = 1> (t, s) y = Mul (r, q) }}"""
    model = vjp(onnx.parser.parse_model(text), wrt="x")
    assert [n.op_type for n in optimized(ir.from_proto(model)).graph].count("Pad") == 0
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    names = signature(model)
    feeds = {"x": x, names.cotangents["y"]: np.ones((3, 4), np.float32)}
    (output,) = names.gradients.values()
    plain, quick = (Session(model, Options(layout=how)).run(feeds, [output])[output] for how in ("plain", "auto"))
    np.testing.assert_array_equal(quick, plain)


def test_terms_that_are_broadcast_are_no_slices():
    """A sum of a row and a matrix, each beside zeros, is no Concat."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[1, 3] x, float[4, 3] z) => (float[4, 6] y) {
      before = Constant <value = int64[4] {0, 3, 0, 0}> () after = Constant <value = int64[4] {0, 0, 0, 3}> ()
      a = Pad (x, after) b = Pad (z, before) y = Add (a, b) }"""
    model = onnx.parser.parse_model(text)
    assert "Concat" not in [n.op_type for n in optimized(ir.from_proto(model)).graph]
    feeds = {"x": np.ones((1, 3), np.float32), "z": np.full((4, 3), 2, np.float32)}
    (y,) = Session(model).run(feeds).values()
    np.testing.assert_array_equal(y, [[1, 1, 1, 2, 2, 2]] * 4)


@pytest.mark.parametrize("other", ["float[N, 4, 6]", "float[6]", "float[N, 1, 6]", "float[5, N, 4, 6]", "float"])
def test_other_terms_are_added_to_the_concatenation(other):
    """The cotangent of a rotation: halves that change places, and the tensor itself, which may be broadcast."""
    text = f"""<ir_version: 10, opset_import: ["": 20]> g ({other} x, float[N, 4, 3] a, float[N, 4, 3] b) => (y) {{
      before = Constant <value = int64[6] {{0, 0, 3, 0, 0, 0}}> ()
      after = Constant <value = int64[6] {{0, 0, 0, 0, 0, 3}}> ()
      p = Pad (a, before) q = Pad (b, after) s = Add (x, p) t = Add (s, q) y = Add (t, x) }}"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert [n.op_type for n in optimized(ir.from_proto(model)).graph].count("Pad") == 0
    rng = np.random.default_rng(0)
    for n in (2, 1, 0):
        sizes = [int(d) if d.isdigit() else n for d in other[5:].strip("[]").replace(" ", "").split(",") if d]
        x, a, b = (rng.standard_normal(s).astype(np.float32) for s in (sizes, (n, 4, 3), (n, 4, 3)))
        (y,) = Session(model, Options(target="portable")).run({"x": x, "a": a, "b": b}).values()
        np.testing.assert_allclose(y, 2 * x + np.concatenate([b, a], -1), rtol=1e-6, atol=1e-6)

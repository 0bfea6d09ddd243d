"""Convolutions in blocks of channels: the same numbers as in the plain layout, and only where they gain."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxgrad import vjp
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.rewrites.blocked_layout import DOMAIN, block_size, blocked
from tests.runtime.passes import optimized

pytestmark = pytest.mark.skipif(not block_size(), reason="this processor has no blocked layout")
B = block_size() or 16


def _conv(c, o, k, groups=1, strides=(1, 1), pads=(1, 1, 1, 1), dilations=(1, 1), hw=(12, 10), batch="N", bias=True):
    """y = Conv(x, w, b), pulled back: a graph with the convolution, its transpose and its correlation."""
    given = [("x", [batch, c, *hw]), ("w", [o, c // groups, *k]), ("b", [o])][: 3 if bias else 2]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in given]
    how = {"strides": strides, "pads": pads, "dilations": dilations, "group": groups}
    graph = helper.make_graph(
        [helper.make_node("Conv", [n for n, _ in given], ["y"], **how)],
        "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(vjp(model, wrt=["x", "w"]))


def _feeds(model, n=3):
    rng = np.random.default_rng(0)
    shapes = {v.name: [n if not isinstance(d, int) else d for d in v.shape] for v in model.graph.inputs}
    plain = Session(model, Options(layout="plain"))
    feeds = {
        k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items() if k in plain.inputs and k[0] != "c"
    }
    (y,) = plain.run(feeds | {k: np.zeros(s, np.float32) for k, s in shapes.items() if k not in feeds}, ["y"]).values()
    return feeds | {k: rng.standard_normal(y.shape).astype(np.float32) for k in shapes if k not in feeds}


CASES = {
    "plain": ({"c": B, "o": 2 * B, "k": (3, 3)}, 2),
    "strided": ({"c": B, "o": B, "k": (3, 3), "strides": (2, 2)}, 1),
    "dilated": ({"c": B, "o": B, "k": (3, 3), "dilations": (2, 1), "pads": (2, 1, 2, 1)}, 2),
    "no bias, oblong": ({"c": B, "o": B, "k": (3, 1), "pads": (1, 0, 1, 0), "bias": False}, 2),
    "even kernel": ({"c": B, "o": B, "k": (2, 4), "pads": (0, 1, 1, 2)}, 2),
    "few channels in": ({"c": 3, "o": B, "k": (3, 3)}, 1),
    "few channels in, strided": ({"c": 1, "o": 2 * B, "k": (5, 3), "strides": (2, 1), "pads": (2, 0, 1, 2)}, 1),
    "not a block of channels in": ({"c": B // 2 + 1, "o": B, "k": (3, 3), "dilations": (2, 2), "bias": False}, 1),
    "more than a block of channels in": ({"c": B + 2, "o": B, "k": (3, 3)}, 0),
    "few channels out": ({"c": B, "o": 3, "k": (3, 3)}, 1),
    "one tap": ({"c": B, "o": B, "k": (1, 1), "pads": (0, 0, 0, 0)}, 0),
    "two groups": ({"c": 2 * B, "o": 2 * B, "k": (3, 3), "groups": 2}, 0),
    "depthwise": ({"c": 2 * B, "o": 2 * B, "k": (3, 3), "groups": 2 * B}, 3),
    "depthwise, fixed batch": ({"c": B, "o": B, "k": (3, 3), "groups": B, "batch": 2}, 3),
    "depthwise, strided": ({"c": B, "o": B, "k": (3, 3), "groups": B, "strides": (2, 2)}, 2),
    "depthwise, strided and odd": ({"c": B, "o": B, "k": (3, 3), "groups": B, "strides": (2, 2), "hw": (11, 9)}, 2),
    "depthwise, ragged": ({"c": B, "o": B, "k": (3, 3), "groups": B, "strides": (2, 2), "pads": (0, 0, 0, 0)}, 1),
    "depthwise, dilated": (
        {"c": B, "o": B, "k": (3, 3), "groups": B, "dilations": (2, 2), "pads": (2, 2, 2, 2)}, 3),
    "depthwise, wide": ({"c": B, "o": B, "k": (5, 3), "groups": B, "pads": (2, 1, 2, 1)}, 3),
    "depthwise, no padding": ({"c": B, "o": B, "k": (3, 3), "groups": B, "pads": (0, 0, 0, 0)}, 3),
    "depthwise, lopsided": ({"c": B, "o": B, "k": (3, 3), "groups": B, "pads": (2, 0, 0, 2)}, 3),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name):
    how, count = CASES[name]
    model = _conv(**how)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    changed = optimized(model)
    assert sum(n.op_type == "Conv" and n.domain == DOMAIN for n in changed.graph) == count
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    feeds = _feeds(model, how.get("batch", 3) if isinstance(how.get("batch"), int) else 3)
    outputs = [v.name for v in model.graph.outputs]
    for threads in (1, 2):
        plain = Session(model, Options(layout="plain", threads=threads)).run(feeds, outputs)
        found = Session(model, Options(threads=threads)).run(feeds, outputs)
        for output in outputs:
            scale = np.abs(plain[output]).max()
            np.testing.assert_allclose(found[output], plain[output], atol=2e-5 * scale, rtol=0, err_msg=output)


@pytest.mark.parametrize("k", [(3, 3), (3, 1), (2, 4)])
def test_weights_are_turned_round_in_blocks(k):
    """The operand of the transposed convolution is not computed number by number and then reordered."""
    model = _conv(B, 2 * B, k, pads=(0, 0, 0, 0), hw=(8, 8))
    assert any(n.op_type == "Slice" for n in model.graph)
    assert not any(n.op_type == "Slice" for n in optimized(model).graph)


def test_another_block_than_the_processors_is_not_taken():
    assert blocked(_conv(B, B, (3, 3)), 0).graph.num_nodes() == _conv(B, B, (3, 3)).graph.num_nodes()


def test_unknown_layout():
    with pytest.raises(BadInput, match="layout must be"):
        Options(layout="best").native()


def test_constant_weights_are_left_to_the_runtime():
    """Also those turned round of the way back, which it folds: reordering them in every run cost more than it won."""
    w = onnx.numpy_helper.from_array(np.ones((B, B, 3, 3), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, B, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [w],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for model in (ir.from_proto(proto), vjp(ir.from_proto(proto), wrt="x")):
        assert blocked(model, B) is model


def test_a_session_takes_a_model_as_onnx_has_it():
    """The same as that of onnx_ir, rewrites included."""
    model = _conv(**CASES["plain"][0])
    feeds = _feeds(model)
    ours, theirs = (Session(m).run(feeds) for m in (model, ir.to_proto(model)))
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)


def _row_model(channels, out, length, taps, **attributes):
    info = helper.make_tensor_value_info
    inputs = [
        info("x", TensorProto.FLOAT, ["N", channels, length]),
        info("w", TensorProto.FLOAT, [out, channels // attributes.get("group", 1), taps]),
    ]
    inputs.append(info("b", TensorProto.FLOAT, [out]))
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [info("y", TensorProto.FLOAT, ["N", out, None])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


@pytest.mark.parametrize(
    ("channels", "out", "length", "taps", "attributes"),
    [
        (64, 64, 150, 3, {"pads": [4, 4], "dilations": [4]}),
        (12, 64, 301, 15, {"pads": [7, 6], "strides": [2]}),
        (32, 64, 400, 7, {"strides": [3], "kernel_shape": [7]}),
        (512, 512, 210, 31, {"pads": [15, 15], "group": 512}),
        (64, 64, 150, 1, {}),
        (64, 64, 30, 3, {"pads": [1, 1]}),
    ],
)
def test_one_axis(channels, out, length, taps, attributes):
    model = _row_model(channels, out, length, taps, **attributes)
    blocks = [n.op_type for n in optimized(model).graph if n.domain == DOMAIN]
    assert ("Conv" in blocks) == (taps > 1 and length > 48)  # of others, laying them out shows
    derived = vjp(model, wrt=["x", "w", "b"])
    rng = np.random.default_rng(0)
    shapes = {v.name: [d if isinstance(d, int) else 3 for d in v.shape] for v in derived.graph.inputs}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    outputs = [v.name for v in derived.graph.outputs]
    expected, found = (
        Session(derived, Options(target="portable", layout=layout)).run(feeds, outputs) for layout in ("plain", "auto")
    )
    for name in outputs:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)

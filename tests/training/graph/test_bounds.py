"""Between which numbers a value lies, also where many paths lead to it."""

import onnx_ir as ir

from onnxgrad.training.graph.bounds import bounds


def test_many_paths_are_looked_at_once():
    """There are 2⁴⁰ paths: each sum reads one value twice, as each block of a residual network does."""
    node = ir.Node("", "Sigmoid", [ir.Value(name="x")])
    for _ in range(40):
        node = ir.Node("", "Add", [node.outputs[0], node.outputs[0]])
    assert bounds(node.outputs[0]) == (0.0, 2.0**40)


def test_what_is_too_far_back_may_be_anything():
    node = ir.Node("", "Sigmoid", [ir.Value(name="x")])
    for _ in range(60):
        node = ir.Node("", "Identity", [node.outputs[0]])
    assert bounds(node.outputs[0]) == (-float("inf"), float("inf"))

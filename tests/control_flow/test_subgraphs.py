"""A builder whose graph was closed and pruned goes on with what the graph still has."""

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.ir import Builder
from onnxgrad.ir.subgraphs import empty, formal, give


@pytest.fixture
def body():
    """A builder of a body with one input, float[N, 3]."""
    outer = Builder(ir.Graph([], [], nodes=[], name="outer", opset_imports={"": 21}))
    b, graph = empty(outer, "body")
    like = ir.Value(name="like", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3]))
    x = formal(b, like, "x")
    graph.inputs.append(x.value)
    return b, graph, x


def test_a_constant_that_was_pruned_is_written_again(body):
    b, graph, x = body
    first = b.const(np.float32(2.5))
    give(b, [x + 1.0])
    assert first.value not in graph.initializers.values()
    again = b.const(np.float32(2.5))
    assert graph.initializers[again.name] is again.value
    assert b.const(np.float32(2.5)).value is again.value


@pytest.mark.parametrize("make", [lambda b, x: b.Tanh(x), lambda b, x: b.shape_of(x)], ids=["node", "shape"])
def test_a_node_that_was_pruned_is_written_again(body, make):
    b, graph, x = body
    first = make(b, x)
    assert make(b, x).value is first.value
    give(b, [x + 1.0])
    assert first.value.producer().graph is None
    again = make(b, x)
    assert again.value.producer().graph is graph

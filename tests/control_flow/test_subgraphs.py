"""A builder whose graph was closed and pruned goes on with what the graph still has."""

import numpy as np
import onnx_ir as ir
import pytest
from benchmarks.derivations.graphs import nested

import onnxgrad
from onnxgrad.ir import Builder, Names
from onnxgrad.ir.aliases import known_as
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import free, scopes
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


def test_a_body_that_stacks_residuals_is_the_callers_own():
    """Nothing is copied to be added to: the names stay, and the nodes are as many."""
    given = nested(1).model
    derived = onnxgrad.vjp(given, wrt=["x"], of=["y"])
    loops = [n for n in derived.graph.node if n.op_type == "Loop"]
    before, after = (next(a.g for a in n.attribute if a.name == "body") for n in (given.graph.node[0], *loops))
    assert [n.output[0] for n in after.node][: len(before.node)] == [n.output[0] for n in before.node]
    assert len(after.output) > len(before.output)


def test_a_copy_reads_the_same_values_outside_and_none_inside():
    graph = ir.from_proto(nested(1).model).graph
    body = graph[0].attributes["body"].as_graph()
    names = Names.of_graph(graph)
    copies = Copies({}, names)
    copy = copies.graph(body)
    assert [n.op_type for g in scopes(copy) for n in g] == [n.op_type for g in scopes(body) for n in g]
    assert set(free(copy)) == set(free(body))
    own, new = ({v.name for g in scopes(which) for n in g for v in n.outputs} for which in (body, copy))
    assert len(own) == len(new)
    assert not own & new
    assert all(copies.values[v].shape is v.shape for v in body.inputs)
    assert "held0" in known_as(copy.inputs[2])

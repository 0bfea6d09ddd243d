"""Operators, constants and patterns are found whatever the spelling of the domain, and in the order asked for."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from onnxgrad.ir.match import (
    constant,
    is_number,
    is_op,
    only_reader,
    pattern,
    permutation,
    producer,
    rank,
    single_constant,
    sizes,
)

TEXT = """
<ir_version: 9, opset_import: ["" : 20, "own": 1]>
g (float[2,3] x, float[N] n) => (float[2,3] y, float[3,2] t, float[3,2] u, float[2,3] z)
<float[1] one = {1}, float[2] ones = {1, 1}, int64[1] nought = {0}>
{
    s = Sigmoid(x)
    rest = Sub(one, s)
    y = Mul(rest, s)
    t = Transpose(x)
    u = Transpose<perm=[1, 0]>(s)
    z = own.Mul(x, x)
}
"""


@pytest.fixture
def graph() -> ir.Graph:
    return ir.from_proto(parser.parse_model(TEXT)).graph


def _value(graph: ir.Graph, name: str) -> ir.Value:
    named = {v.name: v for v in [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]}
    return named[name]


def test_operators_are_those_of_the_standard_domain(graph):
    assert is_op(_value(graph, "y").producer(), "Mul")
    assert is_op(_value(graph, "y").producer(), ("Add", "Mul"))
    assert not is_op(_value(graph, "y").producer(), "Mu")
    assert not is_op(_value(graph, "z").producer(), "Mul")
    assert not is_op(None, "Mul")
    assert is_op(onnx.helper.make_node("Mul", ["x", "x"], ["y"], domain="ai.onnx"), "Mul")


def test_producers_and_readers(graph):
    assert producer(_value(graph, "s"), "Sigmoid") is _value(graph, "s").producer()
    assert producer(_value(graph, "x"), "Sigmoid") is None
    assert producer(None, "Sigmoid") is None
    assert only_reader(_value(graph, "rest"), "Mul") is _value(graph, "y").producer()
    assert only_reader(_value(graph, "rest"), "Add") is None
    assert only_reader(_value(graph, "s"), "Sub") is None
    assert only_reader(_value(graph, "y"), "Mul") is None


def test_constants(graph):
    np.testing.assert_array_equal(constant(_value(graph, "ones")), np.ones(2, np.float32))
    assert single_constant(_value(graph, "ones")) is None
    assert is_number(_value(graph, "one"), 1)
    assert is_number(_value(graph, "nought"), 0)
    assert not is_number(_value(graph, "one"), 0)
    assert not is_number(_value(graph, "ones"), 1)
    assert constant(_value(graph, "x")) is None


def test_shapes(graph):
    assert permutation(_value(graph, "t").producer()) == (1, 0)
    assert permutation(_value(graph, "u").producer()) == (1, 0)
    assert (sizes(_value(graph, "x")), sizes(_value(graph, "n")), rank(_value(graph, "n"))) == ((2, 3), None, 1)


def test_a_pattern_binds_each_name_to_one_value(graph):
    slope = pattern("Mul", pattern("Sub", 1, "gate", name="rest"), pattern("Sigmoid", "x", name="gate"))
    found = slope.match(_value(graph, "y"))
    assert {name: value.name for name, value in found.items()} == {"gate": "s", "rest": "rest", "x": "x"}
    assert pattern("Mul", pattern("Sub", 1, "gate"), pattern("Sigmoid", "gate")).match(_value(graph, "y")) is None
    assert pattern("Mul", pattern("Sub", 2, "gate"), "gate").match(_value(graph, "y")) is None


def test_a_pattern_may_match_in_any_order(graph):
    turned = pattern("Sigmoid", "x", name="gate"), pattern("Sub", 1, "gate")
    assert pattern("Mul", *turned).match(_value(graph, "y")) is None
    assert pattern("Mul", *turned, in_any_order=True).match(_value(graph, "y")) is not None

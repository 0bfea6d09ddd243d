"""The rule of a node is looked up in one order."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad import custom_rules, custom_vjp
from onnxgrad.engine import function_calls  # noqa: F401  (it registers the rule of calls)
from onnxgrad.engine.resolve import CONSTANT, replacement, rule_of
from onnxgrad.ir import Builder
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.rules.registry import registry, straight_through
from onnxgrad.rules.rule import OWN, General, Zero


class EveryNode:
    """Local functions of which every node is a call."""

    def __contains__(self, node: ir.Node) -> bool:
        return True


def _builder(functions=None):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18})
    builder = Builder(graph, infer=Inference.of(graph, functions))
    return builder, builder.var(x)


def test_each_source_comes_before_the_next():
    builder, x = _builder()
    calls = Builder(builder.graph, infer=Inference.of(builder.graph))
    calls.infer.context.calls = EveryNode()
    node = builder.Round(x).value.producer()
    own = custom_vjp("Round", lambda op, g, x: g)
    noted = General(lambda op, g, x: g)
    plain = registry.get("", "Round", 18)
    assert rule_of(node, builder) is plain
    assert isinstance(plain, Zero)
    with straight_through("Round"):
        estimator = rule_of(node, builder)
        assert estimator not in (None, plain)
        assert rule_of(node, calls) is registry.of_calls
        with custom_rules(own):
            assert rule_of(node, builder) is rule_of(node, calls) is own.rule
            node.meta[OWN] = noted
            assert rule_of(node, builder) is rule_of(node, calls) is noted
            node.metadata_props[CONSTANT] = "a constant"
            assert rule_of(node, builder).reason == rule_of(node, calls).reason == "a constant"


def test_an_operator_without_a_rule_is_replaced():
    builder, x = _builder()
    node = builder.emit("DynamicQuantizeLinear", x, outputs=3)[0].value.producer()
    assert rule_of(node, builder) is None
    new = replacement(node, None, builder, (), None)
    assert new
    assert node.graph is None

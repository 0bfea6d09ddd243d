"""Resolution of a node: its rule, or the nodes that replace it, in one order of precedence.

1. The metadata of the node say that no derivative passes.
2. The node brings a rule of its own, which the code that emitted it noted.
3. A rule of the user (`custom_rules`) for its operator or function.
4. For a call of a local function that stays a function: the rule of calls.
5. The estimator of its operator, if `straight_through` names it.
6. The rule of its operator at the opset of the model.

A node without a rule is replaced: (7) by the lowering written for its operator, (8) by the function body that the
specification gives for it. So is one whose value could be infinite where another form of it is finite, a Loop whose
steps have one form for all, and in reverse mode one whose rule asks for it (`Rule.rewrite`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.exporter_names import is_detached
from onnxgrad.ir.notes import notes, properties
from onnxgrad.lower import expand
from onnxgrad.lower.bags import write_bags
from onnxgrad.lower.stable_forms import write_stable
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import OWN, Rule, Zero

#: Metadata of a node through which no derivative passes, for any operator; the value is the reason.
CONSTANT = "onnxgrad.constant"


def is_constant(node: ir.Node) -> bool:
    """True if the metadata of `node` say that no derivative passes through it."""
    metadata = properties(node)
    return bool(metadata) and (CONSTANT in metadata or is_detached(node))


def rule_of(node: ir.Node, builder: Builder) -> Rule | None:
    """Return the rule that applies to `node` at the opset of the model; None if it has to be replaced."""
    if is_constant(node):
        return Zero(properties(node).get(CONSTANT, "PyTorch detached it"))
    if (noted := notes(node)) and OWN in noted:
        return noted[OWN]
    if (functions := builder.functions) is not None and node in functions:
        return registry.custom(node.domain, node.op_type) or registry.of_calls
    return registry.get(node.domain, node.op_type, builder.infer.context.get_opset_version(node.domain))


def replacement(
    node: ir.Node, rule: Rule | None, builder: Builder, wrt: Collection[ir.Value], of: Sequence[ir.Value] | None
) -> list[ir.Node] | None:
    """Replace `node` in its graph, if its `rule` asks for it or is missing. Returns the new nodes, or None.

    Args:
        node: on the path.
        rule: its rule.
        builder: writes into the graph.
        wrt: the values that get a derivative.
        of: in reverse mode, the values that have a cotangent.
    """
    if rule is None:
        return expand(builder, node)
    if not rule.is_custom:
        better = write_stable(builder, node, set(wrt)) or write_bags(builder, node)
        if better is not None:
            return better
    return None if of is None or rule.rewrite is None else rule.rewrite(builder, node, of)

"""Traits of operators: what the rooms below the rules read must be known without them."""

import json
import subprocess
import sys

import onnx_ir as ir
import pytest

from onnxgrad.ir.operators import Kind, Moves, Traits, declare, traits_of
from onnxgrad.rules.registry import registry

READ_BELOW_THE_RULES = """
import json, sys
import onnx, onnx_ir as ir
import onnxgrad.runtime, onnxgrad.remat
from onnxgrad.ir.operators import Moves, traits_of

def known():
    names = sorted({s.name for s in onnx.defs.get_all_schemas() if not s.domain})
    of = {name: traits_of(ir.Node("", name, [])) for name in names}
    return {n: [t.moves, t.exact, t.slow, t.grows, t.sized_by, t.is_product] for n, t in of.items()}

assert not any(m == "onnxgrad.rules" or m.startswith("onnxgrad.rules.") for m in sys.modules)
before = known()
import onnxgrad.rules, onnxgrad.control_flow
after = known()
print(json.dumps([n for n in before if before[n] != after[n]]), sum(any(t) for t in before.values()))
"""


def test_traits_that_are_read_below_the_rules_do_not_come_from_them():
    done = subprocess.run([sys.executable, "-c", READ_BELOW_THE_RULES], capture_output=True, text=True, check=True)
    differ, count = done.stdout.rsplit(" ", 1)
    assert json.loads(differ) == []
    assert int(count) > 50


def node(name: str, domain: str = "") -> ir.Node:
    return ir.Node(domain, name, [])


def test_an_unknown_operator_has_no_traits():
    assert traits_of(node("Tanh", "com.example")) == traits_of(node("NoSuchOperator")) == Traits()
    assert traits_of(node("Tanh", "ai.onnx")) == traits_of(node("Tanh")) != Traits()


def test_declared_traits_stay_until_they_are_given_again():
    declare("Twice", domain="com.example", total=True, slow=True)
    declare("Twice", domain="com.example", slow=False, moves=Moves.SELECTION)
    assert traits_of(node("Twice", "com.example")) == Traits(moves=Moves.SELECTION, total=True)
    with pytest.raises(TypeError, match="totally"):
        declare("Twice", domain="com.example", totally=True)


def test_the_class_of_a_rule_and_the_kind_of_its_operator_agree():
    """An elementwise rule of an operator that is not elementwise itself is a choice, which its decorator states."""
    others = {
        n for d, n, _, r in registry.items() if r.kind == "elementwise" and not traits_of(node(n, d)).is_elementwise
    }
    assert others == {"Dropout", "Imputer"}
    reductions = {n for _, n, _, _ in registry.items() if n.startswith("Reduce")}
    assert reductions == {n for d, n, _, _ in registry.items() if traits_of(node(n, d)).kind is Kind.REDUCTION}

"""The ladder bites: with its cotangents scaled by 1.001, the cases of every rule go red."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tests.rules
from onnxgrad.ir import Var, containers
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import FunctionRule
from onnxgrad.testing import Case, check_rule


def _by_operator() -> dict[tuple[str, str], list[Case]]:
    """The cases of each operator, the smallest first."""
    found = defaultdict(list)
    for module in pkgutil.iter_modules(tests.rules.__path__):
        if module.name.startswith("test_") and module.name != "test_mutations":
            for case in getattr(importlib.import_module(f"tests.rules.{module.name}"), "CASES", []):
                found[case.domain, case.op].append(case)
    return {op: sorted(cases, key=lambda c: (c.order, c.runtime, _size(c))) for op, cases in sorted(found.items())}


def _size(case: Case) -> int:
    return sum(int(np.prod(x)) if isinstance(x, tuple) else np.size(x) for x in case.inputs)


def _scaled(part: Any) -> Any:
    plain = isinstance(part, Var) and not containers.is_sequence(part)
    return part * 1.001 if plain else part


@contextmanager
def _mutated(rule: FunctionRule) -> Iterator[None]:
    original = rule.function
    assert original is not None

    @functools.wraps(original)
    def wrong(op, g, *operands):
        result = original(op, g, *operands)
        if isinstance(result, dict):
            return {x: _scaled(part) for x, part in result.items()}
        return [_scaled(part) for part in (result if isinstance(result, (tuple, list)) else [result])]

    rule.function = wrong
    try:
        yield
    finally:
        rule.function = original


OPERATORS = _by_operator()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda key: "::".join(filter(None, key)))
def test_a_scaled_rule_is_caught(operator):
    cases = OPERATORS[operator]
    rules = {id(r): r for c in cases if isinstance(r := registry.get(*operator, c.opset), FunctionRule)}
    for rule in rules.values():
        own = [c for c in cases if registry.get(*operator, c.opset) is rule]
        with _mutated(rule):
            assert any(_is_red(case) for case in own), "no case notices that its rule is wrong"


def _is_red(case: Case) -> bool:
    try:
        check_rule(case)
    except AssertionError:
        return True
    return False


def test_every_rule_has_a_case():
    """But those of graphs and sequences (tests/control_flow), and what computes in float32 alone, tested apart."""
    rules = {(d, op): rule.function for d, op, _, rule in registry.items() if isinstance(rule, FunctionRule)}
    narrow = {("", op) for op in ("Celu", "DequantizeLinear", "MeanVarianceNormalization")}
    apart = {key for key, function in rules.items() if ".control_flow." in function.__module__} | narrow
    assert not rules.keys() - apart - OPERATORS.keys()

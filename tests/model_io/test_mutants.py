"""Models whose declarations lie are refused, and no rule is blamed for it (see `tests.fuzz.mutants`)."""

from collections import Counter

import pytest

from onnxgrad import BadInput
from onnxgrad.errors import RuleError
from tests.fuzz import mutants


def test_mutants():
    models = mutants.sources()
    outcomes = Counter(mutants.judged(mutants.mutant(seed, models)) for seed in range(150))
    assert outcomes["differentiated"] > 30
    assert outcomes["BadInput"] > 30


def test_a_failing_rule_is_not_passed_over(monkeypatch):
    """The judge can fail: an error of a rule comes through."""

    def fails(model, **names):
        raise RuleError("the rule failed")

    monkeypatch.setattr(mutants, "vjp", fails)
    models = mutants.sources()
    with pytest.raises(RuleError):
        [mutants.judged(mutants.mutant(seed, models)) for seed in range(20)]
    assert not issubclass(RuleError, BadInput)

"""Gradients of random graphs are those of differences (see `tests.fuzz.graphs`, which runs for longer by command)."""

from collections import Counter

import pytest

from tests.fuzz import graphs

EACH = 40


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 4 * EACH, EACH))
def test_random_graphs(start):
    outcomes = Counter(graphs.case(seed) for seed in range(start, start + EACH))
    assert outcomes["judged"] > 0.9 * EACH


def test_a_wrong_gradient_is_found(monkeypatch):
    """The judge can fail: it does where every gradient is twice what it is."""
    real = graphs.run

    def doubled(model, feeds):
        factor = 2 if "x0_grad" in [o.name for o in model.graph.output] else 1
        return [factor * a for a in real(model, feeds)]

    monkeypatch.setattr(graphs, "run", doubled)
    with pytest.raises(AssertionError, match="by differences"):
        list(map(graphs.case, range(10)))

"""Metrics of probabilities, spreads, sets and embeddings, against scikit-learn, SciPy and their definitions."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm, spearmanr
from sklearn.metrics import brier_score_loss, log_loss

from onnxgrad.training.metrics.registry import METRICS

rng = np.random.default_rng(0)
SCORES = rng.standard_normal((300, 4)) * 3
LABELS = np.where(rng.random(300) < 0.5, SCORES.argmax(1), rng.integers(0, 4, 300))
ODDS = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)


def test_ece_by_its_definition():
    sure, right, total = ODDS.max(1), ODDS.argmax(1) == LABELS, 0.0
    for k in range(15):
        inside = (sure >= k / 15) & (sure < (k + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    assert METRICS["ece"].of("classes", SCORES, LABELS) == pytest.approx(total)
    parts = METRICS["ece"].tasks["classes"]()
    parts.add(SCORES[:100], LABELS[:100])
    other = METRICS["ece"].tasks["classes"]()
    other.add(SCORES[100:], LABELS[100:])
    parts.join(other.sums())
    assert parts.result() == pytest.approx(total)


def test_brier_is_that_of_scikit_learn():
    odds, ones = 1 / (1 + np.exp(-SCORES[:, 0])), (LABELS == 0).astype(int)
    assert METRICS["brier"].of("binary", SCORES[:, 0], ones) == pytest.approx(2 * brier_score_loss(ones, odds))


@pytest.mark.parametrize("factor", [0.2, 1.0, 7.0])
def test_temperature_minimizes_the_log_loss(factor):
    z = SCORES * factor

    def loss(t):
        odds = np.exp(z / t - (z / t).max(1, keepdims=True))
        return log_loss(LABELS, odds / odds.sum(1, keepdims=True))

    known = minimize_scalar(loss, bounds=(0.01, 100), method="bounded", options={"xatol": 1e-8}).x
    assert METRICS["temperature"].of("classes", z, LABELS) == pytest.approx(known, rel=1e-4)
    pair = np.stack([np.zeros(300), z[:, 0]], 1)
    ones = (LABELS == 0).astype(int)
    found = [METRICS["temperature"].of(task, y, ones) for task, y in (("binary", z[:, 0]), ("classes", pair))]
    assert found[0] == pytest.approx(found[1])


def test_a_normal_distribution():
    mean, spread = rng.standard_normal((500, 2)), rng.uniform(0.5, 2, (500, 2))
    t = mean + spread * rng.standard_normal((500, 2))
    parts = np.stack([mean, spread], -1)
    assert METRICS["nll"].of("gaussian", parts, t) == pytest.approx(-norm.logpdf(t, mean, spread).mean())
    assert METRICS["coverage"].of("gaussian", parts, t) == pytest.approx(0.9, abs=0.03)
    assert METRICS["width"].of("gaussian", parts, t) == pytest.approx(np.mean(2 * norm.ppf(0.95) * spread))


def test_sets_and_intervals():
    sets = np.array([[True, True, False], [False, True, False]])
    assert METRICS["coverage"].of("sets", sets, np.array([1, 2])) == 0.5
    assert METRICS["set_size"].of("sets", sets, np.array([1, 2])) == 1.5
    ends = np.array([[[0.0, 1.0]], [[2.0, 5.0]]])
    assert METRICS["coverage"].of("intervals", ends, np.array([[1.0], [1.0]])) == 0.5
    assert METRICS["width"].of("intervals", ends, np.array([[1.0], [1.0]])) == 2


def test_ranks_of_embeddings():
    rows = np.array([[1.0, 0], [0.9, 0.1], [0, 1], [0.8, 0.3], [0.5, 0.5]])
    groups = np.array([0, 1, 1, 0, 2])  # the last one has no relative
    cosines = rows @ rows.T / np.outer(*[np.linalg.norm(rows, axis=1)] * 2)
    ranks = []
    for i in range(4):
        order = [j for j in np.argsort(-cosines[i]) if j != i]
        ranks.append(1 + next(k for k, j in enumerate(order) if groups[j] == groups[i]))
    assert METRICS["mrr"].of("embeddings", rows, groups) == pytest.approx(np.mean([1 / r for r in ranks]))
    for k in (1, 5):
        found = METRICS[f"recall_at_{k}"].of("embeddings", rows, groups)
        assert found == pytest.approx(np.mean([r <= k for r in ranks]))
    assert set(ranks) != {1}


def test_spearman_is_that_of_scipy():
    y, t = rng.integers(0, 9, 50) * 1.0, rng.standard_normal(50)
    t += y
    assert METRICS["spearman"].of("numbers", y[:, None], t[:, None]) == pytest.approx(spearmanr(y, t).statistic)

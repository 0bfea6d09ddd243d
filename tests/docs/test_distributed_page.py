"""The page on many machines is written from what was measured, and its predictions are those of the cost model."""

from __future__ import annotations

import json

import pytest
from benchmarks.distributed_scale import PAGE, RESULTS
from benchmarks.distributed_scale_page import MACHINES, NETWORKS, PLANS, RESNET50, page
from benchmarks.network_cost import Network, predict


def test_the_page_is_that_of_the_results():
    assert page(json.loads(RESULTS.read_text())) == PAGE.read_text()


def test_what_was_measured_fits_the_model_and_the_bytes_of_a_ring():
    """The fit is no better than the machine was quiet; the counted bytes are exact but for headers."""
    found = json.loads(RESULTS.read_text())
    network = Network.fitted(found["all_reduce"], found["about"]["cores"])
    for ranks, size, seconds in found["all_reduce"]:
        assert network.all_reduce(ranks, size) == pytest.approx(seconds, rel=0.5)
    for ranks, size, sent in found["sent"]:
        assert sent == pytest.approx(2 * (ranks - 1) / ranks * size, rel=0.01)


def test_efficiencies_fall_with_machines_and_rise_with_bandwidth():
    for plan in PLANS.values():
        table = [[predict(n, RESNET50, network, plan).efficiency for n in MACHINES] for network in NETWORKS.values()]
        assert all(row == sorted(row, reverse=True) for row in table)
        assert all(list(column) == sorted(column) for column in zip(*table))

"""Exports within a limit of memory of a host's whole process, and hosts that keep to the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad import BadInput
from onnxgrad.model_io import save_model
from onnxgrad.training import export_step
from onnxgrad.training.build.attach import attached
from onnxgrad.training.build.recipe import LossRecipe, OptimizerRecipe
from onnxgrad.training.export import peak
from onnxgrad.training.export.host import Host
from onnxgrad.training.loop.recipe import Recipe
from tests.cli.said import said
from tests.training.models import blobs, classifier

RECIPE = Recipe.of("export-step", {"loss": "cross_entropy", "optimizer": "adam"}, (LossRecipe, OptimizerRecipe))


def export(folder, limit):
    model = ir.from_proto(classifier())

    def attach(recipe):
        return attached(model, accumulate=True, **recipe.algorithm()).model

    return peak.export_within_peak(model, attach, folder, RECIPE, limit, batch_size=8)


@pytest.fixture
def modelled(monkeypatch):
    """Memory that hosts take in place of a measurement: 20 MB, and 10 MB for a part; the plans that were measured."""
    seen = []

    def memory(host, device, contract, batch_size, dims=None):
        plan = contract["plan"]
        seen.append((plan["small"], plan["parts"]))
        adapted = "w1" not in contract["state"]
        return 20e6 + (80e6 / plan["parts"] if plan["small"] else 90e6) - 5e6 * adapted

    monkeypatch.setattr(peak, "build_host", lambda folder: None)
    monkeypatch.setattr(peak, "host_memory", memory)
    return seen


def test_the_fastest_plan_that_fits_is_exported(modelled, tmp_path):
    contract, note = export(tmp_path, "70MB")
    assert contract["plan"].items() >= {"batch_size": 8, "parts": 2, "small": True}.items()
    assert json.loads((tmp_path / "contract.json").read_text()) == contract
    assert note.startswith("60.0 MB measured within 70.0 MB: accumulate=2, small=True")
    assert modelled[:3] == [(False, 1), (True, 8), (True, 1)]
    assert export(tmp_path, "120MB")[0]["plan"].items() >= {"parts": 1, "small": False}.items()


def test_adapters_are_exported_where_parts_do_not_suffice(modelled, tmp_path):
    contract, note = export(tmp_path, "27MB")
    assert "lora=4" in note
    assert {"w2", "b2"} & contract["state"].keys() == {"w2"}  # of three columns: it trains as a whole


def test_a_limit_that_no_host_keeps_names_the_smallest(modelled, tmp_path):
    with pytest.raises(BadInput, match=r"no host trains .* the smallest limit that can be met is 26\.1 MB"):
        export(tmp_path, "15MB")
    assert not (tmp_path / "contract.json").exists()


def test_a_model_with_training_information_is_refused(tmp_path):
    source = attached(classifier(), loss="cross_entropy", optimizer="sgd").model
    save_model(source, tmp_path / "m.onnx")
    line = "export-step PLACE/m.onnx -o PLACE/device --peak 64MB"
    assert "peak chooses how a model is trained" in said(tmp_path, line, code=2)


def test_hosts_keep_to_the_plan(tmp_path):
    contract = export_step(attached(classifier(), loss="cross_entropy", accumulate=True).model, tmp_path)
    batch = {name: array[:6] for name, array in blobs().items()}
    expected = Host(tmp_path, 1).step_in_parts(batch, 3)
    contract["plan"] = {"batch_size": 6, "parts": 3, "small": True}
    (tmp_path / "contract.json").write_text(json.dumps(contract))
    host = Host(tmp_path)
    assert host.step(batch)[contract["loss"]] == pytest.approx(expected[contract["loss"]], rel=1e-6)
    assert host._threads == 1
    np.savez(tmp_path / "data.npz", **blobs())
    words = [sys.executable, tmp_path / "host.py", tmp_path / "data.npz"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == -(-len(blobs()["labels"]) // 6)


@pytest.mark.complete  # several exports, and a compiler
def test_the_promise_holds_for_the_host_from_outside(tmp_path):
    contract, note = export(tmp_path, "140MB")
    host = peak.build_host(tmp_path) if "host.hpp" in note else None
    assert peak.host_memory(host, tmp_path, contract, 8) <= 140e6
    assert os.path.exists(tmp_path / "saved.npz")

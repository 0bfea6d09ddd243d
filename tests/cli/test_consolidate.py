"""``onnxgrad consolidate``: what it writes, and what it says of checkpoints that are none or not whole."""

from __future__ import annotations

import shutil

import pytest

from onnxgrad.training.loop.checkpoint import FILE, Checkpoint, named_parts
from tests.cli.said import said
from tests.training.parallel.test_sharded_runs import fitted


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    fitted(2, folder, epochs=1)
    return folder


def test_it_writes_an_ordinary_checkpoint(tmp_path, kept):
    shutil.copytree(kept, tmp_path / "run")
    out = said(tmp_path, "consolidate PLACE/run -o PLACE/one.safetensors")
    assert out.split() == ["checkpoint", str(tmp_path / "one.safetensors")]
    assert said(tmp_path, f"consolidate PLACE/run/{FILE}").split()[1] == str(tmp_path / "run" / FILE)
    found = [Checkpoint.load(tmp_path / name) for name in ("one.safetensors", f"run/{FILE}")]
    assert found[0].run == found[1].run
    assert {n: a.tolist() for n, a in found[0].state.items()} == {n: a.tolist() for n, a in found[1].state.items()}
    assert "w1_mean" in found[0].state
    assert "is an ordinary one: it has no parts" in said(tmp_path, "consolidate PLACE/run", code=2)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("consolidate PLACE/none", "there is no checkpoint"),
        ("consolidate PLACE/run", "'part-1-of-2-"),
        ("consolidate PLACE/run -o PLACE/run/checkpoint.safetensors", "would write over"),
        ("consolidate PLACE/run -o PLACE/nowhere/one.safetensors", "nowhere"),
    ],
)
def test_wrong_use_is_one_line_and_touches_nothing(tmp_path, kept, line, told):
    shutil.copytree(kept, tmp_path / "run")
    names = named_parts(tmp_path / "run" / FILE)
    (tmp_path / "run" / names[1]).unlink()
    before = sorted(p for p in tmp_path.rglob("*"))
    out = said(tmp_path, line, code=2)
    assert told in out
    assert out.startswith("error: ")
    assert "Traceback" not in out
    assert sorted(p for p in tmp_path.rglob("*")) == before

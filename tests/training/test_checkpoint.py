"""A checkpoint is whole or not there, and is never taken for another's."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.training.checkpoint import Checkpoint, check_state_fits, previous, replacing

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8]
DTYPES += [np.uint64, np.uint32, np.uint16, np.uint8, np.bool_]


def state():
    rng = np.random.default_rng(0)
    found = {f"t{i}": (rng.standard_normal((2, 3)) * 3).astype(d) for i, d in enumerate(DTYPES)}
    return found | {"scalar": np.array(7, np.int64), "empty": np.zeros((0, 3), np.float32)}


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    Checkpoint(state(), {"step": 3, "history": {"x": [0.1]}}, "abc").save(path)
    found = Checkpoint.load(path)
    assert found.run == {"step": 3, "history": {"x": [0.1]}}
    assert found.step_graph == "abc"
    for name, array in state().items():
        assert found.state[name].dtype == array.dtype
        assert found.state[name].shape == array.shape
        assert found.state[name].tobytes() == array.tobytes()
        assert found.state[name].flags.writeable
    assert os.listdir(path.parent) == [path.name], "nothing temporary stays"


def test_every_truncation_is_refused_by_name(tmp_path):
    path = tmp_path / "c.safetensors"
    Checkpoint(state(), {"step": 3}, "abc").save(path)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 41), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match=r"checkpoint .*c\.safetensors' is damaged"):
            Checkpoint.load(path)


def test_foreign_files_are_refused_by_name(tmp_path):
    path = tmp_path / "c.safetensors"
    for metadata in (None, {"format": "pt"}, {"onnxgrad.checkpoint": "not json"}):
        safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, path, metadata)
        with pytest.raises(BadInput, match=r"c\.safetensors' is not a checkpoint of onnxgrad"):
            Checkpoint.load(path)
    safetensors.numpy.save_file({}, path, {"onnxgrad.checkpoint": json.dumps({"version": 99})})
    with pytest.raises(BadInput, match="version 99"):
        Checkpoint.load(path)
    with pytest.raises(BadInput, match="there is no checkpoint"):
        Checkpoint.load(tmp_path / "none")
    with pytest.raises(BadInput, match="cannot read"):
        Checkpoint.load(tmp_path)


def test_a_state_of_another_step_is_refused(tmp_path):
    mine = Checkpoint({"w": np.ones(2, np.float32)}, {}, "abc")
    check_state_fits(mine, {"w": np.zeros(2, np.float32)}, "abc", tmp_path)
    for like, graph, words in [
        ({"v": np.zeros(2, np.float32)}, "abc", "lacks 'v'"),
        ({"w": np.zeros(2, np.float32), "v": np.zeros(1)}, "abc", "lacks 'v'"),
        ({}, "abc", "has 'w'"),
        ({"w": np.zeros(3, np.float32)}, "abc", r"float32\[2\], not float32\[3\]"),
        ({"w": np.zeros(2, np.float64)}, "abc", "float64"),
        ({"w": np.zeros(2, np.float32)}, "xyz", "another training step"),
    ]:
        with pytest.raises(BadInput, match=words):
            check_state_fits(mine, like, graph, tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_not_finite_does_not_replace_what_is_good(tmp_path, dtype):
    path = tmp_path / "c.safetensors"
    Checkpoint({"w": np.ones(2, dtype)}, {"step": 1}, "").save(path)
    with pytest.raises(TrainingError, match="'w' is not finite after step 2"):
        Checkpoint({"w": np.array([1, np.nan], dtype)}, {"step": 2}, "").save(path)
    assert Checkpoint.load(path).run["step"] == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("new")
        raise ZeroDivisionError
    with pytest.raises(BadInput, match=r"cannot write .*file': No space"), replacing(path):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with replacing(path) as temporary:
        assert path.read_text() == "old"
        temporary.write_text("new")
    assert path.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_package_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    with pytest.raises(BadInput, match=r"pip install 'onnxgrad\[train\]'"):
        Checkpoint({}, {}, "").save(tmp_path / "c")


def test_the_previous_one_is_kept_and_offered(tmp_path):
    path = tmp_path / "c.safetensors"
    for step in (1, 2, 3):
        Checkpoint(state(), {"step": step}, "abc").save(path, keep=True)
    assert sorted(os.listdir(tmp_path)) == ["c.previous.safetensors", "c.safetensors"]
    assert Checkpoint.load(previous(path)).run["step"] == 2
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"c\.safetensors' is damaged(.|\n)*of step 2, is whole: rename"):
        Checkpoint.load(path)
    previous(path).write_bytes(b"nothing")
    with pytest.raises(BadInput) as caught:
        Checkpoint.load(path)
    assert "whole" not in str(caught.value)


def test_without_hard_links_the_previous_one_is_a_copy(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2):
        Checkpoint(state(), {"step": step}, "abc").save(tmp_path / "c.safetensors", keep=True)
    assert Checkpoint.load(tmp_path / "c.previous.safetensors").run["step"] == 1

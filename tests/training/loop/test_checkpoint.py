"""A checkpoint is whole or not there, and is never taken for another's."""

import hashlib
import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.files import replacing
from onnxgrad.training.loop.checkpoint import Checkpoint, check_state_fits, previous
from onnxgrad.training.step.compile import compile_step
from tests.training.models import trainable

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


def test_the_fingerprint_of_a_step_does_without_the_names_inside():
    """A loss that says what it weighs draws other names; another optimizer or rate of decay is another step."""
    plain, weighing, other, decayed = (
        compile_step(trainable(**how)).fingerprint
        for how in ({}, {"accumulate": True}, {"optimizer": "sgd"}, {"weight_decay": 0.1})
    )
    assert plain == weighing
    assert len({plain, other, decayed}) == 3


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
    check_state_fits(mine, {"w": np.zeros(2, np.float32)}, tmp_path)
    for like, words in [
        ({"v": np.zeros(2, np.float32)}, "lacks 'v'"),
        ({"w": np.zeros(2, np.float32), "v": np.zeros(1)}, "lacks 'v'"),
        ({}, "has 'w'"),
        ({"w": np.zeros(3, np.float32)}, r"float32\[2\], not float32\[3\]"),
        ({"w": np.zeros(2, np.float64)}, "float64"),
    ]:
        with pytest.raises(BadInput, match=words):
            check_state_fits(mine, like, tmp_path)


def test_every_bit_that_flips_is_noticed(tmp_path):
    """Every bit of the header, one in a hundred of the tensors: none is loaded as if nothing were the matter."""
    path = tmp_path / "c.safetensors"
    held = {"w": np.linspace(-1, 1, 400, dtype=np.float32), "steps": np.array(7), "on": np.ones(3, bool)}
    run = {"step": 3, "history": {"loss": 0.1}}
    Checkpoint(held, run, "abc").save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for bit in [*range(header * 8), *range(header * 8, len(whole) * 8, 97)]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"c\.safetensors"):
            Checkpoint.load(path)


def rewritten(path, change):
    """The checkpoint at `path` with another document, as somebody might write it who knows how."""
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    arrays = {n: np.frombuffer(bytes(t["data"]), np.float32).reshape(t["shape"]) for n, t in tensors.items()}
    with safetensors.safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["onnxgrad.checkpoint"])
    text = json.dumps(change(about))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    kept = {"onnxgrad.checkpoint": text} | ({} if about.get("version") == 1 else {"onnxgrad.digest": digest})
    safetensors.numpy.save_file(arrays, path, kept)


WRONG = ["x", None, [1], {"a": 1}, True, -1, 1.5]


@pytest.mark.parametrize("key", ["version", "step_graph", "run", "digests", "run.step", "run.epoch", "run.row",
                                 "run.total", "run.seconds", "run.drawing", "run.finished", "run.callbacks",
                                 "run.history", "run.settings"])  # fmt: skip
def test_wrong_types_in_the_document_are_one_message(tmp_path, key):
    path = tmp_path / "c.safetensors"
    run = {"step": 1, "epoch": 0, "row": 2, "total": 0.5, "seconds": 1.0, "drawing": {}, "finished": ""}
    run |= {"callbacks": [], "history": {}, "settings": {}}
    Checkpoint({"w": np.ones(2, np.float32)}, run, "abc").save(path)
    whole = path.read_bytes()
    first, _, second = key.partition(".")
    right = run.get(second) if second else {"version": 2, "step_graph": "", "run": {}, "digests": {}}[first]
    for value in WRONG:
        fits = type(value) is type(right) or (isinstance(right, float) and type(value) is int)
        if fits and (value != -1 or key not in ("run.step", "run.epoch", "run.row")) and key != "digests":
            continue
        path.write_bytes(whole)
        rewritten(path, lambda a: a | ({first: {**a[first], second: value}} if second else {first: value}))  # noqa: B023
        with pytest.raises(BadInput, match=r"c\.safetensors") as caught:
            Checkpoint.load(path)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_of_before_has_no_digests(tmp_path):
    path = tmp_path / "c.safetensors"
    Checkpoint({"w": np.ones(2, np.float32)}, {"step": 1}, "abc").save(path)
    rewritten(path, lambda a: {"version": 1, "step_graph": "abc", "run": {"step": 1}})
    with safetensors.safe_open(path, "numpy") as file:
        text = file.metadata()["onnxgrad.checkpoint"]
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, path, {"onnxgrad.checkpoint": text})
    with pytest.warns(UserWarning, match="has no digests"):
        assert Checkpoint.load(path).run == {"step": 1}


def test_what_is_not_finite_is_not_gone_on_with(tmp_path):
    like = {"w": np.ones(2, np.float32)}
    with pytest.raises(BadInput, match="is no good: its 'w' is not finite"):
        check_state_fits(Checkpoint({"w": np.array([1, np.inf], np.float32)}, {}, ""), like, tmp_path / "c")
    bound = {"w": np.array([0, np.inf], np.float32)}
    check_state_fits(Checkpoint(bound, {}, ""), bound, tmp_path / "c")  # as it was from the start


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


def test_a_write_leaves_the_mask_of_the_process_alone(tmp_path, monkeypatch):
    """Another thread may create a file at this moment."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the mask of the process was changed"))
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("new")


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

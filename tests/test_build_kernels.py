"""The kernels are compiled when the package is built, and an installation without a compiler says so."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools import build_kernels

ROOT = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(
    sys.platform == "win32" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A library that is quickly built."""
    folder = tmp_path / "source"
    folder.mkdir()
    visible = '__attribute__((visibility("default")))'
    (folder / "small.c").write_text(f"{visible} int answer(void); int answer(void) {{ return 5; }}\n")
    monkeypatch.setattr(build_kernels, "SOURCES", folder)
    return folder


@needs_compiler
def test_a_library_for_each_kind_of_processor(sources, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "older.so").write_bytes(b"")
    places = build_kernels.build_kinds(tmp_path / "made")
    assert sorted(places) == sorted((tmp_path / "made").iterdir())
    assert [p.stem.split("-", 2)[2] for p in places] == build_kernels.processors.architecture_kinds()
    assert ctypes.CDLL(str(places[-1])).answer() == 5


@needs_compiler
def test_sources_that_do_not_compile_leave_no_library(sources, tmp_path):
    (sources / "broken.c").write_text("int broken(void) { return }")
    with pytest.raises(build_kernels.NoCompiler, match=r"cannot build the kernels: .*error"):
        build_kernels.build_library(build_kernels.find_compiler(), [], tmp_path / "made" / "a.so")
    assert not list((tmp_path / "made").iterdir())


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build_kernels.NoCompiler, match="there is no C compiler"):
        build_kernels.find_compiler()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build_kernels.NoCompiler, match=r"there is no C compiler \(no-such-compiler\)"):
        build_kernels.find_compiler()


@pytest.mark.complete
@needs_compiler
@pytest.mark.parametrize("editable", [[], ["-e"]], ids=["install", "editable"])
@pytest.mark.parametrize("compiler", ["", "no-such-compiler"], ids=["compiler", "none"])
def test_an_installation(tmp_path, editable, compiler):
    """From a copy of this clone, with pip: the libraries are there, or a line says why not."""
    import venv

    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns(".*", "prebuilt", "__pycache__", "tests", "docs", "out", "dist", "*.egg-info")
    shutil.copytree(ROOT, clone, ignore=ignored)
    venv.create(tmp_path / "empty", with_pip=True)
    pip = [str(tmp_path / "empty" / "bin" / "python"), "-m", "pip", "install", "-v", "--no-deps", *editable, str(clone)]
    env = {k: v for k, v in os.environ.items() if k != "CC"} | ({"CC": compiler} if compiler else {})
    done = subprocess.run(pip, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = "onnxgrad is installed without kernels in C: there is no C compiler (no-such-compiler)"
    assert (said in done.stdout + done.stderr) == bool(compiler)
    made = list((clone if editable else tmp_path / "empty").rglob("prebuilt/onnxgrad-*"))
    assert len(made) == (0 if compiler else len(build_kernels.processors.architecture_kinds()))

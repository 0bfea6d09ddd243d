"""The library of kernels: built once, in a place of this user's own, and what is said where it cannot be had."""

import ctypes
import hashlib
import os
import subprocess
import sys

import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels import build, library
from onnxgrad.training import compile_step
from tests.runtime.kernels.test_steps import NATIVE, PORTABLE, batches
from tests.runtime.kernels.twins import needs_compiler
from tests.training.models import trainable


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own, and a library that is quickly built."""
    monkeypatch.setenv("ONNXGRAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "small.c").write_text(
        'int small(void) { return 5; }\n__attribute__((visibility("default")))'
        " int answer(void); int answer(void) { return small(); }\n"
    )
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    build._recipe.cache_clear()
    yield tmp_path / "cache" / "native"
    build._recipe.cache_clear()


@needs_compiler
def test_it_is_built_once(fresh):
    place = library()
    assert sorted(fresh.iterdir()) == [place, place.with_name(f"{place.name}.sha256")]
    stamp = place.stat().st_mtime_ns
    build._recipe.cache_clear()
    assert library() == place
    assert place.stat().st_mtime_ns == stamp
    place.unlink()
    assert library().exists()


@needs_compiler
@pytest.mark.parametrize("damage", [lambda b: b"no library", lambda b: b[:-9] + b"x" * 9, lambda b: b[: len(b) // 2]])
def test_a_library_that_is_damaged_is_built_anew(fresh, damage):
    place = library()
    whole = place.read_bytes()
    place.write_bytes(damage(whole))
    assert ctypes.CDLL(str(library())).answer() == 5
    stamp = place.with_name(f"{place.name}.sha256")
    assert hashlib.sha256(place.read_bytes()).hexdigest() == stamp.read_text().strip()
    stamp.unlink()  # as an earlier version left it
    place.write_bytes(b"no library")
    assert library().read_bytes() != b"no library"
    assert hashlib.sha256(place.read_bytes()).hexdigest() == stamp.read_text().strip()


@needs_compiler
def test_a_library_that_is_none(fresh):
    """It is what was built, and the runtime does not take it."""
    with pytest.raises(BadInput, match="cannot load the kernels"):
        NATIVE.native()


@needs_compiler
def test_sources_that_do_not_compile(fresh):
    (build.SOURCES / "broken.c").write_text("int broken(void) { return }")
    with pytest.raises(BadInput, match=r"cannot build the kernels of target 'native': .*error"):
        library()
    assert not list(fresh.iterdir())


@needs_compiler
def test_several_build_at_once(fresh):
    """Each gets a whole library, and nothing else stays."""
    script = (
        "import ctypes, pathlib; from onnxgrad.runtime.kernels import build; "
        f"build.SOURCES = pathlib.Path({str(build.SOURCES)!r}); "
        "assert ctypes.CDLL(str(build.library())).answer() == 5; print('whole')"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2)]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == [b"whole"] * 2
    assert len(list(fresh.iterdir())) == 2


def test_without_a_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BadInput, match="needs a C compiler, and there is none"):
        library()
    step = compile_step(trainable())
    with pytest.raises(BadInput, match="hint: install one"):
        StepRunner(step, options=NATIVE)
    assert StepRunner(step, options=PORTABLE).step(batches(1)[0])


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", sys.executable, '"cc'])
def test_a_compiler_that_is_none(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BadInput, match=r"CC|C compiler") as error:
        library()
    assert "portable" in str(error.value)
    assert not fresh.exists()


def test_systems_without_the_library(fresh, monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(BadInput, match="for Linux and macOS, not win32; use target 'portable'"):
        library()


def test_targets_that_there_are(fresh):
    with pytest.raises(BadInput, match="target must be 'auto', 'portable' or 'native', not 'gpu'"):
        Options(target="gpu").native()


# --- whose it is -----------------------------------------------------------------------------------


def _given_away(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def _linked(place, monkeypatch):
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))


def _dangling(place, monkeypatch):
    place.unlink()
    place.symlink_to("nowhere")


def _piped(place, monkeypatch):
    place.unlink()
    os.mkfifo(place)


def _folder(place, monkeypatch):
    place.unlink()
    place.mkdir()


#: What happens to the library, and what is said of it then.
FOREIGN = {
    "anybody writes it": (lambda place, _: place.chmod(0o602), "other users may write it"),
    "a group writes it": (lambda place, _: place.chmod(0o620), "other users may write it"),
    "anybody writes its folder": (lambda place, _: place.parent.chmod(0o707), "other users may write its folder"),
    "another's": (_given_away, "belongs to another user"),
    "another's folder": (lambda place, monkeypatch: _given_away(place.parent, monkeypatch), "belongs to another user"),
    "a link": (_linked, "cannot be opened as a file"),
    "a link to nothing": (_dangling, "cannot be opened as a file"),
    "a pipe": (_piped, "no ordinary file"),
    "a folder": (_folder, "no ordinary file"),
}


@needs_compiler
@pytest.mark.parametrize("how", FOREIGN)
def test_a_library_that_others_may_have_written_is_not_taken(fresh, monkeypatch, how):
    happens, said = FOREIGN[how]
    happens(library(), monkeypatch)
    with pytest.raises(BadInput, match=rf"are not taken: .*{said}"):
        library()
    with pytest.raises(BadInput, match="hint: remove it, or have ONNXGRAD_CACHE"):
        NATIVE.native()


@needs_compiler
def test_it_is_private_whatever_the_mask(fresh):
    old = os.umask(0)
    try:
        fresh.mkdir(parents=True)  # as an earlier version made it
        place = library()
    finally:
        os.umask(old)
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o022 == 0

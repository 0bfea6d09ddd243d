"""The libraries of a wheel for a platform: the best one for this processor, and none that other sources made."""

from __future__ import annotations

import shutil

import pytest

from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels import build, find_library, library, prebuilt
from tests.runtime.kernels.twins import needs_compiler

V2 = {"sse4_2", "popcnt"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The package as a wheel has it: a processor as in `has`, and libraries of the kinds that `put` puts there."""
    for name in ("CC", "ONNXGRAD_TARGET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prebuilt.sys, "platform", "linux")
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "_instructions", lambda: V4)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    shutil.copytree(build.SOURCES, tmp_path / "source")
    (tmp_path / "prebuilt").mkdir()
    return tmp_path


def put(wheel, *kinds, suffix="so"):
    for kind in kinds:
        (wheel / "prebuilt" / prebuilt.name_library(wheel / "source", kind, suffix)).write_bytes(b"")


@pytest.mark.parametrize(
    ("machine", "has", "best"),
    [
        ("x86_64", V4, "x86-64-v4"),
        ("AMD64", V4 - {"avx512vl"}, "x86-64-v3"),  # as the first processors with 512 bits
        ("x86_64", V3 - {"fma"}, "x86-64"),
        ("x86_64", set(), "x86-64"),
        ("aarch64", set(), "aarch64"),
        ("arm64", V4, "aarch64"),
        ("riscv64", V4, None),
    ],
)
def test_the_best_that_the_processor_can_run(wheel, monkeypatch, machine, has, best):
    put(wheel, "x86-64", "x86-64-v3", "x86-64-v4", "aarch64")
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "_instructions", lambda: has)
    found = prebuilt.library()
    assert (found and found.stem.split("-", 2)[2]) == best


def test_where_the_best_is_not_carried_the_next_is_taken(wheel):
    put(wheel, "x86-64", "x86-64-v3")
    assert library().stem.endswith("-x86-64-v3")


def test_libraries_of_other_sources_and_systems_are_passed_over(wheel):
    put(wheel, "x86-64", suffix="dll")
    assert prebuilt.library() is None
    prebuilt._best.cache_clear()
    put(wheel, "x86-64")
    with (wheel / "source" / "rows.c").open("a") as file:
        file.write("/* changed */")
    assert prebuilt.library() is None


def test_who_names_a_compiler_has_it_used(wheel, monkeypatch):
    put(wheel, "x86-64")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert prebuilt.library() is None


def test_what_cannot_be_loaded_is_not_at_hand(wheel):
    put(wheel, "x86-64")  # which is empty
    assert find_library() is None
    assert Options().settled().target == "portable"


def test_on_windows_they_are_for_those_who_ask(wheel, monkeypatch):
    """Nobody has run them there yet."""
    monkeypatch.setattr(prebuilt.sys, "platform", "win32")
    put(wheel, "x86-64", suffix="dll")
    assert prebuilt.library().suffix == ".dll"
    assert find_library() is None


@needs_compiler
def test_it_needs_no_compiler(wheel, tmp_path, monkeypatch):
    """A library in the place of the wheel is what a session loads."""
    made = tmp_path / "prebuilt" / prebuilt.name_library(tmp_path / "source", "x86-64", "so")
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "none")
    shutil.copy(library(), made)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setenv("ONNXGRAD_CACHE", str(tmp_path / "none"))
    assert library() == find_library() == made
    assert Options().settled().target == "native"
    Options(target="native").native()


def test_what_this_processor_has():
    """Whatever it is, what it is said to have is a chain: who has the best has the others."""
    found = prebuilt.kinds()
    assert found in ([], ["aarch64"], *(["x86-64-v4", "x86-64-v3", "x86-64"][i:] for i in range(3)))

"""The library of kernels of the installation: the best one for this processor, and none of other sources."""

from __future__ import annotations

import shutil

import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels import has_kernels, installed, library, processors
from tests.runtime.kernels.twins import needs_kernels

MODULE = "onnxgrad.runtime.kernels.libraries"
V2 = {"sse4_2", "popcnt"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def package(no_kernels, tmp_path, monkeypatch):
    """A folder of libraries and one of sources, on Linux with a processor that has AVX-512."""
    monkeypatch.delenv("ONNXGRAD_TARGET", raising=False)
    monkeypatch.setattr(processors.sys, "platform", "linux")
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processors, "_instruction_sets", lambda: V4)
    (tmp_path / "none").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "small.c").write_text("int small(void) { return 5; }")
    monkeypatch.setattr(f"{MODULE}.SOURCES", tmp_path / "source")
    # files here are empty: the choice is tested, not whether ONNX Runtime loads them
    monkeypatch.setattr(f"{MODULE}.onnxruntime.SessionOptions", lambda: Accepting())
    return tmp_path


class Accepting:
    """Session options that load any library."""

    def register_custom_ops_library(self, place):
        assert place


def put(package, *kinds, suffix=""):
    for kind in kinds:
        (package / "none" / processors.name_library(package / "source", kind, suffix)).write_bytes(b"")


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
def test_the_best_library_for_the_processor(package, monkeypatch, machine, has, best):
    put(package, "x86-64", "x86-64-v3", "x86-64-v4", "aarch64")
    monkeypatch.setattr(processors.platform, "machine", lambda: machine)
    monkeypatch.setattr(processors, "_instruction_sets", lambda: has)
    place = installed().place
    assert (place and place.stem.split("-", 2)[2]) == best
    assert has_kernels() == (best is not None)


def test_the_next_best_library_if_the_best_is_missing(package):
    put(package, "x86-64", "x86-64-v3")
    assert library().stem.endswith("-x86-64-v3")


def test_the_choice_is_made_once_per_process(package):
    put(package, "x86-64")
    first = library()
    put(package, "x86-64-v4")
    assert library() == first


@pytest.mark.parametrize("change", ["another system", "other sources"])
def test_a_library_of_another_system_or_of_other_sources_is_not_loaded(package, change):
    put(package, "x86-64", suffix="dll" if change == "another system" else "")
    if change == "other sources":
        with (package / "source" / "small.c").open("a") as file:
            file.write("/* changed */")
    with pytest.warns(UserWarning, match="built from other sources or for another processor; install onnxgrad again"):
        assert not has_kernels()
    with pytest.raises(BadInput, match=r"target 'native' has no kernels here: .*\n  hint: install a wheel"):
        library()


@pytest.mark.parametrize(("system", "suffix"), [("win32", "dll"), ("darwin", "dylib")])
def test_on_untested_systems_only_the_target_native_runs_kernels(package, monkeypatch, system, suffix):
    monkeypatch.setattr(processors.sys, "platform", system)
    put(package, "x86-64", suffix=suffix)
    monkeypatch.setattr(processors, "_instruction_sets", lambda: ())
    assert library().suffix == f".{suffix}"
    assert not has_kernels()
    assert Options().resolve_target().target == "portable"


def test_a_library_that_onnx_runtime_cannot_load(no_kernels, monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setenv("ONNXGRAD_LIBRARY", str(tmp_path / "broken.so"))
    assert not has_kernels()
    assert "cannot load broken.so" in installed().missing
    assert Options().resolve_target().target == "portable"
    with pytest.raises(BadInput, match="cannot load broken"):
        Options(target="native").native()


@needs_kernels
def test_the_library_that_the_environment_names(no_kernels, monkeypatch, tmp_path):
    installed.cache_clear()
    monkeypatch.undo()
    shutil.copy(library(), tmp_path / "mine.so")
    installed.cache_clear()
    monkeypatch.setenv("ONNXGRAD_LIBRARY", str(tmp_path / "mine.so"))
    assert library() == tmp_path / "mine.so"
    Options(target="native").native()


def test_targets_that_do_not_exist():
    with pytest.raises(BadInput, match="target must be 'auto', 'portable' or 'native', not 'gpu'"):
        Options(target="gpu").native()


def test_the_kinds_of_this_processor_include_all_lesser_ones():
    assert processors.supported_kinds() in (
        [],
        ["aarch64"],
        *(["x86-64-v4", "x86-64-v3", "x86-64"][i:] for i in range(3)),
    )

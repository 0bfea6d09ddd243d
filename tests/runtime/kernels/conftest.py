"""Tensors with borders where the kernels are watched (see ``sanitized.py``); an installation without kernels."""

import os

import pytest

from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels.libraries import LIBRARY, installed
from tests.runtime.kernels.sanitized import SANITIZED


@pytest.fixture(autouse=True)
def tensors_one_by_one(monkeypatch):
    """No arena, whose tensors lie side by side: an access beyond one would be one to the next."""
    if not os.environ.get(SANITIZED):
        return
    ordinary = Options.native

    def native(self):
        options = ordinary(self)
        options.enable_cpu_mem_arena = False
        return options

    monkeypatch.setattr(Options, "native", native)


@pytest.fixture
def no_kernels(monkeypatch, tmp_path):
    """This process, as if the package had been installed without a C compiler."""
    monkeypatch.setattr("onnxgrad.runtime.kernels.libraries.FOLDER", tmp_path / "none")
    monkeypatch.delenv(LIBRARY, raising=False)
    installed.cache_clear()
    yield
    installed.cache_clear()

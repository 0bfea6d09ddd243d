"""Tensors with borders where the kernels are watched (see ``sanitized.py``)."""

import os

import pytest

from onnxgrad.runtime import Options
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

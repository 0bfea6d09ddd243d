"""``onnxgrad info --system``: what a report of a problem needs."""

import json
import os

import pytest

from tests.commands import command

PYTHON_NAMES = {"onnxgrad", "python", "system", "onnxruntime", "numpy", "target", "kernels", "processor"}


@pytest.mark.parametrize("target", ["portable", "native"])
def test_the_target_and_why(target):
    done = command("info", "--system", "--json", env={**os.environ, "ONNXGRAD_TARGET": target})
    found = json.loads(done.stdout)
    assert found.keys() >= PYTHON_NAMES
    assert found["target"] == f"{target} (ONNXGRAD_TARGET is set)"


def test_an_installation_without_kernels_says_why(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "ONNXGRAD_TARGET"}
    done = command("info", "--system", env=env | {"ONNXGRAD_LIBRARY": str(tmp_path / "none.so")})
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["target"] == "portable"
    assert "cannot load none.so" in lines["kernels"]

"""What would be published: installed into an empty environment, it runs the first snippet of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import onnxgrad

ROOT = Path(__file__).parents[1]


@pytest.mark.complete
def test_the_wheel_runs_the_first_snippet_of_the_readme(tmp_path):
    pytest.importorskip("build", reason="no build")

    def ran(*command: object) -> str:
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [*map(str, command)], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    ran(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    source, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    assert (source.name, wheel.suffix) == (f"onnxgrad-{onnxgrad.__version__}.tar.gz", ".whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ran(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    (tmp_path / "snippet.py").write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1])
    ran(python, "snippet.py")
    assert onnxgrad.__version__ in ran(python, "-m", "onnxgrad", "--version")

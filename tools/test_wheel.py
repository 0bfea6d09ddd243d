"""Install the wheel for a platform into an empty environment, and run the tests of kernels and a run of training there.

    python tools/test_wheel.py DIST TAG

The tests come from this clone, the package from the wheel in DIST. Kernels must be there. Only the
standard library is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Tests of all kernels, and of whole steps.
TESTS = ("tests/runtime/kernels", "tests/training/loop/test_trainer.py")
#: What `tools/build_kernels.py` reads of the clone.
PROCESSORS = "src/onnxgrad/runtime/kernels/processors.py"


def main(dist: str, tag: str) -> int:
    """The exit code of the tests."""
    (wheel,) = Path(dist).resolve().glob(f"onnxgrad-*-py3-none-{tag}.whl")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        venv.create(place / "environment", with_pip=True)
        binaries = place / "environment" / ("Scripts" if os.name == "nt" else "bin")
        python = binaries / ("python.exe" if os.name == "nt" else "python")
        shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tools", place / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt", PROCESSORS):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
        run = ["-m", "pip", "install", "--quiet", "-c", "constraints.txt", f"onnxgrad[dev] @ {wheel.as_uri()}"]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "ONNXGRAD_TARGET")}
        kernels = ["-c", "from onnxgrad.runtime.kernels.libraries import library; print(library())"]
        for words in (run, kernels, ["-m", "pytest", "-q", "-n", "auto", *TESTS]):
            code = subprocess.run([str(python), *words], cwd=place, env=env, check=False).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run HIPS autograd's own tests on onnxgrad.eager, through `onnxgrad.eager.as_autograd`.

``python -m benchmarks.autograd_suite [--tests FOLDER] [--page docs/autograd-suite.md]``

The tests are those of the source distribution of the installed version, which pip downloads, or of a checkout. They are
not changed; their ``conftest.py`` is, which imports the shim.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import onnxgrad

CONFTEST = """
import onnxgrad.eager.as_autograd
import autograd.core
import numpy
import pytest

autograd.core.primitive_vjps = {}  # one test of HIPS autograd's tables imports it, and seven others are in its file


@pytest.fixture(autouse=True)
def random_seed():
    numpy.random.seed(42)
"""

_HERE = "works here"
#: Tests that do not pass, and why.
REASONS = {
    "test_assignment_raises_error": f"asserts that assignment to elements is refused; it {_HERE}",
    "test_rfftn_odd_not_implemented": f"asserts that a transform is not implemented; it {_HERE}",
    "test_const_graph": "counts calls of `const_graph`, which here only fixes arguments",
    "test_const_graph_args": "counts calls of `const_graph`, which here only fixes arguments",
    "test_cast_to_int": "`np.int64(x)`, numpy's type, of an array on the tape: write `x.astype(np.int64)`",
    "test_pinv": "calls the private function `numpy.linalg._dot`",
    "test_dtypes": "asks for a gradient in long doubles, which ONNX does not have",
    "test_custom_where_dtypes": "asks that `where` of Python's numbers and lists returns these, not arrays",
    "test_wrapped_name_and_docs": "compares the text of a docstring",
}


def download(folder: Path) -> Path:
    """The tests of the installed version, from its source distribution."""
    wanted = f"autograd=={version('autograd')}"
    pip = [sys.executable, "-m", "pip", "download", "-q", wanted, "--no-deps", "--no-binary", ":all:", "-d", folder]
    subprocess.run(pip, check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/tests"))


def run(tests: Path, folder: Path) -> str:
    """The output of pytest."""
    copy = folder / "suite"
    shutil.copytree(tests, copy)
    (copy / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-c", os.devnull, "--rootdir=.", "."]
    path = os.pathsep.join([str(Path(onnxgrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    return found.stdout


def page(output: str, source: str) -> str:
    """The counts of each file, and what does not pass."""
    counts: dict[str, Counter[str]] = {}
    failed = []
    for outcome, file, name in re.findall(r"^(PASSED|FAILED|ERROR) (\w+)\.py(?:::(\S+))?", output, re.M):
        counts.setdefault(file, Counter())[outcome] += 1
        if outcome != "PASSED":
            failed.append(f"{file}.py::{name}")
    total = sum(c.total() for c in counts.values())
    passed = sum(c["PASSED"] for c in counts.values())
    skipped = sum(int(n) for n in re.findall(r"(\d+) skipped", output)[-1:])
    lines = [
        "# HIPS autograd's own tests on onnxgrad.eager",
        "",
        "Written by `python -m benchmarks.autograd_suite --page docs/autograd-suite.md`, which runs the tests of",
        f"HIPS autograd {source}, unchanged, with `import onnxgrad.eager.as_autograd` in their `conftest.py`.",
        "",
        f"**{passed} of {total} pass**; {skipped} more skip themselves for want of xarray.",
        "",
        "| file | pass | of |",
        "|---|---|---|",
        *(f"| {name} | {c['PASSED']} | {c.total()} |" for name, c in sorted(counts.items())),
        "",
        "## What does not pass",
        "",
        "| test | why |",
        "|---|---|",
    ]
    for test in sorted(failed):
        name = test.rpartition("::")[2].partition("[")[0]
        lines.append(f"| `{test}` | {REASONS.get(name, '**unexpected**')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="the folder of the tests in a checkout")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = options.tests or download(folder)
        text = page(run(tests, folder), "of a checkout" if options.tests else version("autograd"))
    print(text)
    if options.page:
        options.page.write_text(text)


if __name__ == "__main__":
    main()

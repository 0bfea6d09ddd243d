"""The published wheel: installed into an empty environment, it runs the first snippet of the README."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import onnxgrad

ROOT = Path(__file__).parents[1]


def ran(*command: object, cwd: Path, **more: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CC", "ONNXGRAD_TARGET")}
    line = [*map(str, command)]
    done = subprocess.run(line, cwd=cwd, env=clean | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the source archive and the pure wheel."""
    pytest.importorskip("build", reason="no build")
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder, ONNXGRAD_KERNELS="0")
    return folder


def empty(folder: Path, wheel: Path) -> Path:
    """The Python of an environment that has the wheel and what it requires, alone; the snippet is in the folder."""
    venv.create(folder / "empty", with_pip=True)
    python = folder / "empty" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ran(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (folder / "snippet.py").write_text(found[1])
    return python


@pytest.mark.complete
def test_the_wheel_runs_the_first_snippet_of_the_readme(dist, tmp_path):
    version = onnxgrad.__version__
    assert (dist / f"onnxgrad-{version}.tar.gz").exists()
    python = empty(tmp_path, dist / f"onnxgrad-{version}-py3-none-any.whl")
    ran(python, "snippet.py", cwd=tmp_path)
    assert version in ran(python, "-m", "onnxgrad", "--version", cwd=tmp_path)


#: The tag of the wheel for the platform at hand.
HERE = {
    ("linux", "x86_64"): "manylinux_2_28_x86_64",
    ("linux", "aarch64"): "manylinux_2_28_aarch64",
    ("darwin", "arm64"): "macosx_11_0_arm64",
    ("win32", "AMD64"): "win_amd64",
}.get((sys.platform, platform.machine()))

NATIVE = """
import numpy as np
import onnx.parser
from onnxgrad.runtime import Options, StepRunner, kernels
from onnxgrad.training import attach, compile_step

model = onnx.parser.parse_model('''<ir_version: 9, opset_import: ["": 20]>
    m (float[N, 3, 9, 9] x) => (float[N, 4, 4, 4] y) <float[4, 3, 3, 3] w = {WEIGHTS}> {
        c = Conv <strides = [2, 2]> (x, w)  y = Tanh (c) }'''.replace("WEIGHTS", ", ".join(["0.1"] * 108)))
step = compile_step(attach(model, loss="mse", optimizer="adam"))
rng = np.random.default_rng(0)
batch = {n: rng.standard_normal(s, np.float32) for n, s in (("x", (5, 3, 9, 9)), ("labels", (5, 4, 4, 4)))}
found = []
for target in ("portable", "native"):
    runner = StepRunner(step, options=Options(threads=1, target=target))
    found.append([float(runner.step(batch)["loss"]) for _ in range(5)])
np.testing.assert_allclose(*found, rtol=1e-5)
assert found[0][-1] < found[0][0]
print(kernels.library())
"""


@pytest.mark.complete
@pytest.mark.skipif(HERE is None, reason="there is no wheel for this platform")
def test_the_wheel_for_this_platform_needs_no_compiler(dist, tmp_path):
    for package in ("wheel", "ziglang"):
        pytest.importorskip(package, reason=f"no {package}")
    ran(sys.executable, ROOT / "tools" / "platform_wheels.py", dist, HERE, cwd=dist, PYTHONPATH=str(ROOT / "src"))
    python = empty(tmp_path, dist / f"onnxgrad-{onnxgrad.__version__}-py3-none-{HERE}.whl")
    (tmp_path / "native.py").write_text(NATIVE)
    nothing = {"PATH": str(tmp_path / "nothing"), "ONNXGRAD_CACHE": str(tmp_path / "cache")}
    ran(python, "snippet.py", cwd=tmp_path, **nothing)
    taken = Path(ran(python, "native.py", cwd=tmp_path, **nothing).strip())
    assert taken.parent.name == "prebuilt"
    assert tmp_path / "empty" in taken.parents
    assert not (tmp_path / "cache").exists()

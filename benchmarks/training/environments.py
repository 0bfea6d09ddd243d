"""The environments of the competitors: made on demand, versions pinned, kept in a cache of the user's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

#: What is installed for each competitor that does not run in the project's own environment.
PINS = {
    "jax": ("jax==0.10.2", "jaxlib==0.10.2", "numpy==2.4.6"),
    "ort-training": ("onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy==1.26.4", "protobuf==5.29.5"),
    "onnx-ad": ("onnx-ad==0.3.0", "onnx==1.23.2", "onnxruntime==1.31.1", "numpy==2.4.6"),
    "onnxsim": ("onnxsim==0.8.1", "onnx==1.23.2", "onnxruntime==1.31.1", "numpy==2.4.6"),
}
#: MKL takes its AVX-512 kernels only where this says that the processor is Intel's.
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n"


class Missing(Exception):
    """An environment cannot be had; the message is the reason."""


@dataclass(frozen=True)
class Environment:
    """The interpreter of a competitor, and the environment that it needs."""

    python: str
    variables: dict[str, str]


def cache() -> Path:
    """The folder of environments: $ONNXGRAD_BENCHMARKS, or in the user's cache."""
    given = os.environ.get("ONNXGRAD_BENCHMARKS")
    return Path(given) if given else Path.home() / ".cache" / "onnxgrad-benchmarks"


def environment(name: str) -> Environment:
    """The environment called `name`: "own", "own-avx512" or one of `PINS`. Raises Missing with the reason."""
    if name == "own":
        return Environment(sys.executable, {})
    if name == "own-compiler":
        if not (shutil.which("g++") or shutil.which("clang++")):
            raise Missing("torch.compile needs a C++ compiler, and there is neither g++ nor clang++")
        return Environment(sys.executable, {})
    if name == "own-avx512":
        return Environment(sys.executable, {"LD_PRELOAD": str(_intel())})
    return Environment(str(_installed(name)), {})


def _installed(name: str) -> Path:
    pins = PINS[name]
    folder = cache() / f"{name}-{hashlib.sha256(' '.join(pins).encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Missing(f"pip cannot install {' '.join(pins)}: {(errors or ['no message'])[-1]}")
    (folder / "complete").touch()
    return python


def _intel() -> Path:
    library = cache() / "intel.so"
    if library.exists():
        return library
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise Missing("without a C compiler MKL cannot be told to take its AVX-512 kernels")
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        raise Missing("the processor has no AVX-512")
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".c")
    source.write_text(INTEL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library

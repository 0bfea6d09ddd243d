"""Memory, files and start-up of the C++ host on the stock library of ONNX Runtime, within limits of memory.

    python -m benchmarks.hosts --headers /usr/include

The host of an exported step trains classifiers of 5,000 and of 1.3 million weights. Measured from outside: the largest
resident memory, its part that is the process's own (not pages of files, which the system can drop), and the time from
the start of the process to its end. Limits are those of a memory cgroup (version 1, which has to be writable), without
swap: pages of files count there, and are dropped and read again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from onnxgrad.training import export_step
from onnxgrad.training.build.attach import attached
from onnxgrad.training.export import files

LIMITS = (64, 32, 16, 12, 8, 4)
_NOTHING = """#include <onnxruntime_cxx_api.h>
int main() { Ort::Env environment{ORT_LOGGING_LEVEL_ERROR, "none"}; return 0; }
"""


def classifier() -> onnx.ModelProto:
    """A convolutional network of 5,000 weights."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> net (float[N, 1, 16, 16] x) => (float[N, 10] y) {
            a = Conv <strides = [2, 2]> (x, w1)  b = Relu (a)  c = Conv <strides = [2, 2]> (b, w2)  d = Relu (c)
            p = GlobalAveragePool (d)  f = Flatten (p)  y = MatMul (f, head) }""")
    return _with_weights(model, {"w1": (16, 1, 3, 3), "w2": (32, 16, 3, 3), "head": (32, 10)})


def large() -> onnx.ModelProto:
    """A network of three products, of 1.3 million weights."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> net (float[N, 1, 16, 16] x) => (float[N, 10] y) {
            f = Flatten (x)  a = MatMul (f, w1)  b = Relu (a)  c = MatMul (b, w2)  d = Relu (c)
            y = MatMul (d, head) }""")
    return _with_weights(model, {"w1": (256, 1024), "w2": (1024, 1024), "head": (1024, 10)})


def _with_weights(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def build(source: Path, program: Path, headers: Path, *flags: str) -> None:
    """Compile a program against the shared library of the wheel."""
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    link = program.parent / "libonnxruntime.so.1"
    if not link.exists():
        link.symlink_to(library)
    command = ["g++", "-std=c++17", "-Os", "-s", *flags, "-isystem", headers, "-isystem", headers / "onnxruntime"]
    command += ["-x", "c++", source, "-x", "none", library, f"-Wl,-rpath,{program.parent}", "-o", program]
    subprocess.run(list(map(str, command)), check=True)


def run(command: list[str], limit: int | None = None) -> dict[str, Any]:
    """The exit status, milliseconds, and the memory of a process in megabytes: at most, and its own at most."""

    group = Path(f"/sys/fs/cgroup/memory/onnxgrad-{os.getpid()}")
    if limit is not None:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit << 20))

    def within() -> None:
        if limit is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=within)
    own = resident = 0
    status = Path(f"/proc/{process.pid}/status")
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        lines = [line.split() for line in status.read_text().splitlines()]
        own = max([own, *(int(words[1]) for words in lines if words[0] == "RssAnon:")])
        resident = max([resident, *(int(words[1]) for words in lines if words[0] == "VmRSS:")])
        time.sleep(0.0005)
    seconds = time.perf_counter() - start
    code = process.wait()
    if limit is not None:
        group.rmdir()
    return {"code": code, "ms": 1e3 * seconds, "resident": resident / 1024, "own": own / 1024}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--headers", type=Path, default=Path("/usr/include"), help="of ONNX Runtime and nlohmann/json")
    headers = parser.parse_args().headers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size, network in (("small", classifier()), ("large", large())):
            export_step(attached(network, loss="cross_entropy", optimizer="sgd").model, folder / size)
        rng = np.random.default_rng(0)
        rows: dict[str, Any] = {
            "x": rng.standard_normal((64, 1, 16, 16)).astype(np.float32),
            "labels": rng.integers(0, 10, 64),
        }
        np.savez(folder / "data.npz", **rows)
        (folder / "nothing.cpp").write_text(_NOTHING)
        build(folder / "nothing.cpp", folder / "nothing", headers)
        build(Path(files.__file__).with_name("host.hpp"), folder / "host", headers, "-DONNXGRAD_HOST_MAIN")
        host = [str(folder / "host"), str(folder / "data.npz"), "--batch-size", "8", "--folder"]
        cases = {"the library alone": [str(folder / "nothing")]}
        for weights, size in (("5,000 weights", "small"), ("1.3 million weights", "large")):
            cases[f"a step of {weights}"] = [*host, str(folder / size), "--threads", "1"]
            cases[f"a step of {weights}, small"] = [*host, str(folder / size), "--small", "1"]
        for case, command in cases.items():
            found = [run(command) for _ in range(5)]
            assert not any(r["code"] for r in found)
            medians = {key: float(np.median([r[key] for r in found])) for key in ("resident", "own", "ms")}
            works = {n: round(r["ms"]) for n in LIMITS if (r := run(command, n))["code"] == 0}
            print(
                f"{case}: " + ", ".join(f"{key} {value:.1f}" for key, value in medians.items()),
                f"milliseconds within MB: {works}",
            )
        print("program", (folder / "host").stat().st_size, "train.onnx", (folder / "small/train.onnx").stat().st_size)


if __name__ == "__main__":
    main()

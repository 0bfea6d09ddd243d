"""The speed of products of matrices: ONNX Runtime's own (MLAS), the kernel of target "native", OpenBLAS and MKL.

    python -m benchmarks.products [--rounds 15] [--threads 1]    # measures
    python -m benchmarks.products --page  # writes the table of docs/internals/kernels-measured.md

The shapes are those of linear layers of the training benchmark: of m rows, from k numbers to n. A layer takes three
products: forward x·W or x·Wᵀ, the cotangent of x, and that of W, which is aᵀ·b. All take turns in one process; each
rate is the median over the turns. With one thread time is CPU time, with more it is that of the clock. OpenBLAS
is that of NumPy, MKL that of PyTorch if it is installed, with its AVX-512 kernels also where it reserves those for
Intel's processors. The peak is that of multiply-adds in registers, in a loop that a C compiler makes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from benchmarks.pages import write_table
from benchmarks.training.environments import Missing, environment
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels.libraries import SOURCES
from onnxgrad.runtime.kernels.substitute import DOMAIN

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "kernels-measured.md"
#: (m, k, n), and where such layers are.
SHAPES = {
    (128, 784, 512): "mlp",
    (1024, 128, 512): "transformer, bert",
    (1024, 512, 128): "transformer, bert",
    (2048, 192, 768): "vit",
    (2048, 768, 192): "vit",
    (1024, 128, 8000): "bert, its vocabulary",
    (512, 242, 256): "dlrm",
    (4096, 242, 256): "dlrm, batch of 4096",
    (2048, 256, 256): "a radiance field",
    (4096, 96, 384): "swin",
    (1600, 64, 512): "lstm",
}
KERNELS = ("Product",)
PEAK = """
#include "lanes.h"
float peak(long count) {
  lanes sum[12];
  for (int i = 0; i < 12; i++) sum[i] = lanes_of(i);
  lanes x = lanes_of(0.5f), y = lanes_of(1e-3f);
  for (long k = 0; k < count; k++) {
    HELD(x);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum[i] = sum[i] * x + y;
  }
  float all = 0;
  for (int i = 0; i < 12; i++) all += lanes_sum(sum[i]);
  return all;
}
long width(void) { return LANES; }
"""
Run = Callable[[], object]


def peak() -> float:
    """Multiplications and additions per second of one thread, at most."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(PEAK)
        flags = ["-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", f"-I{SOURCES}"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.peak.argtypes, loaded.width.restype = [ctypes.c_long], ctypes.c_long
        count = 1_000_000
        least = min(_seconds(lambda: loaded.peak(count), time.process_time) for _ in range(20))
        return 2 * 12 * loaded.width() * count / least


def _seconds(run: Run, clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return clock() - begin


def session(nodes: list[tuple[str, list[str], str, dict[str, object]]], out: tuple[int, int], threads: int,
            **arrays: np.ndarray) -> Run:  # fmt: skip
    """Runs nodes (operator, inputs, output, attributes) as they are, into memory that is there."""
    kinds = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in arrays.items()}
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, out)
    made = [helper.make_node(op, given, [to], domain=DOMAIN if op in KERNELS else "", **attributes)
            for op, given, to, attributes in nodes]  # fmt: skip
    graph = helper.make_graph(made, "product", list(kinds.values()), [y])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = Options(threads=threads, level="none", target="native").native()
    native = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = native.io_binding()
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in arrays.items()}
    held["y"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(out, np.float32))
    for name in arrays:
        binding.bind_ortvalue_input(name, held[name])
    binding.bind_ortvalue_output("y", held["y"])
    return lambda: (native.run_with_iobinding(binding), held)


def kernel(left: int, right: int) -> tuple[str, list[str], str, dict[str, object]]:
    """The node of the kernel, by which operands it transposes."""
    return "Product", ["a", "b", ""], "y", {"left": left, "right": right, "relu": 0}


def forms(m: int, k: int, n: int, threads: int) -> dict[str, dict[str, Run]]:
    """The ways to compute each product of a layer, by its name and theirs."""
    rng = np.random.default_rng(0)
    x, g, w = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (m, n), (k, n)))
    turned: list[tuple[str, list[str], str, dict[str, object]]] = [("Transpose", ["a"], "t", {"perm": [1, 0]})]
    found: dict[str, dict[str, Run]] = {
        "forward": {
            "MLAS": session([("Gemm", ["a", "b"], "y", {})], (m, n), threads, a=x, b=w),
            "kernel": session([kernel(0, 0)], (m, n), threads, a=x, b=w),
            "OpenBLAS": lambda: x @ w,
        },
        "of x": {
            "MLAS": session([("Gemm", ["a", "b"], "y", {"transB": 1})], (m, k), threads, a=g, b=w),
            "kernel": session([kernel(0, 1)], (m, k), threads, a=g, b=w),
            "OpenBLAS": lambda: g @ w.T,
        },
        "of W": {
            "MLAS": session([("Gemm", ["a", "b"], "y", {"transA": 1})], (k, n), threads, a=x, b=g),
            "MLAS, Transpose before": session([*turned, ("Gemm", ["t", "b"], "y", {})], (k, n), threads, a=x, b=g),
            "MLAS, Transpose after": session(
                [("Gemm", ["b", "a"], "t", {"transA": 1}), ("Transpose", ["t"], "y", {"perm": [1, 0]})],
                (k, n), threads, a=x, b=g,
            ),
            "kernel": session([kernel(1, 0)], (k, n), threads, a=x, b=g),
            "OpenBLAS": lambda: x.T @ g,
        },
    }  # fmt: skip
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(threads)
    tx, tg, tw = map(torch.from_numpy, (x, g, w))
    found["forward"]["MKL"] = lambda: tx @ tw
    found["of x"]["MKL"] = lambda: tg @ tw.T
    found["of W"]["MKL"] = lambda: tx.T @ tg
    return found


def rates(work: float, ways: dict[str, Run], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Operations per second of each."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    count = max(1, int(4e8 / work))
    for turn in range(-1, rounds):
        for name, run in ways.items():
            begin = clock()
            for _ in range(count):
                run()
            if turn >= 0:
                taken[name].append((clock() - begin) / count)
    return {name: work / float(np.median(v)) for name, v in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the table of docs/internals/kernels-measured.md")
    given = parser.parse_args()
    if "_ONNXGRAD_PRODUCTS" not in os.environ:  # OpenBLAS and MKL read these when they are loaded
        variables = {"_ONNXGRAD_PRODUCTS": "1", "OMP_NUM_THREADS": str(given.threads)}
        try:
            variables |= environment("own-avx512").variables
        except Missing as why:
            print(f"MKL as it is: {why}")
        command = [sys.executable, "-m", "benchmarks.products", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | variables, check=False).returncode)
    top = peak() * given.threads
    print(f"peak: {top / 1e9:.0f} GFLOP/s")
    columns = ("MLAS", "MLAS, Transpose before", "MLAS, Transpose after", "kernel", "OpenBLAS", "MKL")
    lines = [f"| m × k → n | product | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    clock = time.process_time if given.threads == 1 else time.perf_counter
    for (m, k, n), where in SHAPES.items():
        for product, ways in forms(m, k, n, given.threads).items():
            found = rates(2.0 * m * k * n, ways, given.rounds, clock)
            cells = (f"{found[c] / top:.2f}" if c in found else "" for c in columns)
            lines.append(f"| {m} × {k} → {n} ({where}) | {product} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if given.page:
        write_table(PAGE, "products", "\n".join(lines))


if __name__ == "__main__":
    main()

"""Attention over long sequences, all scores at once against blocks of queries.

    python -m benchmarks.long_sequences [--lengths 2048,4096,8192] [--target native]

One causal layer of 4 heads of width 64. A process for each kind and length: the CPU time of a step on one thread
(median), by how much the largest memory of the process grows in the steps, and the largest difference of a gradient,
as a share of its largest element, to the one with all scores at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.vocabularies import from_outside, peak

HEADS, WIDTH = 4, 64
KINDS = {"plain": 0, "blocks": None}


def model(length: int) -> onnx.ModelProto:
    """x [rows, length, width] → y of that shape."""
    rng = np.random.default_rng(0)
    size = HEADS * WIDTH
    weights = {f"w{c}": (rng.standard_normal((size, size)) / size**0.5).astype(np.float32) for c in "qkvo"}
    nodes = [helper.make_node("MatMul", ["x", f"w{c}"], [c]) for c in "qkv"]
    nodes += [
        helper.make_node("Attention", ["q", "k", "v"], ["a"], is_causal=1, q_num_heads=HEADS, kv_num_heads=HEADS),
        helper.make_node("MatMul", ["a", "wo"], ["y"]),
    ]
    ends = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", length, size]) for n in "xy")
    graph = helper.make_graph(nodes, "layer", [next(ends)], [next(ends)],
                              [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def measure(kind: str, length: int, steps: int, target: str, rows: int | None, path: str) -> dict[str, float]:
    """What a few steps take, in this process; the weights after them go to `path`."""
    from onnxgrad import Options
    from onnxgrad.runtime import StepRunner
    from onnxgrad.training import attach, compile_step

    trained = attach(model(length), loss="mse:reduction=sum", optimizer="sgd", learning_rate=1.0)
    step = compile_step(trained, attention_rows=KINDS[kind] if kind == "plain" or rows is None else rows)
    runner = StepRunner(step, options=Options(threads=1, target=target))
    rng = np.random.default_rng(1)
    shape = (1, length, HEADS * WIDTH)
    batch = {name: rng.standard_normal(shape).astype(np.float32) for name in step.batch}
    first = runner.state()
    before, seconds = peak(), []
    for _ in range(steps):
        runner.load_state(first)
        start = time.process_time()
        runner.step(batch)
        seconds.append(time.process_time() - start)
    np.savez(path, **{n: a - first[n] for n, a in runner.state().items()})
    return {"step s": statistics.median(seconds), "grown MB": peak() - before}


def main() -> None:
    """Measure, and print a line for each length and kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, help="queries of a block")
    parser.add_argument("--target", default="portable", choices=("portable", "native"))
    parser.add_argument("--of", nargs=3, metavar=("KIND", "LENGTH", "PATH"), help="measure one kind in this process")
    asked = parser.parse_args()
    if asked.of:
        kind, length, path = asked.of
        print(json.dumps(measure(kind, int(length), asked.steps, asked.target, asked.rows, path)))
        return
    command = [sys.executable, "-m", "benchmarks.long_sequences", f"--steps={asked.steps}", f"--target={asked.target}"]
    command += [] if asked.rows is None else [f"--rows={asked.rows}"]
    for length in asked.lengths.split(","):
        with tempfile.TemporaryDirectory() as folder:
            paths = {kind: str(Path(folder, f"{kind}.npz")) for kind in KINDS}
            for kind, path in paths.items():
                row = from_outside([*command, "--of", kind, length, path])
                print(f"{length:>6} {kind:8}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()))
            plain, blocks = (np.load(path) for path in paths.values())
            worst = max(np.abs(blocks[n] - plain[n]).max() / np.abs(plain[n]).max() for n in plain)
            print(f"{length:>6} largest difference {worst:.1e}")


if __name__ == "__main__":
    main()

"""Attention over long sequences, all scores at once against blocks of queries.

    python -m benchmarks.long_sequences [--lengths 2048,4096,8192] [--target native]
    python -m benchmarks.long_sequences --decoder [--lengths 2048,4096] [--target native]

One causal layer of 4 heads of width 64; or the decoder of `benchmarks.adapters` (six layers of width 384, six heads of
queries on two of keys, 16 million weights, of symbolic length), which PyTorch exports. A process for each kind and
length: the CPU time of a step on one thread (median), the largest memory of the process as the one that has started it
is told, by how much it grows in the steps, and the largest difference of a gradient, as a share of its largest element,
to the one with all scores at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.adapters import WORDS
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


def measure(
    kind: str, length: int, steps: int, target: str, rows: int | None, path: str, decoder: str | None
) -> dict[str, float]:
    """The time of a few steps, in this process; the change of the weights by a step is written to `path`."""
    from onnxgrad import Options
    from onnxgrad.runtime import StepRunner
    from onnxgrad.training import attach, compile_step

    rng = np.random.default_rng(1)
    if decoder is None:
        trained = attach(model(length), loss="mse:reduction=sum", optimizer="sgd", learning_rate=1.0)
        shape = (1, length, HEADS * WIDTH)
        batch = {name: rng.standard_normal(shape).astype(np.float32) for name in ("x", "labels")}
    else:  # so far that no digit of a weight is seen in its difference
        trained = attach(decoder, loss="cross_entropy:axis=-1", optimizer="sgd", learning_rate=2.0**24)
        ids = rng.integers(0, WORDS, (1, length + 1))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        rows = rows or 512  # it does not say how long sequences are
    runner = StepRunner(
        compile_step(trained, attention_rows=0 if kind == "plain" else rows), options=Options(threads=1, target=target)
    )
    first = runner.state()
    before, seconds = peak(), []
    for _ in range(steps):
        runner.load_state(first)
        start = time.process_time()
        runner.step(batch)
        seconds.append(time.process_time() - start)
    grown = peak() - before
    np.savez(path, **{n: a - first[n] for n, a in runner.state().items()})
    return {"step s": statistics.median(seconds), "grown MB": grown}


def main() -> None:
    """Measure, and print a line for each length and kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", help="default: 2048,4096,8192; of the decoder, 2048,4096")
    parser.add_argument("--decoder", nargs="?", const="", metavar="FILE", help="a decoder; default: it is exported")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, help="queries of a block")
    parser.add_argument("--target", default="portable", choices=("portable", "native"))
    parser.add_argument("--of", nargs=3, metavar=("KIND", "LENGTH", "PATH"), help="measure one kind in this process")
    asked = parser.parse_args()
    if asked.of:
        kind, length, path = asked.of
        print(json.dumps(measure(kind, int(length), asked.steps, asked.target, asked.rows, path, asked.decoder)))
        return
    command = [sys.executable, "-m", "benchmarks.long_sequences", f"--steps={asked.steps}", f"--target={asked.target}"]
    command += [] if asked.rows is None else [f"--rows={asked.rows}"]
    lengths = (asked.lengths or ("2048,4096,8192" if asked.decoder is None else "2048,4096")).split(",")
    with tempfile.TemporaryDirectory() as folder:
        decoder = asked.decoder
        if decoder == "":
            decoder = str(Path(folder, "decoder.onnx"))
            run = [sys.executable, "-m", "benchmarks.adapters", "--of", decoder, "export"]
            subprocess.run(run, check=True, capture_output=True)
        command += [] if decoder is None else ["--decoder", decoder]
        for length in lengths:
            compare(command, length, folder)


def compare(command: list[str], length: str, folder: str) -> None:
    """Print a line for each kind, and how far gradients differ."""
    paths = {kind: str(Path(folder, f"{kind}.npz")) for kind in KINDS}
    for kind, path in paths.items():
        row = from_outside([*command, "--of", kind, length, path])
        print(f"{length:>6} {kind:8}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()), flush=True)
    plain, blocks = (np.load(path) for path in paths.values())
    worst = max(np.abs(blocks[n] - plain[n]).max() / np.abs(plain[n]).max() for n in plain if plain[n].any())
    print(f"{length:>6} largest difference {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()

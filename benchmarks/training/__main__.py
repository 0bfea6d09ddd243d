"""Time one training step of the same exported models in onnxgrad and PyTorch, interleaved in one run.

``python -m benchmarks.training [WORKLOAD …] [--rounds 15] [--steps 4] [--threads 2] [--page docs/benchmarks.md]``

Each competitor is a process of its own; they take turns (A B C A B C …), so that a slow minute of the
machine hits all, after a pause in which the threads of the one before stop spinning. Reported: median step
time, ratio of medians to PyTorch eager with the spread of the per-round ratios, peak memory of the process,
and whether the losses of the first steps agree — a fast wrong step does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

COMPETITORS = ("torch", "torch-best", "onnxgrad")
INTRODUCTION = """\
# Benchmark: one training step

Written by `python -m benchmarks.training --page docs/benchmarks.md`, which explains how it measures. The models
are exported by PyTorch; the competitors start from the same weights, see the same batches and must report the
same losses. `torch` is PyTorch eager with its defaults, `torch-best` has fused optimizers and channels_last.
Ratios are to `torch`.
"""
HEAD = (
    "| model | | ms per step | ratio | quartiles | peak MB | ratio | start-up, s | largest difference of losses |",
    "|---|---|---|---|---|---|---|---|---|",
)
DEFAULT = ("mlp", "cnn", "transformer", "residual", "depthwise")


class Worker:
    """A competitor's process."""

    def __init__(self, competitor: str, workload: str, folder: Path, threads: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        args = [sys.executable, "-m", "benchmarks.training.worker", competitor, workload, str(folder), str(threads)]
        self.process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.start_up = self.answer()["start_up"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a competitor died: {self.process.args}")
        return json.loads(line)

    def steps(self, count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"steps {count}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(workload: str, rounds: int, steps: int, threads: int, competitors: tuple[str, ...]) -> dict[str, Any]:
    """Interleaved times of one workload."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.training.workloads", workload, scratch],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        workers = {c: Worker(c, workload, folder, threads) for c in competitors}
        first = {c: w.steps(8)["losses"] for c, w in workers.items()}  # also the warm-up
        times: dict[str, list[float]] = {c: [] for c in competitors}
        peak: dict[str, float] = {}
        for _ in range(rounds):
            for c, w in workers.items():
                time.sleep(0.05)
                answer = w.steps(steps)
                times[c].append(median(answer["times"]))
                peak[c] = answer["peak_mb"]
        for w in workers.values():
            w.close()
    base = competitors[0]
    result: dict[str, Any] = {}
    for c in competitors:
        ratios = np.array(times[c]) / np.array(times[base])
        result[c] = {
            "step_ms": 1e3 * median(times[c]),
            "ratio": median(times[c]) / median(times[base]),
            "ratio_quartiles": [float(q) for q in np.quantile(ratios, [0.25, 0.75])],
            "peak_mb": peak[c],
            "peak_ratio": peak[c] / peak[base],
            "start_up_s": workers[c].start_up,
            "loss_difference": float(np.max(np.abs(np.array(first[c]) - np.array(first[base])))),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--competitors", nargs="*", default=COMPETITORS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the results as a page of the documentation")
    args = parser.parse_args()
    results = {}
    for workload in args.workloads:
        results[workload] = measure(workload, args.rounds, args.steps, args.threads, tuple(args.competitors))
        table = Table(title=workload)
        for column in ("", "ms/step", "× torch", "quartiles", "peak MB", "× torch", "start-up s", "max Δloss, 8 steps"):
            table.add_column(column, justify="right")
        for c, r in results[workload].items():
            low, high = r["ratio_quartiles"]
            table.add_row(
                c, f"{r['step_ms']:.2f}", f"{r['ratio']:.2f}", f"{low:.2f}–{high:.2f}", f"{r['peak_mb']:.0f}",
                f"{r['peak_ratio']:.2f}", f"{r['start_up_s']:.1f}", f"{r['loss_difference']:.1e}",
            )  # fmt: skip
        Console(width=110).print(table)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2))
    if args.page:
        args.page.write_text(page(results, args.threads, args.rounds))


def page(results: dict[str, Any], threads: int, rounds: int) -> str:
    """The results as Markdown."""
    setting = f"{threads} threads on {processor()}; medians of {rounds} rounds; PyTorch {version('torch')}, "
    lines = [f"{INTRODUCTION}\n{setting}ONNX Runtime {version('onnxruntime')}.\n", *HEAD]
    for workload, competitors in results.items():
        for c, r in competitors.items():
            low, high = r["ratio_quartiles"]
            speed = f"{r['step_ms']:.2f} | {r['ratio']:.2f} | {low:.2f}–{high:.2f}"
            memory = f"{r['peak_mb']:.0f} | {r['peak_ratio']:.2f}"
            lines.append(
                f"| {workload} | {c} | {speed} | {memory} | {r['start_up_s']:.1f} | {r['loss_difference']:.1e} |"
            )
    return "\n".join(lines) + "\n"


def processor() -> str:
    """What the machine calls its processor."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(": ")[2] if names else "a processor that does not tell its name"


if __name__ == "__main__":
    main()

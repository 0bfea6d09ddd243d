"""Derivations timed beside onnx-ad: one table.

    python -m benchmarks.derivations                  # writes benchmarks/results/derivations.json
    python -m benchmarks.derivations --rounds 20 --page     # also writes the table of docs/internals/derivations.md

Both contenders make the same pullback (vector-Jacobian product by all weights) of the same graph, a message in memory,
as a message in memory. Each has a process of its own; they take turns. The ratio is that of the shortest turns, in CPU
time, which other programs lengthen; that of memory is of what the peak of the process grew by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.derivations.graphs import PROBLEMS
from benchmarks.pages import write_table
from benchmarks.training.environments import environment

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "derivations.json"
PAGE = ROOT / "docs" / "internals" / "derivations.md"
CONTENDERS = {"onnxgrad": "own", "onnx-ad": "onnx-ad"}


def measure(problem: str, rounds: int) -> dict[str, list[float]]:
    """For each contender: CPU seconds of the shortest turn, nodes, megabytes."""
    workers = {}
    for name, where in CONTENDERS.items():
        given = environment(where)
        command = [given.python, "-m", "benchmarks.derivations.worker", name, problem]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = os.environ | given.variables | {"PYTHONPATH": path}
        workers[name] = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes)  # type: ignore[call-overload]
    told: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            told[name].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return {n: [min(t[0] for t in all_[1:]), all_[0][1], all_[0][2]] for n, all_ in told.items()}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The rows of the page."""
    lines = ["| graph | time ÷ onnx-ad | memory ÷ onnx-ad | nodes | nodes of onnx-ad |", "|---|---|---|---|---|"]
    for problem in PROBLEMS:
        if problem in found:
            own, other = (found[problem][name] for name in CONTENDERS)
            small = min(own[2], other[2]) < 10  # pages that a process had to spare
            memory = "–" if small else f"{own[2] / other[2]:.2f}"
            lines.append(f"| {problem} | {own[0] / other[0]:.2f} | {memory} | {own[1]:,} | {other[1]:,} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", action="append", choices=list(PROBLEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page", action="store_true", help="write the table of docs/internals/derivations.md")
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for problem in (given.graph or PROBLEMS) if given.rounds else ():
        kept[problem] = measure(problem, given.rounds)
        print(problem, kept[problem], flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    if given.page:
        write_table(PAGE, "derivations", table(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ranks against one process: what an engine costs, and what two processes of one thread gain.

    python -m benchmarks.distributed [--workloads cnn transformer] [--steps 30] [--rounds 5]

Processes in turns, one of each kind and round, on the same batches; a line for each workload and kind has the wall time
and the CPU time (of all ranks) of a step, medians over rounds. Kinds:

- ``plain 1``: one process with one thread; ``engine 1``: the same as a rank of torch.distributed that is alone, with
  the step in two halves and sums over one rank (a run of one rank does without: it is ``plain 1``);
- ``plain 2``: one process with two threads; ``ranks 2``: two ranks with one thread each, which share the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

KINDS = {"plain 1": (0, 1), "engine 1": (1, 1), "plain 2": (0, 2), "ranks 2": (2, 1)}  # ranks, threads


def worker(folder: Path, threads: int, steps: int, joined: bool) -> None:
    """One process: rank 0 prints seconds per step."""
    from onnxgrad.distributed import blocks, gathered, join
    from onnxgrad.runtime import Options, StepRunner
    from onnxgrad.training import attach, compile_step
    from onnxgrad.training.parallel.machine import DataParallel
    from onnxgrad.training.step.accumulate import split_step

    spec = json.loads((folder / "spec.json").read_text())
    how = {"loss": "cross_entropy", "optimizer": spec["optimizer"], "learning_rate": spec["learning_rate"]}
    model = attach(folder / "model.onnx", accumulate=True, **how)
    options = Options(threads=threads, spinning=False)
    ranks = join("torch" if joined else "none")
    runner = DataParallel(split_step(model), 1, ranks, options=options) if joined else None
    machine = runner or StepRunner(compile_step(model), options=options)
    with np.load(folder / "batches.npz") as held:
        arrays = dict(held)
    label = next(name for name in compile_step(model).batch if name not in arrays)
    arrays[label] = arrays.pop("y")
    low, high = blocks(len(arrays[label][0]), ranks.size)[ranks.rank :][:2]
    batches = [{n: np.ascontiguousarray(a[k][low:high]) for n, a in arrays.items()} for k in range(len(arrays[label]))]
    for k in range(3):
        machine.step(batches[k])
    ranks.barrier()
    before, wall = _cpu(), time.perf_counter()
    for k in range(steps):
        machine.step(batches[k % len(batches)])
    wall, cpu = (time.perf_counter() - wall) / steps, (_cpu() - before) / steps
    total = sum(gathered(ranks, cpu))
    if ranks.rank == 0:
        print(json.dumps({"wall": wall, "cpu": total}))
    ranks.close()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(folder: Path, kind: str, steps: int) -> dict[str, float]:
    """A launch of one kind."""
    ranks, threads = KINDS[kind]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    own = ["benchmarks.distributed", "--worker", str(folder), str(threads), str(steps), str(int(ranks > 0))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *launcher, *own], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["cnn", "transformer"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        folder, threads, steps, joined = given.worker
        return worker(Path(folder), int(threads), int(steps), joined == "1")
    for name in given.workloads:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.training.workloads", name, folder], check=True
            )
            found = {kind: [] for kind in KINDS}
            for _ in range(given.rounds):
                for kind, of in found.items():
                    of.append(run(Path(folder), kind, given.steps))
        for kind, of in found.items():
            wall, cpu = (1e3 * statistics.median(one[what] for one in of) for what in ("wall", "cpu"))
            print(f"{name:<12} {kind:<9} {wall:8.2f} ms a step, {cpu:8.2f} ms of processors", flush=True)


if __name__ == "__main__":
    main()

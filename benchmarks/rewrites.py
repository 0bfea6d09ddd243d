"""The time that each rewrite of `onnxgrad.runtime.rewrites` saves in a training step, measured by disabling it.

    python -m benchmarks.rewrites                          # all workloads; writes benchmarks/results/rewrites.json
    python -m benchmarks.rewrites --workload cnn --rounds 40
    python -m benchmarks.rewrites --page                   # also writes the table of docs/internals/runtime.md

The factor is the CPU time of a step on one thread with all rewrites, over the same without that one: sessions
of both kinds in one process, which take turns; the median of the ratios of all turns. CPU time of one thread
hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from benchmarks.pages import write_table
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.rewrites import REWRITES
from onnxgrad.runtime.session import passes_of
from onnxgrad.training import attach, compile_step
from onnxgrad.training.step.compile import Step

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "rewrites.json"
PAGE = ROOT / "docs" / "internals" / "runtime.md"
WORKLOADS = (
    "mlp",
    "cnn",
    "residual",
    "depthwise",
    "transformer",
    "lstm",
    "dlrm",
    "graph_net",
    "wavenet",
    "mamba",
    "resnet18",
    "pool_mixer",
    "cnn3d",
    "global_filter",
    "traffic_graph",
    "axial_attention",
    "diffusion",
    "swin",
    "graph_attention",
    "generator",
    "bert",
)
STEPS = 4  #: in a turn
ALL = "all of them"


def training_of(workload: str) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """The model of `workload` with a loss and an optimizer, and batches for it."""
    from benchmarks.training.workloads import export, find

    how = find(workload)
    with tempfile.TemporaryDirectory() as folder:
        export(workload, Path(folder))
        training = attach(Path(folder, "model.onnx"), loss="cross_entropy", optimizer=how.optimizer)
    inputs, labels = how.batches(8)
    label = training.training_info[0].algorithm.input[0].name
    return training, [{**{name: x[i] for name, x in inputs.items()}, label: labels[i]} for i in range(8)]


def step_of(workload: str) -> tuple[Step, list[dict[str, np.ndarray]]]:
    """A step of `workload`, and batches for it."""
    training, batches = training_of(workload)
    return compile_step(training), batches


def measure(workload: str, rounds: int, only: list[str]) -> dict[str, tuple[float, float, float]]:
    """For each rewrite that finds something: the median factor, and between what the middle half of them lies."""
    step, batches = step_of(workload)
    applied = passes_of(step.model, Options(target="portable")).applied
    found = [r.name for r in REWRITES if r.name in applied]
    left_out = {name: (name,) for name in found if not only or name in only}
    if found and not only:
        left_out[ALL] = tuple(found)
    portable = Options(threads=1, target="portable")
    whole = StepRunner(step, options=portable)
    others = {n: StepRunner(step, options=dataclasses.replace(portable, without=out)) for n, out in left_out.items()}
    return in_turns(whole, others, batches, rounds)


def in_turns(
    whole: StepRunner, others: dict[str, StepRunner], batches: list[dict[str, np.ndarray]], rounds: int
) -> dict[str, tuple[float, float, float]]:
    """The median of the time of `whole` over that of each of `others`, and between what the middle half lies."""
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for turn in range(-2, rounds):
        for name, other in others.items():
            pair = (whole, other) if turn % 2 else (other, whole)
            seconds = {runner: seconds_of(runner, batches) for runner in pair}
            if turn >= 0:
                ratios[name].append(seconds[whole] / seconds[other])
    spread = {name: np.quantile(found, (0.25, 0.75)) for name, found in ratios.items()}
    return {name: (round(median(r), 3), *(round(float(q), 3) for q in spread[name])) for name, r in ratios.items()}


def seconds_of(runner: StepRunner, batches: list[dict[str, np.ndarray]]) -> float:
    return median(seconds_of_each(runner, batches))


def seconds_of_each(runner: StepRunner, batches: list[dict[str, np.ndarray]]) -> list[float]:
    """The CPU times of the steps of a turn."""
    runner.step(batches[0])
    taken = []
    for i in range(STEPS):
        begin = time.thread_time()
        runner.step(batches[i % len(batches)])
        taken.append(time.thread_time() - begin)
    return taken


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The rows of the page: a rewrite, where it applies, its factor for each workload."""
    head = ["rewrite", "what is written", "where", *WORKLOADS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, what, where in [*((r.name, r.what, r.where) for r in REWRITES), (ALL, "", "")]:
        factors = [found.get(w, {}).get(name) for w in WORKLOADS]
        shown = ["–" if f is None else f"{f[0]:.2f}".lstrip("0") for f in factors]
        title = name if name == ALL else f"`{name}`"
        lines.append("| " + " | ".join([title, what, where, *shown]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--rewrite", action="append", choices=[r.name for r in REWRITES], help="none other; not kept")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--page", action="store_true", help="write the table of docs/internals/runtime.md")
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for workload in (given.workload or WORKLOADS) if given.rounds else ():
        factors = measure(workload, given.rounds, given.rewrite or [])
        print(workload, *(f"{name} {f} ({low}-{high})" for name, (f, low, high) in factors.items()), flush=True)
        if not given.rewrite:
            kept[workload] = factors
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    if given.page:
        write_table(PAGE, "rewrites", table(kept))


if __name__ == "__main__":
    main()

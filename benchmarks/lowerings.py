"""The time that each variant chosen by a rule saves in a training step, measured by disabling it.

    python -m benchmarks.lowerings                          # all workloads; writes benchmarks/results/lowerings.json
    python -m benchmarks.lowerings --workload cnn --rounds 40
    python -m benchmarks.lowerings --page                   # also writes the table of docs/internals/runtime.md

The factor is measured as that of a rewrite (`benchmarks.rewrites`), on the processor at hand, with standard operators:
CPU time of a step on one thread with all lowerings, over the same step compiled without that one.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.pages import write_table
from benchmarks.rewrites import PAGE, ROOT, in_turns, training_of
from onnxgrad import without_lowerings
from onnxgrad.ir.lowerings import LOWERINGS
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import compile_step
from onnxgrad.training.step.compile import Step

RESULTS = ROOT / "benchmarks" / "results" / "lowerings.json"
WORKLOADS = ("mlp", "cnn", "residual", "depthwise", "transformer", "unet", "cnn3d")


def measure(workload: str, rounds: int, only: list[str]) -> dict[str, tuple[float, float, float]]:
    """For each lowering that a rule chooses here: the median factor, and between what the middle half of them lies."""
    training, batches = training_of(workload)
    step = compile_step(training)
    options = Options(threads=1, target="portable")
    others = {}
    for name in only or LOWERINGS:
        with without_lowerings(name):
            other = compile_step(training)
        if _said(other) != _said(step):
            others[name] = StepRunner(other, options=options)
    return in_turns(StepRunner(step, options=options), others, batches, rounds)


def _said(step: Step) -> list[str]:
    """The operators of a step, in order."""
    return [f"{node.op_type} {sorted(map(str, node.attributes.values()))}" for node in step.model.graph]


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The rows of the page: a lowering, what it is in place of, its factor for each workload."""
    measured = [w for w in WORKLOADS if w in found]
    head = ["lowering", "derivative of", "what is written", "in place of", *measured]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for held in sorted(LOWERINGS.values(), key=lambda held: held.name):
        factors = [found[w].get(held.name) for w in measured]
        shown = ["–" if f is None else f"{f[0]:.2f}".removeprefix("0") for f in factors]
        lines.append("| " + " | ".join([f"`{held.name}`", held.where, held.what, held.instead, *shown]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--lowering", action="append", choices=list(LOWERINGS), help="none other; not kept")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--page", action="store_true", help="write the table of docs/internals/runtime.md")
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for workload in (given.workload or WORKLOADS) if given.rounds else ():
        factors = measure(workload, given.rounds, given.lowering or [])
        print(workload, *(f"{name} {f} ({low}-{high})" for name, (f, low, high) in factors.items()), flush=True)
        if not given.lowering:
            kept[workload] = factors
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    if given.page:
        write_table(PAGE, "lowerings", table(kept))


if __name__ == "__main__":
    main()

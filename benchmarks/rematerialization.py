"""Memory against time: steps of a residual CNN and of a transformer, within ever smaller budgets of memory.

    python -m benchmarks.rematerialization            # writes docs/checkpointing-budgets.md and its picture

Each point is a process of its own, on one thread: what the plan predicts, what ONNX Runtime says that its results took
at their fullest, how much the process grew in a step, and the CPU time of a step. Rounds of all points are interleaved,
and a time is the median of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.checkpointing import peak

#: Name: rows of a batch, what it is, optimizer.
MODELS = {
    "residual": (64, "Residual CNN: 12 blocks of two 3×3 convolutions with BatchNormalization", "momentum"),
    "transformer": (16, "Transformer: 8 layers of width 128, 4 heads, 64 tokens, 512 words", "adamw"),
}
SHARES = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1, 0.0)
ROUNDS, STEPS = 2, 4


def export(name: str, path: Path) -> None:
    """Write the model of that name: the parts of those of `benchmarks.training`, deeper."""
    import torch
    from torch import nn

    from benchmarks.training.models import Residual, Transformer

    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer(vocab=512, width=128, heads=4, layers=8, length=64)
        x = torch.zeros(2, 64, dtype=torch.int64)
    else:
        widths = [16] * 4 + [32] * 4 + [64] * 4
        blocks = [Residual(i, o, 1 if i == o else 2) for i, o in zip([16, *widths], widths)]
        stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        x = torch.zeros(2, 3, 32, 32)
    torch.onnx.export(
        model.eval(), (x,), str(path), dynamo=False, opset_version=20, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}, do_constant_folding=False,
    )  # fmt: skip


def batch(step: Any, rows: int) -> dict[str, np.ndarray]:
    """A batch of random numbers."""
    rng = np.random.default_rng(0)
    made = {}
    for value in step.model.graph.inputs:
        if value.name in step.batch:
            shape = [d if isinstance(d, int) else rows for d in value.shape]
            whole = value.dtype.name == "INT64"
            made[value.name] = rng.integers(0, 10, shape) if whole else rng.standard_normal(shape, np.float32)
    return made


def compiled(name: str, path: str, budget: int) -> Any:
    """The step of a model, within `budget` bytes if that is not 0."""
    from onnxgrad.training import attach, compile_step, within_memory

    rows, _, optimizer = MODELS[name]
    step = compile_step(attach(path, loss="cross_entropy", optimizer=optimizer))
    return within_memory(step, budget, rows) if budget else step


def measure(name: str, path: str, budget: int) -> dict[str, Any]:
    """One point: bytes, seconds and a number to compare."""
    from onnxgrad.runtime import Options, StepRunner, measured_peak

    options = Options(threads=1, target="portable")
    step = compiled(name, path, budget)
    fed = batch(step, MODELS[name][0])
    runner = StepRunner(step, options=options)
    runner.step({key: array[:2] for key, array in fed.items()})
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = peak()
    losses = [float(runner.step(fed)[step.loss])]
    grown = peak() - before
    times = []
    for _ in range(STEPS):
        begin = time.thread_time()
        losses.append(float(runner.step(fed)[step.loss]))
        times.append(time.thread_time() - begin)
    plan = step.plan
    return {
        "predicted": plan.predicted if plan else 0,
        "plain": plan.plain if plan else 0,
        "extra": plan.extra if plan else 0.0,
        "nodes": plan.nodes if plan else 0,
        "measured": measured_peak(step, fed, options),
        "grown": int(grown * 2**20),
        "times": times,
        "losses": losses,
    }


def budgets(name: str, path: str) -> list[int]:
    """From all that a step takes to the least that it can do with."""
    from onnxgrad.errors import BadInput
    from onnxgrad.remat import amount

    plain = compiled(name, path, 10**15).plan.plain
    try:
        compiled(name, path, 1)
    except BadInput as refused:
        least = amount(str(refused).split("at least ")[1].split(" at a time")[0])
    return [int(least + share * (plain * 1.001 - least)) for share in SHARES]


def points(name: str, path: str) -> list[dict[str, Any]]:
    """All points of a model."""
    found: dict[int, dict[str, Any]] = {}
    asked = budgets(name, path)
    for _ in range(ROUNDS):
        for budget in asked:
            command = [sys.executable, "-m", "benchmarks.rematerialization", "--measure", name, path, str(budget)]
            made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            if budget in found:
                found[budget]["times"] += made["times"]
                found[budget]["grown"] = max(found[budget]["grown"], made["grown"])
            else:
                found[budget] = {**made, "budget": budget}
    rows = list(found.values())
    for row in rows:  # the same training
        assert np.allclose(row["losses"], rows[0]["losses"], rtol=1e-3), (row["losses"], rows[0]["losses"])
        row["time"] = statistics.median(row["times"])
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| budget | predicted | measured | process grew by | nodes run twice | estimated work | CPU time of a step |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        mb = [f"{row[key] / 1e6:.1f} MB" for key in ("budget", "predicted", "measured", "grown")]
        ratio = row["time"] / rows[0]["time"]
        cells = [*mb, str(row["nodes"]), f"+{row['extra']:.0%}", f"{row['time'] * 1e3:.0f} ms (× {ratio:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(all_rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A picture: memory across, time up."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for (name, rows), mark in zip(all_rows.items(), "os"):
        across = [row["measured"] / rows[0]["measured"] for row in rows]
        axes.plot(across, [row["time"] / rows[0]["time"] for row in rows], f"-{mark}", label=f"{name}, measured")
        color = axes.lines[-1].get_color()
        axes.plot(across, [1 + row["extra"] for row in rows], ":", color=color, label=f"{name}, estimated")
    axes.set_xlabel("memory of what a step computes, as a share")
    axes.set_ylabel("time of a step, as a ratio")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure one point, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "PATH", "BUDGET"))
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/checkpointing-budgets.md"))
    parser.add_argument("--export", nargs=2, metavar=("MODEL", "PATH"))
    arguments = parser.parse_args()
    if arguments.export:
        export(arguments.export[0], Path(arguments.export[1]))
        return
    if arguments.measure:
        name, path, budget = arguments.measure
        print(json.dumps(measure(name, path, int(budget))))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            path = str(Path(folder, f"{name}.onnx"))
            command = [sys.executable, "-m", "benchmarks.rematerialization", "--export", name, path]
            subprocess.run(command, capture_output=True, check=True)
            found[name] = points(name, path)
    picture = arguments.output.parent / "images" / "rematerialization.svg"
    draw(found, picture)
    intro = (
        "Written by `python -m benchmarks.rematerialization`. Steps of training within budgets of memory, on one "
        f"thread of ONNX Runtime {onnxruntime.__version__}, each point in a process of its own; the first of each "
        "table keeps everything. Measured is what the runtime says that the results of nodes took at their fullest; a "
        "process grows by that, what kernels take for themselves, and what is lost between blocks. Times are medians "
        "of CPU time; all points give the same losses. [Checkpointing](checkpointing.md) says how to ask for it."
    )
    parts = ["# Memory against time, measured", ""]
    parts += [textwrap.fill(intro, 120, break_long_words=False, break_on_hyphens=False)]
    parts += ["", f"![Memory against time](images/{picture.name})"]
    for name, rows in found.items():
        parts += ["", f"## {MODELS[name][1]}, {MODELS[name][0]} rows", "", table(rows)]
    arguments.output.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()

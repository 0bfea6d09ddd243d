"""The cost of ranks on one machine, and the cost model's prediction for many.

    python -m benchmarks.distributed_scale            # measures (minutes), keeps the results, writes the page
    python -m benchmarks.distributed_scale --page     # writes the page from the results that are there

All-reduces over gloo by size and number of ranks, bytes on the loopback interface, and steps of two models: one process
of two threads against two of one, and one rank under torchrun against no launcher. Ranks have one thread that does not
spin. Of many rounds the fastest counts, since others may use the machine. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("results") / "distributed_scale.json"
PAGE = Path(__file__).parents[1] / "docs" / "distributed-scale.md"
RANKS, SIZES = (2, 4, 8), tuple(4**k for k in range(6, 13))  # of a buffer, in bytes: 4 KiB to 16 MiB
MODELS = ("cnn", "transformer")
ROUNDS, REPEATS, BATCHES = 3, 12, 8


def launch(ranks: int, *arguments: str) -> Any:
    """The answer of the first of `ranks` processes of this module under torchrun; of one without it, if 0."""
    command = ["-m", "benchmarks.distributed_scale", *arguments]
    if ranks:
        how = ["--standalone", "--nproc-per-node", str(ranks)]
        command = ["-W", "ignore", "-m", "torch.distributed.run", *how, *command]
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.NamedTemporaryFile("r") as answer:
        environment = os.environ | alone | {"ANSWER": answer.name}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-9000:]}")
        return json.loads(answer.read())


def answer(found: Any) -> None:
    Path(os.environ["ANSWER"]).write_text(json.dumps(found))


# --- what ranks do ------------------------------------------------------------------------------


def loopback() -> int:
    """Bytes that the loopback interface has sent so far; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def all_reduces() -> None:
    """The fastest all-reduce of each size, and the fewest bytes per rank that one of the largest sent."""
    from onnxgrad.distributed import join

    ranks = join("torch")
    arrays = {size: np.zeros(size // 4, np.float32) for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    sent = []
    for _ in range(REPEATS):
        for size, array in arrays.items():
            ranks.barrier()  # nobody sends
            before = loopback()
            ranks.barrier()
            begin = time.perf_counter()
            ranks.all_reduce(array)
            times[size].append(time.perf_counter() - begin)
            ranks.barrier()
            if size == SIZES[-1]:
                sent.append((loopback() - before) / ranks.size)
    if ranks.rank == 0:
        answer({"seconds": {size: min(taken) for size, taken in times.items()}, "sent": min(sent)})
    ranks.close()


def steps(folder: Path, threads: int, share: int) -> None:
    """The time of a step in the fastest of some epochs: seconds, and CPU time of all ranks.

    The batch is 1/`share` of that of the workload.
    """
    from onnxgrad import Options, Trainer
    from onnxgrad.distributed import Alone, gathered
    from onnxgrad.training.loop.callbacks import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.read = []

        def epoch(self, run: Any, record: Any) -> None:
            self.read.append(time.process_time())

    clock = Clock()
    spec = json.loads((folder / "spec.json").read_text())
    batches = np.load(folder / "batches.npz")
    rows = batches["y"].shape[1] // share
    data = {n: batches[n][:, :rows].reshape(-1, *batches[n].shape[2:]) for n in batches.files if n != "y"}
    data["labels"] = batches["y"][:, :rows].reshape(-1, *batches["y"].shape[2:])
    trainer = Trainer(
        str(folder / "model.onnx"), loss="cross_entropy", optimizer=spec["optimizer"],
        learning_rate=spec["learning_rate"], options=Options(threads=threads, spinning=False, target="portable"),
    )  # fmt: skip
    history = trainer.fit(data, epochs=5, batch_size=rows, progress=False, callbacks=[clock])
    seconds = min(epoch["seconds"] for epoch in history.epochs[1:]) / BATCHES
    ranks = trainer.ranks.collective if trainer.ranks else Alone()
    cpu = sum(gathered(ranks, float(np.diff(clock.read).min()) / BATCHES))
    weights = [t.initial for t in trainer.step.state.values() if t.kind == "parameter"]
    gradient = sum(t.size for t in weights) * 4
    if trainer.is_writer:
        answer({"seconds": seconds, "cpu": cpu, "gradient": gradient, "loss": history.epochs[-1]["loss"]})


# --- all of it ----------------------------------------------------------------------------------


def measured(rounds: int) -> dict[str, Any]:
    import onnxruntime
    import torch

    reduced = [launch(n, "--all-reduces") for _ in range(rounds) for n in RANKS]
    by_ranks = {n: reduced[k :: len(RANKS)] for k, n in enumerate(RANKS)}
    return {
        "about": {"cores": os.cpu_count(), "torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
        "all_reduce": [
            [n, size, min(one["seconds"][str(size)] for one in found)]
            for n, found in by_ranks.items()
            for size in SIZES
        ],
        "sent": [[n, SIZES[-1], min(one["sent"] for one in found)] for n, found in by_ranks.items()],
        "steps": {name: measured_steps(name, rounds) for name in MODELS},
    }


def measured_steps(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """The time of a step of a workload by case: ranks (0: no launcher), threads, and share of the batch."""
    from benchmarks.training.workloads import export

    cases = {"1 × 2": (0, 2, 1), "2 × 1": (2, 1, 1), "1 × 1": (0, 1, 1), "torchrun": (1, 1, 1), "half": (0, 1, 2)}
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        export(name, Path(folder), BATCHES)
        for _ in range(rounds):
            for case, (ranks, threads, share) in cases.items():
                found[case].append(launch(ranks, "--steps", folder, str(threads), str(share)))
    return {case: {what: min(one[what] for one in taken) for what in taken[0]} for case, taken in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--all-reduces", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.all_reduces:
        all_reduces()
    elif asked.steps:
        steps(Path(asked.steps[0]), int(asked.steps[1]), int(asked.steps[2]))
    else:
        from benchmarks.distributed_scale_page import page

        if not asked.page:
            RESULTS.write_text(json.dumps(measured(asked.rounds), indent=1) + "\n")
        PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
